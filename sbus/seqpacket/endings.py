"""The ways in which a protocol ends a connection: the part of a packet transport that does not depend on its carrier.

The transport of a socket and the fake for tests extend `Endings`, so that they close by the same steps: a queue that is
sent first, a direction that ends by itself, an abort. They provide each step that reaches the peer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Final

from twisted.internet import error, main
from twisted.python.failure import Failure

from sbus.seqpacket.states import Connection, Event, Life, WriteSide

__all__ = ["Endings"]

# A member looked up in its enum costs ten times a global.
_OPEN: Final = WriteSide.OPEN
_DRAINING: Final = WriteSide.DRAINING


class Endings(Connection, ABC):
    """A connection that its protocol can end (`ITransport`, `IPushProducer`)."""

    __slots__ = ()

    @abstractmethod
    def write(self, data: bytes) -> None:
        """Send one packet, soon."""

    @abstractmethod
    def flush(self) -> None:
        """Send as much of the queue as possible; once it is empty, complete a pending end."""

    @abstractmethod
    def _call_soon(self, call: Callable[..., object], *args: object) -> None:
        """Call when the events in hand are dealt with."""

    @abstractmethod
    def _stop_input(self) -> None:
        """Deliver nothing from now on, as the connection is closing."""

    @abstractmethod
    def _end_writing(self, event: Event) -> None:
        """Discard the queue, and report the end of writing; if reading has ended too, close instead."""

    @abstractmethod
    def _abort(self, reason: Failure) -> None:
        """Close soon, and discard the waiting packets."""

    @abstractmethod
    def _close_soon(self, reason: Failure) -> None:
        """Close when the events in hand are dealt with."""

    def writeSequence(self, data: Iterable[bytes]) -> None:
        """Send several packets, one for each item (`ITransport`)."""
        for packet in data:
            self.write(packet)

    def stopProducing(self) -> None:
        """Close (`IPushProducer`)."""
        self.loseConnection()

    def loseConnection(self) -> None:
        """Send the queue, and what a producer adds, then close (`ITransport`).

        Nothing that arrives from now on is delivered.
        """
        if self.life is not Life.OPEN:
            return
        self.move(Event.LOSE)
        self._stop_input()
        if self._is_writable():
            self._call_soon(self.flush)
        else:
            self._close_soon(Failure(main.CONNECTION_DONE))

    def loseWriteConnection(self) -> None:
        """Send the queue, then end the sending: the peer reads end of file, and may still send."""
        if self._is_writable():
            self.move(Event.DRAIN)
            self._call_soon(self.flush)

    def abortConnection(self) -> None:
        """Close soon, and discard the waiting packets."""
        self._abort(Failure(error.ConnectionAborted()))

    def _is_writable(self) -> bool:
        return self.write_side is _OPEN or self.write_side is _DRAINING

    def _lose_writing(self) -> None:
        """Note that the peer no longer reads."""
        if self._is_writable():
            self._end_writing(Event.FAIL)
