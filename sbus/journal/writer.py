"""The writer of a journal: appends, syncs, rolls segments, repairs after a crash.

Its promises, after a crash of the process as well as after a power cut:

* A row that was synced is never lost, changed or renumbered.
* No reader sees a row before it is synced.
* Numbers of rows have no holes, and no number is used twice. So a journal whose newest segment no longer states where
  it ends is refused.
* Within an epoch times never fall (`sbus.journal.row_clock`). The order of rows is their number.
* An `OSError` leaves the journal as it was before the call, and the same call may be made again, as the recorder does
  (`sbus.recorder.writer_thread`).

The caller appends, and calls `JournalWriter.sync` as often as it can afford: a power cut costs what was appended since
then. A crash of the process alone costs nothing that `append` has returned for: the kernel has those bytes.

`JournalWriter.open` closes each segment that the last writer left open. If the disk has failed in a way that leaves the
current segment in doubt (`SegmentWriter.suspect`), the next call reopens that segment, closes it, and continues in a
new one.

A journal can be moved away while it is written, which its open files do not notice. While another directory or none is
in its place (`sbus.journal.place`), no file is made or renamed, and no sync succeeds.

One writer at a time holds the file ``lock`` with flock(2), which the process's end releases.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import NamedTuple, Self

import pyarrow as pa

from sbus.errors import JournalError
from sbus.journal import disk
from sbus.journal.clock import SECOND, from_seconds, now, to_seconds, uptime
from sbus.journal.digests import Digest
from sbus.journal.index import REPAIR, last_sync
from sbus.journal.layout import (
    IDENTITY,
    INDEX,
    LATEST,
    SUMMARY,
    Segment,
    is_journal,
    link_error,
    list_segments,
    read_identity,
)
from sbus.journal.lock import make_directory, take_lock
from sbus.journal.place import Place
from sbus.journal.row_clock import EPOCH_STEP, TOLERANCE, RowClock
from sbus.journal.schema import FORMAT, Kind, damaged_rows, encode
from sbus.journal.segment import SegmentWriter, remove_leftovers
from sbus.journal.senders import Senders
from sbus.journal.summary import read_summary

__all__ = ["JournalWriter"]

_log = logging.getLogger("sbus.journal")

_AGAIN = "restore it from a copy, run 'sbus journal repair', or record into another directory"


class JournalWriter:
    """A journal that is open for writing; made by `open`.

    One thread at a time may use it.

    :ivar directory: the absolute path of the journal.
    :ivar id: the ID of the journal, 32 hexadecimal digits.
    :ivar next_seq: the number that the next row gets.
    :ivar ended: how the last recording ended: ``"stop"``, ``"crash"``, or ``"new"`` if there was none.
    :ivar unsynced_rows: the number of rows appended since the last `sync`.
    :ivar segments_closed: the number of segments closed since `open`, including those that `open` closed.
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
        elapsed: Callable[[], int] | None,
        warn: Callable[[str], object],
        host: str | None,
    ) -> None:
        self.directory = directory
        self.id = ""
        self.next_seq = 0
        self.ended = "new"
        self.unsynced_rows = 0
        self.segments_closed = 0
        self._lock = lock
        self._place = Place(directory)
        self._segment_bytes = segment_bytes
        self._max_age = from_seconds(segment_seconds)
        self._file_mode = file_mode
        self._times = RowClock(clock, elapsed, warn)
        self._epoch = 0
        self._warn = warn
        self._host = host
        self._segment: SegmentWriter | None = None
        self._segment_started = 0.0  # on the monotonic clock
        self._pending_gap: _LostRows | None = None

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
        elapsed: Callable[[], int] | None = None,
        warn: Callable[[str], object] = _log.warning,
        host: str | None = None,
    ) -> JournalWriter:
        """Open a journal for writing.

        It is created if there is none, and repaired after a crash.

        :param segment_bytes: the length in bytes at which a segment is closed; a single batch may be longer.
        :param segment_seconds: the age of the first row at which a segment is closed, even if the clock was set back.
        :param directory_mode: the permissions of the directory, if it is created.
        :param file_mode: the permissions of the files that are created.
        :param clock: returns the time, in µs since the epoch.
        :param elapsed: returns the time that has really passed, in µs from any origin; None: `uptime` of
            `sbus.journal.clock` if `clock` is the system's, and else steps forward are not noticed.
        :param warn: called with a sentence about what the operator should know: a torn tail, a clock that went back.
        :param host: the name of the machine that the rows of a new journal come from; empty: unknown; None: this one.
        :raises JournalLocked: if another writer has the journal open.
        :raises JournalError: if the journal is damaged, this package cannot read its format, or the clock shows a time
            that a journal has no room for.
        :raises OSError: if it cannot be written; the call may be repeated.
        """
        directory = os.path.abspath(directory)
        make_directory(directory, directory_mode)
        lock = take_lock(directory, file_mode)
        journal = cls(
            directory,
            lock,
            segment_bytes=segment_bytes,
            segment_seconds=segment_seconds,
            file_mode=file_mode,
            clock=clock,
            elapsed=uptime if elapsed is None and clock is now else elapsed,
            warn=warn,
            host=host,
        )
        try:
            journal._recover()
        except BaseException as e:
            os.close(lock)
            if isinstance(e, OSError) and e.errno == errno.ELOOP:
                raise link_error(str(e.filename)) from None
            raise
        return journal

    def _recover(self) -> None:
        """Find the next row, and close the segments that the last writer left open."""
        self._check_time(self._times.read())
        if not is_journal(self.directory):
            if list_segments(self.directory):
                raise JournalError(f"{self.directory}: {IDENTITY} is missing: restore it from a copy")
            fields = {
                "format": FORMAT,
                "id": uuid.uuid4().hex,
                "created": self._times.read(),
                "host": socket.gethostname() if self._host is None else self._host,
            }
            self._write_identity(fields)
        identity = read_identity(self.directory)
        self.id = identity.id
        lost = remove_leftovers(self.directory)
        newest: Segment | None = None
        for segment in list_segments(self.directory):
            if not segment.closed:
                try:
                    writer = self._reopen(segment)
                except FileNotFoundError:
                    self._warn(f"{segment.path(INDEX)}: it is missing, or its first record is: {REPAIR}")
                    newest = segment  # `_continue_after` refuses it, if no other one follows
                    continue
                self._finish(writer)
                if writer.next_seq == segment.first_seq:
                    self._continue_at(segment)
                    continue  # it has no rows and was removed; if that failed, the next `open` does it
            newest = segment
        if lost:
            self._warn(f"{lost.path()}: it is missing: {REPAIR}")
            newest = lost
        if newest:
            self._continue_after(newest)
        if identity.format.version < FORMAT:  # before its first segment: an older package then refuses the journal
            self._write_identity({**identity.fields, "format": FORMAT})

    def _write_identity(self, fields: Mapping[str, object]) -> None:
        disk.replace(os.path.join(self.directory, IDENTITY), json.dumps(fields).encode() + b"\n", self._file_mode)

    def _continue_at(self, segment: Segment) -> None:
        """Continue at the first row of a segment without rows.

        A later `_continue_after` overrides this.
        """
        self.next_seq = segment.first_seq
        if segment.first_seq:
            self._times.last = segment.first_time
            self._epoch = segment.epoch
            self.ended = "crash"

    def _continue_after(self, segment: Segment) -> None:
        """Continue after the last row of a segment.

        :raises JournalError: if it cannot be known which row is the last one.
        """
        try:
            sync = last_sync(segment)
        except FileNotFoundError:
            sync = None
        if sync is None:
            raise JournalError(
                f"{segment.path(INDEX)}: it no longer states which row of the journal is the last one: {_AGAIN}"
            )
        # If the index lost its end, its last whole sync record is an earlier one; the summary shows that.
        if segment.closed and (end := read_summary(segment).last_seq + 1) != sync.next_seq:
            raise JournalError(
                f"{segment.path(INDEX)}: it ends before row {sync.next_seq}, but {segment.path(SUMMARY)} before row "
                f"{end}: {_AGAIN}"
            )
        self.next_seq = sync.next_seq
        self._times.last = sync.max_time
        self._epoch = segment.epoch
        self.ended = "stop" if sync.kind is Kind.STOP else "crash"

    def append(self, messages: Sequence[tuple[bytes, bytes]], times: int | Sequence[int] | None = None) -> None:
        """Append messages, as one batch.

        :param messages: the key and the payload of each.
        :param times: when they arrived, in µs since the epoch: one time for all, or one for each; None: now. A time
            that is at most 60 s earlier than the one before it is raised to that; more begins a new epoch.
        :raises OSError: if they cannot be written; the journal is then as it was before.
        :raises JournalError: if a journal has no room for such times; no row was appended.
        :raises ValueError: if they hold 2 GiB or more.
        """
        if messages:
            keys = [message[0] for message in messages]
            self._write(Kind.MESSAGE, keys, [message[1] for message in messages], times)

    def append_columns(
        self,
        keys: pa.Array,
        payloads: pa.Array,
        times: Sequence[int],
        ends: Sequence[int],
        senders: Senders | None = None,
    ) -> None:
        """Append messages that are in columns already, as one batch.

        :param keys: the key of each message, an array of ``binary``.
        :param payloads: the payload of each message, likewise.
        :param times: when they arrived, in µs since the epoch, as for `append`; each may stand for several messages.
        :param ends: for each time, the number of messages up to the last one with that time.
        :param senders: the publishers of the messages; None: unknown.
        :raises OSError: if they cannot be written; the journal is then as it was before.
        """
        if len(keys):
            self._write(Kind.MESSAGE, keys, payloads, times, ends, senders)

    def append_digest(
        self, key: bytes, digest: Digest, time: int | None = None, senders: Senders | None = None
    ) -> None:
        """Append the row of a message whose payload is too long to be kept.

        :param digest: the digest of the payload.
        :param time: when the message arrived; as for `append`.
        :param senders: its publisher; None: unknown.
        :raises OSError: as for `append`.
        """
        self._write(Kind.DIGEST, [key], [digest.pack()], time, senders=senders)

    def append_gap(self, kind: Kind, details: Mapping[str, object], time: int | None = None) -> None:
        """Append the row of a gap.

        :param kind: the kind of the gap.
        :param details: what is known about the gap; its payload, as a JSON object.
        :param time: when the gap ended, in µs since the epoch; as for `append`.
        :raises OSError: if the row cannot be written; the journal is then as it was before.
        """
        self._write(kind, [b""], [json.dumps(details).encode()], time)

    def append_lost(self, receipt: bytes, time: int | None = None) -> None:
        """Append the row for messages that the bus has dropped.

        :param receipt: the bus's receipt: ``<messages> <bytes> <total> <why>``.
        :param time: when it was received; as for `append`.
        :raises OSError: as for `append_gap`.
        """
        self._write(Kind.LOST, [b""], [receipt], time)

    def append_copies(
        self,
        kind: Kind,
        keys: Sequence[bytes],
        payloads: Sequence[bytes],
        times: Sequence[int],
        senders: Senders | None = None,
    ) -> None:
        """Append rows of one kind as another journal has them, as one batch.

        A ``clock`` row comes alone; that of a large step begins a new epoch, as it did there. A ``damaged`` row comes
        alone, and takes the numbers of all rows that it stands for.

        :param keys: the key of each row; empty for a gap.
        :param payloads: the payload of each row.
        :param times: when they arrived, in µs since the epoch, as for `append`.
        :param senders: the publishers of messages; None: unknown.
        :raises OSError: as for `append`.
        """
        if kind is not Kind.CLOCK:
            stands_for = damaged_rows(payloads[0]) if kind is Kind.DAMAGED else None
            self._write(kind, keys, payloads, times, senders=senders, stands_for=stands_for)
            return
        self._repair()
        try:
            step = from_seconds(json.loads(payloads[0])["step"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            step = 0  # not of this package: the times of the rows show what it was
        is_new = self.next_seq > 0 and abs(step) > EPOCH_STEP
        if is_new:
            self.roll()
        epoch = self._epoch + is_new
        self._put(kind, keys, payloads, times[0] if is_new else max(times[0], self._times.last), epoch)
        self._epoch = epoch

    def _write(
        self,
        kind: Kind,
        keys: Sequence[bytes] | pa.Array,
        payloads: Sequence[bytes] | pa.Array,
        times: int | Sequence[int] | None,
        ends: Sequence[int] | None = None,
        senders: Senders | None = None,
        stands_for: int | None = None,
    ) -> None:
        self._repair()  # before the times are chosen: it may append a row, and no later row may have an earlier time
        times, is_set_back = self._times.on_one_clock(self._times.read() if times is None else times)
        first = times if isinstance(times, int) else times[0]
        if is_set_back and self.next_seq:
            self._begin_epoch(first)
        self._note_step(first)
        self._put(kind, keys, payloads, self._times.rising(times), self._epoch, ends, senders, stands_for)

    def _begin_epoch(self, time: int) -> None:
        """Begin a segment with a ``clock`` row: a clock that was wrong once spoils the times of that while only."""
        step = time - self._times.last
        self.roll()
        self._put_step(time, step, self._epoch + 1)
        self._epoch += 1
        self._times.is_behind = False
        self._warn(
            f"the clock was set by {to_seconds(step):+g} s: a new epoch begins, and the times before and after it "
            "cannot be compared"
        )

    def _note_step(self, first: int) -> None:
        """Append a row if the clock was set since the last append.

        :param first: the time of the row that is to be appended.
        """
        step = self._times.step(first)
        if step is None:
            return
        if step.size > EPOCH_STEP and self.next_seq:
            self._begin_epoch(first)
        elif TOLERANCE < abs(step.size) <= EPOCH_STEP and self.next_seq:
            self._put_step(max(first, self._times.last), step.size, self._epoch)
        # Smaller steps are the slewing of NTP; large ones back show in the times of rows.
        self._times.offset = step.offset

    def _put_step(self, time: int, step: int, epoch: int) -> None:
        details = {"since": self._times.last, "step": to_seconds(step), "epoch": epoch}
        self._put(Kind.CLOCK, [b""], [json.dumps(details).encode()], time, epoch)

    def now(self) -> int:
        """Return the time by the clock of the newest row, in µs since the epoch.

        A step of the clock that no row has shown yet is left out.
        """
        return self._times.now()

    def _put(
        self,
        kind: Kind,
        keys: Sequence[bytes] | pa.Array,
        payloads: Sequence[bytes] | pa.Array,
        rising: int | Sequence[int],
        epoch: int,
        ends: Sequence[int] | None = None,
        senders: Senders | None = None,
        stands_for: int | None = None,
    ) -> None:
        """Append rows whose times are those that they get.

        :param stands_for: the number of rows that a ``damaged`` row stands for.
        """
        first, last = (rising, rising) if isinstance(rising, int) else (rising[0], rising[-1])
        self._check_time(first)
        self._check_time(last)
        data = encode(kind, self.next_seq, rising, keys, payloads, ends, senders)
        if self._segment and (self._segment.size + data.size > self._segment_bytes or self._is_too_old(first)):
            self.roll()
        count = len(keys) if stands_for is None else stands_for
        try:
            self._segment_at(first, epoch).add(kind, count, data, first, last)
        except OSError as e:
            # No file may be longer (RLIMIT_FSIZE): the next segment has room, unless the rows alone are too long.
            if e.errno != errno.EFBIG or not self._segment or self._segment.next_seq == self._segment.segment.first_seq:
                raise
            self.roll()
            self._segment_at(first, epoch).add(kind, count, data, first, last)
        assert self._segment is not None
        self.next_seq = self._segment.next_seq
        self._times.last = last
        self.unsynced_rows += len(keys)

    def _segment_at(self, first: int, epoch: int) -> SegmentWriter:
        """Return the open segment; begin one, if there is none.

        :param first: the time of its first row, in µs since the epoch.
        """
        if not self._segment:
            self._place.check()
            segment = Segment(self.directory, self.next_seq, first, closed=False, epoch=epoch)
            self._segment = SegmentWriter.create(segment, self.id, self._file_mode)
            self._segment_started = monotonic()
        return self._segment

    def _check_time(self, time: int) -> None:
        if not 0 <= time <= LATEST:
            raise JournalError(
                f"{self.directory}: the clock shows a time of {time / SECOND:.0f} s since 1970, and a journal has room "
                "for those from 1970 to November 2286: set the clock"
            )

    def _is_too_old(self, time: int) -> bool:
        if self._segment is None:
            return False
        # If the clock was set back after the segment was begun, only the monotonic clock shows the age.
        age = max(time - self._segment.segment.first_time, from_seconds(monotonic() - self._segment_started))
        return age >= self._max_age

    def sync(self) -> None:
        """Sync the appended rows, and make them visible to readers.

        A segment that is too old is closed.

        To be called at intervals even without new rows, so that a segment of a silent bus is closed too.

        :raises JournalMoved: if the journal is no longer in its place; the rows are safe where it is now.
        :raises OSError: if that fails; the rows are neither safe nor visible until a later call succeeds.
        """
        self._repair()
        if self._segment:
            try:
                self._segment.sync()
            except FileNotFoundError:
                self._place.check()
                raise
        self._place.check()
        self.unsynced_rows = 0
        if self._is_too_old(self._times.read()):
            self.roll()

    def roll(self) -> None:
        """Close the segment; the next row begins a new one.

        The appended rows are then safe and visible.

        :raises OSError: if that fails; nothing is lost, and the next call of any method tries again.
        """
        self._repair()
        if self._segment:
            self._finish(self._segment)

    def _finish(self, writer: SegmentWriter) -> None:
        self._place.check()
        writer.finish()
        self._segment = None
        self.unsynced_rows = 0
        self.segments_closed += 1

    def _repair(self) -> None:
        """Reopen and close a segment that an error has left in doubt.

        If it has lost rows, append the gap that says how many, before all other rows.
        """
        if self._segment and self._segment.suspect:
            self._place.check()
            self._segment.close_files()
            writer = self._reopen(self._segment.segment)
            self._segment = writer
            if lost := self.next_seq - writer.next_seq:
                since = writer.last.max_time if writer.last else writer.segment.first_time
                if self._pending_gap:  # its row was not written yet; the two gaps follow each other and become one
                    since = min(since, self._pending_gap.since)
                    lost += self._pending_gap.lost
                self._pending_gap = _LostRows(since, lost)
                self.next_seq = writer.next_seq
            self._finish(writer)
        if self._pending_gap:
            pending, self._pending_gap = self._pending_gap, None
            try:
                self.append_gap(Kind.FULL, pending.details())
            except OSError:
                self._pending_gap = pending
                raise

    def _reopen(self, segment: Segment) -> SegmentWriter:
        writer = SegmentWriter.reopen(segment, self.id, self._file_mode)
        if writer.torn:
            self._warn(f"{segment.path()}: cut off {writer.torn} bytes of an incomplete batch")
        if writer.damaged:
            self._warn(
                f"{segment.path()}: it is damaged: run 'sbus journal verify' to see what is affected, and "
                "'sbus journal repair' to make it readable"
            )
        return writer

    def follow(self) -> bool:
        """Go on where the journal is now, after it was moved away.

        :returns: whether there is such a place; there is none if it was removed.
        """
        place = self._place.find(self._lock)
        if place is None:
            return False
        self.directory, self._place = place, Place(place)
        if self._segment:
            self._segment.segment = self._segment.segment._replace(directory=place)
        return True

    def close(self) -> None:
        """Close the segment, and release the journal in any case.

        :raises OSError: if what was appended may not be safe; the next `open` keeps what it can.
        """
        if self._lock < 0:
            return
        try:
            self.roll()
        finally:
            if self._segment:
                self._segment.close_files()
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


class _LostRows(NamedTuple):
    """Rows that were appended, and that the disk has lost.

    :ivar since: the time of the last row before them, in µs since the epoch.
    :ivar lost: the number of rows.
    """

    since: int
    lost: int

    def details(self) -> dict[str, object]:
        return {"since": self.since, "reason": "the disk has lost what was written to it", "lost": self.lost}
