"""The table of control messages: what the server, the clients and the documentation rely on."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

import pytest

from sbus.protocol.controls import (
    CONTROLS,
    HARD,
    ORDER,
    SOFT,
    HardChoice,
    OrderChoice,
    SoftChoice,
    choices,
    find,
    group_of,
)


def test_each_key_has_one_row() -> None:
    """Each control message has one row, which its key finds."""
    assert all(find(control.key) is control for control in CONTROLS)
    assert len({control.key for control in CONTROLS}) == len(CONTROLS)
    assert find(b"no such key") is None


def test_each_setting_has_one_default() -> None:
    """Exactly one choice of each group is in force at the start."""
    defaults = Counter(control.group for control in CONTROLS if control.default)
    assert defaults == dict.fromkeys({control.group for control in CONTROLS}, 1)


@pytest.mark.parametrize(
    ("key", "group"),
    [
        (b"blocking/soft/queue", b"blocking/soft"),
        (b"order/random", b"order"),
        (b"blocking/soft/recent", b"blocking/soft"),
        (b"acme/limit/high", b"acme/limit"),
    ],
)
def test_groups(key: bytes, group: bytes) -> None:
    """The group of a plugin's control message is the part before its last slash."""
    assert group_of(key) == group


def test_choices_begin_with_the_default() -> None:
    """The choices of a command line are the last words of the keys, the default first."""
    assert choices(HARD)[0] == "discard"
    assert choices(ORDER)[0] == "queue"


@pytest.mark.parametrize(("group", "literal"), [(SOFT, SoftChoice), (HARD, HardChoice), (ORDER, OrderChoice)])
def test_literals_are_the_choices(group: bytes, literal: Any) -> None:
    """A type checker accepts the words of the table, and no others."""
    assert set(get_args(literal)) == set(choices(group))
