"""Damage on the disk: exactly the damaged rows are lost, a row says so, and a repair makes the journal readable."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sbus.cli.main import cli
from sbus.errors import JournalError
from sbus.journal.index import RECORD_SIZE, open_rows, read_index, read_record
from sbus.journal.layout import list_segments, read_object
from sbus.journal.lock import locked
from sbus.journal.reader import JournalReader, read
from sbus.journal.repair import repair
from sbus.journal.schema import FORMATS
from sbus.journal.snapshot import open_journals
from sbus.journal.summary import read_summary
from sbus.journal.verify import verify
from sbus.journal.writer import JournalWriter
from tests.support.disks import filled, mounted
from tests.support.examples import examples
from tests.support.faults import Crash, FaultyDisk
from tests.support.journals import Clock, forge

ROWS = 40
"""Rows of the journal: two segments, and four batches of five rows in each."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undamaged journal."""
    directory = tmp_path_factory.mktemp("whole") / "journal"
    with JournalWriter.open(directory, clock=Clock()) as journal:
        for start in range(0, ROWS, 5):
            if start == ROWS // 2:
                journal.roll()
            journal.append([(b"k/%d" % n, b"payload %d" % n * 20) for n in range(start, start + 5)])
    return directory


@pytest.fixture
def journal(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "journal"))


def overwrite(path: str, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def damage_batch(directory: Path, number: int) -> None:
    """Overwrite 64 bytes in the middle of a batch of the first segment."""
    segment = list_segments(str(directory))[0]
    batch = read_index(segment).batches[number]
    overwrite(segment.path(), (batch.start + batch.end) // 2 // 64 * 64, b"\xa5" * 64)


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
    """Empty a file, and keep its length."""
    size = os.path.getsize(path)
    os.truncate(path, 0)
    os.truncate(path, size)


def all_rows(directory: Path, *, skip_damaged: bool, **how: Any) -> list[dict[str, Any]]:
    reader = JournalReader(directory, skip_damaged=skip_damaged)
    parts = reader.plan(reader.start(), reader.end(), **how)
    return [row for part in parts for batch in read(part) for row in batch.to_pylist()]


def covered(rows: list[dict[str, Any]]) -> list[int]:
    """Return the numbers that rows stand for."""
    numbers: list[int] = []
    for row in rows:
        count = json.loads(row["payload"])["rows"] if row["kind"] == "damaged" else 1
        numbers.extend(range(row["seq"], row["seq"] + count))
    return numbers


def messages_of(rows: list[dict[str, Any]]) -> set[int]:
    for row in rows:
        if row["kind"] == "message":
            assert row["payload"] == b"payload %d" % row["seq"] * 20
    return {row["seq"] for row in rows if row["kind"] == "message"}


class TestSkip:
    """Reading with ``skip_damaged``."""

    def test_one_batch(self, journal: Path) -> None:
        """64 bytes overwritten cost exactly their batch; one row says what and how many."""
        damage_batch(journal, 1)
        with pytest.raises(JournalError, match="sbus journal repair"):
            all_rows(journal, skip_damaged=False)
        rows = all_rows(journal, skip_damaged=True)
        assert covered(rows) == list(range(ROWS))
        (damaged,) = [row for row in rows if row["kind"] == "damaged"]
        details = json.loads(damaged["payload"])
        assert (damaged["seq"], details["rows"], details["last"]) == (5, 5, 9)
        assert "5 rows from 5" in details["reason"]

    def test_part_of_a_batch(self, journal: Path) -> None:
        """Of a read that begins or ends within a damaged batch, the row counts only what belongs to the read."""
        damage_batch(journal, 1)
        reader = JournalReader(journal, skip_damaged=True)
        halves = [covered(list(_rows(reader, *part))) for part in ((0, 7), (7, 40))]
        assert halves == [list(range(7)), list(range(7, 40))]

    def test_only_messages(self, journal: Path) -> None:
        """A read that asks for messages alone gets no row for the damaged ones."""
        damage_batch(journal, 1)
        rows = all_rows(journal, skip_damaged=True, kinds={"message"})
        assert messages_of(rows) == set(range(ROWS)) - set(range(5, 10))
        assert len(rows) == ROWS - 5

    @pytest.mark.parametrize("is_closed", [True, False])
    def test_missing_newest_index(self, journal: Path, is_closed: bool) -> None:
        """The rows of the newest segment are found without its index, as those of any other one."""
        newest = list_segments(str(journal))[-1]
        for suffix in (".idx",) if is_closed else (".idx", ".json"):
            os.unlink(newest.path(suffix))
        with pytest.raises(JournalError, match=r"\.idx: it is missing: .*sbus journal repair"):
            all_rows(journal, skip_damaged=False)
        assert messages_of(all_rows(journal, skip_damaged=True)) == set(range(ROWS))

    @pytest.mark.parametrize("is_missing", [True, False])
    def test_end_is_lost(self, journal: Path, is_missing: bool) -> None:
        """If the last rows were read before, and neither they nor their index are left, the journal counts as older."""
        newest = list_segments(str(journal))[-1]
        os.truncate(newest.path(), os.path.getsize(newest.path()) - 100)
        for suffix in (".idx", ".json"):
            os.unlink(newest.path(suffix))
        if not is_missing:
            os.mkdir(newest.path(".idx"))
        reader = JournalReader(journal, skip_damaged=True)
        assert reader.end() == ROWS - 5
        assert reader.is_older_than(ROWS)

    @pytest.mark.parametrize("suffix", [".arrows", ".idx", ".json"])
    def test_missing_file(self, journal: Path, suffix: str) -> None:
        """A file that is gone stops nothing; an index alone costs no row at all."""
        os.unlink(list_segments(str(journal))[0].path(suffix))
        if suffix == ".arrows":
            with pytest.raises(JournalError, match="was deleted by retention"):
                JournalReader(journal, skip_damaged=True).plan(0, ROWS)
        else:
            rows = all_rows(journal, skip_damaged=True, split_bytes=1, wanted=lambda summary: True)
            assert covered(rows) == list(range(ROWS))
            assert (len(messages_of(rows)) == ROWS) == (suffix == ".json" or bool(messages_of(rows)))

    def test_limit(self, journal: Path) -> None:
        """A limit on bytes works with a damaged index."""
        overwrite(list_segments(str(journal))[0].path(".idx"), 64, bytes(64))
        reader = JournalReader(journal, skip_damaged=True)
        assert reader.limit(0, max_bytes=1) == 5


def _rows(reader: JournalReader, start: int, end: int) -> list[dict[str, Any]]:
    return [row for part in reader.plan(start, end) for batch in read(part) for row in batch.to_pylist()]


def plant_pipe(path: str) -> None:
    os.mkfifo(path)


def plant_socket(path: str) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


def plant_link(path: str) -> None:
    os.symlink("/dev/zero", path)


_NO_FILE = "it is damaged (no plain file): restore it from a copy"
NOT_PLAIN: dict[Callable[[str], None], str] = {
    plant_pipe: _NO_FILE,
    plant_socket: _NO_FILE,
    plant_link: "it is a symbolic link, which is not followed: put the journal's file itself in its place",
}
"""What is said of what is planted."""


@pytest.mark.timeout(20)
class TestPlanted:
    """What another user has put in the place of a file is damage: nothing waits for it, or reads without end."""

    @pytest.mark.parametrize("plant", [plant_pipe, plant_socket, plant_link])
    def test_identity(self, journal: Path, plant: Callable[[str], None]) -> None:
        path = str(journal / "journal.json")
        os.unlink(path)
        plant(path)
        for read_it in (JournalReader, lambda directory: list(verify(directory, print)), open_one):
            with pytest.raises(JournalError, match=rf"journal\.json: {re.escape(NOT_PLAIN[plant])}"):
                read_it(journal)

    @pytest.mark.parametrize("text", [b"[" * 200_000, b'{"id": "%s"}' % (b"0" * (16 << 20))])
    def test_object(self, journal: Path, text: bytes) -> None:
        """JSON that is too deep or too long is no object of a journal."""
        (journal / "journal.json").write_bytes(text)
        with pytest.raises(JournalError, match=r"journal\.json: it is damaged \(no JSON object\)"):
            JournalReader(journal)

    def test_endless_number(self, journal: Path) -> None:
        """A number that is not finite is damage, too."""
        (segment, _) = list_segments(str(journal))
        text = re.sub('"rows": [0-9]+', '"rows": Infinity', Path(segment.path(".json")).read_text())
        Path(segment.path(".json")).write_text(text)
        with pytest.raises(JournalError, match="it is damaged"):
            read_summary(segment)

    @pytest.mark.parametrize("number", [0, 1])
    @pytest.mark.parametrize("suffix", [".arrows", ".idx", ".json"])
    @pytest.mark.parametrize("plant", [plant_pipe, plant_socket, plant_link])
    def test_segment(self, journal: Path, plant: Callable[[str], None], suffix: str, number: int) -> None:
        segment = list_segments(str(journal))[number]
        os.unlink(segment.path(suffix))
        plant(segment.path(suffix))
        with pytest.raises(JournalError, match=rf"{suffix}: {re.escape(NOT_PLAIN[plant])}"):
            all_rows(journal, skip_damaged=False, wanted=lambda summary: True)
        problems = [problem for found in verify(journal, print) for problem in found.problems]
        assert f"{segment.path(suffix)}: {NOT_PLAIN[plant]}" in problems
        assert covered(all_rows(journal, skip_damaged=True)) == list(range(ROWS))


def test_without_proc(journal: Path, tmp_path: Path) -> None:
    """A journal can be read where /proc is not mounted; what needs it says so, and takes nothing for damage."""
    if os.geteuid() or subprocess.run(["unshare", "--mount", "umount", "--lazy", "/proc"]).returncode:
        pytest.skip("only root can unmount /proc")

    def sbus(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = ["sh", "-c", 'umount --lazy /proc && exec "$@"', "sh", sys.executable, "-m", "sbus"]
        command = ["unshare", "--mount", *command, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    done = sbus("journal", "verify", journal)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    damage_batch(journal, 1)
    for words in (
        ["archive", f"--journal={journal}", f"--lake={tmp_path}/lake", "--once"],
        ["journal", "repair", journal],
    ):
        done = sbus(*words)
        assert done.returncode == 1
        assert done.stderr.endswith(": it cannot be changed safely while /proc is not mounted: mount it\n")
    assert len(JournalReader(journal).plan(0, ROWS)) == 2


def test_rows_that_are_cut_off_while_they_are_read(tmp_path: Path) -> None:
    """The owner of a journal who cuts a file is damage for its readers, and not their end."""
    program = f"""
import os
from sbus.errors import JournalError
from sbus.journal import JournalReader, JournalWriter, read
with JournalWriter.open({str(tmp_path / "journal")!r}) as journal:
    for _ in range(3):
        journal.append([(b"k", bytes(20_000))])
reader = JournalReader(journal.directory)
(part,) = reader.plan(0, 3)
batches = read(part)
next(batches)
os.truncate(part.segment.path(), 30_000)
try:
    next(batches)
except JournalError as e:
    print(e)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        "it ends at byte 30000, before the rows do: restore it from a copy, or run 'sbus journal repair'" in done.stdout
    )


@pytest.mark.parametrize(
    ("column", "reason"),
    [("payload", ".*out of bounds.*"), ("seq", "they have other numbers"), ("time", "they have other times")],
)
def test_forged_rows(journal: Path, column: str, reason: str) -> None:
    """Whoever owns a journal can put any rows in it, with the right checksum: for all readers that is damage.

    They lead out of their batch, or have other numbers or times than the index states.
    """
    forge(journal, column)
    with pytest.raises(JournalError, match=rf"are not 5 rows from 5 \({reason}\): restore it from a copy"):
        all_rows(journal, skip_damaged=False)
    assert messages_of(all_rows(journal, skip_damaged=True)) == set(range(ROWS)) - set(range(5, 10))
    assert re.search(reason, next(verify(journal, print)).problems[0])
    (found,) = repair(journal)
    assert [(lost.first_seq, lost.rows) for lost in found.lost] == [(5, 5)]
    assert messages_of(all_rows(journal, skip_damaged=False)) == set(range(ROWS)) - set(range(5, 10))
    assert [found.problems for found in verify(journal, print)] == [[]] * 2


@pytest.mark.parametrize(("source", "target"), [(1, 0), (0, 1), (2, 1), (1, 3), (4, 2), (5, 1)])
def test_a_record_in_the_place_of_another(journal: Path, source: int, target: int) -> None:
    """Each record of an index is whole, but they do not follow one another: that is damage, and costs no row."""
    segment = list_segments(str(journal))[0]
    data = Path(segment.path(".idx")).read_bytes()
    overwrite(segment.path(".idx"), target * RECORD_SIZE, data[source * RECORD_SIZE : (source + 1) * RECORD_SIZE])
    with pytest.raises(JournalError, match=r"\.idx: a record in it is damaged"):
        all_rows(journal, skip_damaged=False)
    assert messages_of(all_rows(journal, skip_damaged=True)) == set(range(ROWS))
    (found,) = repair(journal)
    assert found.lost == []
    assert messages_of(all_rows(journal, skip_damaged=False)) == set(range(ROWS))
    assert [found.problems for found in verify(journal, print)] == [[]] * 2


def test_a_bad_sector(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that the disk cannot read are damage of their batch."""

    def fail(*args: Any) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    segment = list_segments(str(journal))[0]
    record = read_index(segment).batches[1]
    monkeypatch.setattr("sbus.journal.index.os.pread", fail)
    with (
        open_rows(segment) as rows,
        pytest.raises(JournalError, match=r"^x: the bytes \d+ to \d+ cannot be read: Input/output error: restore it"),
    ):
        read_record("x", rows, record)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE])
@pytest.mark.parametrize("suffix", [".arrows", ".idx"])
def test_a_file_that_cannot_be_opened_now(
    journal: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, code: int
) -> None:
    """Its rows are not lost, also for a reader that may lose rows: nothing takes them for damaged ones."""
    path, real = list_segments(str(journal))[0].path(suffix), os.open

    def fail(name: Any, *args: Any, **how: Any) -> int:
        if name == path:
            raise OSError(code, os.strerror(code), name)
        return real(name, *args, **how)

    monkeypatch.setattr("sbus.journal.layout.os.open", fail)
    with pytest.raises(JournalError if code == errno.EACCES else OSError) as caught:
        all_rows(journal, skip_damaged=True)
    assert path in str(caught.value)
    with locked(journal), pytest.raises(type(caught.value)):
        list(repair(journal))
    monkeypatch.undo()
    assert messages_of(all_rows(journal, skip_damaged=False)) == set(range(ROWS))


def test_a_read_that_fails_now(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the disk did not damage the rows, as on a file server that is away, no repair overwrites them."""
    real = os.pread

    def fail(fd: int, size: int, at: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".arrows"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(fd, size, at)

    before = {path: path.read_bytes() for path in journal.iterdir()}
    monkeypatch.setattr("sbus.journal.index.os.pread", fail)
    with pytest.raises(OSError, match="Stale file handle"):
        all_rows(journal, skip_damaged=True)
    with pytest.raises(OSError, match="Stale file handle"):
        list(repair(journal))
    assert {path: path.read_bytes() for path in journal.iterdir()} == before


@pytest.mark.parametrize("name", ["lock", ".arrows", ".idx"])
def test_a_writer_names_a_link(journal: Path, tmp_path: Path, name: str) -> None:
    """A writer does not follow a link, either: it says which one it is, and what to do."""
    writer = JournalWriter.open(journal)
    writer.append([(b"k", b"")])
    writer.sync()
    crashed = Path(shutil.copytree(journal, tmp_path / "crashed"))
    writer.close()
    path = crashed / name if name == "lock" else Path(list_segments(str(crashed))[-1].path(name))
    path.unlink()
    path.symlink_to(journal / path.name)
    with pytest.raises(JournalError, match=f"{re.escape(str(path))}: {NOT_PLAIN[plant_link]}"):
        JournalWriter.open(crashed)


def test_index_on_a_bad_sector(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that the disk cannot read is damage: the error names it, and a repair loses no row."""
    path = list_segments(str(journal))[0].path(".idx")
    bad, pread = os.stat(path).st_ino, os.pread

    def failing(fd: int, size: int, at: int) -> bytes:
        if os.fstat(fd).st_ino == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, size, at)

    monkeypatch.setattr(os, "pread", failing)
    with pytest.raises(
        JournalError, match=rf"^{re.escape(path)}: it cannot be read \(Input/output error\): restore it"
    ):
        all_rows(journal, skip_damaged=False)
    assert messages_of(all_rows(journal, skip_damaged=True)) == set(range(ROWS))


def test_object_on_a_bad_sector(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file with the journal's identity, likewise."""

    class Bad(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("sbus.journal.layout.open_plain", lambda path: Bad())
    with pytest.raises(JournalError, match=r"nowhere: it cannot be read \(Input/output error\): restore it"):
        read_object("/nowhere")


def open_one(directory: Path) -> object:
    return open_journals([str(directory)])


@pytest.mark.timeout(20)
class TestSparse:
    """An index of a terabyte, nearly all of it a hole, costs neither memory nor time."""

    @pytest.fixture(autouse=True)
    def _limited(self) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_DATA)
        (used,) = re.findall(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())
        resource.setrlimit(resource.RLIMIT_DATA, ((int(used) << 10) + (256 << 20), before[1]))
        yield
        resource.setrlimit(resource.RLIMIT_DATA, before)

    @pytest.mark.parametrize("number", [0, 1])
    def test_closed(self, journal: Path, number: int) -> None:
        """It is damaged; a repair loses no row."""
        path = list_segments(str(journal))[number].path(".idx")
        os.truncate(path, 1 << 40)
        with pytest.raises(JournalError, match=r"\.idx: it does not end like the index of a closed segment"):
            all_rows(journal, skip_damaged=False)
        assert messages_of(all_rows(journal, skip_damaged=True)) == set(range(ROWS))
        (found,) = repair(journal)
        assert found.lost == []
        assert os.stat(found.kept[0]).st_size == 1 << 40
        assert messages_of(all_rows(journal, skip_damaged=False)) == set(range(ROWS))

    def test_rows(self, journal: Path) -> None:
        """Nor does a record that stands for a hole among the rows: its bytes are checked before they take memory."""
        segment = list_segments(str(journal))[0]
        record = read_index(segment).batches[-1]
        os.truncate(segment.path(), record.start + (1 << 30))
        with (
            open_rows(segment) as rows,
            pytest.raises(JournalError, match=r"\.arrows: the bytes .* are damaged \(5 rows"),
        ):
            read_record(segment.path(), rows, record._replace(end=record.start + (1 << 30)))

    def test_open(self, journal: Path, tmp_path: Path) -> None:
        """What follows the last sync record counts for nothing, as ever, and the next writer cuts it off."""
        writer = JournalWriter.open(journal)
        writer.append([(b"k/40", b"payload 40" * 20)])
        writer.sync()
        crashed = Path(shutil.copytree(journal, tmp_path / "crashed"))
        writer.close()
        segment = list_segments(str(crashed))[-1]
        os.truncate(segment.path(".idx"), 1 << 40)
        assert messages_of(all_rows(crashed, skip_damaged=False)) == set(range(ROWS + 1))
        assert list(repair(crashed, dry_run=True)) == []
        JournalWriter.open(crashed).close()
        assert os.stat(segment.path(".idx")).st_size < 1 << 10
        assert [found.problems for found in verify(crashed, print)] == [[]] * 3

    def test_a_sync_record_behind_the_hole(self, journal: Path) -> None:
        """Records are missing before it: the segment is damaged."""
        path = list_segments(str(journal))[-1].path(".idx")
        data = Path(path).read_bytes()
        os.truncate(path, 128)
        overwrite(path, 1 << 40, data[-64:])
        assert JournalReader(journal).end() == ROWS
        with pytest.raises(JournalError, match=r"\.idx: a record in it is damaged"):
            all_rows(journal, skip_damaged=False)
        assert messages_of(all_rows(journal, skip_damaged=True)) == set(range(ROWS))


class TestAnyDamage:
    """Random damage to any file of a segment."""

    @settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        suffix=st.sampled_from([".arrows", ".idx", ".json"]),
        segment=st.integers(0, 1),
        where=st.floats(0, 1, exclude_max=True),
        length=st.integers(1, 200),
        value=st.integers(0, 255),
        cut=st.booleans(),
    )
    def test_every_number_once(
        self,
        whole: Path,
        tmp_path_factory: pytest.TempPathFactory,
        suffix: str,
        segment: int,
        where: float,
        length: int,
        value: int,
        cut: bool,
    ) -> None:
        """Every row is there unchanged or counted as lost, while damaged and after the repair; then nothing is damaged.

        A repair that is repeated changes nothing, and a writer can continue.
        """
        directory = Path(shutil.copytree(whole, tmp_path_factory.mktemp("any") / "journal"))
        path = list_segments(str(directory))[segment].path(suffix)
        at = int(os.path.getsize(path) * where)
        if cut:
            os.truncate(path, at)
        else:
            overwrite(path, at, bytes((value,)) * min(length, os.path.getsize(path) - at))
        before = all_rows(directory, skip_damaged=True)
        assert covered(before) == list(range(len(covered(before))))
        with locked(directory):
            found = list(repair(directory))
            assert [problem.lost for problem in repair(directory)] == []
        after = all_rows(directory, skip_damaged=False)
        assert covered(after) == list(range(ROWS))
        lost = {n for one in found for part in one.lost for n in range(part.first_seq, part.first_seq + part.rows)}
        assert messages_of(after) == set(range(ROWS)) - lost >= messages_of(before)
        assert [problem for one in verify(directory, pytest.fail) for problem in one.problems] == []
        with JournalWriter.open(directory, clock=Clock()) as writer:
            assert writer.next_seq == ROWS
            writer.append([(b"new", b"")])


@pytest.mark.parametrize("lose", [os.unlink, empty, zero, tear, spoil])
@pytest.mark.parametrize("number", [0, 1])
def test_a_writer_leaves_a_segment_without_index(journal: Path, number: int, lose: Callable[[str], None]) -> None:
    """A segment that lost index and summary is not taken for one that was never synced, and has all its rows."""
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
        assert ["run 'sbus journal repair'" in problem for problem in problems] == [True]  # no recorder mends that
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
    reader takes fewer rows for all of them, and repair finds all its rows.
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
