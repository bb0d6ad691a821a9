"""The options of the three `connect` functions are one set, described and checked in one place."""

from __future__ import annotations

import dataclasses
import inspect
from asyncio import sleep
from typing import get_type_hints

import pytest

from sbus.client import aio, blocking, tx
from sbus.client.connecting import Backoff
from sbus.client.options import ConnectOptions, Keywords, ServiceKeywords
from sbus.errors import UsageError
from sbus.protocol.bundles import MAX_BUNDLE

FIELDS = {field.name for field in dataclasses.fields(ConnectOptions)}


def test_keywords_are_the_fields() -> None:
    """What type checkers accept is what the class takes, with the same types; a service cannot choose to reconnect."""
    assert get_type_hints(Keywords) == get_type_hints(ConnectOptions)
    assert Keywords.__annotations__.keys() - ServiceKeywords.__annotations__.keys() == {"reconnect"}


@pytest.mark.parametrize("connect", [aio.connect, blocking.connect, tx.connect])
def test_every_option_is_named(connect: object) -> None:
    """The help of each function lists the options, and the class describes each of them."""
    assert all(name in (inspect.getdoc(connect) or "") for name in FIELDS)
    assert all(f":ivar {name}:" in (ConnectOptions.__doc__ or "") for name in FIELDS)


@pytest.mark.parametrize("bus", [aio.Bus, blocking.Bus, tx.Bus])
def test_every_call_is_documented(bus: type) -> None:
    """A call that one library does not document has the documentation of what all share."""
    calls = [name for name in dir(bus) if not name.startswith("_") and callable(getattr(bus, name))]
    assert [name for name in calls if not inspect.getdoc(getattr(bus, name))] == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dialect": "latest"}, "use 'current' or 'early'"),
        ({"max_packet": 0}, "give the server's limit in bytes"),
        ({"max_packet": "1"}, "give the server's limit in bytes"),
        ({"reconnect_buffer": 1.5}, "give a number of bytes above 0"),
        ({"timeout": "1"}, "give a number of seconds"),
        ({"reconnect": 5}, "give True, False or a Backoff"),
        ({"on_gap": "log"}, "on_gap is a function, not str"),
        *[
            ({name: sleep}, f"{name} is an ordinary function")
            for name in ("on_gap", "on_lost", "on_denied", "on_control")
        ],
    ],
)
def test_values_are_checked(options: dict, error: str) -> None:
    """A value that cannot work raises before anything is connected."""
    with pytest.raises(UsageError, match=error):
        blocking.connect("/nowhere", **options)
    with pytest.raises(TypeError, match="no_such_option"):
        blocking.connect("/nowhere", no_such_option=1)  # type: ignore[call-arg]


def test_buffers_hold_a_bundle() -> None:
    """Buffers are as long as the longest packet, or the longest bundle where there may be one."""
    assert ConnectOptions(max_packet=100).buffer_size == MAX_BUNDLE
    assert ConnectOptions(max_packet=100, bundles=False).buffer_size == 100
    assert ConnectOptions(max_packet=2 * MAX_BUNDLE).buffer_size == 2 * MAX_BUNDLE


def test_reconnecting() -> None:
    """True stands for the usual pauses, False for none at all."""
    own = Backoff(first=1.0)
    assert [ConnectOptions(reconnect=value).backoff for value in (False, True, own)] == [None, Backoff(), own]
