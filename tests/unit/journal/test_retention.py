"""Retention deletes old segments, and none that a consumer still needs."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import stat

import pytest

from sbus.errors import JournalError, UsageError
from sbus.journal import disk
from sbus.journal import verify as verifying
from sbus.journal.consumers import advance, check_consumer, consumers
from sbus.journal.index import REPAIR
from sbus.journal.layout import list_segments
from sbus.journal.reader import JournalReader, read
from sbus.journal.retention import retain
from sbus.journal.writer import JournalWriter
from tests.support.faults import Crash, FaultyDisk
from tests.support.journals import Clock, rows

DAY = 86_400_000_000


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def journal(tmp_path, clock):
    """A journal with five segments of ten rows, one a day; the newest is open."""
    journal = JournalWriter.open(tmp_path / "j", clock=clock)
    for _ in range(5):
        journal.roll()
        journal.append([(b"k", bytes(100))] * 10)
        clock.time += DAY
    journal.sync()
    yield journal
    journal.close()


def firsts(journal):
    return [segment.first_seq for segment in list_segments(journal.directory)]


def size(journal):
    return sum(
        entry.stat().st_size for entry in os.scandir(journal.directory) if entry.name[:1] in "01" and entry.is_file()
    )


class TestRetain:
    def test_days(self, journal, clock):
        """A segment is deleted when all its rows are older than the limit, not when its first row is."""
        advance(journal.directory, "archive", 50)
        # All rows of segment n are of day n; retention knows only that they are earlier than segment n + 1.
        assert retain(journal.directory, keep_days=4, clock=clock) == []
        clock.time += 1
        names = [segment.name for segment in list_segments(journal.directory)]
        assert retain(journal.directory, keep_days=4, clock=clock) == names[:1]
        assert retain(journal.directory, keep_days=2, clock=clock) == names[1:3]
        assert firsts(journal) == [30, 40]
        assert [row["seq"] for row in rows(journal.directory)] == list(range(30, 50))

    def test_bytes(self, journal):
        """The oldest segments are deleted, with all their files, until the rest is within the limit."""
        advance(journal.directory, "archive", 50)
        each = size(journal) // 5
        retain(journal.directory, keep_bytes=each * 3 + 100)
        assert firsts(journal) == [20, 30, 40]
        assert size(journal) <= each * 3 + 100
        assert retain(journal.directory, keep_bytes=size(journal)) == []
        assert len(retain(journal.directory, keep_bytes=size(journal) - 1)) == 1

    def test_newest(self, journal):
        """The newest segment is never deleted, whether it is closed or not."""
        retain(journal.directory, keep_bytes=0, force=True)
        assert firsts(journal) == [40]
        journal.close()
        retain(journal.directory, keep_bytes=0, keep_days=0, force=True)
        assert firsts(journal) == [40]
        with JournalWriter.open(journal.directory) as again:
            assert again.next_seq == 50

    def test_newest_that_is_safe(self, journal, tmp_path):
        """A segment without a sync record does not count as the newest: the one that states the last row stays."""
        journal.roll()
        journal.append([(b"k", b"unsynced")])
        retain(journal.directory, keep_bytes=0, force=True)
        assert firsts(journal) == [40, 50]
        # A power cut at this point.
        copy = shutil.copytree(journal.directory, tmp_path / "copy")
        newest = list_segments(str(copy))[-1]
        for suffix in (".arrows", ".idx"):
            os.truncate(newest.path(suffix), 0)
        with JournalWriter.open(copy) as again:
            assert again.next_seq == 50
        journal.sync()
        retain(journal.directory, keep_bytes=0, force=True)
        assert firsts(journal) == [50]

    def test_nothing_is_safe(self, journal):
        """If no segment has a sync record, none is deleted."""
        for segment in list_segments(journal.directory)[:-1]:
            os.unlink(segment.path(".idx"))
        os.truncate(list_segments(journal.directory)[-1].path(".idx"), 64)
        assert retain(journal.directory, keep_bytes=0, force=True) == []

    def test_unlimited(self, journal):
        """Without limits nothing is deleted."""
        advance(journal.directory, "archive", 50)
        assert retain(journal.directory) == []
        assert retain(journal.directory, force=True) == []

    @pytest.mark.parametrize(("taken", "left"), [(0, 0), (9, 0), (10, 10), (11, 10), (29, 20), (30, 30), (99, 40)])
    def test_taken(self, journal, taken, left):
        """A segment of which a consumer still needs a row stays."""
        advance(journal.directory, "archive", 50)
        advance(journal.directory, "other", taken)
        retain(journal.directory, keep_bytes=0, warn=lambda text: None)
        assert firsts(journal)[0] == left

    def test_warning(self, journal):
        """The warning about what keeps segments is not repeated until it changes."""
        warnings: list[str] = []
        for _ in range(2):
            assert retain(journal.directory, keep_bytes=0, warn=warnings.append) == []
        assert len(warnings) == 1
        assert "nothing is deleted, as no consumer has taken anything" in warnings[0]
        advance(journal.directory, "archive", 15)
        for _ in range(2):
            retain(journal.directory, keep_bytes=0, warn=warnings.append)
        assert len(warnings) == 2
        assert "the consumer 'archive' has not taken the oldest segment yet" in warnings[1]
        advance(journal.directory, "archive", 50)
        retain(journal.directory, keep_bytes=0, warn=warnings.append)
        assert len(warnings) == 2

    def test_unknown(self, journal):
        """If the file of a consumer is damaged, nothing is deleted, and the error names the file."""
        advance(journal.directory, "archive", 50)
        for damaged in (b"", b"{}", b'{"next": "1"}', b"\0" * 10):
            with open(f"{journal.directory}/consumers/archive.json", "wb") as file:
                file.write(damaged)
            with pytest.raises(JournalError, match=r"consumers/archive.json"):
                retain(journal.directory, keep_bytes=0)
        assert firsts(journal)[0] == 0

    def test_readers(self, journal):
        """A reader that has opened a segment reads it to the end; a later one gets an error that names retention."""
        reader = JournalReader(journal.directory)
        first, second = reader.plan(0, 20)
        reading = read(first)
        beginning = next(reading)
        retain(journal.directory, keep_bytes=0, force=True)
        assert beginning.num_rows + sum(batch.num_rows for batch in reading) == 10
        with pytest.raises(JournalError, match=f"{second.segment.name}.arrows: was deleted by retention"):
            list(read(second))
        with pytest.raises(JournalError, match=r"was deleted by retention: rows 0 to 39"):
            reader.plan(0, 50)
        assert (reader.start(), reader.end()) == (40, 50)

    @pytest.mark.parametrize(
        "ask",
        [
            lambda reader: reader.limit(0, max_bytes=10**6),
            lambda reader: reader.plan(0, 30, wanted=lambda summary: True),
            lambda reader: reader.plan(0, 30, split_bytes=1),
        ],
        ids=["limit", "wanted", "split"],
    )
    @pytest.mark.parametrize("seen", [3, 5])
    def test_deleted_while_looking(self, journal, monkeypatch, seen, ask):
        """A reader that knows a deleted segment gets an error that names retention, and then sees the other rows."""
        reader = JournalReader(journal.directory)
        answers = [reader.segments()[:seen]]
        monkeypatch.setattr(reader, "segments", lambda: answers.pop() if answers else list_segments(reader.directory))
        retain(journal.directory, keep_bytes=0, force=True)
        with pytest.raises(JournalError, match=r"was deleted by retention"):
            ask(reader)
        assert (reader.start(), reader.end()) == (40, 50)

    def test_all_deleted_while_looking(self, journal, monkeypatch):
        """The end of the journal is right even if all segments that the reader knows have been deleted."""
        reader = JournalReader(journal.directory)
        answers = [reader.segments()[:3]]
        monkeypatch.setattr(reader, "segments", lambda: answers.pop() if answers else list_segments(reader.directory))
        retain(journal.directory, keep_bytes=0, force=True)
        assert reader.end() == 50

    def test_interrupted(self, journal):
        """The next writer removes the remains of an interrupted deletion and continues."""
        oldest = list_segments(journal.directory)[0]
        journal.close()
        os.unlink(oldest.path())
        with JournalWriter.open(journal.directory) as again:
            assert again.next_seq == 50
        assert not [name for name in os.listdir(journal.directory) if name.startswith(oldest.name)]

    def test_verified_meanwhile(self, journal, monkeypatch):
        """Verification reports no problem for segments that retention deletes meanwhile."""

        def found_after(after, count=1):
            """Return problems and first rows if `count` segments are deleted after `after` batches were read."""
            copy = shutil.copytree(journal.directory, f"{journal.directory}-{after}-{count}")
            segments = list_segments(str(copy))
            looks = itertools.count()

            def delayed(part, **how):
                if next(looks) == after:
                    for suffix in (".arrows", ".idx", ".json"):
                        for segment in segments[:count]:
                            disk.remove(segment.path(suffix))
                return read(part, **how)

            monkeypatch.setattr(verifying, "read", delayed)
            problems: list[str] = []
            firsts = []
            for found in verifying.verify(copy, problems.append):
                problems += found.problems
                firsts.append(found.segment.first_seq)
            return problems, firsts

        assert found_after(0) == ([], [10, 20, 30, 40])
        assert found_after(1, 2) == ([], [0, 20, 30, 40])
        assert found_after(2, 4) == ([], [0, 10, 40])
        assert found_after(0, 5) == ([], [])

    def test_verified_without_index(self, journal):
        """An index that is missing by itself is a problem: retention does not delete it alone."""
        segment = list_segments(journal.directory)[1]
        os.unlink(segment.path(".idx"))
        problems: list[str] = []
        assert len(list(verifying.verify(journal.directory, problems.append))) == 4
        assert problems == [f"{segment.path('.idx')}: it is missing: {REPAIR}"]

    def test_not_a_journal(self, tmp_path):
        """Nothing is deleted where there is no journal."""
        with pytest.raises(JournalError, match=r"this is no journal"):
            retain(tmp_path, keep_bytes=0, force=True)


class TestConsumers:
    def test_advance(self, journal):
        """The progress of a consumer is stored, and never falls."""
        assert consumers(journal.directory) == {}
        for following in (5, 7, 6):
            advance(journal.directory, "archive", following)
        advance(journal.directory, "b.c", 1)
        assert consumers(journal.directory) == {"archive": 7, "b.c": 1}
        with open(f"{journal.directory}/consumers/archive.json") as file:
            assert json.load(file) == {"next": 7}

    def test_of_another_user(self, journal):
        """Another user's recorder can read the progress of a consumer; the mode of the journal protects both."""
        advance(journal.directory, "archive", 5)
        assert stat.S_IMODE(os.stat(journal.directory).st_mode) == 0o700
        assert stat.S_IMODE(os.stat(f"{journal.directory}/consumers").st_mode) == 0o755
        assert stat.S_IMODE(os.stat(f"{journal.directory}/consumers/archive.json").st_mode) == 0o644

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
    def test_of_root(self, journal):
        """What root writes belongs to the owner of the journal."""
        os.chown(journal.directory, 65534, 65533)
        for following in (1, 2):
            advance(journal.directory, "archive", following)
            for name in ("", "archive.json"):
                found = os.stat(f"{journal.directory}/consumers/{name}")
                assert (found.st_uid, found.st_gid) == (65534, 65533)

    def test_full_disk(self, journal):
        """On a full disk an existing number can be raised; a new file cannot be written."""
        advance(journal.directory, "archive", 199)
        faulty = FaultyDisk()
        faulty.fail_from(0, 1000, "open")
        with faulty():
            advance(journal.directory, "archive", 2000)
            with pytest.raises(OSError, match="No space left"):
                advance(journal.directory, "other", 1)
        assert consumers(journal.directory) == {"archive": 2000}
        assert os.listdir(f"{journal.directory}/consumers") == ["archive.json"]

    @pytest.mark.parametrize(("old", "new"), [(199, 200), (99, 100), (0, 10**18), (123456, 213456)])
    def test_full_disk_and_a_crash(self, journal, old, new):
        """A crash on a full disk never leaves too large a number, and the next update corrects what it left."""
        for step in itertools.count():
            shutil.rmtree(f"{journal.directory}/consumers", ignore_errors=True)
            advance(journal.directory, "archive", old)
            faulty = FaultyDisk()
            writes = itertools.count()

            def fails(_: int, name: str, writes=writes, step=step) -> None:
                if name == "open":
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if name == "pwrite" and next(writes) == step:
                    raise Crash

            faulty.fails = fails
            faulty.part = 0
            with faulty(), contextlib.suppress(Crash):
                advance(journal.directory, "archive", new)
                break
            with contextlib.suppress(JournalError):
                assert consumers(journal.directory)["archive"] <= new
            advance(journal.directory, "archive", new)
            assert consumers(journal.directory) == {"archive": new}
        assert step > 20
        assert consumers(journal.directory) == {"archive": new}

    def test_damaged(self, journal):
        """The consumer of a damaged file corrects it."""
        advance(journal.directory, "archive", 5)
        with open(f"{journal.directory}/consumers/archive.json", "w"):
            pass
        advance(journal.directory, "archive", 3)
        assert consumers(journal.directory) == {"archive": 3}

    def test_identity(self, journal):
        """A name belongs to the lake that first used it; another lake is refused before and while it reports."""
        advance(journal.directory, "archive", 5, identity="one")
        for refused in (
            lambda: check_consumer(journal.directory, "archive", "two", "/srv/two"),
            lambda: advance(journal.directory, "archive", 50, identity="two"),
        ):
            with pytest.raises(
                JournalError,
                match=r"another lake or stream \(one\).*--consumer=NAME.*journal release .* archive' if that one",
            ):
                refused()
        check_consumer(journal.directory, "archive", "one")
        check_consumer(journal.directory, "other", "two")
        advance(journal.directory, "archive", 7, identity="one")
        advance(journal.directory, "archive", 9)
        assert consumers(journal.directory) == {"archive": 9}
        with pytest.raises(JournalError, match="another lake"):
            check_consumer(journal.directory, "archive", "two")

    def test_identity_of_an_older_version(self, journal):
        """A file without an identity gets that of the first lake that reports, also if it reports no progress."""
        advance(journal.directory, "archive", 5)
        advance(journal.directory, "archive", 0, identity="one")
        assert consumers(journal.directory) == {"archive": 5}
        with pytest.raises(JournalError, match="another lake"):
            advance(journal.directory, "archive", 6, identity="two")

    def test_identity_on_a_full_disk(self, journal):
        """With an identity, too, an existing number can be raised on a full disk."""
        advance(journal.directory, "archive", 199, identity="a" * 32)
        faulty = FaultyDisk()
        faulty.fail_from(0, 1000, "open")
        with faulty():
            advance(journal.directory, "archive", 2000, identity="a" * 32)
        assert consumers(journal.directory) == {"archive": 2000}

    @pytest.mark.parametrize("name", ["", "../x", ".x", "a/b", "a b", "a" * 201])
    def test_names(self, journal, name):
        """A name that is not a plain file name is refused."""
        with pytest.raises(UsageError, match="is no name for a consumer"):
            advance(journal.directory, name, 1)
