"""Every step that a disk can refuse: no row is lost, and the refused call can be repeated."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from contextlib import suppress

import pytest

from sbus.errors import JournalError
from sbus.journal.layout import Segment
from sbus.journal.reader import JournalReader, Slice, read
from sbus.journal.schema import Kind
from sbus.journal.segment import SegmentWriter
from sbus.journal.verify import verify
from sbus.journal.writer import JournalWriter
from tests.support.disks import filled, mounted
from tests.support.faults import Crash, FaultyDisk, let_go
from tests.support.journals import Clock, messages, rows

SCRIPT = ["append", "sync", "append", "sync", "roll", "append", "append", "sync", "append"]


def play(directory, disk):
    """Run the script on a disk that fails, repeating refused calls; all synced rows survive a power cut at the end."""
    written, promised, failures = [], 0, 0

    def insist(call):
        nonlocal failures
        while True:
            try:
                return call()
            except OSError:
                failures += 1
                assert failures < 30

    journal = insist(lambda: JournalWriter.open(directory, clock=Clock(), warn=lambda text: None))
    for number, name in enumerate(SCRIPT):
        if name == "append":
            batch = [(b"key", b"%d-%d" % (number, n)) for n in range(3)]
            insist(lambda batch=batch: journal.append(batch))
            written += batch
        else:
            insist(getattr(journal, name))
            promised = len(written)
            assert JournalReader(directory).end() == promised
        assert journal.next_seq == len(written)
        assert journal.unsynced_rows <= len(written) - promised
    disk.work_again()
    let_go(directory)
    disk.cut_power(lambda count: 1)  # names and bytes that were not synced are gone
    with JournalWriter.open(directory, warn=lambda text: None):
        assert promised <= JournalReader(directory).end() <= len(written)
    found = messages(directory)
    assert found == written[: len(found)]
    problems: list[str] = []
    for verified in verify(directory, problems.append):
        problems += verified.problems
    assert problems == []
    return failures


@pytest.mark.parametrize("names", [("pwrite",), ("fdatasync", "fsync"), ()])
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_every_step(tmp_path, names, count):
    """Whichever step fails, once or three times, wholly or in part: recording continues without a loss."""
    for first in itertools.count(0, count):
        disk = FaultyDisk()
        disk.part = first * 37 % 256
        with disk():
            disk.fail_from(first, count, *names, error=errno.EIO if "fsync" in names else errno.ENOSPC)
            failures = play(tmp_path / "j", disk)
        shutil.rmtree(tmp_path / "j")
        if not failures:
            break
    assert first > 10


def test_power_cuts_that_leave_the_rows_and_not_the_name_of_the_index(tmp_path):
    """Whenever the power is cut in a new journal: the next writer continues."""
    for step in itertools.count():
        directory, disk = tmp_path / str(step), FaultyDisk()
        with disk():
            disk.crash_at(step)
            with suppress(Crash), JournalWriter.open(directory) as journal:
                journal.append([(b"k", b"1")])
                journal.sync()
            has_crashed = disk.is_dead
            disk.work_again()
            let_go(directory)
            names = iter([True, False])  # of the rows and of the index, if neither is synced
            disk.cut_power(lambda count: int(not next(names, True)) if count == 2 else 0)  # noqa: B023
            with JournalWriter.open(directory) as journal:
                assert journal.next_seq in (0, 1)
        if not has_crashed:
            break
    assert step > 10


def test_kills_while_a_torn_header_is_repaired(tmp_path):
    """A repair of a segment with only half a header may be killed at any step: the journal is never refused."""
    JournalWriter.open(tmp_path / "whole").close()

    def is_killed(step, directory):
        disk = FaultyDisk()
        with disk():
            disk.crash_at(step)
            with suppress(Crash), JournalWriter.open(directory) as journal:
                journal.append([(b"k", b"1")])
        let_go(directory)
        return disk.is_dead

    for step in itertools.count():
        torn = shutil.copytree(tmp_path / "whole", tmp_path / f"{step}")
        assert is_killed(step, torn)
        if any(path.stat().st_size for path in torn.glob("*.arrows")):
            break
    for step in itertools.count():
        directory = shutil.copytree(torn, tmp_path / f"again-{step}")
        was_killed = is_killed(step, directory)
        with JournalWriter.open(directory) as journal:
            assert journal.next_seq in (0, 1)
        if not was_killed:
            break
    assert step > 10


def test_closing_twice(tmp_path):
    """A journal that cannot be closed releases its lock, and synced rows stay."""
    disk = FaultyDisk()
    with disk():
        journal = JournalWriter.open(tmp_path)
        journal.append([(b"k", b"1")])
        journal.sync()
        disk.fail_from(0, 100)
        with pytest.raises(OSError, match="No space left"):
            journal.close()
        journal.close()
        disk.work_again()
        with JournalWriter.open(tmp_path) as again:
            assert again.ended == "crash"
            assert messages(tmp_path) == [(b"k", b"1")]


def lose(disk, journal):
    """Make a sync fail after which the kernel has dropped the last pages."""
    disk.fail_from(0, 1, "fdatasync", error=errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        journal.sync()
    (segment,) = JournalReader(journal.directory).segments()
    with open(segment.path(), "r+b") as file:
        file.seek(-500, os.SEEK_END)
        file.write(bytes(500))


def half_safe(directory, clock):
    """Return a journal with a synced row, and two batches of three rows that are not synced, a second apart."""
    journal = JournalWriter.open(directory, clock=clock)
    journal.append([(b"k", b"1")])
    journal.sync()
    for _ in range(2):
        clock.time += 1_000_000
        journal.append([(b"k", b"2")] * 3)
    return journal


def test_lost_pages(tmp_path):
    """If the kernel dropped pages that it could not write, a gap states how many rows are lost, and since when."""
    disk = FaultyDisk()
    clock = Clock()
    with disk():
        journal = half_safe(tmp_path, clock)
        clock.time += 1_000_000
        lose(disk, journal)
        journal.append([(b"k", b"3")])
        journal.sync()
        found = rows(tmp_path)
        assert [(row["seq"], row["kind"], row["payload"]) for row in found if row["kind"] == "message"] == [
            (0, "message", b"1"),
            (1, "message", b"2"),
            (2, "message", b"2"),
            (3, "message", b"2"),
            (5, "message", b"3"),
        ]
        assert found[4]["kind"] == Kind.FULL
        assert found[4]["payload"] == (
            b'{"since": 1700000001000000, "reason": "the disk has lost what was written to it", "lost": 3}'
        )
        journal.close()


def test_lost_pages_again(tmp_path):
    """If more rows are lost before the gap is written, one gap states all of them; later times are not earlier."""
    disk = FaultyDisk()
    clock = Clock()
    with disk():
        journal = half_safe(tmp_path, clock)
        came = clock.time
        clock.time += 500_000
        lose(disk, journal)
        lose(disk, journal)
        journal.append([(b"k", b"3")], came)
        journal.close()
    found = rows(tmp_path)
    assert [row["payload"] for row in found] == [
        b"1",
        b'{"since": 1700000000000000, "reason": "the disk has lost what was written to it", "lost": 6}',
        b"3",
    ]
    assert [row["time"] for row in found] == sorted(row["time"] for row in found)
    assert [verified.problems for verified in verify(tmp_path, pytest.fail)] == [[], []]


def test_full_file_system(tmp_path):
    """On a full file system each append is done wholly or refused; recording continues when there is space."""
    appended = []
    refused = []

    def append(journal, n):
        batch = [(b"k", b"%d" % n * 1000)] * 3
        try:
            journal.append(batch)
        except OSError as e:
            refused.append(e.errno)
        else:
            appended.extend(batch)

    with mounted(tmp_path / "disk", "64k") as disk:
        journal = JournalWriter.open(disk / "j", warn=lambda text: None)
        append(journal, 0)
        with filled(disk):
            for n in range(1, 20):
                append(journal, n)
        for n in range(20, 25):
            append(journal, n)
        journal.close()
        assert len(refused) > 5
        assert set(refused) == {errno.ENOSPC}
        assert messages(disk / "j") == appended
        assert len(appended) >= 15


def test_remains_of_a_refused_batch(tmp_path):
    """The remains of a refused batch that could not be cut off do no harm to later batches."""
    disk = FaultyDisk()
    with disk():
        journal = JournalWriter.open(tmp_path)
        journal.append([(b"k", b"1")])
        disk.part = 255
        disk.fail_from(1, 100, "pwrite", "ftruncate")
        with pytest.raises(OSError, match="No space left"):
            journal.append([(b"k", bytes(5000))])
        disk.work_again()
        journal.append([(b"k", b"2")])
        journal.close()
    assert messages(tmp_path) == [(b"k", b"1"), (b"k", b"2")]
    assert [found.problems for found in verify(tmp_path, pytest.fail)] == [[], []]


@pytest.mark.parametrize(
    ("suffix", "at", "lost"), [(".arrows", 2600, {2, 3}), (".arrows", -1, {4, 5}), (".idx", 70, {0, 1, 2, 3, 4, 5})]
)
def test_damage_to_what_was_safe(tmp_path, suffix, at, lost):
    """A damaged synced row is not cut off: no number is used twice, and the rows around it can be read."""
    journal = JournalWriter.open(tmp_path)
    for n in range(3):
        journal.append([(b"k", b"%d" % n)] * 2)
    journal.sync()
    (segment,) = JournalReader(tmp_path).segments()
    let_go(tmp_path)
    with open(segment.path(suffix), "r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes((byte ^ 1,)))
    reports: list[str] = []
    with JournalWriter.open(tmp_path, warn=reports.append) as again:
        assert again.next_seq == 6
        again.append([(b"k", b"new")])
    readable: set[int] = set()
    for seq in range(7):
        try:
            readable.update(row["seq"] for row in rows(tmp_path, seq, seq + 1))
        except JournalError:
            pass
    assert readable == set(range(7)) - lost
    assert any(found.problems for found in verify(tmp_path, reports.append))


def flip(path):
    with open(path, "r+b") as file:
        file.seek(-30, os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes((byte ^ 1,)))


@pytest.mark.parametrize(
    ("harm", "is_read"),
    [
        (flip, False),
        (lambda path: os.truncate(path, os.path.getsize(path) - 1), False),
        (lambda path: os.truncate(path, os.path.getsize(path) - 64), False),
        (
            lambda path: os.truncate(path, os.path.getsize(path) - 128),
            True,
        ),  # now an earlier sync record is the last one
        (lambda path: os.truncate(path, 0), False),
    ],
    ids=["byte", "cut", "record", "sync", "all"],
)
def test_damage_to_the_end_of_an_index(tmp_path, harm, is_read):
    """A journal whose newest segment no longer states its last row is refused: no number is used twice."""
    with JournalWriter.open(tmp_path) as journal:
        for n in range(3):
            journal.append([(b"k", b"%d" % n)] * 2)
            journal.sync()
    (segment,) = JournalReader(tmp_path).segments()
    harm(segment.path(".idx"))
    with pytest.raises(JournalError, match=r"\.idx: .*restore it from a copy"):
        JournalWriter.open(tmp_path)
    if not is_read:
        with pytest.raises(JournalError, match=r"\.idx: .*restore it from a copy"):
            list(read(Slice(segment, journal.id, 0, 6)))
    assert any(found.problems for found in verify(tmp_path, pytest.fail))


def test_nothing_but_a_segment_without_rows(tmp_path):
    """Numbering continues where a segment without rows begins, even if all segments before it are gone."""
    clock = Clock()
    journal = JournalWriter.open(tmp_path, clock=clock)
    journal.append([(b"k", b"1")] * 5)
    journal.roll()
    (oldest,) = JournalReader(tmp_path).segments()
    clock.time += 1_000_000
    journal.append([(b"k", b"2")])
    newest = JournalReader(tmp_path).segments()[-1]
    let_go(tmp_path)
    os.truncate(newest.path(), 0)
    for suffix in (".arrows", ".idx", ".json"):
        os.unlink(oldest.path(suffix))
    clock.time -= 10_000_000
    with JournalWriter.open(tmp_path, clock=clock, warn=lambda text: None) as again:
        assert (again.next_seq, again.ended) == (5, "crash")
        again.append([(b"k", b"3")])
    (found,) = rows(tmp_path)
    assert found["seq"] == 5
    assert JournalReader(tmp_path).segments()[0].first_time >= newest.first_time


def test_a_segment_without_rows_that_is_left_is_no_problem(tmp_path):
    """A segment without rows that cannot be removed is no problem: the next writer removes it."""
    clock, disk = Clock(), FaultyDisk()
    with JournalWriter.open(tmp_path, clock=clock) as journal:
        empty = Segment(journal.directory, 0, clock.time, closed=False)
        SegmentWriter.create(empty, journal.id, 0o600).close_files()
    clock.time += 1_000_000
    with disk():
        disk.fail_from(0, 100, "unlink")
        with JournalWriter.open(tmp_path, clock=clock) as journal:
            journal.append([(b"key", b"1")])
            journal.sync()
            disk.work_again()
            assert len(JournalReader(tmp_path).segments()) == 2
            assert [found.problems for found in verify(tmp_path, pytest.fail)] == [[], []]
    JournalWriter.open(tmp_path).close()
    assert messages(tmp_path) == [(b"key", b"1")]
    assert len(JournalReader(tmp_path).segments()) == 1


def test_a_segment_without_rows_that_cannot_be_removed(tmp_path):
    """The remains of a segment that had only begun do not keep the next writer from continuing."""
    with JournalWriter.open(tmp_path) as journal:
        journal.append([(b"key", b"1")])
    disk = FaultyDisk()
    for step in itertools.count():
        journal = JournalWriter.open(tmp_path)
        with disk():
            disk.crash_at(step)
            try:
                journal.append([(b"key", b"2")])
            except Crash:
                pass
            disk.work_again()
        let_go(tmp_path)
        if journal.next_seq == 2:
            break
        with disk():
            disk.fail_from(0, 100, "unlink")
            with suppress(OSError):  # a part of it may be left, which is an error
                JournalWriter.open(tmp_path).close()
            disk.work_again()
    assert step > 3
    with JournalWriter.open(tmp_path) as journal:
        journal.append([(b"key", b"3")])
    assert messages(tmp_path) == [(b"key", b"1"), (b"key", b"2"), (b"key", b"3")]


def test_a_crash_while_a_failed_close_is_repeated(tmp_path):
    """If a close fails at any step, and a crash ends its repetition at any step, the segment is whole."""
    for failed, crashed in itertools.product(range(12), range(8)):
        directory = tmp_path / f"{failed}-{crashed}"
        disk = FaultyDisk()
        with disk():
            journal = JournalWriter.open(directory)
            journal.append([(b"key", b"1")])
            journal.sync()
            disk.fail_from(failed, 1, error=errno.EIO)
            with suppress(OSError):
                journal.roll()
            disk.crash_at(crashed)
            with suppress(Crash):
                journal.append([(b"key", b"2")])
            disk.work_again()
            let_go(directory)
            JournalWriter.open(directory).close()
        assert messages(directory)[0] == (b"key", b"1")
        assert {problem for found in verify(directory, pytest.fail) for problem in found.problems} == set()
