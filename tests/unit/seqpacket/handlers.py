"""Handlers of a multiplexer's events, on real sockets."""

from __future__ import annotations

from collections.abc import Callable

from twisted.python.failure import Failure

from sbus.seqpacket.multiplexer import READ, Multiplexer
from tests.support.reactors import socket_pair


class Handler:
    """A socket in the multiplexer that records its calls.

    :ivar react: called when it is ready.
    """

    def __init__(self, multiplexer: Multiplexer, events: int = READ, name: str = "") -> None:
        self.multiplexer = multiplexer
        self.sock, self.peer = socket_pair()
        self.name = name
        self.events: list[int] = []
        self.exclusive: list[bool] = []
        self.failures: list[Failure] = []
        self.reasons: list[Failure] = []
        self.react: Callable[[], object] = lambda: None
        multiplexer.add(self.sock.fileno(), self, events)

    def ready(self, events: int, exclusive: bool) -> None:
        self.events.append(events)
        self.exclusive.append(exclusive)
        self.react()

    def failed(self, failure: Failure) -> None:
        self.failures.append(failure)

    def lost(self, reason: Failure) -> None:
        self.reasons.append(reason)
        self.close()

    def close(self) -> None:
        self.multiplexer.remove(self.sock.fileno())
        self.sock.close()
        self.peer.close()
