"""A recording without a bus: each row is in its place, whatever fails."""

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
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from twisted.internet import defer

from sbus.client.losses import Lost
from sbus.errors import JournalError, JournalLocked
from sbus.journal import disk
from sbus.journal.layout import list_segments
from sbus.recorder import pipeline as recording
from sbus.recorder.retention import RetentionTrigger
from sbus.recorder.service import open_journal
from sbus.recorder.settings import Settings
from tests.support.examples import examples
from tests.support.faults import let_go
from tests.support.journals import rows
from tests.unit.recorder.parts import TIMEOUT, Disk, FakeConnection, Recorder, numbered


def shown(found: list[dict[str, Any]]) -> list[str]:
    """Return rows in short: payloads of messages, kinds of gaps."""
    return [row["payload"].decode() if row["kind"] == "message" else f"<{row['kind']}>" for row in found]


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
