"""The parts of the recorder: settings, batches, the writer thread, and a recording without a bus."""

from __future__ import annotations

import errno
import itertools
import json
import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from twisted.internet import defer
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from sbus.client.losses import Lost
from sbus.errors import JournalError, JournalLocked, UsageError
from sbus.journal import disk
from sbus.journal.layout import list_segments
from sbus.journal.place import JournalMoved
from sbus.journal.senders import Senders
from sbus.recorder import pipeline as recording
from sbus.recorder.buffer import Batch, BatchBuffer
from sbus.recorder.pipeline import Recording
from sbus.recorder.retention import RetentionTrigger
from sbus.recorder.service import open_journal
from sbus.recorder.settings import Settings
from sbus.recorder.twistd import Options, makeService
from sbus.recorder.writer_thread import Job, JournalThread
from tests.support.examples import examples
from tests.support.faults import let_go
from tests.support.journals import rows

TIMEOUT = 10.0


# --- settings and options -------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [b"!/cred////inbox", b"!/cred/1/2/3/", b"!/", b"!"])
def test_secrets_are_not_recorded(pattern: bytes) -> None:
    """A pattern that matches secret messages is refused; the error does not quote the secret part."""
    with pytest.raises(UsageError, match="secret messages are never recorded") as refused:
        Settings(patterns=(b"a", pattern))
    assert "inbox" not in str(refused.value)


@pytest.mark.parametrize(("mode", "directory"), [(0o600, 0o700), (0o640, 0o750), (0o644, 0o755), (0o660, 0o770)])
def test_who_may_read_the_files_may_enter_the_directory(mode: int, directory: int) -> None:
    """The mode of the directory follows from the mode of the files."""
    assert Settings(mode=mode).directory_mode == directory


def settings_of(*arguments: str) -> Settings:
    options = Options()
    options.parseOptions(["--socket=/run/bus", "--journal=there", *arguments])
    return options.settings


def test_options_become_settings() -> None:
    """Each option sets the setting of its name; without options the settings are the defaults."""
    assert settings_of() == Settings()
    assert settings_of(
        *("--pattern=a/", "-p", "b/*", "--pattern=a/", "--soft=block", "--hard=block", "--max-lag=2s", "--order=stack"),
        *("--batch-rows=5", "--batch-bytes=6", "--batch-time=250ms", "--sync=0", "--buffer-bytes=7", "--max-packet=99"),
        *("--max-payload=10",),
        *("--segment-bytes=8", "--segment-age=2h", "--keep-bytes=9", "--keep-days=1.5", "--force", "--mode=0640"),
    ) == Settings(
        patterns=(b"a/", b"b/*"),
        soft="block",
        hard="block",
        order="stack",
        batch_rows=5,
        batch_bytes=6,
        batch_time=0.25,
        sync=0.0,
        buffer_bytes=7,
        max_lag=2.0,
        max_packet=99,
        max_payload=10,
        segment_bytes=8,
        segment_age=7200.0,
        keep_bytes=9,
        keep_days=1.5,
        force=True,
        mode=0o640,
    )


@pytest.mark.parametrize(
    ("argument", "remedy"),
    [
        ("--journal=", "--journal=DIRECTORY"),
        ("--socket=systemd", "give a path or @NAME"),
        ("--pattern=!/cred////x", "never recorded"),
        ("--pattern=a/!/b", "not allowed"),
        ("--soft=drop", "queue or discard or block or error"),
        ("--hard=queue", "adaptive or discard or block or error"),
        ("--max-lag=1ms", "of 0.1 seconds or more"),
        ("--order=none", "queue or stack or random"),
        ("--sync=soon", "give a time, such as 500ms, 1s"),
        ("--sync=-1", "give a time"),
        ("--batch-time=1 s", "give a time"),
        ("--segment-age=10ms", "of 1 seconds or more"),
        ("--batch-rows=0", "a number of messages above 0"),
        ("--batch-bytes=2147483648", "at most 1073741824"),
        ("--max-payload=2147483648", "at most 1073741824"),
        ("--buffer-bytes=1000", "raise --buffer-bytes or lower --batch-bytes"),
        ("--keep-days=0", "a number of days above 0"),
        ("--mode=0440", "the owner must be able to read and write"),
        ("--mode=999", "three octal digits"),
        ("--force", "--keep-bytes or --keep-days"),
        ("--dialect=late", "current or early"),
        ("--nonsense", "not recognized"),
    ],
)
def test_wrong_options(argument: str, remedy: str) -> None:
    """A wrong option ends the program with one line that has the remedy."""
    with pytest.raises(SystemExit) as end:
        settings_of(argument)
    line = str(end.value)
    assert line.startswith("sbus-recorder: ")
    assert line.endswith(" (see twistd sbus-recorder --help)")
    assert "\n" not in line
    assert remedy in line


def test_early_dialect_has_no_settings() -> None:
    """Flood control cannot be chosen in the early dialect."""
    with pytest.raises(SystemExit, match="the early dialect does not have"):
        settings_of("--dialect=early", "--hard=block")
    assert settings_of("--dialect=early").dialect == "early"


def test_without_arrow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If PyArrow is not installed, the error names the extra that installs it."""
    import sys

    for name in sorted(sys.modules, reverse=True):
        if name.startswith(("sbus.recorder.service", "sbus.recorder.pipeline", "sbus.recorder.ret", "sbus.journal")):
            package, _, child = name.rpartition(".")
            monkeypatch.setattr(sys.modules[package], child, sys.modules[name])  # so that monkeypatch restores it
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    options = Options()
    options.parseOptions([f"--socket={tmp_path}/bus", f"--journal={tmp_path}/journal"])
    with pytest.raises(SystemExit, match=r"sbus-recorder: .*pip install 'sbusd\[recorder\]'"):
        makeService(options)


# --- batches --------------------------------------------------------------------------------------


@pytest.fixture
def sent() -> list[Batch]:
    return []


def make(clock: Clock, sent: list[Any], **limits: Any) -> BatchBuffer:
    limits = {"rows": 4, "size": 100, "seconds": 0.1, **limits}
    return BatchBuffer(clock, sent.append, **limits, now=lambda: round(clock.seconds() * 1e6))


def packets(*messages: tuple[bytes, bytes]) -> list[bytes]:
    return [b"MSG %b\0%b" % message for message in messages]


def contents(batch: Batch) -> list[tuple[bytes, bytes]]:
    return list(zip(batch.keys.to_pylist(), batch.payloads.to_pylist(), strict=True))


def test_batch_by_number(sent: list[Batch]) -> None:
    """The maximum number of messages completes a batch; each message has the time of its arrival."""
    clock = Clock()
    batches = make(clock, sent)
    batches.add(packets((b"a", b"1"), (b"b", b"2")))
    clock.advance(0.05)
    batches.add(packets((b"c", b"3")))
    assert sent == []
    assert batches.rows == 3
    batches.add(packets((b"d", b"4"), (b"e", b"5")))
    assert [contents(batch) for batch in sent] == [[(b"a", b"1"), (b"b", b"2"), (b"c", b"3"), (b"d", b"4")]]
    assert (sent[0].times, sent[0].ends, sent[0].size) == ([0, 50_000], [2, 4], 8)
    batches.flush()
    assert contents(sent[1]) == [(b"e", b"5")]
    assert (batches.rows, batches.oldest) == (0, None)
    assert clock.getDelayedCalls() == []


def test_batch_by_size(sent: list[Batch]) -> None:
    """The maximum number of bytes in keys and payloads completes a batch."""
    batches = make(Clock(), sent)
    batches.add(packets((b"k" * 50, b"p" * 49)))
    assert sent == []
    batches.add(packets((b"k", b"")))
    assert [batch.size for batch in sent] == [100]


def test_lone_message(sent: list[Batch]) -> None:
    """A message that no other follows is sent when the time is up; after that no timer runs."""
    clock = Clock()
    batches = make(clock, sent)
    batches.add(packets((b"alone", b"")))
    clock.advance(0.099)
    assert sent == []
    clock.advance(0.001)
    assert [contents(batch) for batch in sent] == [[(b"alone", b"")]]
    clock.advance(10)
    batches.add([])
    batches.flush()
    assert len(sent) == 1
    assert clock.getDelayedCalls() == []


steps = st.lists(
    st.one_of(
        st.integers(0, 6).map(lambda n: ("add", n)),
        st.floats(0, 0.15).map(lambda s: ("wait", s)),
        st.just(("flush", 0)),
    )
)


@given(steps)
def test_batches_keep_everything_in_order(plan: list[tuple[str, Any]]) -> None:
    """For any arrivals: no message is lost, reordered or held too long, and no batch is empty."""
    clock, sent = Clock(), list[Batch]()
    batches = make(clock, sent)
    added: list[tuple[bytes, bytes]] = []
    arrived: list[float] = []
    for what, amount in plan:
        if what == "add":
            messages = [(b"%d" % (len(added) + i), b"") for i in range(amount)]
            added += messages
            arrived += [clock.seconds()] * amount
            batches.add(packets(*messages))
        elif what == "wait":
            clock.advance(amount)
        else:
            batches.flush()
        together = [message for batch in sent for message in contents(batch)]
        assert together == added[: len(together)]
        assert batches.rows == len(added) - len(together)
        assert not batches.rows or clock.seconds() - arrived[len(together)] < 0.1 + 1e-9
    batches.flush()
    assert [message for batch in sent for message in contents(batch)] == added
    assert all(batch.rows == batch.ends[-1] and batch.ends == sorted(set(batch.ends)) for batch in sent)
    assert all(batch.times == sorted(set(batch.times)) for batch in sent)


# --- the thread -----------------------------------------------------------------------------------


class Loop(Clock):
    """A reactor without I/O: the test advances the time, and `until` runs the calls from threads."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: SimpleQueue[Callable[[], Any]] = SimpleQueue()

    def callFromThread(self, call: Callable[..., Any], *args: Any) -> None:
        self._calls.put(lambda: call(*args))

    def until(self, condition: Callable[[], Any]) -> None:
        """Run the calls of threads until the condition holds."""
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            self._calls.get(timeout=max(0.0, deadline - time.monotonic()))()

    def run_pending(self) -> None:
        """Run the calls that threads have made so far."""
        while not self._calls.empty():
            self._calls.get()()


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


FULL = os.strerror(errno.ENOSPC)
MOVED = "its directory was moved away"


def full() -> OSError:
    return OSError(errno.ENOSPC, FULL)


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


def batch(count: int) -> Batch:
    nobody = Senders(pa.nulls(1, pa.binary()), pa.array([count], pa.int32()))
    return Batch(pa.array([b"k"] * count), pa.array([b"p"] * count), [0], [count], nobody)


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


# --- a recording ----------------------------------------------------------------------------------


class FakeConnection:
    """A connection in whose place the test adds messages."""

    newest: FakeConnection

    def __init__(self, *args: Any) -> None:
        FakeConnection.newest = self
        self.gap: dict[str, Any] | None = None
        self.resumed = 0
        self.stopped: float | None = None

    def start(self) -> None:
        pass

    def resume(self) -> None:
        self.resumed += 1

    async def stop(self, timeout: float) -> None:
        self.stopped = timeout


class Recorder:
    """A recording with a real journal and thread, but without a bus."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.loop = Loop()
        self.directory = directory
        self.failures: list[str] = []
        self.settings = Settings(**{"batch_time": 0.1, "sync": 1.0, **settings})
        journal = open_journal(str(directory), self.settings)
        self.recording = Recording(
            self.loop, journal, "/run/bus", self.settings, lambda: self.failures.append("failed"), retry=0.01
        )
        self.connection = FakeConnection.newest
        self.recording.start()
        self.recording.recording_started(None)

    def appended(self, count: int) -> None:
        """Wait until `count` messages are in the journal."""
        self.loop.until(lambda: self.recording.counters.rows >= count)

    def stop(self) -> list[dict[str, Any]]:
        """Stop the recording; return the rows of the journal."""
        stopped = defer.Deferred.fromCoroutine(self.recording.stop())
        self.loop.until(lambda: stopped.called)
        assert stopped.result is None
        return rows(self.directory)


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recorder]:
    monkeypatch.setattr(recording, "Connection", FakeConnection)
    return lambda **settings: Recorder(tmp_path / "journal", **settings)


def shown(found: list[dict[str, Any]]) -> list[str]:
    """Return rows in short: payloads of messages, kinds of gaps."""
    return [row["payload"].decode() if row["kind"] == "message" else f"<{row['kind']}>" for row in found]


def numbered(start: int, stop: int) -> list[bytes]:
    return [b"MSG key\0%d" % number for number in range(start, stop)]


def test_time_of_batches_and_of_syncs(record: Callable[..., Recorder]) -> None:
    """A message is written after `batch_time`, and visible to readers after `sync`."""
    recorder = record()
    recorder.recording.add(numbered(0, 1))
    recorder.loop.advance(0.1)
    recorder.appended(1)
    assert shown(rows(recorder.directory)) == []
    recorder.loop.advance(0.9)
    recorder.loop.until(lambda: shown(rows(recorder.directory)) == ["<start>", "0"])
    recorder.recording.add(numbered(1, 2))
    assert shown(recorder.stop()) == ["<start>", "0", "1", "<stop>"]


def test_sync_after_every_batch(record: Callable[..., Recorder]) -> None:
    """With `sync` 0, readers see each batch at once."""
    recorder = record(sync=0.0, batch_rows=2)
    recorder.recording.add(numbered(0, 2))
    recorder.loop.until(lambda: shown(rows(recorder.directory)) == ["<start>", "0", "1"])
    recorder.stop()


def test_losses_are_rows_in_their_place(record: Callable[..., Recorder]) -> None:
    """What the bus reports as dropped is a row between the messages, with the numbers of the receipt."""
    recorder = record()
    recorder.recording.add(numbered(0, 2))
    recorder.recording.add_lost(Lost(3, 300, 3, "queue-full"))
    recorder.recording.add(numbered(2, 3))
    recorder.recording.add_lost(Lost(None, None, None, "restart"))
    found = recorder.stop()
    assert shown(found) == ["<start>", "0", "1", "<lost>", "2", "<lost>", "<stop>"]
    assert [row["payload"] for row in found if row["kind"] == "lost"] == [b"3 300 3 queue-full", b"? ? ? restart"]
    assert (recorder.recording.counters.dropped, recorder.recording.counters.gaps) == (3, 4)


def test_messages_have_the_time_at_which_they_came(record: Callable[..., Recorder]) -> None:
    """The time of a row is when the message arrived, not when it was written."""
    recorder = record()
    before = time.time()
    recorder.recording.add(numbered(0, 1))
    after = time.time()
    while time.time() < after + 0.05:  # the clock must have advanced by more than its resolution
        pass
    [_, row, stop] = recorder.stop()
    assert before - 1e-6 <= row["time"].timestamp() <= after < stop["time"].timestamp()


def test_silent_bus(record: Callable[..., Recorder]) -> None:
    """A segment that is old enough is closed even if no message follows."""
    recorder = record(batch_rows=1, sync=3600.0, segment_age=0.01)
    recorder.recording.add(numbered(0, 1))
    recorder.appended(1)
    began = time.time()
    while time.time() < began + 0.02:  # the journal uses the real clock
        pass
    recorder.loop.advance(60)
    recorder.loop.until(lambda: all(segment.closed for segment in list_segments(str(recorder.directory))))
    assert shown(rows(recorder.directory)) == ["<start>", "0"]
    recorder.stop()


class Disk:
    """Wraps the functions that write, and makes them fail while `errors` has an entry."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.errors: dict[str, int] = {}
        for name in ("write", "sync"):
            monkeypatch.setattr(disk, name, self._wrapped(name, getattr(disk, name)))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if number := self.errors.get(name):
                raise OSError(number, os.strerror(number))
            return real(*args)

        return call


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_full_disk(record: Callable[..., Recorder], faulty: Disk, number: int) -> None:
    """While the disk fails, messages are kept; afterwards they are written, and a gap marks the place and the time."""
    recorder = record(batch_rows=2)
    recorder.recording.add(numbered(0, 2))
    recorder.appended(2)
    faulty.errors["write"] = number
    before = time.time_ns() // 1000
    recorder.recording.add(numbered(2, 4))
    recorder.loop.until(lambda: recorder.recording._disk_failure)
    recorder.recording.add(numbered(4, 7))
    assert recorder.recording.has_capacity()
    assert recorder.recording.oldest_waiting() > 0
    del faulty.errors["write"]
    recorder.loop.until(lambda: not recorder.recording._disk_failure)
    recorder.recording.add(numbered(7, 9))
    found = recorder.stop()
    assert shown(found) == ["<start>", *"0123456", "<full>", "7", "8", "<stop>"]
    details = json.loads(found[8]["payload"])
    assert details["reason"] == os.strerror(number)
    assert before <= details["since"] <= found[8]["time"].timestamp() * 1e6 + 1
    assert recorder.connection.stopped
    assert recorder.recording.counters.lost == 0
    assert recorder.recording.oldest_waiting() == 0


def test_failed_sync(record: Callable[..., Recorder], faulty: Disk) -> None:
    """After a failed sync no row is missing or duplicated, and a gap reports it."""
    recorder = record(sync=0.0, batch_rows=2)
    recorder.recording.add(numbered(0, 2))
    recorder.loop.until(lambda: shown(rows(recorder.directory)) == ["<start>", "0", "1"])
    faulty.errors["sync"] = errno.EIO
    recorder.recording.add(numbered(2, 4))
    recorder.loop.until(lambda: recorder.recording._disk_failure)
    faulty.errors.clear()
    recorder.loop.until(lambda: not recorder.recording._disk_failure)
    assert shown(recorder.stop()) == ["<start>", *"0123", "<full>", "<stop>"]


@pytest.mark.parametrize("is_slow", [False, True])
def test_disk_that_does_not_answer(
    record: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    """A recorder ends although a call of its thread never returns; as long as the thread gets on, it is waited for."""
    first, later = threading.Event(), threading.Event()
    real, calls = disk.sync, itertools.count()

    def sync(fd: int) -> None:
        (first if next(calls) == 0 else later).wait()
        real(fd)

    recorder = record(batch_rows=2)
    monkeypatch.setattr(disk, "sync", sync)
    recorder.recording.add(numbered(0, 2))
    recorder.loop.advance(1)
    recorder.recording.add(numbered(2, 7))
    stopped = defer.Deferred.fromCoroutine(recorder.recording.stop())
    recorder.loop.advance(10)
    if is_slow:
        later.set()
        first.set()
        recorder.appended(3)
        later.clear()
        recorder.loop.advance(10)
        assert not stopped.called
    recorder.loop.advance(10)
    assert stopped.called
    assert recorder.recording.counters.lost == 7 - recorder.recording.counters.rows
    first.set()
    later.set()
    recorder.loop.until(lambda: recorder.recording.counters.rows == 7)
    recorder.recording._thread._thread.join()


def test_disk_that_stays_full(record: Callable[..., Recorder], faulty: Disk) -> None:
    """A recorder that is stopped while the disk is full gives up in time, and counts the lost messages."""
    recorder = record(batch_rows=2)
    recorder.recording.add(numbered(0, 2))
    recorder.appended(2)
    faulty.errors["write"] = errno.ENOSPC
    recorder.recording.add(numbered(2, 7))
    recorder.loop.until(lambda: recorder.recording._disk_failure)
    stopped = defer.Deferred.fromCoroutine(recorder.recording.stop())
    assert recorder.connection.stopped == 0.0
    recorder.loop.advance(20)
    recorder.loop.until(lambda: stopped.called)
    assert stopped.result is None
    assert recorder.recording.counters.lost == 5
    del faulty.errors["write"]
    open_journal(str(recorder.directory), recorder.settings).close()
    assert shown(rows(recorder.directory)) == ["<start>", "0", "1"]


def test_disk_that_recovers_during_the_stop(record: Callable[..., Recorder], faulty: Disk) -> None:
    """If the disk recovers when the journal is about to be closed, all is written, and no other row is counted."""
    recorder = record(batch_rows=2)
    faulty.errors["write"] = errno.ENOSPC
    recorder.recording.add(numbered(0, 2))
    recorder.loop.until(lambda: recorder.recording._disk_failure)
    stopped = defer.Deferred.fromCoroutine(recorder.recording.stop())
    del faulty.errors["write"]
    recorder.loop.until(lambda: stopped.called)
    assert stopped.result is None
    assert shown(rows(recorder.directory)) == ["<start>", "0", "1", "<stop>"]
    assert (recorder.recording.counters.gaps, recorder.recording.counters.lost) == (2, 0)
    assert not recorder.loop.getDelayedCalls()


@given(st.lists(st.integers(1, 8), max_size=20), st.integers(400, 4_000))
@settings(max_examples=examples(100), deadline=None)
def test_unconfirmed_messages_are_the_newest(counts: list[int], limit: int) -> None:
    """What is kept before the confirmation is the end of what came, in bounded memory, and no loss comes before it."""
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "Connection", FakeConnection)
        recorder = Recorder(Path(directory) / "journal", batch_rows=3, batch_bytes=400, buffer_bytes=limit)
        recorder.recording.connected()
        came = 0
        for count in counts:
            recorder.recording.add([b"MSG key\0%-100d" % number for number in range(came, came + count)])
            assert recorder.recording._held_bytes <= limit
            came += count
        recorder.recording.add_lost(Lost(1, 1, 1, "queue-full"))
        recorder.recording.recording_started({"since": 0, "reason": "test"})
        found = [text.strip() for text in shown(recorder.stop())]
    assert found[:3] == ["<start>", "<reconnect>", "<lost>"]
    kept = found[3:-1]
    assert kept == [str(number) for number in range(came - len(kept), came)]
    assert recorder.recording._dropped_unconfirmed == came - len(kept)
    assert kept or came == 0 or limit < 1_000  # a batch can take a little more than 600 bytes of memory


def test_memory_is_bounded(record: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
    """At the memory limit there is no capacity until half of it is written."""
    may_write, real = threading.Event(), disk.write

    def write(*args: Any) -> None:
        assert may_write.wait(TIMEOUT)
        real(*args)

    recorder = record(batch_rows=10, batch_bytes=10_000, buffer_bytes=20_000)
    monkeypatch.setattr(disk, "write", write)
    messages = [b"MSG key\0" + bytes(100)] * 10
    batches = 0
    while recorder.recording.has_capacity():
        assert batches < 20
        recorder.recording.add(messages)
        batches += 1
    assert batches > 10
    may_write.set()
    recorder.loop.until(lambda: recorder.connection.resumed)
    assert 0 < recorder.recording.counters.rows < 10 * batches
    assert recorder.recording.has_capacity()
    assert len(recorder.stop()) == 10 * batches + 2
    assert recorder.connection.resumed == 1


def test_a_bug_is_reported(record: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug is reported, and the bus is not read any more."""

    def write(*args: Any) -> None:
        raise ZeroDivisionError

    recorder = record(batch_rows=1)
    recorder.loop.until(lambda: recorder.recording._thread._jobs.empty())
    monkeypatch.setattr(disk, "write", write)
    recorder.recording.add(numbered(0, 1))
    recorder.loop.until(lambda: recorder.failures)
    assert not recorder.recording.has_capacity()
    assert recorder.recording.counters.lost == 1


def test_gaps_between_connections(record: Callable[..., Recorder]) -> None:
    """A reconnect is a row between the messages of both connections; a lost one at the end is part of `stop`."""
    recorder = record()
    recorder.recording.add(numbered(0, 1))
    recorder.recording.recording_started({"since": 5, "reason": "the server closed the connection"})
    recorder.recording.add(numbered(1, 2))
    recorder.connection.gap = {"since": 7, "reason": "it went away"}
    found = recorder.stop()
    assert shown(found) == ["<start>", "0", "<reconnect>", "1", "<stop>"]
    assert [row["payload"] for row in found[2::2]] == [
        b'{"since": 5, "reason": "the server closed the connection"}',
        b'{"since": 7, "reason": "it went away"}',
    ]


actions = st.lists(
    st.one_of(
        st.integers(1, 5).map(lambda count: ("add", count)),
        st.sampled_from([("reconnect", 0), ("break", 0), ("heal", 0)]),
        st.sampled_from([0.05, 0.1, 1.0, 60.0]).map(lambda seconds: ("wait", seconds)),
    ),
    max_size=15,
)


@given(actions)
@example([("add", 3), ("break", 0), ("add", 4), ("wait", 0.1), ("reconnect", 0), ("heal", 0), ("add", 1)])
@settings(max_examples=examples(150), deadline=None)
def test_rows_are_complete_and_in_order(plan: list[tuple[str, Any]]) -> None:
    """For any sequence of messages, reconnects and failures of the disk: every row is there once, and in order."""
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "Connection", FakeConnection)
        faulty = Disk(patch)
        recorder = Recorder(Path(directory) / "journal", batch_rows=3)
        expected, count = ["<start>"], 0
        for action, amount in plan:
            if action == "add":
                recorder.recording.add(numbered(count, count + amount))
                expected += map(str, range(count, count + amount))
                count += amount
            elif action == "reconnect":
                recorder.recording.recording_started({"since": 5, "reason": "the server closed the connection"})
                expected.append("<reconnect>")
            elif action == "break":
                faulty.errors["write"] = errno.ENOSPC
            elif action == "heal":
                faulty.errors.clear()
            else:
                recorder.loop.advance(amount)
            recorder.loop.run_pending()
        faulty.errors.clear()
        found = shown(recorder.stop())
        assert [row for row in found if row != "<full>"] == [*expected, "<stop>"]
        assert found.count("<full>") <= sum(action == "break" for action, _ in plan)
        assert recorder.recording.counters.lost == 0
        assert recorder.recording.counters.rows == count
        assert recorder.failures == []


def test_one_recorder(tmp_path: Path, record: Callable[..., Recorder]) -> None:
    """A second recorder of a journal is refused; so is a directory that cannot be written, with the remedy."""
    recorder = record()
    with pytest.raises(JournalLocked, match=f"process {os.getpid()}"):
        open_journal(str(recorder.directory), recorder.settings)
    recorder.stop()
    open_journal(str(recorder.directory), recorder.settings).close()
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match="name another directory"):
        open_journal(str(tmp_path / "file" / "journal"), Settings())


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_to_begin(tmp_path: Path, faulty: Disk, error: int) -> None:
    """If there is no space for a journal, the remedy is to free some, not another directory."""
    faulty.errors["write"] = error
    with pytest.raises(JournalError, match=r"free space on that file system, then start again$"):
        open_journal(str(tmp_path / "journal"), Settings())


def test_a_segment_longer_than_files_may_be(tmp_path: Path) -> None:
    """If the limit was lowered while a segment was open, the remedy is to raise it; then the segment is closed."""
    directory = str(tmp_path / "journal")
    journal = open_journal(directory, Settings())
    journal.append([(b"key", bytes(10_000))])
    journal.sync()
    let_go(directory)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        with pytest.raises(JournalError, match=r"raise the limit on the length of files \(.*\), then start again$"):
            open_journal(directory, Settings())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with open_journal(directory, Settings()) as journal:
        assert journal.next_seq == 1


@pytest.mark.parametrize(
    ("settings", "left"),
    [(Settings(keep_bytes=1, force=True), ["3"]), (Settings(keep_bytes=1), None), (Settings(), None)],
    ids=["may go", "is needed", "keeps all"],
)
def test_no_space_to_go_on_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Settings, left: list[str] | None
) -> None:
    """Deleting segments that need not be kept frees the space to repair a journal; others are not deleted."""
    directory = str(tmp_path / "journal")
    journal = open_journal(directory, settings)
    for number in range(3):
        journal.append([(b"key", b"%d" % number)])
        journal.roll()
    journal.append([(b"key", b"3")])
    journal.sync()
    let_go(directory)
    segments, replace = len(list_segments(directory)), disk.replace

    def full(*args: Any) -> None:
        if len(list_segments(directory)) == segments:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(*args)

    monkeypatch.setattr(disk, "replace", full)
    if left is None:
        with pytest.raises(JournalError, match="free space on that file system, then start again"):
            open_journal(directory, settings)
        assert len(list_segments(directory)) == segments
    else:
        open_journal(directory, settings).close()
        assert shown(rows(directory)) == left


def test_old_segments_are_deleted_when_one_is_closed(tmp_path: Path) -> None:
    """Retention runs when a segment is closed, and while the disk is full."""
    settings = Settings(keep_bytes=1, force=True)
    journal = open_journal(str(tmp_path / "journal"), settings)
    keeper = RetentionTrigger(journal, settings)
    for number in range(3):
        journal.append([(b"key", b"%d" % number)])
        journal.roll()
    keeper(False)
    assert shown(rows(journal.directory)) == ["2"]
    journal.append([(b"key", b"3")])
    journal.sync()
    keeper(False)
    assert shown(rows(journal.directory)) == ["2", "3"]
    keeper(True)
    assert shown(rows(journal.directory)) == ["3"]
    journal.close()
