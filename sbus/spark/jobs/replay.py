"""Replay: publish recorded messages again, in order.

They keep their rhythm, or go as fast as the bus accepts them.

Theory of operation
-------------------

Spark sorts the rows by time, journal and sequence number, on disk if they do not fit into memory. It divides them into
ordered parts of about 32 MiB and at most 500,000 rows, and `toLocalIterator` brings the parts to this process one after
the other, the next one while one is being published. So memory is bounded by two parts however much is replayed, and
only this process connects to the bus.

Every message is due at a time that is counted from the first message, divided by the speed. It is never published
before that. Because the due time does not depend on earlier messages, one long pause makes some messages late and does
not shift the rest; adding up intervals would.

Messages are published in chunks of at most 1024, so progress is reported, and a stop is noticed, several times a
second. The replay ends with a fence: it is complete only when the bus has handled every message.
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
from sbus.journal.clock import from_seconds, to_seconds
from sbus.journal.keytext import from_text
from sbus.journal.schema import Kind

__all__ = ["Gap", "Replay", "replay"]

_MAX_PART_BYTES = 32 * 1024 * 1024
"""Bytes of keys and payloads in a part that Spark hands over at once, about."""
_MAX_PART_ROWS = 500_000
"""Rows in such a part."""
_CHUNK_MESSAGES = 1024
"""Messages that are published together at most."""
_POLL_INTERVAL = 0.2
"""Seconds between two reports of progress, and the longest sleep before the next look at `stop`."""
_FENCE_TIMEOUT = 300.0
"""Seconds for the bus to handle the last messages."""


class Gap(NamedTuple):
    """A gap of the recording, where messages may be missing.

    :ivar time: when it ended, in µs since the epoch.
    :ivar kind: the kind of its row in the journal.
    """

    time: int
    kind: str


@dataclass
class Replay:
    """The progress and the result of a replay.

    :ivar total: messages to publish.
    :ivar span: µs from the first message to the last one, as they were recorded.
    :ivar messages: messages published so far; `bytes`: their payload bytes.
    :ivar gaps: the first `MAX_GAPS` gaps of the recording; `gap_count`: all of them.
    :ivar digests: messages that cannot be published, as the recording has only a digest of their payload.
    :ivar late: the largest delay of a message after it was due, in seconds; `late_sum`: the sum of all delays.
    :ivar seconds: the time that the replay has taken, including the fence.
    :ivar is_complete: whether all messages were published and the bus has handled them.
    """

    MAX_GAPS = 1000
    """Gaps that are kept with their times."""

    total: int = 0
    span: int = 0
    messages: int = 0
    bytes: int = 0
    gaps: list[Gap] = field(default_factory=list)
    gap_count: int = 0
    digests: int = 0
    late: float = 0.0
    late_sum: float = 0.0
    seconds: float = 0.0
    is_complete: bool = False

    def add_gap(self, gap: Gap) -> None:
        """Count a gap."""
        self.gap_count += 1
        if len(self.gaps) < self.MAX_GAPS:
            self.gaps.append(gap)


def replay(
    rows: DataFrame,
    bus: Bus,
    *,
    speed: float | None = 1.0,
    prefix: bytes = b"",
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[Replay], None] = lambda state: None,
    part_bytes: int = _MAX_PART_BYTES,
) -> Replay:
    """Publish recorded messages again, and wait until the bus has handled them.

    They are ordered by time, journal and sequence number.

    :param rows: rows with the columns of a journal; keys as text or as bytes; rows of other kinds are gaps, or digests.
    :param bus: the connection to publish with.
    :param speed: 1 for the original rhythm, 2 for twice as fast; None: as fast as the bus accepts messages.
    :param prefix: bytes to put in front of every key.
    :param stop: called several times a second; when it returns true, the replay ends in order.
    :param progress: called several times a second.
    :param part_bytes: about how many bytes Spark hands over at once.
    :raises sbus.errors.UsageError: if the speed is not positive, or there is no message to publish.
    :raises sbus.errors.Disconnected: if the connection to the bus is lost.
    :raises sbus.errors.NotAllowed: if the bus refuses a message, and the connection raises denials.
    :raises sbus.errors.TimedOut: if the bus has not handled the last messages within five minutes.
    """
    if speed is not None and not speed > 0:
        raise UsageError(f"a speed of {speed:g}: use 1 for the original rhythm, 2 for twice as fast, or max")
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
        raise UsageError("there is no message to replay: check the pattern, --since and --until")
    state.span = last - first
    parts = max(1, -(-size // part_bytes), -(-count // _MAX_PART_ROWS))
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
    """Yield the rows of one partition after the other, in lists."""
    rows = ordered.toLocalIterator(prefetchPartitions=True)
    while batch := list(islice(rows, _CHUNK_MESSAGES)):
        yield batch


def _key(key: str | bytearray) -> bytes:
    """Return the key as it was on the bus, from its text or its bytes."""
    if not isinstance(key, str):
        return bytes(key)
    return from_text(key) if "\\" in key else key.encode()


class _Pacer:
    """Publishes each message when it is due."""

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
        self._start: float | None = None  # time.monotonic() of the first message, when all rows are sorted
        self._reported_at = 0.0

    def publish(self, rows: list[Row]) -> bool:
        """Publish rows; return whether to go on."""
        if self._start is None:
            self._start = time.monotonic()
        times, messages = [], []
        for us, kind, key, payload in rows:
            if kind == Kind.MESSAGE.value:
                times.append(us)
                messages.append((self._prefix + _key(key), bytes(payload)))
            elif kind == Kind.DIGEST.value:
                self._state.digests += 1
            elif kind != Kind.CLOCK.value:
                self._state.add_gap(Gap(us, kind))
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
        """Return the index after the last message that is due now."""
        end = min(len(times), at + _CHUNK_MESSAGES)
        if self._speed is None:
            return end
        now = self._first + from_seconds(self._elapsed() * self._speed)
        return bisect_right(times, now, at, end)

    def _elapsed(self) -> float:
        return 0.0 if self._start is None else time.monotonic() - self._start

    def _seconds(self, recorded: int) -> float:
        """Return the due time of a message, in seconds from the start."""
        assert self._speed is not None
        return to_seconds(recorded - self._first) / self._speed

    def _wait(self, recorded: int) -> None:
        while not self._stop():
            left = self._seconds(recorded) - self._elapsed()
            if left <= 0:
                return
            time.sleep(min(left, _POLL_INTERVAL))
            self._report_progress()

    def _count(self, chunk: list[tuple[bytes, bytes]], times: list[int]) -> None:
        state = self._state
        state.messages += len(chunk)
        state.bytes += sum(len(payload) for _, payload in chunk)
        if self._speed is not None:
            elapsed = self._elapsed()
            state.late = max(state.late, elapsed - self._seconds(times[0]))
            state.late_sum += len(chunk) * elapsed - sum(map(self._seconds, times))
        self._report_progress()

    def _report_progress(self) -> None:
        now = time.monotonic()
        if now - self._reported_at >= _POLL_INTERVAL:
            self._reported_at = now
            self._state.seconds = self._elapsed()
            self._progress(self._state)

    def end(self) -> None:
        """Complete the result, after the fence."""
        self._state.seconds = self._elapsed()
        self._state.is_complete = self._state.messages >= self._state.total
