"""One recording: what the bus brings goes to the disk, and what comes between them becomes rows of gaps.

::

    Connection --messages--> Batches --jobs--> JournalThread
        ^                                           |
        +------------- room, or none ---------------+

Memory is bounded: when too much waits for the disk, or the disk is in trouble, the connection is not read. What the bus
does with messages for a client that does not read is flood control, which the recorder chooses when it connects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twisted.internet import defer
from twisted.logger import Logger
from twisted.python.failure import Failure

from sbus.client.connecting import Backoff, find_address
from sbus.journal.keytext import as_text
from sbus.journal.schema import Kind
from sbus.recorder.buffer import Batch, Batches, microseconds
from sbus.recorder.connection import Connection
from sbus.recorder.retention import RetentionTrigger
from sbus.recorder.settings import Settings
from sbus.recorder.writer_thread import Job, JournalThread
from sbus.version import __version__

if TYPE_CHECKING:
    from sbus.journal.writer import JournalWriter

__all__ = ["Counters", "Recording"]

_STOP_TIMEOUT = 10.0
"""Seconds that the bus, and then the disk, may take when the recorder stops."""
_IDLE = 60.0
"""Seconds after which the journal is looked after when nothing comes, so that old segments are closed."""
_MESSAGE_COSTS = 160
"""Bytes of memory that a message takes besides its key and payload."""


@dataclass(slots=True)
class Counters:
    """What a recording has done.

    :ivar rows: messages that are in the journal.
    :ivar bytes: bytes in their keys and payloads.
    :ivar gaps: rows that tell of a gap, of whatever kind.
    :ivar lost: messages that were received and not written: the disk was full to the end, or something broke.
    :ivar lag: seconds from when the first message of the last batch came to when it was in the journal.
    :ivar longest_lag: the most that this ever was.
    """

    rows: int = 0
    bytes: int = 0
    gaps: int = 0
    lost: int = 0
    lag: float = 0.0
    longest_lag: float = 0.0


class Recording:
    """Records until it is stopped (a `RecordSink` and a `ThreadListener`).

    :param journal: open for writing; it is closed at the end.
    :param address: of the bus, as for `sbus.client.tx.connect`.
    :param on_failure: called when it cannot go on, for a reason that is none of the disk's or the bus's.
    :param retry: seconds after which the disk is tried again.
    :ivar counters: what it has done so far.
    """

    _log = Logger(namespace="sbus.recorder")

    def __init__(
        self,
        reactor: Any,
        journal: JournalWriter,
        address: str | None,
        settings: Settings,
        on_failure: Callable[[], Any],
        *,
        backoff: Backoff | None = None,
        retry: float = 1.0,
    ) -> None:
        self.counters = Counters()
        self._reactor = reactor
        self._journal = journal
        self._address = find_address(address)
        self._settings = settings
        self._on_failure = on_failure
        self._thread = JournalThread(
            journal, self, reactor.callFromThread, after=RetentionTrigger(journal, settings), retry=retry
        )
        self._batches = Batches(
            reactor,
            self._append,
            rows=settings.batch_rows,
            size=settings.batch_bytes,
            seconds=settings.batch_time,
        )
        self._connection = Connection(reactor, self._address, settings, self, backoff)
        self._has_begun = False
        self._trouble: dict[str, Any] | None = None
        self._waiters: list[defer.Deferred[None]] = []  # for room
        self._submitted = 0  # bytes of memory in messages that the thread has to write
        self._sync_timer: Any = None
        self._idle_timer: Any = None
        self._is_syncing = False
        self._is_unsynced = False  # since the newest sync that was asked for
        self._stopping = False
        self._ended: defer.Deferred[None] = defer.Deferred()

    def start(self) -> None:
        """Begin."""
        self._thread.start()
        self._connection.start()
        self._idle_timer = self._reactor.callLater(_IDLE, self._look_after)

    async def stop(self) -> None:
        """Write all that the bus has for us, and end; takes at most some seconds."""
        await self._connection.stop(0.0 if self._trouble else _STOP_TIMEOUT)
        if self._has_begun:
            self._mark(Kind.STOP, self._trouble or self._connection.gap or {})
        self._batches.flush()
        self._stopping = True
        for timer in (self._sync_timer, self._idle_timer):
            if _is_active(timer):
                timer.cancel()
        self._thread.finish()
        limit = self._reactor.callLater(_STOP_TIMEOUT, self._thread.give_up)
        await self._ended
        if _is_active(limit):
            limit.cancel()
        self.log_counters()

    def log_counters(self) -> None:
        """Say in the log what was recorded so far."""
        self._log.info(
            "recorded {c.rows} messages ({c.bytes} bytes) and {c.gaps} gaps; {waiting} bytes of memory wait for the "
            "disk; lag {c.lag:.3f} s, at most {c.longest_lag:.3f} s; lost {c.lost} messages",
            c=self.counters,
            waiting=self._waiting(),
        )

    # --- what the connection says --------------------------------------------------------------

    def recording_started(self, gap: dict[str, Any] | None) -> None:
        """See `sbus.recorder.connection.RecordSink`."""
        patterns = [as_text(pattern) for pattern in self._settings.patterns]
        self._log.info(
            "recording {patterns} of {address} into {journal}",
            patterns=", ".join(map(repr, patterns)),
            address=self._address,
            journal=self._journal.directory,
        )
        if gap is None:
            self._has_begun = True
            details = {
                "patterns": patterns,
                "socket": self._address,
                "version": __version__,
                "ended": self._journal.ended,
            }
            self._mark(Kind.START, details)
        else:
            self._mark(Kind.RECONNECT, gap)

    def add(self, messages: Sequence[tuple[bytes, bytes]]) -> None:
        """See `sbus.recorder.connection.RecordSink`."""
        self._batches.add(messages)

    def wait_for_capacity(self) -> defer.Deferred[None] | None:
        """See `sbus.recorder.connection.RecordSink`."""
        if not self._trouble and self._waiting() < self._settings.buffer_bytes:
            return None
        waiter: defer.Deferred[None] = defer.Deferred(self._waiters.remove)
        self._waiters.append(waiter)
        return waiter

    def failed(self, failure: Failure) -> None:
        """See `sbus.recorder.connection.RecordSink`."""
        self._log.failure("the recorder cannot go on", failure=failure)
        self._on_failure()

    # --- what is to be written -----------------------------------------------------------------

    def _append(self, batch: Batch) -> None:
        self._submitted += _cost(len(batch.messages), batch.size)
        self._thread.submit(Job(lambda journal: journal.append(batch.messages, batch.times), batch))
        self._sync_soon()

    def _mark(self, kind: Kind, details: dict[str, Any]) -> None:
        self._batches.flush()
        now = microseconds()
        self._thread.submit(Job(lambda journal: journal.append_gap(kind, details, now)))
        self.counters.gaps += 1
        self._sync_soon()

    def _sync_soon(self) -> None:
        """Something new is to be synced, once for all that comes until then."""
        self._is_unsynced = True
        if not self._settings.sync:
            self._sync()
        elif not self._is_syncing and not _is_active(self._sync_timer):
            self._sync_timer = self._reactor.callLater(self._settings.sync, self._sync)

    def _sync(self) -> None:
        self._is_syncing, self._is_unsynced = True, False
        self._thread.submit(_SYNC)

    def _look_after(self) -> None:
        if not self._is_syncing:
            self._sync()
        self._idle_timer = self._reactor.callLater(_IDLE, self._look_after)

    def _waiting(self) -> int:
        """Bytes of memory in messages that are not in the journal yet."""
        return self._submitted + _cost(self._batches.rows, self._batches.size)

    # --- what the thread says ------------------------------------------------------------------

    def done(self, job: Job) -> None:
        """See `sbus.recorder.writer_thread.ThreadListener`."""
        counters = self.counters
        if job is _SYNC:
            self._is_syncing = False
            if self._is_unsynced and not self._stopping:
                self._sync_soon()
        elif job.batch is not None:
            batch, rows = job.batch, len(job.batch.messages)
            counters.rows += rows
            counters.bytes += batch.size
            counters.lag = max(0.0, (microseconds() - batch.times[0]) / 1e6)
            counters.longest_lag = max(counters.lag, counters.longest_lag)
            self._submitted -= _cost(rows, batch.size)
            self._make_room()

    def trouble(self, error: OSError) -> None:
        """See `sbus.recorder.writer_thread.ThreadListener`."""
        why = error.strerror or str(error)
        if self._trouble is None:
            self._trouble = {"since": microseconds(), "reason": why}
        self._log.error(
            "the journal {journal} cannot be written: {why}: the bus is not read until it can be; {waiting} bytes of "
            "memory wait",
            journal=self._journal.directory,
            why=why,
            waiting=self._waiting(),
        )

    def recovered(self) -> None:
        """See `sbus.recorder.writer_thread.ThreadListener`."""
        trouble, self._trouble = self._trouble, None
        if trouble is not None:
            # What was read before the reading stopped comes before the gap.
            self._batches.add(self._connection.ready())
            self._mark(Kind.FULL, trouble)
            self._log.warn("the journal {journal} can be written again", journal=self._journal.directory)
        self._make_room()

    def _make_room(self) -> None:
        if self._waiters and not self._trouble and self._waiting() <= self._settings.buffer_bytes // 2:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                waiter.callback(None)

    def ended(self, lost: int, failure: Failure | None) -> None:
        """See `sbus.recorder.writer_thread.ThreadListener`."""
        self.counters.lost = lost
        if lost:
            self._log.error("{lost} messages were received and could not be written: they are lost", lost=lost)
        self._ended.callback(None)
        if failure is not None:
            self._trouble = {"since": microseconds(), "reason": failure.getErrorMessage()}
            self.failed(failure)


_SYNC = Job(lambda journal: journal.sync())


def _cost(messages: int, size: int) -> int:
    """Bytes of memory that messages take with so many bytes in keys and payloads."""
    return size + messages * _MESSAGE_COSTS


def _is_active(timer: Any) -> bool:
    return timer is not None and timer.active()
