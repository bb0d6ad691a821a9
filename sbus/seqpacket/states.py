"""The states of a connection and the table of their transitions; no I/O.

Theory of operation
-------------------

A connection is three small state machines. The kernel ends reading and writing separately, so each direction has one;
the third is the connection as a whole. An `Event` moves one, two or all of them.

=============  ====================================================================================
machine        its states, and the events between them
=============  ====================================================================================
`Life`         ``NEW --START--> OPEN --LOSE--> CLOSING --ABORT--> ABORTING --CLOSE--> CLOSED``
`ReadSide`     ``OPEN --PAUSE--> PAUSED --RESUME--> RESUMING --RESUMED--> OPEN``
..             ``OPEN, RESUMING --END_OF_FILE--> EOF --REPORT--> REPORTED``
..             ``PAUSED --END_OF_FILE--> PAUSED_EOF --RESUME--> EOF``
..             ``any --LOSE, ABORT, CLOSE--> STOPPED``
`WriteSide`    ``OPEN --DRAIN, LOSE--> DRAINING --SHUT_DOWN--> SHUT``
..             ``OPEN, DRAINING --FAIL, ABORT, CLOSE--> LOST``
=============  ====================================================================================

Invariants:

* The tables (`LIFE`, `READ_SIDE`, `WRITE_SIDE`) are the only rules. A state without an entry for an event makes that
  event an error (`TransitionError`), and the connection stays as it was.
* An event that no row of a machine names does not concern that machine.
* While its read side is OPEN, the transport watches its socket for packets, or will try again later; in any other
  state, only until some are reported.
* A protocol can call every method of a transport at any time, so PAUSE, RESUME, LOSE, ABORT and CLOSE have an entry in
  every state of a connection that has started.

Two states look superfluous and are not. RESUMING lies between ``resumeProducing`` and the deferred call that reads
again: packets kept back come first, and never inside the caller. PAUSED_EOF remembers that the peer left during a
pause; its packets come before the end of file.

`PacketTransport` and `sbus.testing.fakes.FakePacketTransport` both extend `Connection`. A transition costs 0.2 to 0.5
µs; a packet on its way needs none.

Rejected: about fifteen booleans in each. The fake delivered packets before a resume was due, and the transport reported
an end of file after ``abortConnection``.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, TypeVar

__all__ = [
    "LIFE",
    "READ_SIDE",
    "WRITE_SIDE",
    "Connection",
    "Event",
    "Life",
    "ReadSide",
    "TransitionError",
    "WriteSide",
]


class _Hashable(enum.Enum):
    """A base for enums whose members are keys.

    `enum.Enum` hashes the name, with a call in Python.
    """

    __hash__ = object.__hash__


class Life(_Hashable):
    """The connection as a whole."""

    NEW = "no protocol yet"
    OPEN = "the protocol has the connection"
    CLOSING = "loseConnection: closes once the queue is sent"
    ABORTING = "the close is scheduled, and what waits is discarded"
    CLOSED = "the socket is closed, and the protocol had its connectionLost"


class ReadSide(_Hashable):
    """The direction from the peer to the protocol."""

    OPEN = "packets are read and delivered"
    PAUSED = "the protocol has paused the transport"
    RESUMING = "resumed; the deferred call that reads again is due"
    EOF = "the peer's end of file was read and is to be reported"
    PAUSED_EOF = "the same, while the protocol has paused the transport"
    REPORTED = "the protocol had its readConnectionLost"
    STOPPED = "the connection is closing: nothing more is delivered"


class WriteSide(_Hashable):
    """The direction from the protocol to the peer."""

    OPEN = "packets are queued and sent"
    DRAINING = "what is queued, and what a producer adds, is still sent"
    SHUT = "everything was sent, and the peer reads end of file"
    LOST = "nothing can be sent any more"


class Event(_Hashable):
    """An event that moves a connection from one state to the next."""

    START = "the transport is connected to its protocol"
    PAUSE = "pauseProducing"
    RESUME = "resumeProducing"
    RESUMED = "the deferred call of a resume has delivered what was kept back"
    END_OF_FILE = "the end of file was read from the socket"
    REPORT = "readConnectionLost is called next"
    DRAIN = "loseWriteConnection"
    SHUT_DOWN = "everything is sent, and the socket is shut down for writing"
    FAIL = "the peer does not read any more: a send failed, or it hung up"
    LOSE = "loseConnection"
    ABORT = "abortConnection, or an error that ends the connection"
    CLOSE = "the socket is closed"


_State = TypeVar("_State", Life, ReadSide, WriteSide)
_Rows = Mapping[_State, Mapping[Event, _State]]

LIFE: Final[_Rows[Life]] = {
    Life.NEW: {Event.START: Life.OPEN},
    Life.OPEN: {Event.LOSE: Life.CLOSING, Event.ABORT: Life.ABORTING, Event.CLOSE: Life.CLOSED},
    Life.CLOSING: {Event.LOSE: Life.CLOSING, Event.ABORT: Life.ABORTING, Event.CLOSE: Life.CLOSED},
    Life.ABORTING: {Event.LOSE: Life.ABORTING, Event.ABORT: Life.ABORTING, Event.CLOSE: Life.CLOSED},
    Life.CLOSED: {Event.LOSE: Life.CLOSED, Event.ABORT: Life.CLOSED, Event.CLOSE: Life.CLOSED},
}

_STOP: Final = {
    Event.LOSE: ReadSide.STOPPED,
    Event.ABORT: ReadSide.STOPPED,
    Event.CLOSE: ReadSide.STOPPED,
}
READ_SIDE: Final[_Rows[ReadSide]] = {
    ReadSide.OPEN: {
        Event.PAUSE: ReadSide.PAUSED,
        Event.RESUME: ReadSide.OPEN,
        Event.END_OF_FILE: ReadSide.EOF,
        **_STOP,
    },
    ReadSide.PAUSED: {
        Event.PAUSE: ReadSide.PAUSED,
        Event.RESUME: ReadSide.RESUMING,
        Event.END_OF_FILE: ReadSide.PAUSED_EOF,
        **_STOP,
    },
    ReadSide.RESUMING: {
        Event.PAUSE: ReadSide.PAUSED,
        Event.RESUME: ReadSide.RESUMING,
        Event.RESUMED: ReadSide.OPEN,
        Event.END_OF_FILE: ReadSide.EOF,
        **_STOP,
    },
    ReadSide.EOF: {
        Event.PAUSE: ReadSide.PAUSED_EOF,
        Event.RESUME: ReadSide.EOF,
        Event.REPORT: ReadSide.REPORTED,
        **_STOP,
    },
    ReadSide.PAUSED_EOF: {
        Event.PAUSE: ReadSide.PAUSED_EOF,
        Event.RESUME: ReadSide.EOF,
        **_STOP,
    },
    ReadSide.REPORTED: {Event.PAUSE: ReadSide.REPORTED, Event.RESUME: ReadSide.REPORTED, **_STOP},
    ReadSide.STOPPED: {
        Event.PAUSE: ReadSide.STOPPED,
        Event.RESUME: ReadSide.STOPPED,
        Event.END_OF_FILE: ReadSide.STOPPED,
        **_STOP,
    },
}

WRITE_SIDE: Final[_Rows[WriteSide]] = {
    WriteSide.OPEN: {
        Event.DRAIN: WriteSide.DRAINING,
        Event.LOSE: WriteSide.DRAINING,
        Event.FAIL: WriteSide.LOST,
        Event.ABORT: WriteSide.LOST,
        Event.CLOSE: WriteSide.LOST,
    },
    WriteSide.DRAINING: {
        Event.DRAIN: WriteSide.DRAINING,
        Event.LOSE: WriteSide.DRAINING,
        Event.SHUT_DOWN: WriteSide.SHUT,
        Event.FAIL: WriteSide.LOST,
        Event.ABORT: WriteSide.LOST,
        Event.CLOSE: WriteSide.LOST,
    },
    WriteSide.SHUT: {
        Event.DRAIN: WriteSide.SHUT,
        Event.LOSE: WriteSide.SHUT,
        Event.ABORT: WriteSide.SHUT,
        Event.CLOSE: WriteSide.SHUT,
    },
    WriteSide.LOST: {
        Event.DRAIN: WriteSide.LOST,
        Event.LOSE: WriteSide.LOST,
        Event.ABORT: WriteSide.LOST,
        Event.CLOSE: WriteSide.LOST,
    },
}


def _complete(rows: _Rows[_State]) -> dict[tuple[_State, Event], _State]:
    """Flatten a table of transitions.

    In a machine that an event does not concern, every state is its own successor.
    """
    concerned = {event for row in rows.values() for event in row}
    return {
        (state, event): row[event] if event in concerned else state
        for state, row in rows.items()
        for event in Event
        if event in row or event not in concerned
    }


_LIFE: Final = _complete(LIFE)
_READ_SIDE: Final = _complete(READ_SIDE)
_WRITE_SIDE: Final = _complete(WRITE_SIDE)
_PACING: Final = frozenset({Event.PAUSE, Event.RESUME, Event.RESUMED})
"""The frequent events, which concern the read side alone."""


class TransitionError(RuntimeError):
    """An event that the table does not provide for in the present states.

    It is a defect of the transport itself.
    """


class Connection:
    """The three states of a connection.

    :ivar life: the connection as a whole.
    :ivar read_side: the direction from the peer to the protocol.
    :ivar write_side: the direction from the protocol to the peer.
    """

    __slots__ = ("life", "read_side", "write_side")

    def __init__(self) -> None:
        self.life = Life.NEW
        self.read_side = ReadSide.OPEN
        self.write_side = WriteSide.OPEN

    @property
    def connected(self) -> bool:
        """Whether the protocol is between ``makeConnection`` and ``connectionLost``."""
        return self.life is not Life.NEW and self.life is not Life.CLOSED

    @property
    def disconnecting(self) -> bool:
        """Whether ``loseConnection`` was called and the connection is not closed yet."""
        return self.life is Life.CLOSING

    def move(self, event: Event) -> None:
        """Enter the states that follow this event.

        :raises TransitionError: if the table has no entry for it in one of the states; then none changes.
        """
        try:
            if event in _PACING:
                self.read_side = _READ_SIDE[self.read_side, event]
                return
            successors = (
                _LIFE[self.life, event],
                _READ_SIDE[self.read_side, event],
                _WRITE_SIDE[self.write_side, event],
            )
        except KeyError:
            states = f"{self.life}, {self.read_side}, {self.write_side}"
            raise TransitionError(f"{event} is not possible in {states}") from None
        self.life, self.read_side, self.write_side = successors
        self._moved()

    def _moved(self) -> None:
        """Act on new states, after any event but those of pacing; a transport can override this."""
