"""The chore of sending packets that waited until their socket had room."""

from __future__ import annotations

from typing import Any, Protocol

from sbus.fair import Scheduler
from sbus.seqpacket.interfaces import IPacketTransport

__all__ = ["ARRANGED_AT_ONCE", "Drain"]

ARRANGED_AT_ONCE = 2_048
"""Messages that are put in order at a time: about 2 ms."""


class _Client(Protocol):
    number: int
    transport: IPacketTransport | None
    drain: Drain | None

    def queue_is_arranged(self, most: int) -> bool: ...


class Drain:
    """Packets that wait for a socket that has room again, to be sent in the client's order: a chore of its user.

    :param client: the receiver.
    """

    __slots__ = ("_client", "_scheduler")

    def __init__(self, client: _Client, scheduler: Scheduler) -> None:
        self._client = client
        self._scheduler = scheduler

    def run(self, until: int) -> bool:
        """See `sbus.fair.Entry`."""
        client = self._client
        while not client.queue_is_arranged(ARRANGED_AT_ONCE):
            if self._scheduler.clock() >= until:
                return False
        client.drain = None
        if client.transport is not None:
            client.transport.send_on(not self._scheduler.is_contended)
        return True

    def describe(self) -> dict[str, Any]:
        """See `sbus.fair.Entry`."""
        return {"client": self._client.number}
