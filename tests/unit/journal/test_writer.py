"""Writer and reader of a journal while nothing fails."""

from __future__ import annotations

import json
import os
import pickle
import resource
import stat
import struct
import time
import zlib
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from sbus.errors import JournalError, JournalLocked
from sbus.journal.consumers import advance, release
from sbus.journal.layout import list_segments
from sbus.journal.reader import JournalReader, Slice, find_journals, read
from sbus.journal.repair import repair
from sbus.journal.schema import FORMAT, FORMATS, Kind
from sbus.journal.summary import read_summary
from sbus.journal.verify import problems_of, verify
from sbus.journal.writer import JournalWriter
from tests.support.journals import Clock, damage, messages, rows

SOME = [(b"a/b", b"1"), (b"a/c", b"2"), (b"\xff", b"\0\1")]


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def journal(tmp_path, clock):
    with_clock = JournalWriter.open(tmp_path / "j", clock=clock)
    yield with_clock
    with_clock.close()


class TestWriting:
    def test_rows(self, journal, clock):
        """Appended rows are read unchanged, each with its number, time and kind."""
        journal.append_gap(Kind.START, {"patterns": ["a/"]})
        clock.time += 1_500_000
        journal.append(SOME)
        journal.sync()
        found = rows(journal.directory)
        assert [row["seq"] for row in found] == [0, 1, 2, 3]
        assert [row["kind"] for row in found] == ["start", "message", "message", "message"]
        assert {row["journal"] for row in found} == {journal.id}
        assert (found[0]["key"], json.loads(found[0]["payload"])) == (b"", {"patterns": ["a/"]})
        assert [(row["key"], row["payload"]) for row in found[1:]] == SOME
        started = datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
        assert [(row["time"] - started).total_seconds() for row in found] == [0, 1.5, 1.5, 1.5]

    def test_unsynced(self, journal):
        """Readers see no row before it is synced."""
        journal.append(SOME)
        reader = JournalReader(journal.directory)
        assert (reader.end(), journal.next_seq, journal.unsynced_rows) == (0, 3, 3)
        journal.sync()
        assert (reader.end(), journal.unsynced_rows) == (3, 0)

    def test_nothing(self, journal):
        """Appending no messages creates no segment, and there is nothing to sync or close."""
        journal.append([])
        journal.sync()
        journal.roll()
        reader = JournalReader(journal.directory)
        assert (reader.segments(), reader.start(), reader.end(), reader.plan(0, 0)) == ([], 0, 0, [])

    def test_times(self, journal, clock):
        """Each message may have its own time; a time that goes back is raised."""
        journal.append(SOME, [clock.time + 5, clock.time + 3, clock.time + 8])
        journal.append(SOME, clock.time)
        journal.sync()
        times = [row["time"].microsecond for row in rows(journal.directory)]
        assert times == [5, 5, 8, 8, 8, 8]

    def test_clock(self, tmp_path, clock):
        """A clock that goes back by more than a second causes one warning; times stand still until it catches up."""
        warnings: list[str] = []
        journal = JournalWriter.open(tmp_path, clock=clock, warn=warnings.append)
        for step in (0, -999_999, -60_000_000, -50_000_000, 1):
            clock.time = 1_700_000_000_000_000 + step
            journal.append(SOME[:1])
        journal.close()
        assert warnings == ["the clock went back by 60 s: until it has caught up, rows get the time of the row before"]
        assert [row["time"].microsecond for row in rows(tmp_path)] == [0, 0, 0, 0, 1]

    def test_clock_was_ahead(self, tmp_path, clock, monkeypatch):
        """A segment that was begun before the clock was set back is closed by the time that has really passed."""
        passed = 0.0
        clock.time += 50_000_000
        monkeypatch.setattr("sbus.journal.writer.monotonic", lambda: passed)
        journal = JournalWriter.open(tmp_path, clock=clock, segment_seconds=10, warn=lambda text: None)
        journal.append([(b"k", b"")])
        clock.time -= 50_000_000
        passed = 9.9
        journal.append([(b"k", b"")])
        journal.sync()
        assert journal.segments_closed == 0
        passed = 10.0
        journal.sync()
        assert journal.segments_closed == 1
        journal.append([(b"k", b"")])
        passed = 20.0
        journal.append([(b"k", b"")])
        assert journal.segments_closed == 2
        journal.close()

    def test_segments(self, tmp_path, clock):
        """Segments are closed by size, by age (also without new rows), and on demand."""
        journal = JournalWriter.open(tmp_path, clock=clock, segment_bytes=5000, segment_seconds=10)
        reader = JournalReader(tmp_path)
        for _ in range(2):
            journal.append([(b"k", bytes(3000))])
        assert len(reader.segments()) == 2
        clock.time += 10_000_000
        journal.append(SOME)
        assert len(reader.segments()) == 3
        clock.time += 9_999_999
        journal.sync()
        assert [segment.closed for segment in reader.segments()] == [True, True, False]
        clock.time += 1
        journal.sync()
        assert [segment.closed for segment in reader.segments()] == [True, True, True]
        journal.append(SOME)
        journal.roll()
        assert [(segment.first_seq, segment.closed) for segment in reader.segments()] == [
            (0, True),
            (1, True),
            (2, True),
            (5, True),
        ]
        assert len(rows(tmp_path)) == 8
        journal.close()

    def test_summary(self, journal, clock):
        """The summary of a closed segment has its rows, times, kinds and keys."""
        journal.append_gap(Kind.START, {})
        clock.time += 7
        journal.append([*SOME, (b"a\\", b"")])
        journal.close()
        (segment,) = JournalReader(journal.directory).segments()
        with open(segment.path(".json")) as file:
            summary = json.load(file)
        assert summary == {
            "first_seq": 0,
            "last_seq": 4,
            "rows": 5,
            "min_time": clock.time - 7,
            "max_time": clock.time,
            "bytes": os.path.getsize(segment.path()),
            "kinds": {"start": 1, "message": 4},
            "keys": ["a/b", "a/c", r"a\x5c", r"\xff"],
            "min_key": "a/b",
            "max_key": r"\xff",
        }

    def test_long_keys(self, journal):
        """A summary lists no keys of more than 1 MiB in all; one that does, by an earlier release, is no damage."""
        keys = [b"%d" % number + b"x" * 400_000 for number in range(3)]
        journal.append([(key, b"") for key in keys])
        journal.close()
        (segment,) = JournalReader(journal.directory).segments()
        summary = read_summary(segment)
        assert (summary.keys, summary.min_key, summary.max_key) == (None, keys[0], keys[2])
        with open(segment.path(".json"), "wb") as file:
            file.write(summary._replace(keys=keys).pack())
        assert problems_of(segment, journal.id) == []

    def test_ended(self, tmp_path):
        """An opened journal states whether the last recording was new, stopped, or ended by a crash."""
        for how, ended in (([Kind.START], "new"), ([Kind.START, Kind.STOP], "crash"), ([Kind.START], "stop")):
            journal = JournalWriter.open(tmp_path)
            assert journal.ended == ended
            for kind in how:
                journal.append_gap(kind, {})
            journal.close()
        assert [row["seq"] for row in rows(tmp_path)] == [0, 1, 2, 3]

    @pytest.mark.parametrize("umask", [0, 0o077])
    def test_modes(self, tmp_path, umask):
        """Other users may not read a journal unless the modes permit it, whatever the umask is."""
        before = os.umask(umask)
        try:
            for name, of_directory, of_file in (("a", 0o700, 0o600), ("b", 0o750, 0o640)):
                journal = (
                    JournalWriter.open(tmp_path / name)
                    if name == "a"
                    else JournalWriter.open(tmp_path / name, directory_mode=of_directory, file_mode=of_file)
                )
                journal.append(SOME)
                journal.close()
        finally:
            os.umask(before)
        for name, of_directory, of_file in (("a", 0o700, 0o600), ("b", 0o750, 0o640)):
            assert stat.S_IMODE(os.stat(tmp_path / name).st_mode) == of_directory
            found = {stat.S_IMODE(entry.stat().st_mode) for entry in os.scandir(tmp_path / name)}
            assert found == {of_file}

    def test_locked(self, journal):
        """A second writer is refused with the ID of the process that writes; a closed journal has no writer."""
        with pytest.raises(JournalLocked, match=f"process {os.getpid()} writes this journal"):
            JournalWriter.open(journal.directory)
        journal.close()
        JournalWriter.open(journal.directory).close()


class TestReading:
    def test_any_arrow(self, journal):
        """A closed segment is a stream that Arrow reads without the code of the journal."""
        journal.append(SOME)
        journal.append_gap(Kind.STOP, {})
        journal.close()
        (segment,) = JournalReader(journal.directory).segments()
        with pa.memory_map(segment.path()) as file:
            table = pa.ipc.open_stream(file).read_all()
        assert table.schema.equals(FORMATS[FORMAT].schema(journal.id), check_metadata=True)
        names = table.schema.names[:-1]  # not the publisher, which is a single column there
        assert table.select(names).to_pylist() == [
            {name: row[name] for name in names} for row in rows(journal.directory)
        ]

    def test_by_the_book(self, journal, clock):
        """An open segment can be read and checked by the documentation alone."""
        journal.append_gap(Kind.START, {})
        journal.append(SOME)
        journal.sync()
        clock.time += 1
        journal.append(SOME)
        (segment,) = JournalReader(journal.directory).segments()
        with open(segment.path(".idx"), "rb") as index, open(segment.path(), "rb") as arrows:
            data, stream = index.read(), arrows.read()
        records = []
        for at in range(0, len(data), 64):
            assert zlib.crc32(data[at : at + 60]) == int.from_bytes(data[at + 60 : at + 64], "little")
            records.append(struct.unpack_from("<4sIQQQIIqqI", data, at))
        assert [(type_, kind, seq, count) for type_, kind, _, _, seq, count, *_ in records] == [
            (b"head", 0, 0, 0),
            (b"rows", 1, 0, 1),
            (b"rows", 0, 1, 3),
            (b"sync", 0, 4, 0),
            (b"rows", 0, 4, 3),
        ]
        assert [record[7:9] for record in records] == [(clock.time - 1,) * 2] * 4 + [(clock.time,) * 2]
        header = stream[: records[0][3]]
        for type_, _, start, end, seq, count, crc, *_ in records:
            if type_ != b"sync":
                assert zlib.crc32(stream[start:end]) == crc
            if type_ == b"rows":
                table = pa.ipc.open_stream(header + stream[start:end]).read_all()
                assert table.column("seq").to_pylist() == list(range(seq, seq + count))

    def test_ranges(self, journal):
        """Any range of rows is read exactly, whether it begins inside a batch or ends in another segment."""
        for _ in range(2):
            for _ in range(3):
                journal.append(SOME)
            journal.roll()
        for start in range(18):
            for end in range(start, 19):
                assert [row["seq"] for row in rows(journal.directory, start, end)] == list(range(start, end))

    def test_slices(self, journal):
        """A slice can be pickled, and is read with the requested columns in the requested order."""
        journal.append(SOME)
        journal.sync()
        (part,) = JournalReader(journal.directory).plan(1, 3)
        (batch,) = read(pickle.loads(pickle.dumps(part)), ["payload", "seq"])
        assert batch.to_pydict() == {"payload": [b"2", b"\0\1"], "seq": [1, 2]}

    def test_split(self, journal):
        """Segments are split into slices of whole batches and about the requested size, without leaving rows out."""
        for _ in range(10):
            journal.append([(b"k", bytes(1000))] * 3)
        journal.sync()
        slices = JournalReader(journal.directory).plan(1, 29, split_bytes=7000)
        assert [(part.start_seq, part.end_seq) for part in slices] == [(1, 6), (6, 12), (12, 18), (18, 24), (24, 29)]

    def test_skips(self, journal, clock):
        """Segments and batches without any of the requested times, kinds or keys are skipped."""
        for n in range(4):
            clock.time += 1_000_000
            journal.append_gap(Kind.START, {})
            journal.append([(b"%d" % n, b"")])
            if n % 2:
                journal.roll()
        begin = 1_700_000_000_000_000
        found = rows(journal.directory, min_time=begin + 2_000_000, max_time=begin + 3_000_000)
        assert [row["seq"] for row in found] == [2, 3, 4, 5]
        assert [row["seq"] for row in rows(journal.directory, kinds={"start"})] == [0, 2, 4, 6]
        found = rows(journal.directory, wanted=lambda summary: summary.keys is None or b"3" in summary.keys)
        assert [row["seq"] for row in found] == [4, 5, 6, 7]

    def test_seq_at_time(self, journal, clock):
        """The first row at or after a time is found, within batches and across segments."""
        begin = clock.time
        for n in range(4):
            journal.append(SOME, [begin + 10 * n, begin + 10 * n + 1, begin + 10 * n + 9])
            if n % 2:
                journal.roll()
        reader = JournalReader(journal.directory)
        times = {0: 0, 1: 1, 2: 2, 9: 2, 10: 3, 12: 5, 20: 6, 29: 8, 30: 9, 39: 11, 40: 12, -5: 0}
        assert {time: reader.seq_at_time(begin + time) for time in times} == times

    def test_limit(self, journal):
        """A read is limited to rows exactly, to bytes by whole batches, and always has one row at least."""
        for n in range(6):
            journal.append([(b"k", bytes(1000))] * 2)
            if n == 2:
                journal.roll()
        journal.sync()
        reader = JournalReader(journal.directory)
        assert [reader.limit(n) for n in (0, 12)] == [12, 12]
        assert [reader.limit(3, max_rows=n) for n in (0, 1, 4, 100)] == [4, 4, 7, 12]
        size = [2 * n for n in (1, 1, 1, 2, 5, 6)]
        assert [reader.limit(0, max_bytes=n) for n in (0, 1, 4000, 5500, 13500, 10**6)] == [2, 2, 2, 4, 10, 12], size
        assert reader.limit(1, max_bytes=1) == 2
        assert reader.limit(0, max_rows=3, max_bytes=5500) == 3

    def test_new_segments(self, journal, monkeypatch):
        """The directory is listed again only after it has changed."""
        listed = []

        def noting(path):
            listed.append(path)
            return list_segments(path)

        monkeypatch.setattr("sbus.journal.reader.list_segments", noting)
        now = time.time()
        reader = JournalReader(journal.directory)
        for count in range(1, 4):
            journal.append(SOME)
            journal.roll()
            os.utime(journal.directory, (now + 60, now + 60))  # it counts as just changed, however slow this test is
            for _ in range(2):
                assert len(reader.segments()) == count
        assert len(listed) == 6
        os.utime(journal.directory, (0, 1_600_000_000))
        for _ in range(5):
            assert len(reader.segments()) == 3
        assert len(listed) == 7
        journal.append(SOME)
        assert len(reader.segments()) == 4

    def test_not_there(self, journal):
        """A plan of rows that readers may not see yet is refused."""
        journal.append(SOME)
        with pytest.raises(JournalError, match="row 2 is not there yet: the last one is -1"):
            JournalReader(journal.directory).plan(0, 3)

    def test_damage(self, journal):
        """Damaged rows are never returned; the error names the segment and the rows."""
        journal.append(SOME)
        journal.append(SOME)
        journal.sync()
        reader = JournalReader(journal.directory)
        (segment,) = reader.segments()
        with open(segment.path(), "r+b") as file:
            file.seek(-30, os.SEEK_END)
            file.write(b"\xaa")
        assert len(rows(journal.directory, 0, 3)) == 3
        with pytest.raises(JournalError, match=rf"{segment.name}.arrows: the bytes .* are damaged \(3 rows from 3\)"):
            rows(journal.directory)

    def test_another_journal(self, journal, tmp_path):
        """A segment of another journal is refused."""
        journal.append(SOME)
        journal.close()
        (segment,) = JournalReader(journal.directory).segments()
        with pytest.raises(JournalError, match="a segment of another schema or journal"):
            list(read(Slice(segment, "0" * 32, 0, 3)))

    def test_find(self, tmp_path):
        """Journals are found by paths and globs; the error names a path that is no journal."""
        for name in ("a", "b"):
            JournalWriter.open(tmp_path / name).close()
        (tmp_path / "c").mkdir()
        assert find_journals([f"{tmp_path}/*", f"{tmp_path}/b"]) == [f"{tmp_path}/a", f"{tmp_path}/b"]
        with pytest.raises(JournalError, match=r"/c: this is no journal \(it has no journal.json\)"):
            find_journals([f"{tmp_path}/c"])
        with pytest.raises(JournalError, match=r"/x\*: no journal is found there"):
            find_journals([f"{tmp_path}/x*"])

    def test_another_format(self, journal):
        """A journal of a newer format is refused, with the remedy."""
        journal.close()
        with open(f"{journal.directory}/journal.json", "w") as file:
            file.write(f'{{"format": {FORMAT + 1}}}')
        with pytest.raises(
            JournalError,
            match=f"written in format {FORMAT + 1}, but this version of sbus reads formats up to {FORMAT}: install",
        ):
            messages(journal.directory)


class TestLinks:
    """The owner of a journal cannot make root write elsewhere."""

    @pytest.mark.parametrize("name", ["lock", "0000000000000001-1790000000000000.arrows"])
    def test_links(self, new_journal, tmp_path, name):
        """What a link leads to is not written: neither a lock, nor a segment."""
        precious = tmp_path / "precious"
        precious.write_bytes(b"of somebody else")
        journal = new_journal()
        journal.append(SOME[:1])
        journal.close()
        path = tmp_path / "journal" / name
        path.unlink(missing_ok=True)
        path.symlink_to(precious)
        with pytest.raises(JournalError, match="it is a symbolic link, which is not followed"):
            JournalWriter.open(tmp_path / "journal")
        assert precious.read_bytes() == b"of somebody else"

    @pytest.mark.parametrize(
        ("name", "do"),
        [
            ("consumers", lambda directory: advance(directory, "archive", 2)),
            ("consumers", lambda directory: release(directory, "archive")),
            ("damaged", lambda directory: list(repair(directory))),
        ],
    )
    def test_links_to_directories(self, new_journal, tmp_path, name, do):
        """Progress, and what was damaged, is not written elsewhere, and no consumer is forgotten there."""
        precious = tmp_path / "precious"
        precious.mkdir()
        (precious / "archive.json").write_text('{"next": 1}')
        journal = new_journal()
        journal.append(SOME)
        journal.append(SOME)
        journal.close()
        damage(journal.directory)
        (tmp_path / "journal" / name).symlink_to(precious)
        with pytest.raises(NotADirectoryError, match="a link to one, which is not followed"):
            do(journal.directory)
        assert [path.read_text() for path in precious.iterdir()] == ['{"next": 1}']


@pytest.mark.parametrize("spare", [0, 7, 8, 9, 500])
def test_files_that_may_not_grow(tmp_path, spare):
    """At a limit to the size of files (RLIMIT_FSIZE), a segment is closed, and recording continues in the next one."""
    with JournalWriter.open(tmp_path / "long") as journal:
        for _ in range(3):
            journal.append(SOME)
        journal.sync()
        (segment,) = list_segments(journal.directory)
        longest = os.path.getsize(segment.path())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (longest + spare, before[1]))
    try:
        with JournalWriter.open(tmp_path / "journal") as journal:
            for _ in range(10):
                journal.append(SOME)
            journal.sync()
            with pytest.raises(OSError, match="File too large: raise the limit"):
                journal.append([(b"k", bytes(longest))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    found = list(verify(tmp_path / "journal", print))
    assert [each.problems for each in found] == [[]] * (4 if spare >= 8 else 5)
    assert messages(tmp_path / "journal") == SOME * 10


def test_a_segment_that_is_longer_than_files_may_be(tmp_path):
    """If the limit is lowered below the segment's length, each refusal names the remedy, and nothing is lost."""
    with JournalWriter.open(tmp_path / "journal") as journal:
        journal.append([(b"k", bytes(10_000))])
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
        try:
            for call in (lambda: journal.append(SOME), journal.roll, journal.sync):
                with pytest.raises(OSError, match="File too large: raise the limit"):
                    call()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        journal.append(SOME)
    assert messages(tmp_path / "journal") == [(b"k", bytes(10_000)), *SOME]
    assert [each.problems for each in verify(tmp_path / "journal", print)] == [[], []]


class TestCopies:
    """A journal that ends before a row that somebody has read is an older copy."""

    def test_older(self, journal):
        """The rows that readers see decide, unless a writer may still find more."""
        journal.append(SOME)
        journal.sync()
        reader = JournalReader(journal.directory)
        assert [reader.is_older_than(seq) for seq in (3, 4)] == [False, True]
        (segment,) = reader.segments()
        index = segment.path(".idx")
        os.truncate(index, os.path.getsize(index) - 64)  # a power cut has taken back the last sync record
        assert [reader.end(), reader.is_older_than(3)] == [0, False]
