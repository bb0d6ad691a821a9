"""What a program passes to its bus: each mistake is named, with what to give instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from twisted.internet import reactor

from sbus.errors import UsageError
from sbus.policy import Policy
from sbus.protocol.keys import EARLY
from sbus.seqpacket.endpoints import SeqpacketServerEndpoint
from sbus.server import BusService
from sbus.server.core.credentials import AccessSettings, OwnUserPolicy
from sbus.server.core.limits import Limits
from sbus.server.core.listeners import Listener
from sbus.server.core.observers import Observer


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., BusService]:
    def make(endpoint: Any = None, **arguments: Any) -> BusService:
        return BusService(endpoint or SeqpacketServerEndpoint(reactor, str(tmp_path / "bus")), **arguments)

    return make


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"endpoint": "/run/bus"},
            r"'/run/bus' is not an endpoint, as it has no listen\(\): .*Seqpacket",
        ),
        ({"endpoint": SeqpacketServerEndpoint}, "is not an endpoint, as it is a class"),
        ({"limits": 5}, r"5 is not a Limits: give, for example, Limits\("),
        ({"limits": {}}, r"{} is not a Limits"),
        ({"dialect": "early"}, "'early' is not a dialect: .*EARLY"),
        ({"policy": "policy.toml"}, r"'policy.toml' is not a policy: give, for example, sbus.policy.load"),
        ({"policy": Policy(), "dialect": EARLY}, "a policy is for keys of the current dialect"),
        ({"credentials": object()}, r"is not credentials, as it has no checkSubscription\(\): .*OwnUserPolicy"),
        ({"observers": [Observer(), object()]}, r"is not an observer, as it has no audited\(\): .*Observer"),
        ({"observers": [Observer]}, "is not an observer, as it is a class"),
        ({"listeners": [(Listener("guests"), "/run/other")]}, "'/run/other' is not an endpoint"),
    ],
)
def test_mistakes(make: Callable[..., BusService], arguments: dict[str, Any], text: str) -> None:
    """A wrong argument is named before the bus is made."""
    with pytest.raises(UsageError, match=text):
        make(**arguments)


def test_good_arguments(make: Callable[..., BusService]) -> None:
    """What the documentation shows is accepted."""
    make(
        credentials=OwnUserPolicy().make(AccessSettings()), limits=Limits(max_clients=10), observers=iter([Observer()])
    )


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({"max_packet": "64K"}, "max_packet is '64K': it must be a whole number"),
        ({"max_clients": 1.5}, "max_clients is 1.5: it must be a whole number"),
        ({"max_clients": None}, "max_clients is None: it must be a whole number"),
        ({"block_timeout": "30s"}, "block_timeout is '30s': it must be a number"),
        ({"block_timeout": 0}, "block_timeout is 0: it must be more than 0"),
        ({"user_memory": -1}, "user_memory is -1: it must be more than 0"),
    ],
)
def test_wrong_limits(limits: dict[str, Any], text: str) -> None:
    """A limit of the wrong type or sign is named."""
    with pytest.raises(UsageError, match=text):
        Limits(**limits)


def test_limits_by_default() -> None:
    """None stands for a limit that is computed; a time-out may be whole."""
    assert Limits(user_memory=None, block_timeout=5).block_timeout == 5


@pytest.mark.parametrize(("key", "payload"), [("k", b""), (b"k", "text"), (b"k", 5)])
def test_publish_takes_bytes(make: Callable[..., BusService], key: Any, payload: Any) -> None:
    """Text is refused, with what to give instead."""
    with pytest.raises(UsageError, match=r"a key and a payload are bytes, .*\.encode\(\): "):
        make().registry.publish(key, payload)
