"""The one thread that has to do with the disk, so that the event loop never waits for it.

It does one job after the other. What fails for the disk's sake (`OSError`: no space, no quota, read-only, an error of
the device) is done again until it succeeds: jobs keep their order, and nothing is thrown away. So the event loop is
told of the trouble, and has to stop what brings more jobs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from twisted.python.failure import Failure

from sbus.recorder.buffer import Batch

if TYPE_CHECKING:
    from sbus.journal.writer import JournalWriter

__all__ = ["Job", "JournalThread", "ThreadListener"]


class Job(NamedTuple):
    """Something to do with the journal.

    :ivar do: does it. It raises `OSError` if the disk is in the way, and has done nothing then.
    :ivar batch: what it writes, which is lost if it is never done.
    """

    do: Callable[[JournalWriter], Any]
    batch: Batch | None = None

    @property
    def rows(self) -> int:
        return len(self.batch.messages) if self.batch else 0


class ThreadListener(Protocol):
    """Who is told what happens, in the event loop."""

    def done(self, job: Job) -> None:
        """A job is done."""

    def trouble(self, error: OSError) -> None:
        """A job cannot be done now, and will be tried again. Told once for each trouble, and at intervals."""

    def recovered(self) -> None:
        """The job that could not be done is done."""

    def ended(self, lost: int, failure: Failure | None) -> None:
        """The thread is at its end.

        :param lost: messages that were not written.
        :param failure: what ended it before its time; no error of the disk's.
        """


class JournalThread:
    """Does jobs with a journal, in the order in which they come.

    :param journal: open for writing; the thread closes it.
    :param tell: calls a function in the event loop (`reactor.callFromThread`).
    :param after: called in the thread whenever a job is done (with False) or has failed (with True), for what is to
        be looked after now and then. It raises nothing.
    :param retry: seconds until a job that has failed is tried again.
    :param remind: seconds after which the owner is told again that it still fails.
    """

    def __init__(
        self,
        journal: JournalWriter,
        owner: ThreadListener,
        tell: Callable[..., Any],
        *,
        after: Callable[[bool], Any] = lambda in_need: None,
        retry: float = 1.0,
        remind: float = 60.0,
    ) -> None:
        self._journal = journal
        self._owner = owner
        self._tell = tell
        self._after = after
        self._retry = retry
        self._remind = remind
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._hopeless = threading.Event()
        # A daemon: a disk that never answers must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="sbus journal", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Do this when what was submitted before is done."""
        self._jobs.put(job)

    def finish(self) -> None:
        """Close the journal and end when all that was submitted is done; the owner is told then."""
        self._jobs.put(None)

    def give_up(self) -> None:
        """Try nothing again from now on: what fails is lost."""
        self._hopeless.set()

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
                failure = Failure()  # the owner waits to be told that this is the end
        try:
            self._journal.close()
        except OSError:
            pass  # the owner has been told; the next to open the journal will put it right
        except Exception:
            failure = failure or Failure()
        self._tell(self._owner.ended, lost, failure)

    def _do(self, job: Job) -> bool:
        """Do a job, if need be again and again; whether it was done."""
        told = None
        while True:
            try:
                job.do(self._journal)
                break
            except OSError as error:
                now = time.monotonic()
                if told is None or now - told >= self._remind:
                    told = now
                    self._tell(self._owner.trouble, error)
            self._after(True)
            if self._hopeless.wait(self._retry):
                return False
        if told is not None:
            self._tell(self._owner.recovered)
        self._tell(self._owner.done, job)
        self._after(False)
        return True
