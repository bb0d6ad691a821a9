"""What was recorded, back onto a bus: in order, in its rhythm or as fast as the bus takes it.

Spark sorts the rows, in parts of a bounded size, on disk where they do not fit in memory; the parts come to this
process one after the other, the next one while one is being published. So there is never more in memory than two
parts, whatever is replayed, and the bus need only be reached from here.

Every message has a time at which it is due, counted from the first one's, and is never published before it. As that
time does not depend on the messages before, waiting a little too long once makes one message late, and not all
that follow.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F

from sbus.client.blocking import Bus
from sbus.errors import UsageError
from sbus.journal.keytext import from_text
from sbus.journal.schema import Kind

__all__ = ["Gap", "Replay", "replay"]

_PART_BYTES = 32 * 1024 * 1024
_PART_ROWS = 500_000
_AT_ONCE = 1024
"""Messages that are handed over together at most, so that progress and the end of it all are not far away."""
_POLL_INTERVAL = 0.2
"""Seconds after which a wait is looked at again."""
_FENCE_TIMEOUT = 300.0
_SECOND = 1_000_000


class Gap(NamedTuple):
    """A gap of the recording that was come across: messages may be missing there.

    :ivar time: when it ended, µs since 1970.
    :ivar kind: as in the journal.
    """

    time: int
    kind: str


@dataclass
class Replay:
    """How it goes, and how it went.

    :ivar total: messages that there are to publish.
    :ivar span: µs from the first one to the last one, as they were recorded.
    :ivar messages: that were published; `bytes` of payload.
    :ivar gaps: that the recording has among them: at most `MOST_GAPS` of the `gap_count`.
    :ivar late: seconds by which the latest was published after it was due; `late_sum`, for all together.
    :ivar seconds: that it took, up to the fence.
    :ivar is_complete: whether all were published, and the bus has dealt with them.
    """

    MOST_GAPS = 1000

    total: int = 0
    span: int = 0
    messages: int = 0
    bytes: int = 0
    gaps: list[Gap] = field(default_factory=list)
    gap_count: int = 0
    late: float = 0.0
    late_sum: float = 0.0
    seconds: float = 0.0
    is_complete: bool = False

    def met(self, gap: Gap) -> None:
        """Take note of a gap."""
        self.gap_count += 1
        if len(self.gaps) < self.MOST_GAPS:
            self.gaps.append(gap)


def replay(
    rows: DataFrame,
    bus: Bus,
    *,
    speed: float | None = 1.0,
    prefix: bytes = b"",
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[Replay], None] = lambda state: None,
    part_bytes: int = _PART_BYTES,
) -> Replay:
    """Publish what was recorded, ordered by time, journal and number; at the end, wait until the bus has dealt with it.

    :param rows: with the columns of a journal; keys as text or as bytes. Rows that are no messages tell of gaps.
    :param bus: to publish on.
    :param speed: 1 is the original rhythm, 2 twice as fast; None: as fast as the bus takes it.
    :param prefix: what is put in front of every key.
    :param stop: whether to end early, in order; asked several times a second.
    :param progress: is told how far it is, several times a second.
    :param part_bytes: about how much is held in memory at a time.
    :raises sbus.errors.UsageError: for a speed that is none, or if there is no message to publish.
    :raises sbus.errors.Disconnected: if the bus goes away.
    :raises sbus.errors.TimedOut: if it has not dealt with everything for minutes.
    """
    if speed is not None and not speed > 0:
        raise UsageError(f"a speed of {speed:g}: say 1 for the original rhythm, 2 for twice as fast, or max")
    is_message = F.col("kind") == Kind.MESSAGE.value
    us = F.unix_micros("time")
    state = Replay()
    found = rows.agg(
        F.count_if(is_message),
        F.count("*"),
        F.sum(F.length("payload") + F.length("key")),
        F.min(F.when(is_message, us)),
        F.max(F.when(is_message, us)),
    ).collect()[0]
    state.total, count, size, first, last = found
    if not state.total:
        raise UsageError("there is no message to replay: look at the pattern, at --since and --until")
    state.span = last - first
    parts = max(1, -(-size // part_bytes), -(-count // _PART_ROWS))
    order = ("us", "journal", "seq")
    columns = rows.select(us.alias("us"), "journal", "seq", "kind", "key", "payload")
    ordered = columns.repartitionByRange(parts, *order).sortWithinPartitions(*order)
    ordered = ordered.select("us", "kind", "key", "payload")
    pacer = _Pacer(bus, first, speed, prefix, stop, state, progress)
    for batch in _batches(ordered):
        if not pacer.publish(batch):
            break
    bus.fence(_FENCE_TIMEOUT)
    pacer.end()
    return state


def _batches(ordered: DataFrame) -> Iterator[list[Row]]:
    """The rows, of one partition after the other."""
    rows = ordered.toLocalIterator(prefetchPartitions=True)
    while batch := list(islice(rows, _AT_ONCE)):
        yield batch


def _key(key: str | bytearray) -> bytes:
    """A key as it was on the bus, from the text or the bytes that it is read as."""
    if not isinstance(key, str):
        return bytes(key)
    return from_text(key) if "\\" in key else key.encode()


class _Pacer:
    """Publishes batches, each message when it is due."""

    def __init__(
        self,
        bus: Bus,
        first: int,
        speed: float | None,
        prefix: bytes,
        stop: Callable[[], bool],
        state: Replay,
        progress: Callable[[Replay], None],
    ) -> None:
        self._bus = bus
        self._first = first
        self._speed = speed
        self._prefix = prefix
        self._stop = stop
        self._state = state
        self._progress = progress
        self._start: float | None = None  # it begins with the first message, when all is sorted
        self._shown = 0.0

    def publish(self, rows: list[Row]) -> bool:
        """Publish rows; returns whether to go on."""
        if self._start is None:
            self._start = time.monotonic()
        times, messages = [], []
        for us, kind, key, payload in rows:
            if kind == Kind.MESSAGE.value:
                times.append(us)
                messages.append((self._prefix + _key(key), bytes(payload)))
            else:
                self._state.met(Gap(us, kind))
        at = 0
        while at < len(messages) and not self._stop():
            due = self._due(times, at)
            if due == at:
                self._wait(times[at])
                continue
            chunk = messages[at:due]
            self._bus.publish_many(chunk)
            self._count(chunk, times[at:due])
            at = due
        return not self._stop()

    def _due(self, times: list[int], at: int) -> int:
        """How far the messages are due by now."""
        most = min(len(times), at + _AT_ONCE)
        if self._speed is None:
            return most
        now = self._first + self._passed() * self._speed * _SECOND
        return bisect_right(times, now, at, most)

    def _passed(self) -> float:
        return 0.0 if self._start is None else time.monotonic() - self._start

    def _seconds(self, recorded: int) -> float:
        """When a message of that time is due, in seconds from the start."""
        assert self._speed is not None
        return (recorded - self._first) / _SECOND / self._speed

    def _wait(self, recorded: int) -> None:
        while not self._stop():
            left = self._seconds(recorded) - self._passed()
            if left <= 0:
                return
            time.sleep(min(left, _POLL_INTERVAL))
            self._tell()

    def _count(self, chunk: list[tuple[bytes, bytes]], times: list[int]) -> None:
        state = self._state
        state.messages += len(chunk)
        state.bytes += sum(len(payload) for _, payload in chunk)
        if self._speed is not None:
            passed = self._passed()
            state.late = max(state.late, passed - self._seconds(times[0]))
            state.late_sum += len(chunk) * passed - sum(map(self._seconds, times))
        self._tell()

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._shown >= _POLL_INTERVAL:
            self._shown = now
            self._state.seconds = self._passed()
            self._progress(self._state)

    def end(self) -> None:
        """All is published, and dealt with."""
        self._state.seconds = self._passed()
        self._state.is_complete = self._state.messages >= self._state.total
