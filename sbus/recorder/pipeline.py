"""One recording: messages of the bus become rows, and interruptions become gaps.

::

    Connection --messages--> BatchBuffer --jobs--> JournalThread --batches--> JournalWriter
        ^                                               |
        +-------- capacity, trouble, counters ----------+

`Recording` connects the parts. Everything above runs in the event loop, except for the thread. Invariants:

* *Order.* Messages and gaps reach the journal in the order in which they happened: before a gap is submitted, the
  buffer is flushed, and the thread keeps the order of its jobs.
* *Bounded memory.* The messages that are not in the journal yet take at most ``buffer_bytes``, and one read of the
  socket; of payloads in sealed memory, the length counts. At that limit the connection is not read; it is read again
  when half of them are written. The messages that arrive before the bus has confirmed the patterns have the same limit;
  of them, the oldest are dropped. There is one exception: when the recorder or its bus stops, the recorder
  reads at once everything that the bus has queued, because the bus is about to drop it.

=========================  =============================================================================================
accident                   what it costs
=========================  =============================================================================================
a full disk                Nothing by itself: messages are kept up to that limit, then written, and a ``full`` row after
                           them. The bus decides by flood control about the messages that it cannot send; if it
                           disconnects the recorder, `Connection` reports a gap of its own.
a journal that was moved   As a full disk, until it is back. If another directory is in its place, the moved journal is
                           closed where it is now, and a new one begins in the directory, with a ``start`` row and the
                           messages that wait.
a power cut                The messages received since the last sync (``sync``).
a crash of the process     Those that were not written yet (``batch_time``, longer if the disk is slow): the kernel has
                           the rest. The next ``start`` row says ``crash``.
=========================  =============================================================================================
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from twisted.internet import defer
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from sbus.client.connecting import Backoff, find_address
from sbus.client.losses import Lost, format_lost
from sbus.errors import SbusError
from sbus.journal import clock
from sbus.journal.keytext import as_text
from sbus.journal.schema import Kind
from sbus.recorder.buffer import Batch, BatchBuffer
from sbus.recorder.connection import Connection, GapDetails
from sbus.recorder.payloads import Payload
from sbus.recorder.retention import RetentionTrigger
from sbus.recorder.settings import Settings
from sbus.recorder.writer_thread import Job, JournalThread
from sbus.version import __version__

if TYPE_CHECKING:
    from sbus.journal.writer import JournalWriter

__all__ = ["Counters", "Recording"]

_STOP_TIMEOUT = 10.0
"""Seconds that the bus, and after it the disk, may take when the recorder stops."""
_IDLE_SYNC_INTERVAL = 60.0
"""Seconds between two syncs of a silent bus, which close segments that are old enough."""


@dataclass(slots=True)
class Counters:
    """The counters of a recording.

    :ivar rows: the number of messages in the journal.
    :ivar bytes: the bytes in their keys and payloads.
    :ivar gaps: the number of gaps recorded, of any kind.
    :ivar dropped: the number of messages that the bus reported as dropped for the recorder.
    :ivar lost: the number of messages that were received and not written, because the disk was full until the end or
        the recorder failed.
    :ivar lag: the seconds from the arrival of the first message of the last batch until the batch was in the journal.
    :ivar longest_lag: the greatest `lag` so far.
    :ivar synced_at: when the journal was last synced to the disk, in seconds since the epoch; 0 before the first sync.
    """

    rows: int = 0
    bytes: int = 0
    gaps: int = 0
    dropped: int = 0
    lost: int = 0
    lag: float = 0.0
    longest_lag: float = 0.0
    synced_at: float = 0.0


class Recording:
    """Records until it is stopped (a `RecordSink` and a `WriterEvents`).

    :param reactor: provides timers, ``callFromThread`` and connections.
    :param journal: open for writing; closed at the end.
    :param address: the address of the bus, as for `sbus.client.tx.connect`.
    :param on_failure: called when a bug ends the recording.
    :param backoff: the pauses between attempts to connect.
    :param retry: the seconds between two attempts to write to a disk that fails.
    :param reopen: opens a journal in the place of one that was moved away; None: the recording waits until it is back.
    :ivar counters: the counters so far.
    """

    _log = Logger(namespace="sbus.recorder")

    def __init__(
        self,
        reactor: Any,
        journal: JournalWriter,
        address: str | None,
        settings: Settings,
        on_failure: Callable[[], object],
        *,
        backoff: Backoff | None = None,
        retry: float = 1.0,
        reopen: Callable[[], JournalWriter] | None = None,
    ) -> None:
        self.counters = Counters()
        self._reactor = reactor
        self._journal = journal
        self._address = find_address(address)
        self._settings = settings
        self._on_failure = on_failure
        self._reopen = reopen
        self._retention = RetentionTrigger(journal, settings)
        self._thread = JournalThread(
            journal,
            self,
            reactor.callFromThread,
            after_job=self._retention,
            successor=self._open_successor,
            retry=retry,
        )
        self._buffer = BatchBuffer(
            reactor,
            self._batch_completed,
            rows=settings.batch_rows,
            size=settings.batch_bytes,
            seconds=settings.batch_time,
            max_payload=settings.max_payload,
            capacity=settings.buffer_bytes,
        )
        self._connection = Connection(reactor, self._address, settings, self, backoff)
        self._has_started = False  # whether there is a start row
        self._disk_failure: GapDetails | None = None
        self._is_full = False  # the connection waits for capacity
        self._submitted: deque[Batch | Payload] = deque()  # batches that are not written yet
        self._submitted_bytes = 0  # of their memory
        self._jobs_done = self._given_up_rows = 0
        self._held: deque[Batch | Payload] | None = None  # batches from before the bus has confirmed the patterns
        self._held_bytes = 0
        self._held_losses: list[Lost] = []
        self._dropped_unconfirmed = 0
        self._sync_timer: IDelayedCall | None = None
        self._idle_timer: IDelayedCall | None = None
        self._deadline: IDelayedCall | None = None  # of the thread, when this recording stops
        self._is_syncing = False
        self._has_unsynced = False  # rows submitted after the newest sync
        self._stopping = False
        self._ended: defer.Deferred[None] = defer.Deferred()

    def start(self) -> None:
        """Start the thread, and connect."""
        self._thread.start()
        self._connection.start()
        self._idle_timer = self._reactor.callLater(_IDLE_SYNC_INTERVAL, self._sync_idle)

    async def stop(self) -> None:
        """Write all that the bus has queued for the recorder, and close the journal.

        This takes up to 20 seconds, and longer only while the disk makes progress; it ends after 10 s without any.
        """
        await self._connection.stop(0.0 if self._disk_failure else _STOP_TIMEOUT)
        if self._has_started:
            self._submit_gap(Kind.STOP, self._disk_failure or self._connection.gap or {})
        self._buffer.flush()
        self._stopping = True
        for timer in (self._sync_timer, self._idle_timer):
            if _is_active(timer):
                timer.cancel()
        self._thread.finish()
        self._deadline = self._reactor.callLater(_STOP_TIMEOUT, self._give_up)
        await self._ended
        if _is_active(self._deadline):
            self._deadline.cancel()
        self.log_counters()

    def _give_up(self) -> None:
        self._thread.give_up()
        self._deadline = self._reactor.callLater(_STOP_TIMEOUT, self._end_if_hung, self._jobs_done)

    def _end_if_hung(self, done: int) -> None:
        """End without the thread, if it has done nothing meanwhile: it may be in a system call that never returns."""
        if self._jobs_done > done:
            self._give_up()
            return
        self._log.error("{journal}: the disk does not answer", journal=self._journal.directory)
        self.thread_ended(self._given_up_rows + sum(batch.rows for batch in self._submitted), None)

    def log_counters(self) -> None:
        """Log the counters so far."""
        self._log.info(
            "recorded {c.rows} messages ({c.bytes} bytes) and {c.gaps} gaps; {waiting} bytes of memory wait for the "
            "disk; lag {c.lag:.3f} s, at most {c.longest_lag:.3f} s; lost {c.lost} messages; the bus dropped "
            "{c.dropped}",
            c=self.counters,
            waiting=self._buffered_bytes(),
        )

    # --- calls of the connection ---------------------------------------------------------------

    def connected(self) -> None:
        """Implement `sbus.recorder.connection.RecordSink`."""
        self._buffer.restart()
        self._held, self._held_bytes, self._held_losses, self._dropped_unconfirmed = deque(), 0, [], 0

    def recording_started(self, gap: GapDetails | None) -> None:
        """Implement `sbus.recorder.connection.RecordSink`."""
        self._buffer.flush()
        held, self._held, self._held_bytes = self._held or (), None, 0
        patterns = [as_text(pattern) for pattern in self._settings.patterns]
        self._log.info(
            "recording {patterns} of {address} into {journal}",
            patterns=", ".join(map(repr, patterns)),
            address=self._address,
            journal=self._journal.directory,
        )
        if gap is None:
            self._has_started = True
            self._submit_gap(Kind.START, self._start_details(self._journal))
        else:
            self._submit_gap(Kind.RECONNECT, gap)
        if self._dropped_unconfirmed:
            self._log.warn(
                "{dropped} messages arrived before the bus had confirmed the patterns and found no memory "
                "(--buffer-bytes): they are not recorded",
                dropped=self._dropped_unconfirmed,
            )
        for lost in self._held_losses:  # before the messages: no gap may stand in front of its row
            self.add_lost(lost)
        for batch in held:
            self._submit_batch(batch)

    def _start_details(self, journal: JournalWriter) -> GapDetails:
        return {
            "patterns": [as_text(pattern) for pattern in self._settings.patterns],
            "socket": self._address,
            "version": __version__,
            "ended": journal.ended,
        }

    def add(self, packets: list[bytes], handle: Callable[[bytes], None] = lambda packet: None) -> bool:
        """Implement `sbus.recorder.connection.RecordSink`."""
        return self._buffer.add(packets, handle)

    def add_lost(self, lost: Lost) -> None:
        """Implement `sbus.recorder.connection.RecordSink`."""
        if self._held is not None:
            self._held_losses.append(lost)
            return
        self.counters.dropped += lost.messages or 0
        receipt = format_lost(lost)
        self._submit_row(lambda journal, now: journal.append_lost(receipt, now))

    def has_capacity(self) -> bool:
        """Implement `sbus.recorder.connection.RecordSink`."""
        if not self._is_full and self._buffered_bytes() >= self._settings.buffer_bytes:
            self._is_full = True
        return not self._is_full

    def oldest_waiting(self) -> float:
        """Implement `sbus.recorder.connection.RecordSink`."""
        oldest = self._submitted[0].times[0] if self._submitted else self._buffer.oldest
        return 0.0 if oldest is None else max(0.0, clock.to_seconds(clock.now() - oldest))

    def failed(self, failure: Failure) -> None:
        """Implement `sbus.recorder.connection.RecordSink`."""
        if failure.check(SbusError):
            self._log.critical("the recorder cannot go on: {reason}", reason=failure.getErrorMessage())
        else:
            self._log.failure("the recorder cannot go on", failure=failure)
        self._on_failure()

    # --- jobs for the thread -------------------------------------------------------------------

    def _batch_completed(self, batch: Batch | Payload) -> None:
        """Submit a batch, or hold it until the patterns are confirmed, and drop the oldest that were held so far."""
        if self._held is None:
            self._submit_batch(batch)
            return
        self._held.append(batch)
        self._held_bytes += batch.memory
        while self._held_bytes > self._settings.buffer_bytes:
            oldest = self._held.popleft()
            self._held_bytes -= oldest.memory
            self._dropped_unconfirmed += oldest.rows

    def _submit_batch(self, batch: Batch | Payload) -> None:
        self._submitted.append(batch)
        self._submitted_bytes += batch.memory
        self._thread.submit(Job(batch.append, batch))
        self._sync_soon()

    def _submit_gap(self, kind: Kind, details: GapDetails) -> None:
        self._submit_row(lambda journal, now: journal.append_gap(kind, details, now))

    def _submit_row(self, append: Callable[[JournalWriter, int], object]) -> None:
        """Append the row of a gap after the messages in the buffer."""
        self._buffer.flush()
        now = clock.now()
        self._thread.submit(Job(lambda journal: append(journal, now)))
        self.counters.gaps += 1
        self._sync_soon()

    def _sync_soon(self) -> None:
        """Start the timer of the next sync, unless it runs or a sync is in progress; with ``sync`` 0, sync now.

        A sync covers everything submitted before it.
        """
        self._has_unsynced = True
        if not self._settings.sync:
            self._sync()
        elif not self._is_syncing and not _is_active(self._sync_timer):
            self._sync_timer = self._reactor.callLater(self._settings.sync, self._sync)

    def _sync(self) -> None:
        self._is_syncing, self._has_unsynced = True, False
        self._thread.submit(_SYNC)

    def _sync_idle(self) -> None:
        if not self._is_syncing:
            self._sync()
        self._idle_timer = self._reactor.callLater(_IDLE_SYNC_INTERVAL, self._sync_idle)

    def _buffered_bytes(self) -> int:
        """Return the bytes of memory in messages that are not in the journal yet."""
        return self._submitted_bytes + self._buffer.memory

    # --- calls of the thread -------------------------------------------------------------------

    def job_done(self, job: Job) -> None:
        """Implement `sbus.recorder.writer_thread.WriterEvents`."""
        counters = self.counters
        self._jobs_done += 1
        if job is _SYNC:
            counters.synced_at = clock.to_seconds(clock.now())
            self._is_syncing = False
            if self._has_unsynced and not self._stopping:
                self._sync_soon()
        elif job.batch is not None:
            batch = job.batch
            counters.rows += batch.rows
            counters.bytes += batch.size
            counters.lag = max(0.0, clock.to_seconds(clock.now() - batch.times[0]))
            counters.longest_lag = max(counters.lag, counters.longest_lag)
            while (first := self._submitted.popleft()) is not batch:  # given up: the disk had refused it
                self._submitted_bytes -= first.memory
                self._given_up_rows += first.rows
            self._submitted_bytes -= batch.memory
            self._resume()

    def disk_failed(self, reason: str) -> None:
        """Implement `sbus.recorder.writer_thread.WriterEvents`."""
        if self._disk_failure is None:
            self._disk_failure = {"since": clock.now(), "reason": reason}
        self._log.error(
            "the journal {journal} cannot be written: {reason}: messages wait until it can be, in {waiting} bytes of "
            "memory",
            journal=self._journal.directory,
            reason=reason,
            waiting=self._buffered_bytes(),
        )

    def disk_recovered(self) -> None:
        """Implement `sbus.recorder.writer_thread.WriterEvents`."""
        gap, self._disk_failure = self._disk_failure, None
        if self._stopping:
            return  # the stop row has the failure, and no row can follow it
        if gap is not None:
            self._submit_gap(Kind.FULL, gap)
            self._log.warn("the journal {journal} can be written again", journal=self._journal.directory)

    def _resume(self) -> None:
        if self._is_full and self._buffered_bytes() <= self._settings.buffer_bytes // 2:
            self._is_full = False
            self._connection.resume()

    def thread_ended(self, lost: int, failure: Failure | None) -> None:
        """Implement `sbus.recorder.writer_thread.WriterEvents`."""
        if self._ended.called:
            return  # it was hung, and was not waited for
        self.counters.lost = lost
        if lost:
            self._log.error("{lost} messages were received and could not be written: they are lost", lost=lost)
        self._ended.callback(None)
        if failure is not None:
            self._disk_failure = {"since": clock.now(), "reason": failure.getErrorMessage()}
            self._is_full = True
            self.failed(failure)

    def _open_successor(self) -> JournalWriter | None:
        """Begin a new journal in the place of one that was moved away, if there is a directory; the thread calls this.

        :raises JournalError: if another recorder writes there.
        :raises OSError: if the directory cannot be written.
        """
        moved, place = self._journal, self._journal.directory
        if self._reopen is None or not os.path.isdir(place):
            return None
        journal = self._reopen()
        try:
            journal.append_gap(Kind.START, self._start_details(journal))
        except BaseException:
            journal.close()
            raise
        is_there = moved.follow()
        try:
            moved.close()
        except OSError as error:
            if is_there:
                self._reactor.callFromThread(self._not_closed, moved.directory, error)
        self._journal = self._retention.journal = journal
        self._reactor.callFromThread(self._replaced, place, moved.directory if is_there else None)
        return journal

    def _not_closed(self, directory: str, error: OSError) -> None:
        self._log.error(
            "the journal {journal} could not be closed: {reason}: run 'sbus journal repair {journal}', so that its "
            "last messages can be read",
            journal=directory,
            reason=error.strerror,
        )

    def _replaced(self, place: str, left: str | None) -> None:
        self.counters.gaps += 1
        if left is None:
            self._log.error(
                "the journal {journal} was removed, with all that was recorded in it; a new one begins in its place",
                journal=place,
            )
        else:
            self._log.warn(
                "the journal {journal} was moved to {left}, and is closed there; a new one begins in its place",
                journal=place,
                left=left,
            )


_SYNC = Job(lambda journal: journal.sync())


def _is_active(timer: IDelayedCall | None) -> TypeGuard[IDelayedCall]:
    return timer is not None and bool(timer.active())
