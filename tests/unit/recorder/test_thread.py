"""The thread that writes the journal."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from twisted.python.failure import Failure

from sbus.errors import JournalLocked
from sbus.journal.place import JournalMoved
from sbus.recorder.writer_thread import Job, JournalThread
from tests.unit.recorder.parts import FULL, Loop, batch, full


class Listener:
    """Records its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def job_done(self, job: Job) -> None:
        self.calls.append(job.do)

    def disk_failed(self, reason: str) -> None:
        self.calls.append(reason)

    def disk_recovered(self) -> None:
        self.calls.append("recovered")

    def thread_ended(self, lost: int, failure: Failure | None) -> None:
        self.calls.append(("ended", lost, failure and failure.type))


class FakeJournal:
    """A journal that records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def follow(self) -> bool:
        self.calls.append("follow")
        return True

    def roll(self) -> None:
        self.calls.append("roll")

    def close(self) -> None:
        self.calls.append("close")


class BrokenJournal(FakeJournal):
    """A journal with a bug in `roll`."""

    def roll(self) -> None:
        raise ValueError


class Work:
    """A job that raises these errors before it succeeds."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)

    def __call__(self, journal: Any) -> None:
        if self.errors:
            raise self.errors.pop(0)


MOVED = "its directory was moved away"


def moved() -> JournalMoved:
    return JournalMoved(errno.ENOENT, MOVED)


def new_thread(journal: FakeJournal, listener: Listener, loop: Loop, **options: Any) -> JournalThread:
    return JournalThread(journal, listener, loop.callFromThread, **options)  # type: ignore[arg-type]


def run_jobs(
    jobs: list[Job], journal: FakeJournal | None = None, **options: Any
) -> tuple[list[Any], FakeJournal, list[bool]]:
    loop, listener, journal, after = Loop(), Listener(), journal or FakeJournal(), list[bool]()
    thread = new_thread(journal, listener, loop, after_job=after.append, retry=0.0, **options)
    for job in jobs:
        thread.submit(job)
    thread.finish()
    thread.start()
    loop.until(lambda: listener.calls and isinstance(listener.calls[-1], tuple))
    return listener.calls, journal, after


def test_jobs_keep_their_order() -> None:
    """A job that the disk refuses is repeated before later jobs; the listener learns of failure and recovery."""
    first, second, third = Work(), Work(full(), full(), full()), Work(OSError(errno.EIO, "input/output error"))
    calls, journal, after = run_jobs([Job(first), Job(second), Job(third)])
    assert calls[:-2] == [first, FULL, "recovered", second, "input/output error", "recovered", third]
    assert calls[-1] == ("ended", 0, None)
    assert journal.calls == ["roll", "close"]
    assert after == [False, True, True, True, False, True, False, False]


def test_lasting_failure_is_reported_again() -> None:
    """A failure that lasts is reported again at intervals."""
    calls, _, _ = run_jobs([Job(Work(full(), full(), full()))], report_interval=0.0)
    assert calls[:4] == [FULL] * 3 + ["recovered"]


def test_a_bug_ends_the_thread() -> None:
    """Any other exception ends the thread: the journal is closed, and the remaining messages count as lost."""
    calls, journal, _ = run_jobs([Job(Work(), batch(1)), Job(Work(ValueError()), batch(2)), Job(Work(), batch(4))])
    assert calls[-1] == ("ended", 6, ValueError)
    assert journal.calls == ["close"]


def test_a_bug_at_the_end() -> None:
    """A bug at closing the last segment is reported too, so that the listener does not wait for ever."""
    calls, journal, _ = run_jobs([Job(Work(), batch(1))], BrokenJournal())
    assert calls[-1] == ("ended", 0, ValueError)
    assert journal.calls == ["close"]


def test_giving_up() -> None:
    """After `give_up` only the messages of jobs that fail are lost."""
    loop, listener, journal = Loop(), Listener(), FakeJournal()
    thread = new_thread(journal, listener, loop, retry=60.0)
    for job in (Job(Work(), batch(1)), Job(Work(full(), full()), batch(2)), Job(Work(), batch(4))):
        thread.submit(job)
    thread.finish()
    thread.start()
    loop.until(lambda: FULL in listener.calls)
    thread.give_up()
    loop.until(lambda: isinstance(listener.calls[-1], tuple))
    assert listener.calls[-1] == ("ended", 2, None)


@pytest.mark.parametrize(
    ("refusal", "reason"), [(None, MOVED), (JournalLocked("another one writes"), "another one writes"), (full(), FULL)]
)
def test_giving_up_on_a_journal_that_was_moved(refusal: Exception | None, reason: str) -> None:
    """After `give_up` a journal that was moved away is written where it is now, whatever is in its place."""

    def refuse() -> None:
        if refusal is not None:
            raise refusal

    loop, listener, journal = Loop(), Listener(), FakeJournal()
    thread = new_thread(journal, listener, loop, successor=refuse, retry=60.0)
    thread.submit(Job(Work(moved()), batch(2)))
    thread.finish()
    thread.start()
    loop.until(lambda: reason in listener.calls)
    thread.give_up()
    loop.until(lambda: isinstance(listener.calls[-1], tuple))
    assert listener.calls[-1] == ("ended", 0, None)
    assert journal.calls == ["follow", "roll", "close"]
