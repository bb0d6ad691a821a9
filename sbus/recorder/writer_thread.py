"""The thread that writes the journal: the event loop never waits for the disk.

The thread takes jobs from a queue and does one after the other; it is the only user of the `JournalWriter`.

* Jobs keep their order, over every error of the disk. A job that raises `OSError` (no space, no quota, a read-only file
  system, an error of the device, a sync that failed) has changed nothing (`sbus.journal.writer`), so it is repeated
  until it succeeds. No later job overtakes it, and nothing is dropped.
* The event loop is notified through ``callFromThread`` when a job fails, at intervals while it keeps failing, and when
  it succeeds. The queue itself is unbounded: to stop adding jobs is the task of the listener.
* If the directory of the journal was moved away, the job waits in the same way. When there is another directory in its
  place, `successor` opens a new journal there, and the job is done with that.
* Any other exception is a bug. It ends the thread; the messages of the remaining jobs are counted as lost.
* `JournalThread.give_up` ends the repetition, for a recorder that is stopped while the disk is full. A journal that was
  moved away is then written where it is now.

The thread is a daemon thread: a disk that never answers must not keep the process from ending.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, Protocol

from twisted.python.failure import Failure

from sbus.errors import JournalError
from sbus.journal.place import JournalMoved
from sbus.recorder.buffer import Batch
from sbus.recorder.payloads import Payload

if TYPE_CHECKING:
    from sbus.journal.writer import JournalWriter

__all__ = ["Job", "JournalThread", "WriterEvents"]


class Job(NamedTuple):
    """Something to do with the journal.

    :ivar do: does it. If the disk refuses, it raises `OSError` and has changed nothing.
    :ivar batch: the messages that it writes; they are lost if the job is never done.
    """

    do: Callable[[JournalWriter], object]
    batch: Batch | Payload | None = None

    @property
    def rows(self) -> int:
        """The number of messages."""
        return self.batch.rows if self.batch else 0


class WriterEvents(Protocol):
    """Is notified, in the event loop, of what the thread does."""

    def job_done(self, job: Job) -> None:
        """A job succeeded."""

    def disk_failed(self, reason: str) -> None:
        """A job failed and will be repeated.

        Called for the first failure of a job, and at intervals while it keeps failing.
        """

    def disk_recovered(self) -> None:
        """The job that had failed succeeded."""

    def thread_ended(self, lost: int, failure: Failure | None) -> None:
        """The thread has closed the journal and ended.

        :param lost: the number of messages that were not written.
        :param failure: the bug that ended the thread, if one did.
        """


class JournalThread:
    """Does jobs with a journal, in the order in which they are submitted.

    :param journal: open for writing; the thread closes it.
    :param listener: is notified of results.
    :param call_in_loop: calls a function in the event loop (``reactor.callFromThread``).
    :param after_job: called in the thread after each attempt, with True if it failed; it must not raise.
    :param successor: called in the thread if the journal is no longer in its place: closes it, and returns the new one
        that is there, or None if there is no place for one. After a `JournalError` or an `OSError` it is called again.
    :param retry: the seconds between two attempts of a job.
    :param report_interval: the seconds between two calls of `WriterEvents.disk_failed` for the same job.
    """

    def __init__(
        self,
        journal: JournalWriter,
        listener: WriterEvents,
        call_in_loop: Callable[..., object],
        *,
        after_job: Callable[[bool], object] = lambda failed: None,
        successor: Callable[[], JournalWriter | None] = lambda: None,
        retry: float = 1.0,
        report_interval: float = 60.0,
    ) -> None:
        self._journal = journal
        self._listener = listener
        self._call_in_loop = call_in_loop
        self._after_job = after_job
        self._successor = successor
        self._retry = retry
        self._report_interval = report_interval
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._gave_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sbus journal", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Add a job after those that were submitted before."""
        self._jobs.put(job)

    def finish(self) -> None:
        """Close the journal and end when all jobs are done; the listener is notified then."""
        self._jobs.put(None)

    def give_up(self) -> None:
        """Repeat no job from now on; the messages of a job that fails are lost."""
        self._gave_up.set()

    def _run(self) -> None:
        lost, failure = 0, None
        while (job := self._jobs.get()) is not None:
            try:
                if not self._do(job):
                    lost += job.rows
            except Exception:
                failure = Failure()
                lost += job.rows
                break
        if failure is not None:
            while not self._jobs.empty() and (job := self._jobs.get()) is not None:
                lost += job.rows
        else:
            try:
                self._do(Job(lambda journal: journal.roll()))
            except Exception:
                failure = Failure()  # the listener must be notified of the end in any case
        try:
            self._journal.close()
        except OSError:
            pass  # reported already; the next writer repairs the journal
        except Exception:
            failure = failure or Failure()
        self._call_in_loop(self._listener.thread_ended, lost, failure)

    def _do(self, job: Job) -> bool:
        """Do a job, repeating it while the disk fails; return whether it was done."""
        reported: float | None = None
        while True:
            try:
                job.do(self._journal)
                break
            except OSError as error:
                has_moved, reason = isinstance(error, JournalMoved), error.strerror or str(error)
            if has_moved:
                try:
                    successor = self._successor()
                except JournalError as error:
                    reason = str(error)
                except OSError as error:
                    reason = error.strerror or str(error)
                else:
                    if successor is not None:
                        self._journal = successor
                        continue
            now = time.monotonic()
            if reported is None or now - reported >= self._report_interval:
                reported = now
                self._call_in_loop(self._listener.disk_failed, reason)
            self._after_job(True)
            # At the end it is better to write where the journal is now than not at all.
            if self._gave_up.wait(self._retry) and not (has_moved and self._journal.follow()):
                return False
        if reported is not None:
            self._call_in_loop(self._listener.disk_recovered)
        self._call_in_loop(self._listener.job_done, job)
        self._after_job(False)
        return True
