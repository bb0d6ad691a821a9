"""A bus with a policy, and clients that ask."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred

from sbus.policy import Policy
from tests.support.buses import Bus, Peer

ON, ANSWER = b"CMSG denied/on", b"CMSG denied/on\0"
RULES = """
[[rule]]
name = "sensors"
users = [1000]
publish = ["sensors/"]
subscribe = ["sensors/", "alarms/*"]
deny_publish = ["sensors/calibration/"]
"""
CLOSED = 'default = "deny"\n' + RULES


def asking(bus: Bus, uid: int = 1000, **settings: Any) -> Peer:
    """Connect a client that stays when it is refused."""
    client = bus.connect(uid=uid, **settings)
    client.send(ON)
    assert client.take() == [ANSWER]
    return client


def adopt(bus: Bus, policy: Policy) -> list[int]:
    """Put a policy into force; return the generations that are in force, as they come."""
    done: list[int] = []
    Deferred.fromCoroutine(bus.registry.guard.adopt(policy)).addCallback(done.append)
    bus.settle()
    return done
