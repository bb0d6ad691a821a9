"""Damaged journals that a writer continues or a repair mends: each number occurs once, and losses are named."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner

from sbus.cli.main import cli
from sbus.errors import JournalError
from sbus.journal.index import RECORD_SIZE
from sbus.journal.layout import list_segments
from sbus.journal.lock import locked
from sbus.journal.reader import JournalReader
from sbus.journal.repair import repair
from sbus.journal.schema import FORMATS
from sbus.journal.verify import verify
from sbus.journal.writer import JournalWriter
from tests.support.disks import filled, mounted
from tests.support.faults import Crash, FaultyDisk
from tests.support.journals import Clock
from tests.unit.journal.damages import ROWS, all_rows, covered, damage_batch, messages_of, overwrite


def lose_all_but_rows(directory: Path, number: int, size: int) -> None:
    """Remove the index and the summary of a segment, and overwrite bytes at the beginning of its rows."""
    segment = list_segments(str(directory))[number]
    for suffix in (".idx", ".json"):
        os.unlink(segment.path(suffix))
    overwrite(segment.path(), 0, b"\xa5" * min(size, os.path.getsize(segment.path())))


def tear(path: str) -> None:
    """Leave half the first record of an index."""
    os.truncate(path, RECORD_SIZE // 2)


def spoil(path: str) -> None:
    """Leave a damaged record of the header, and that of the first batch."""
    os.truncate(path, 2 * RECORD_SIZE)
    overwrite(path, 0, b"damaged")


def empty(path: str) -> None:
    os.truncate(path, 0)


def zero(path: str) -> None:
    """Overwrite a file with zeros, and keep its length."""
    size = os.path.getsize(path)
    os.truncate(path, 0)
    os.truncate(path, size)


@pytest.mark.parametrize("lose", [os.unlink, empty, zero, tear, spoil])
@pytest.mark.parametrize("number", [0, 1])
def test_a_writer_leaves_a_segment_without_index(journal: Path, number: int, lose: Callable[[str], None]) -> None:
    """A segment that has lost its index and summary does not count as never synced, and keeps all its rows."""
    segments = list_segments(str(journal))
    os.unlink(segments[number].path(".json"))
    lose(segments[number].path(".idx"))
    reports: list[str] = []
    if number == 1:
        with pytest.raises(JournalError, match=r"\.idx: it no longer states .*run 'sbus journal repair'"):
            JournalWriter.open(journal, clock=Clock())
        with locked(journal):
            assert [found.lost for found in repair(journal)] == [[]]
    with JournalWriter.open(journal, clock=Clock(), warn=reports.append) as writer:
        assert writer.next_seq == ROWS
        missing = f"{segments[0].path('.idx')}: it is missing, or its first record is: "
        assert [report[: len(missing)] for report in reports] == [missing] * (number == 0)
        writer.append([(b"new", b"")])
    if number == 0:
        problems: list[str] = []
        problems += [problem for found in verify(journal, problems.append) for problem in found.problems]
        assert ["run 'sbus journal repair'" in problem for problem in problems] == [True]  # the recorder cannot mend it
        with locked(journal):
            assert [found.lost for found in repair(journal)] == [[]]
    rows = all_rows(journal, skip_damaged=False)
    assert messages_of([row for row in rows if row["key"] != b"new"]) == set(range(ROWS))
    assert [row["seq"] for row in rows] == list(range(ROWS + 1))


@pytest.mark.parametrize("removed", [(".arrows",), (".arrows", ".json")])
@pytest.mark.parametrize("numbers", [[1], [0, 1]])
def test_a_writer_without_the_newest_rows(journal: Path, removed: tuple[str, ...], numbers: list[int]) -> None:
    """The number of a row that is gone is not used again: the index of its segment states the last one."""
    segments = list_segments(str(journal))
    for number in numbers:
        for suffix in removed:
            os.unlink(segments[number].path(suffix))
    reports: list[str] = []
    for count in range(3):
        with JournalWriter.open(journal, clock=Clock(), warn=reports.append) as writer:
            assert writer.next_seq == ROWS + max(0, count - 1)
            if count:
                writer.append([(b"new", b"")])
    missing = f"{segments[1].path()}: it is missing: "
    assert [report[: len(missing)] for report in reports] == [missing] * 2
    with locked(journal):
        list(repair(journal))
    rows = all_rows(journal, skip_damaged=False)
    assert [row["seq"] for row in rows if row["key"] == b"new"] == [ROWS, ROWS + 1]
    assert covered(rows) == list(range(rows[0]["seq"], ROWS + 2))


def test_a_writer_with_a_summary_alone(journal: Path) -> None:
    """A segment of which nothing but the summary is left is not taken for the remains of a deletion."""
    segment = list_segments(str(journal))[1]
    for suffix in (".arrows", ".idx"):
        os.unlink(segment.path(suffix))
    with pytest.raises(JournalError, match=r"\.idx: it no longer states .*record into another directory"):
        JournalWriter.open(journal, clock=Clock(), warn=lambda text: None)


@pytest.mark.parametrize("records", [0, 3, 10])
def test_the_end_of_a_closed_index_is_lost(journal: Path, records: int) -> None:
    """No reader takes fewer rows for all of them: a closed segment states its last row, and a repair finds it."""
    (*_, segment) = list_segments(str(journal))
    os.truncate(segment.path(".idx"), records * RECORD_SIZE)
    with pytest.raises(JournalError, match=r"\.idx: it does not end like the index of a closed segment.* repair"):
        JournalReader(journal).end()
    assert messages_of(all_rows(journal, skip_damaged=True)) == set(range(ROWS))
    with locked(journal):
        assert [found.lost for found in repair(journal)] == [[]]
    assert messages_of(all_rows(journal, skip_damaged=False)) == set(range(ROWS))


def test_a_closed_index_and_its_summary_are_lost(journal: Path) -> None:
    """A reader that may skip damaged rows finds them all: an unreadable index is not taken for a missing segment."""
    (*_, segment) = list_segments(str(journal))
    os.unlink(segment.path(".idx"))
    os.mkdir(segment.path(".idx"))
    os.unlink(segment.path(".json"))
    assert messages_of(all_rows(journal, skip_damaged=True)) == set(range(ROWS))


@pytest.mark.parametrize("lose", [os.unlink, empty, zero, tear, spoil])
def test_the_last_batch_of_a_killed_writer(tmp_path: Path, lose: Callable[[str], None]) -> None:
    """A segment that was not closed has no end-of-stream marker. If its index is lost, no number is used again, no
    reader mistakes some of the rows for all, and repair finds every row.
    """
    directory = tmp_path / "journal"
    writer = JournalWriter.open(directory, clock=Clock())
    for start in range(0, 10, 5):
        writer.append([(b"k/%d" % n, b"payload %d" % n * 20) for n in range(start, start + 5)])
        writer.sync()
    copy = Path(shutil.copytree(directory, tmp_path / "copy"))
    writer.close()
    (segment,) = list_segments(str(copy))
    lose(segment.path(".idx"))
    with pytest.raises(JournalError, match=r"\.idx: it no longer states .*run 'sbus journal repair'"):
        JournalWriter.open(copy, clock=Clock(), warn=lambda text: None)
    with pytest.raises((JournalError, FileNotFoundError), match=r"\.idx"):
        JournalReader(copy).end()
    problems: list[str] = []
    problems += [problem for found in verify(copy, problems.append) for problem in found.problems]
    assert "run 'sbus journal repair'" in problems[0]
    assert messages_of(all_rows(copy, skip_damaged=True)) == set(range(10))
    with locked(copy):
        assert [found.lost for found in repair(copy)] == [[]]
    assert messages_of(all_rows(copy, skip_damaged=False)) == set(range(10))


def test_rows_without_index_and_summary(journal: Path) -> None:
    """A job that may lose rows finds those of a segment that has lost both."""
    for suffix in (".idx", ".json"):
        os.unlink(list_segments(str(journal))[0].path(suffix))
    assert messages_of(all_rows(journal, skip_damaged=True)) == set(range(ROWS))


class TestRepair:
    def test_batch(self, journal: Path) -> None:
        """The damaged batch is kept aside, its rows are counted, and other programs can read the segment again."""
        damage_batch(journal, 2)
        segment = list_segments(str(journal))[0]
        original = Path(segment.path()).read_bytes()
        with locked(journal):
            (found,) = repair(journal)
        ((first, rows, *_),) = found.lost
        assert (first, rows) == (10, 5)
        aside = [Path(path) for path in found.kept if path.endswith(".bytes")]
        assert aside[0].read_bytes() in original
        table = pa.ipc.open_stream(pa.memory_map(segment.path())).read_all()
        assert table.column("seq").to_pylist() == [*range(11), *range(15, 20)]
        assert table.column("kind").to_pylist().count("damaged") == 1

    def test_nothing(self, journal: Path) -> None:
        """An undamaged journal is left alone."""
        before = {path.name: path.read_bytes() for path in journal.iterdir() if path.is_file()}
        with locked(journal):
            assert list(repair(journal)) == []
        assert {path.name: path.read_bytes() for path in journal.iterdir() if path.is_file()} == before

    def test_dry_run(self, journal: Path) -> None:
        """A dry run names the same rows and changes nothing."""
        damage_batch(journal, 0)
        before = sorted(os.listdir(journal))
        (found,) = repair(journal, dry_run=True)
        assert [(part.first_seq, part.rows) for part in found.lost] == [(0, 5)]
        assert sorted(os.listdir(journal)) == before
        with locked(journal):
            assert next(iter(repair(journal))).lost == found.lost

    def test_index_alone(self, journal: Path) -> None:
        """Damage to the index, even its loss, costs no row: the batches are found without it."""
        for segment in list_segments(str(journal)):
            os.unlink(segment.path(".idx"))
        with locked(journal):
            assert [found.lost for found in repair(journal)] == [[], []]
        assert messages_of(all_rows(journal, skip_damaged=False)) == set(range(ROWS))

    @pytest.mark.parametrize("number", [0, 1])
    @pytest.mark.parametrize("version", sorted(FORMATS))
    def test_header_index_and_summary(self, version: int, number: int, tmp_path: Path) -> None:
        """The first batch shows the format, and no row is lost."""
        journal = Path(shutil.copytree(Path(__file__).parent / "data" / f"format-{version}", tmp_path / "journal"))
        before = all_rows(journal, skip_damaged=False)
        lose_all_but_rows(journal, number, 64)
        with locked(journal):
            assert [found.lost for found in repair(journal)] == [[]]
        assert all_rows(journal, skip_damaged=False) == before
        assert not any(found.problems for found in verify(journal, pytest.fail))

    def test_full_disk(self, whole: Path, tmp_path: Path) -> None:
        """It ends with status 1 and the remedy, leaves nothing behind, and is done once there is room."""
        with mounted(tmp_path / "disk", "256k") as disk:
            journal = Path(shutil.copytree(whole, disk / "journal"))
            (journal / "damaged").mkdir()
            damage_batch(journal, 1)
            with filled(disk):
                done = CliRunner().invoke(cli, ["journal", "repair", str(journal)])
                assert (done.exit_code, os.listdir(journal / "damaged")) == (1, [])
                assert re.search(
                    r"cannot write the repair to .*/journal: No space .*: make room there, or", done.stderr
                )
            done = CliRunner().invoke(cli, ["journal", "repair", str(journal)])
            assert (done.exit_code, len(os.listdir(journal / "damaged"))) == (3, 3)

    def test_number_in_the_summary(self, journal: Path) -> None:
        """A summary whose numbers contradict each other does not say which row is the last one."""
        path = Path(list_segments(str(journal))[1].path(".json"))
        path.write_text(path.read_text().replace('"rows": 20', '"rows": 2000'))
        with pytest.raises(JournalError, match="contradict each other"):
            JournalWriter.open(journal)
        with locked(journal):
            assert [found.lost for found in repair(journal)] == [[]]
        assert JournalReader(journal).end() == ROWS

    def test_file_of_another_journal(self, journal: Path) -> None:
        """A file whose name leaves out more rows than can be lost is no segment of the journal."""
        before = {path: path.read_bytes() for path in journal.iterdir() if path.name != "lock"}
        stray = journal / "0000009999999999-1700000000000000.arrows"
        stray.touch()
        with (
            locked(journal),
            pytest.raises(JournalError, match=r"rows are missing after row 39, more than .* elsewhere"),
        ):
            list(repair(journal))
        stray.unlink()
        assert {path: path.read_bytes() for path in journal.iterdir() if path.name != "lock"} == before

    def test_newest_segment_beyond_repair(self, journal: Path, tmp_path: Path) -> None:
        """The error names a way out: without the segment's files the archive takes what is left."""
        lose_all_but_rows(journal, 1, 1 << 20)
        arguments = ["archive", f"--journal={journal}", f"--lake={tmp_path / 'lake'}", "--once"]
        result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
        assert result.exit_code == 1
        self._give_up(journal, 1, "from now on record into another directory")
        result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
        assert (result.exit_code, result.stderr[:26]) == (0, "archived 20 rows in 1 batc")

    def test_older_segment_beyond_repair(self, journal: Path) -> None:
        """The error names a way out: without its files, one row stands for all of its rows."""
        with JournalWriter.open(journal, clock=Clock()) as writer:
            writer.append([(b"k", b"")])
        lose_all_but_rows(journal, 1, 1 << 20)
        self._give_up(journal, 1, "repair again")
        with locked(journal):
            assert [(part.first_seq, part.rows) for found in repair(journal) for part in found.lost] == [(20, 20)]
        assert covered(all_rows(journal, skip_damaged=False)) == list(range(ROWS + 1))

    def _give_up(self, journal: Path, number: int, then: str) -> None:
        segment = list_segments(str(journal))[number]
        with locked(journal), pytest.raises(JournalError) as caught:
            list(repair(journal))
        assert str(caught.value).endswith(f"move its files ({segment.name}.*) elsewhere, and {then}")
        for path in journal.glob(f"{segment.name}.*"):
            path.unlink()

    def test_rows_that_were_not_synced(self, tmp_path: Path) -> None:
        """What a killed writer had written, and not synced yet, stays: the next writer would have found it whole."""
        journal = JournalWriter.open(tmp_path / "killed", clock=Clock())
        for number in range(6):
            journal.append([(b"k", b"payload %d" % number * 20)])
            if number == 2:
                journal.sync()
        shutil.copytree(journal.directory, tmp_path / "journal")
        journal.close()
        damage_batch(tmp_path / "journal", 1)
        with locked(tmp_path / "journal"):
            (found,) = repair(tmp_path / "journal")
        assert [(part.first_seq, part.rows) for part in found.lost] == [(1, 1)]
        kinds = [row["kind"] for row in all_rows(tmp_path / "journal", skip_damaged=False)]
        assert kinds == ["message", "damaged", *["message"] * 4]

    @pytest.mark.parametrize("size", [0, 100])
    def test_index_gone_after_a_repair(self, tmp_path: Path, size: int) -> None:
        """A row for damaged ones keeps their numbers without an index, so that no whole row behind it is lost.

        Two rows without payloads take so few bytes that the row that replaces them has room for their number alone.
        """
        journal = tmp_path / "journal"
        with JournalWriter.open(journal, clock=Clock()) as writer:
            for start in range(0, 8, 2):
                writer.append([(b"", b"payload %d" % n * (20 if size else 0)) for n in (start, start + 1)])
        damage_batch(journal, 1)
        with locked(journal):
            list(repair(journal))
            before = all_rows(journal, skip_damaged=False)
            os.unlink(list_segments(str(journal))[0].path(".idx"))
            assert [found.lost for found in repair(journal)] == [[]]
        assert all_rows(journal, skip_damaged=False) == before
        assert covered(before) == list(range(8))

    def test_segment_gone(self, journal: Path) -> None:
        """A segment that is missing between others becomes one damaged row."""
        with JournalWriter.open(journal, clock=Clock()) as writer:
            writer.append([(b"k", b"")])
        os.unlink(list_segments(str(journal))[1].path())
        with locked(journal):
            (found,) = repair(journal)
        assert [(part.first_seq, part.rows) for part in found.lost] == [(20, 20)]
        assert covered(all_rows(journal, skip_damaged=False)) == list(range(ROWS + 1))

    @pytest.mark.slow
    def test_interrupted(self, journal: Path, tmp_path: Path) -> None:
        """A repair that is interrupted after any call can be repeated, and nothing that was readable is lost."""
        damage_batch(journal, 2)
        overwrite(list_segments(str(journal))[0].path(".idx"), 64, bytes(64))
        for step in itertools.count():
            copy = Path(shutil.copytree(journal, tmp_path / f"{step}"))
            disk = FaultyDisk()

            def fails(number: int, name: str, step: int = step) -> None:
                if number == step:
                    raise Crash

            disk.fails = fails
            with disk(), contextlib.suppress(Crash):
                list(repair(copy))
                break
            messages = messages_of(all_rows(copy, skip_damaged=True))
            assert messages == set(range(ROWS)) - set(range(10, 15))
            list(repair(copy))
            assert messages_of(all_rows(copy, skip_damaged=False)) == messages
        assert step > 10
