"""Messages on their way to the disk: gathered until they make a batch, by number, by size or by time.

A batch costs the journal a record, a checksum and a write, so there should be many messages in one. A message that
comes alone must not wait for others, though.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from twisted.internet.interfaces import IReactorTime

__all__ = ["Batch", "Batches", "microseconds"]


def microseconds() -> int:
    """The time now in µs since 1970, as it stands in a journal."""
    return time.time_ns() // 1000


class Batch(NamedTuple):
    """What is appended to the journal in one go.

    :ivar messages: pairs of key and payload.
    :ivar times: for each, when it came, in µs since 1970.
    :ivar size: bytes in keys and payloads.
    """

    messages: list[tuple[bytes, bytes]]
    times: list[int]
    size: int


class Batches:
    """Makes batches of what comes.

    :param clock: an `IReactorTime`.
    :param send: called with each `Batch`.
    :param rows: messages that make a batch. What comes at once stays together, so it may have more.
    :param size: bytes that make one.
    :param seconds: for how long a message waits for others at most.
    :param now: the time in µs since 1970.
    :ivar rows: messages that wait here.
    :ivar size: bytes in these.
    """

    def __init__(
        self,
        clock: IReactorTime,
        send: Callable[[Batch], Any],
        *,
        rows: int,
        size: int,
        seconds: float,
        now: Callable[[], int] = microseconds,
    ) -> None:
        self.rows = 0
        self.size = 0
        self._clock = clock
        self._send = send
        self._most_rows = rows
        self._most_bytes = size
        self._seconds = seconds
        self._now = now
        self._messages: list[tuple[bytes, bytes]] = []
        self._times: list[int] = []
        self._timer: Any = None

    def add(self, messages: Sequence[tuple[bytes, bytes]]) -> None:
        """Messages have come, just now."""
        self._times += [self._now()] * len(messages)
        self._messages += messages
        self.rows += len(messages)
        self.size += sum(map(len, chain.from_iterable(messages)))
        if self.rows >= self._most_rows or self.size >= self._most_bytes:
            self.flush()
        elif self._timer is None and messages:
            self._timer = self._clock.callLater(self._seconds, self.flush)

    def flush(self) -> None:
        """Send what waits, if anything does."""
        if self._timer is not None:
            if self._timer.active():
                self._timer.cancel()
            self._timer = None
        if self._messages:
            batch = Batch(self._messages, self._times, self.size)
            self._messages, self._times, self.rows, self.size = [], [], 0, 0
            self._send(batch)
