"""Damage on the disk: exactly the damaged rows are lost, and a row reports the loss."""

from __future__ import annotations

import errno
import io
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

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sbus.errors import JournalError
from sbus.journal.index import RECORD_SIZE, open_rows, read_index, read_record
from sbus.journal.layout import list_segments, read_object
from sbus.journal.lock import locked
from sbus.journal.reader import JournalReader, read
from sbus.journal.repair import repair
from sbus.journal.snapshot import open_journals
from sbus.journal.summary import read_summary
from sbus.journal.verify import verify
from sbus.journal.writer import JournalWriter
from tests.support.examples import examples
from tests.support.journals import Clock, forge
from tests.unit.journal.damages import ROWS, all_rows, covered, damage_batch, messages_of, overwrite


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
