"""``sbus users``: the names of users, those that no account has included."""

from __future__ import annotations

import pwd

import pytest

from sbus.cli.admin.words import name_of
from sbus.server.core.users import LINK, RECORDER, SERVICES


@pytest.mark.parametrize(
    ("uid", "name"),
    [
        (0, pwd.getpwuid(0).pw_name),
        (RECORDER, "(recorder)"),
        (LINK, "(link)"),
        (SERVICES, "(services)"),
        (-4, ""),
        (4_000_000_000, ""),
    ],
)
def test_names_of_users(uid: int, name: str) -> None:
    """The recorder and the link of a bus have names of their own; an unknown UID has none."""
    assert name_of(uid) == name
