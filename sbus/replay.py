"""Replay: publish recorded messages again, in order.

They keep their rhythm, or go as fast as the bus accepts them.

Theory of operation
-------------------

Every message is due at a time that is counted from the first message, divided by the speed. It is never published
before that. Because the due time does not depend on earlier messages, one long pause makes some messages late and does
not shift the rest; adding up intervals would.

Messages are published in chunks. A chunk ends after 1,024 messages, or once it has 16 MiB of payloads. So progress is
reported, and a stop is noticed, several times a second. The replay ends with a fence: it is complete only when the bus
has handled every message.

Rows come in order. Those of a journal are (`JournalRows`): they are read twice, once to count the messages, and several
journals are merged by their times. The first pass checks all rows. If a journal is damaged, nothing is published: who
receives the replay could not tell a hole from silence. Steps of the recorder's clock are left out. Of a lake, Spark
sorts the rows by time (`sbus.spark.jobs.replay`). Either way, memory is bounded, however much is replayed.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from sbus.errors import JournalError, JournalMissing, UsageError
from sbus.journal.clock import from_seconds, to_seconds
from sbus.journal.keytext import from_text, printable
from sbus.journal.reader import Slice, read
from sbus.journal.schema import MESSAGES, Kind
from sbus.journal.snapshot import open_journals

if TYPE_CHECKING:
    from sbus.client.blocking import Bus

__all__ = ["Gap", "JournalRows", "Replay", "Row", "Total", "publish"]

_CHUNK_MESSAGES = 1024
"""Messages that are published together at most."""
_CHUNK_BYTES = 16 << 20
"""A chunk ends once its payloads have this many bytes."""
_POLL_INTERVAL = 0.2
"""Seconds between two reports of progress, and the longest sleep before the next look at `stop`."""
_FENCE_TIMEOUT = 300.0
"""Seconds for the bus to handle the last messages."""

Row = tuple[int, str, str | bytes | bytearray, bytes | bytearray]
"""Time in µs since the epoch, kind, key as text or as bytes, and payload."""


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


class Total(NamedTuple):
    """The messages of a replay: how many, and the times of the first and the last one, in µs since the epoch."""

    messages: int
    first: int
    last: int


def publish(
    rows: Callable[[], Iterable[Row]],
    total: Total | None,
    bus: Bus,
    *,
    speed: float | None = 1.0,
    prefix: bytes = b"",
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[Replay], None] = lambda state: None,
) -> Replay:
    """Publish recorded messages again, and wait until the bus has handled them.

    :param rows: returns the rows in order; those of other kinds are gaps, or digests.
    :param total: the messages among them; None if there are none.
    :param bus: the connection to publish with.
    :param speed: 1 for the original rhythm, 2 for twice as fast; None: as fast as the bus accepts messages.
    :param prefix: bytes to put in front of every key.
    :param stop: called several times a second; when it returns true, the replay ends in order.
    :param progress: called several times a second.
    :raises sbus.errors.UsageError: if the speed is not positive, or there is no message to publish.
    :raises sbus.errors.Disconnected: if the connection to the bus is lost.
    :raises sbus.errors.NotAllowed: if the bus refuses a message, and the connection raises denials.
    :raises sbus.errors.TimedOut: if the bus has not handled the last messages within five minutes.
    """
    if speed is not None and not speed > 0:
        raise UsageError(f"a speed of {speed:g}: use 1 for the original rhythm, 2 for twice as fast, or max")
    if total is None:
        raise UsageError("there is no message to replay: check the pattern, --since and --until")
    state = Replay(total=total.messages, span=total.last - total.first)
    pacer = _Pacer(bus, total.first, speed, prefix, stop, state, progress)
    for chunk in _chunks(rows()):
        if not pacer.publish(chunk):
            break
    bus.fence(_FENCE_TIMEOUT)
    pacer.end()
    return state


def _chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    chunk: list[Row] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += len(row[3])
        if len(chunk) == _CHUNK_MESSAGES or size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class JournalRows:
    """The rows of journals, in order.

    Their times are by the clock as it was when the journal ended: steps of the clock take no time.

    :param paths: directories, or patterns of them.
    :param since: leave out the rows before this time, in µs since the epoch.
    :param until: leave out the rows at or after this time.
    :param wanted: says of a key whether its messages count; None: all count.
    """

    def __init__(
        self,
        paths: Iterable[str],
        since: int | None = None,
        until: int | None = None,
        wanted: Callable[[bytes], bool] | None = None,
    ) -> None:
        """
        :raises JournalError: if a journal is missing.
        """
        self._damage: list[JournalError] = []
        journals = open_journals(paths, on_damage=lambda _, e: self._damage.append(e))
        # Both passes read the same rows of a journal that grows.
        self._parts: list[list[Slice]] = []
        for _, reader in sorted(journals.items()):
            with self._noted_damage():
                end_time = None if until is None else until - 1
                self._parts.append(reader.plan(reader.start(), reader.end(), min_time=since, max_time=end_time))
        self._set_by: list[int] = []  # µs by which the clock of each journal was set in all, as `total` has found
        self._since: float = -math.inf if since is None else since
        self._until: float = math.inf if until is None else until
        self._wanted = wanted

    def total(self) -> Total | None:
        """Count the messages; None if there are none.

        :raises JournalError: if journals are damaged, or retention has deleted rows of them: the text names each.
        """
        messages = 0
        firsts, lasts = [], []
        self._set_by = []
        for at in range(len(self._parts)):
            clock = _SteadyClock()
            times: list[int] = []  # of the first message and the last one
            with self._noted_damage():
                for us, kind, *_ in self._read(at, clock, with_payloads=False):
                    if kind == Kind.MESSAGE:
                        messages += 1
                        times[1:] = [us]
            self._set_by.append(clock.set_by)
            if times:
                firsts.append(times[0] + clock.set_by)
                lasts.append(times[-1] + clock.set_by)
        if self._damage:
            raise JournalError(
                "\n".join(
                    [
                        *(printable(text) for text in sorted(map(str, self._damage))),
                        "nothing is replayed: a part would be missing",
                    ]
                )
            )
        return Total(messages, min(firsts), max(lasts)) if messages else None

    @contextlib.contextmanager
    def _noted_damage(self) -> Iterator[None]:
        try:
            yield
        except JournalMissing:
            raise
        except JournalError as e:
            self._damage.append(e)

    def __call__(self) -> Iterator[Row]:
        """Yield the rows, several journals as one sequence by time.

        :raises JournalError: as `total` does.
        """
        if not self._set_by:
            self.total()
        journals = [self._read(at, _SteadyClock(-set_by)) for at, set_by in enumerate(self._set_by)]
        return journals[0] if len(journals) == 1 else heapq.merge(*journals, key=itemgetter(0))

    def _read(self, at: int, clock: _SteadyClock, *, with_payloads: bool = True) -> Iterator[Row]:
        """Yield rows with times adjusted by `clock`, and with empty payloads if these are not needed."""
        for part in self._parts[at]:
            for batch in read(part, ["time", "kind", "key", "payload"]):
                times = batch.column(0).cast("int64").to_pylist()
                kinds, keys = (column.to_pylist() for column in batch.columns[1:3])
                payloads = batch.column(3)
                if kinds[0] == Kind.CLOCK:  # the only row of its batch
                    clock.set(payloads[0].as_py())
                texts = payloads.to_pylist() if with_payloads else repeat(b"", len(payloads))
                for us, by_clock, kind, key, payload in zip(times, clock.times(times), kinds, keys, texts, strict=True):
                    if not self._since <= us < self._until:
                        continue  # a batch is read as a whole
                    if kind not in MESSAGES or self._wanted is None or self._wanted(key):
                        yield by_clock, kind, key, payload


class _SteadyClock:
    """The times of a journal's rows by a clock that nobody has set.

    :param set_by: by how much the recorder's clock is ahead of this one, in µs.
    :ivar set_by: the same, now.
    """

    def __init__(self, set_by: int = 0) -> None:
        self.set_by = set_by
        self._last: int | None = None

    def set(self, details: bytes) -> None:
        """Note that the recorder's clock was set.

        A step back of more than a minute shows in the times. After a shorter one, rows have the time of the one before
        until the clock has caught up.
        """
        try:
            step = from_seconds(float(json.loads(details)["step"]))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return  # it was imported, and does not say
        self.set_by += max(0, step)

    def times(self, times: list[int]) -> list[int]:
        """Return the adjusted times of the next rows, none before the last row; the clock is not set among them."""
        if self._last is not None and times[0] - self.set_by < self._last:
            self.set_by = times[0] - self._last  # it was set back, or the step was rounded
        self._last = times[-1] - self.set_by
        return [us - self.set_by for us in times] if self.set_by else times


def _key(key: str | bytes | bytearray) -> bytes:
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
        """Publish rows; return whether to continue."""
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
