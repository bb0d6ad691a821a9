"""Collects messages into batches for the journal: by number, by size, or by time.

Each batch costs the journal a record, a checksum and two writes, so a batch should hold many messages. But a message
that arrives alone must not wait for others, so a timer bounds how long it is held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

from twisted.internet.interfaces import IDelayedCall, IReactorTime

from sbus.journal import clock

__all__ = ["Batch", "BatchBuffer", "memory_of"]

_MESSAGE_OVERHEAD = 160
"""Bytes of memory that a message takes besides its key and payload."""


class Batch(NamedTuple):
    """Messages that are appended to the journal in one call.

    :ivar messages: key and payload of each.
    :ivar times: when each arrived, in µs since the epoch.
    :ivar size: the bytes in all keys and payloads.
    """

    messages: list[tuple[bytes, bytes]]
    times: list[int]
    size: int


class BatchBuffer:
    """Collects messages into batches.

    :param reactor: provides the timer.
    :param send: called with each batch.
    :param rows: the number of messages that completes a batch. Messages that are added together stay together, so a
        batch may have more.
    :param size: the number of bytes, in keys and payloads, that completes a batch.
    :param seconds: the longest time that a message is held.
    :param now: returns the time, in µs since the epoch.
    :ivar rows: the number of messages in the buffer.
    :ivar size: the bytes in their keys and payloads.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        send: Callable[[Batch], object],
        *,
        rows: int,
        size: int,
        seconds: float,
        now: Callable[[], int] = clock.now,
    ) -> None:
        self.rows = 0
        self.size = 0
        self._reactor = reactor
        self._send = send
        self._max_rows = rows
        self._max_bytes = size
        self._max_seconds = seconds
        self._now = now
        self._messages: list[tuple[bytes, bytes]] = []
        self._times: list[int] = []
        self._timer: IDelayedCall | None = None

    def add(self, messages: Sequence[tuple[bytes, bytes]]) -> None:
        """Add messages that have just arrived; send a batch if they complete one."""
        self._times += [self._now()] * len(messages)
        self._messages += messages
        self.rows += len(messages)
        self.size += sum(map(len, chain.from_iterable(messages)))
        if self.rows >= self._max_rows or self.size >= self._max_bytes:
            self.flush()
        elif self._timer is None and messages:
            self._timer = self._reactor.callLater(self._max_seconds, self.flush)

    def flush(self) -> None:
        """Send the messages in the buffer, if there are any."""
        if self._timer is not None:
            if self._timer.active():
                self._timer.cancel()
            self._timer = None
        if self._messages:
            batch = Batch(self._messages, self._times, self.size)
            self._messages, self._times, self.rows, self.size = [], [], 0, 0
            self._send(batch)


def memory_of(messages: int, size: int) -> int:
    """Return the bytes of memory that messages take.

    :param messages: the number of messages.
    :param size: the bytes in their keys and payloads.
    """
    return size + messages * _MESSAGE_OVERHEAD
