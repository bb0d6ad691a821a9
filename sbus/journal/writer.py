"""The one who writes a journal: appends rows, makes them safe, rolls segments, and puts things right after a crash.

Nothing that was synced is ever lost or changed, and no row is seen before it is synced. Whatever the disk refuses
(`OSError`) leaves the journal as it was before the call, so that the same call can be made again.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, Self

from sbus.errors import JournalError, JournalLocked
from sbus.journal import disk
from sbus.journal.index import last_sync
from sbus.journal.layout import ARROWS, CLOSED, IDENTITY, INDEX, LOCK, Segment, identity, is_journal, list_segments
from sbus.journal.schema import FORMAT, Kind, encode
from sbus.journal.segment import SegmentWriter
from sbus.journal.summary import read_summary

__all__ = ["JournalWriter", "now"]

_log = logging.getLogger("sbus.journal")

_STEP = 1_000_000  # µs that the clock may go back before it is worth a word


def now() -> int:
    """The time, in µs since 1970."""
    return time.time_ns() // 1000


class JournalWriter:
    """A journal, open for writing; `open` makes one. To be used from one thread at a time.

    :ivar directory: where it is.
    :ivar id: what tells it from all other journals.
    :ivar next_seq: the seq that the next row gets.
    :ivar ended: how the last recording ended: ``"new"`` (there was none), ``"stop"`` or ``"crash"``.
    :ivar unsynced_rows: how many rows were appended since the last `sync`.
    :ivar closed: how many segments were closed since it was opened, those included that it was opened with.
    """

    def __init__(
        self,
        directory: str,
        lock: int,
        *,
        segment_bytes: int,
        segment_seconds: float,
        file_mode: int,
        clock: Callable[[], int],
        warn: Callable[[str], object],
    ) -> None:
        self.directory = directory
        self.id = ""
        self.next_seq = 0
        self.ended = "new"
        self.unsynced_rows = 0
        self.closed = 0
        self._lock = lock
        self._segment_bytes = segment_bytes
        self._segment_time = int(segment_seconds * 1_000_000)
        self._file_mode = file_mode
        self._clock = clock
        self._warn = warn
        self._last_time = 0
        self._is_behind = False
        self._segment: SegmentWriter | None = None
        self._begun = 0.0  # when that was made, on the clock that nobody sets
        self._owed: dict[str, Any] | None = None  # of a gap that is still to be told of

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        segment_bytes: int = 128 << 20,
        segment_seconds: float = 3600,
        directory_mode: int = 0o700,
        file_mode: int = 0o600,
        clock: Callable[[], int] = now,
        warn: Callable[[str], object] = _log.warning,
    ) -> JournalWriter:
        """Open a journal for writing, and make it if it is not there; what a crash has left is put right.

        :param segment_bytes: a segment is closed before it gets longer (one batch may be longer by itself).
        :param segment_seconds: a segment is closed when its first row is so old, also if the clock was set back since.
        :param directory_mode: of a directory that is made.
        :param file_mode: of all files that are made.
        :param clock: tells the time in µs since 1970.
        :param warn: is told, in a sentence, what somebody should know of: a torn tail, a clock that went back.
        :raises JournalLocked: if somebody writes it already.
        :raises JournalError: if it is damaged, or of another format.
        :raises OSError: if it cannot be written; it may be tried again.
        """
        directory = os.path.abspath(directory)
        _make_directory(directory, directory_mode)
        lock = _lock(directory, file_mode)
        journal = cls(
            directory,
            lock,
            segment_bytes=segment_bytes,
            segment_seconds=segment_seconds,
            file_mode=file_mode,
            clock=clock,
            warn=warn,
        )
        try:
            journal._recover()
        except BaseException:
            os.close(lock)
            raise
        return journal

    def _recover(self) -> None:
        """Find out how far the journal has come, and close what the last recording has left open."""
        if not is_journal(self.directory):
            if list_segments(self.directory):
                raise JournalError(f"{self.directory}: {IDENTITY} is missing: restore it from a copy")
            told = {"format": FORMAT, "id": uuid.uuid4().hex, "created": self._clock(), "host": socket.gethostname()}
            disk.replace(os.path.join(self.directory, IDENTITY), json.dumps(told).encode() + b"\n", self._file_mode)
        self.id = identity(self.directory)
        self._remove_leftovers()
        newest: Segment | None = None
        for segment in list_segments(self.directory):
            if not segment.closed:
                writer = self._reopened(segment)
                self._finish(writer)
                if writer.next_seq == segment.first_seq:
                    self._go_on_at(segment)
                    continue  # without rows, it is removed; if that cannot be done now, the next who opens does it
            newest = segment
        if newest:
            self._go_on_after(newest)

    def _remove_leftovers(self) -> None:
        """Remove what an interrupted deletion or creation has left: temporary files, and parts of no segment."""
        names = set(os.listdir(self.directory))
        for name in names:
            base, suffix = os.path.splitext(name)
            is_part = suffix in (INDEX, CLOSED) and Segment.named(self.directory, base, closed=True)
            if suffix == ".tmp" or (is_part and base + ARROWS not in names):
                disk.remove(os.path.join(self.directory, name))

    def _go_on_at(self, segment: Segment) -> None:
        """Go on where a segment without rows begins, unless there is one before it: no number is used twice."""
        self.next_seq = segment.first_seq
        if segment.first_seq:
            self._last_time = segment.first_time
            self.ended = "crash"

    def _go_on_after(self, segment: Segment) -> None:
        try:
            sync = last_sync(segment)
        except FileNotFoundError:
            sync = None
        if sync is None:
            raise JournalError(
                f"{segment.path(INDEX)}: it does not tell any more how far the journal has come: "
                "restore it from a copy, or record into another directory"
            )
        # The last sync record that is whole need not be the last that there was.
        if segment.closed and (end := read_summary(segment).last_seq + 1) != sync.next_seq:
            raise JournalError(
                f"{segment.path(INDEX)}: it ends before row {sync.next_seq}, but {segment.path(CLOSED)} before row "
                f"{end}: restore it from a copy, or record into another directory"
            )
        self.next_seq = sync.next_seq
        self._last_time = sync.max_time
        self.ended = "stop" if sync.kind is Kind.STOP else "crash"

    def append(self, messages: Sequence[tuple[bytes, bytes]], times: int | Sequence[int] | None = None) -> None:
        """Append messages, in one batch.

        :param messages: key and payload of each.
        :param times: when they came, in µs since 1970: one time for all, or one for each; now without it. Times that
            go back are raised to the one before.
        :raises OSError: if they cannot be written; the journal is then as it was before.
        :raises ValueError: if they hold 2 GiB or more.
        """
        if messages:
            keys = [message[0] for message in messages]
            self._write(Kind.MESSAGE, keys, [message[1] for message in messages], times)

    def append_gap(self, kind: Kind, details: Mapping[str, Any], time: int | None = None) -> None:
        """Append a row that tells of a gap.

        :param details: what is known of it, for a JSON object.
        :param time: when it ended, in µs since 1970, as for `append`.
        :raises OSError: if it cannot be written; the journal is then as it was before.
        """
        self._write(kind, [b""], [json.dumps(details).encode()], time)

    def _write(
        self, kind: Kind, keys: Sequence[bytes], payloads: Sequence[bytes], times: int | Sequence[int] | None
    ) -> None:
        self._repair()  # first, as it may write a row itself, and times must not go back behind that
        stamps = self._stamps(times)
        first, last = (stamps, stamps) if isinstance(stamps, int) else (stamps[0], stamps[-1])
        data = encode(kind, self.next_seq, stamps, keys, payloads)
        if self._segment and (self._segment.size + data.size > self._segment_bytes or self._is_old(first)):
            self.roll()
        if not self._segment:
            segment = Segment(self.directory, self.next_seq, first, closed=False)
            self._segment = SegmentWriter.create(segment, self.id, self._file_mode)
            self._begun = monotonic()
        self._segment.add(kind, len(keys), data, first, last)
        self.next_seq = self._segment.next_seq
        self._last_time = last
        self.unsynced_rows += len(keys)

    def _stamps(self, times: int | Sequence[int] | None) -> int | list[int]:
        """Times that do not go back."""
        if times is None:
            times = self._clock()
        first = times if isinstance(times, int) else times[0]
        if first < self._last_time - _STEP and not self._is_behind:
            behind = (self._last_time - first) / 1_000_000
            self._warn(f"the clock went back by {behind:g} s: until it has caught up, rows have the last time")
        self._is_behind = first < self._last_time - _STEP
        if isinstance(times, int):
            return max(times, self._last_time)
        return list(itertools.accumulate(times, max, initial=self._last_time))[1:]

    def _is_old(self, time: int) -> bool:
        if self._segment is None:
            return False
        # The clock may have been ahead when the segment was begun: by it, that would not get old for as long.
        age = max(time - self._segment.segment.first_time, (monotonic() - self._begun) * 1_000_000)
        return age >= self._segment_time

    def sync(self) -> None:
        """Get what was appended onto the disk for good, and let readers see it.

        To be called now and then even without new rows, so that a segment of a silent bus is closed when it is old.

        :raises OSError: if it is not known to be there; it is neither safe nor seen until a later call succeeds.
        """
        self._repair()
        if self._segment:
            self._segment.sync()
        self.unsynced_rows = 0
        if self._is_old(self._clock()):
            self.roll()

    def roll(self) -> None:
        """Close the segment; the next row begins a new one. What was appended is then safe and seen.

        :raises OSError: if that cannot be done; nothing is lost, and the next call of whatever method tries again.
        """
        self._repair()
        if self._segment:
            self._finish(self._segment)

    def _finish(self, writer: SegmentWriter) -> None:
        writer.finish()
        self._segment = None
        self.unsynced_rows = 0
        self.closed += 1

    def _repair(self) -> None:
        """Take up again a segment that an error has left in doubt, and close it."""
        if self._segment and self._segment.suspect:
            self._segment.abandon()
            writer = self._reopened(self._segment.segment)
            self._segment = writer
            if lost := self.next_seq - writer.next_seq:
                since = writer.last.max_time if writer.last else writer.segment.first_time
                if self._owed:  # more was lost before that could be told, and it is what came just before
                    since = min(since, self._owed["since"])
                    lost += self._owed["lost"]
                self._owed = {"since": since, "reason": "the disk has lost what was written to it", "lost": lost}
                self.next_seq = writer.next_seq
            self._finish(writer)
        if self._owed:
            owed, self._owed = self._owed, None
            try:
                self.append_gap(Kind.FULL, owed)
            except OSError:
                self._owed = owed
                raise

    def _reopened(self, segment: Segment) -> SegmentWriter:
        writer = SegmentWriter.reopen(segment, self.id, self._file_mode)
        if writer.torn:
            self._warn(f"{segment.path()}: {writer.torn} bytes of a batch that was not whole were cut off")
        if writer.damaged:
            self._warn(f"{segment.path()}: it is damaged: see what 'sbus journal verify' says")
        return writer

    def close(self) -> None:
        """Close the segment and let go of the journal, whatever happens.

        :raises OSError: if what was appended is not known to be safe; the next `open` keeps what it can.
        """
        if self._lock < 0:
            return
        try:
            self.roll()
        finally:
            if self._segment:
                self._segment.abandon()
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


def _make_directory(directory: str, mode: int) -> None:
    try:
        os.makedirs(os.path.dirname(directory), exist_ok=True)
        os.mkdir(directory, mode)
    except FileExistsError:
        return
    os.chmod(directory, mode)  # whatever the umask is
    disk.sync_directory(os.path.dirname(directory))


def _lock(directory: str, mode: int) -> int:
    """Become the one who writes; returns a descriptor that holds the lock until it is closed."""
    path = os.path.join(directory, LOCK)
    try:
        fd = disk.create(path, mode)
    except FileExistsError:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        disk.write(fd, b"%-10d\n" % os.getpid(), 0)
    except BlockingIOError:
        holder = os.pread(fd, 10, 0).decode("ascii", "replace").strip() or "of unknown number"
        os.close(fd)
        raise JournalLocked(
            f"{directory}: process {holder} writes this journal: stop it, or record into another directory"
        ) from None
    except OSError:
        os.close(fd)
        raise
    return fd
