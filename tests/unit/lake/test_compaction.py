"""Compaction of a lake of plain Parquet: each row stays there once, whatever is killed, and whoever reads meanwhile."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sbus.errors import LakeError
from sbus.lake import maintenance, pins, plain
from sbus.lake.maintenance import compact, forget, prune
from sbus.lake.merge import Limits
from sbus.lake.plain import PlainTable
from sbus.lake.table import GRACE, Hour
from tests.support.examples import examples
from tests.support.lakes import Row, archive, row, rows_of

NOW = Hour("2026-02-02", 0).start.timestamp()


@pytest.fixture
def lake(tmp_path: Path) -> PlainTable:
    """A lake with three hours, of twelve batches, the last one of which is not done."""
    return filled(tmp_path / "lake")


def filled(directory: Path, first: int = 0) -> PlainTable:
    table = PlainTable(directory)
    for batch in range(first, 12):
        rows = [row(j, 10 * batch + n, (batch + n) // 7) for j in ("one", "two") for n in range(10)]
        archive(table, batch, rows, done=batch < 11)
    return table


def test_an_hour_becomes_one_sorted_file(lake):
    """After compaction, an hour has one sorted file and the file of the batch that is not done, which is counted."""
    before = rows_of(lake)
    done = compact(lake, now=NOW)
    assert rows_of(lake) == before
    assert (done.hours, done.dropped, done.left) == (3, 0, 2)
    files = lake.files()
    assert [file.batch for file in files] == [None, None, 11, None, 11]
    for file in files:
        found = pq.read_table(lake.open(file.name)).to_pylist()
        assert [(r["journal"], r["seq"]) for r in found] == sorted((r["journal"], r["seq"]) for r in found)
    assert compact(lake, now=NOW).hours == 0
    assert [event.what for event in lake.history()] == ["compact"] * 3


def test_an_hour_that_is_not_over_is_left_alone(lake):
    """The current hour, and one ahead of the clock, have too little time behind them; a day later both are closed."""
    noon = Hour("2026-01-31", 1).start.timestamp() + 60
    assert compact(lake, now=noon).hours == 0
    for file in lake.files():
        os.utime(Path(lake.location) / file.name, (noon - 3700, noon - 3700))
    assert compact(lake, now=noon).hours == 1  # the one after this; nothing has changed it for an hour


def test_rows_that_come_late_are_merged_by_the_next_run(lake):
    """A compact hour that gets another batch is compacted again; large files are not read again."""
    compact(lake, now=NOW)
    (lake.state.checkpoint / "commits/11").write_text("v1\n{}\n")
    archive(lake, 12, [row("late", 0, 0)])
    before = rows_of(lake)
    assert compact(lake, now=NOW, limits=Limits(min_bytes=1)).hours == 0
    assert compact(lake, now=NOW).hours == 3
    assert rows_of(lake) == before
    assert len(lake.files()) == 3


def test_a_batch_that_was_compacted_is_refused(lake):
    """A checkpoint that is older than the lake would archive rows twice: the error says so."""
    compact(lake, now=NOW)
    before = rows_of(lake)
    with pytest.raises(LakeError, match=r"batch 7 .* the checkpoint .* is older than the lake"):
        archive(lake, 7, [row("one", 0, 0)])
    assert rows_of(lake) == before


def test_two_compactions_exclude_each_other(lake):
    """The second process is refused, and names the remedy."""
    with lake.state.maintaining(), pytest.raises(LakeError, match="another process compacts or prunes"):
        compact(PlainTable(Path(lake.location)), now=NOW)


def test_a_full_disk_changes_nothing(lake, monkeypatch):
    """An error while merging or moving leaves the lake as it was, and no files behind."""
    before = rows_of(lake)
    monkeypatch.setattr(plain, "_link", mock.Mock(side_effect=OSError(28, "No space left on device")))
    monkeypatch.setattr(maintenance, "is_due", lambda files, *_: len(files) > 1)
    archive(lake, 12, [row("one", 500, 0)], done=False)  # a file to be linked
    before = rows_of(lake)
    with pytest.raises(OSError, match="No space left"):
        compact(lake, now=NOW)
    assert rows_of(lake) == before
    assert not (lake.state.directory / "work").exists()


def test_a_reader_that_is_slow_reads_on(lake, monkeypatch):
    """Paths that a reader has pinned stay readable after compaction, and without it when the reader has ended."""
    paths = lake.pin(lake.files())
    compact(lake, now=NOW)
    assert sum(pq.read_metadata(path).num_rows for path in paths) == len(rows_of(lake))
    lake.vacuum(0)
    assert all(os.path.exists(path) for path in paths)
    os.unlink(f"{pins._mine[Path(lake.location)]}.lock")  # as if its process had ended
    lake.vacuum(0)
    assert not any(os.path.exists(path) for path in paths)


def test_replaced_files_are_deleted_after_the_grace(lake):
    """The directory as it was before stays for an hour; then its space is given back."""
    compact(lake, now=NOW)
    retired = lake.state.directory / "retired"
    assert len(list(retired.iterdir())) == 3
    assert lake.vacuum(GRACE) == 0
    for directory in retired.iterdir():
        directory.rename(retired / f"{1:020}-{directory.name[-8:]}")
    assert lake.vacuum(GRACE) > 0
    assert not list(retired.iterdir())


def test_old_days_are_pruned(lake):
    """Whole hours go; those that are younger stay, and an hour ahead of the clock goes by the age of its files."""
    (lake.state.checkpoint / "commits/11").write_text("v1\n{}\n")
    archive(lake, 12, [row("one", 1000, 24 * 365 * 70)])
    old = prune(lake, 1, now=Hour("2026-02-01", 1).start.timestamp())
    assert (old.hours, old.left) == (1, 0)
    assert {file.hour for file in lake.files()} == {
        Hour("2026-01-31", 1), Hour("2026-01-31", 2), Hour("2096-01-14", 0)
    }  # fmt: skip
    for file in lake.files():
        os.utime(Path(lake.location) / file.name, (NOW - 90_000, NOW - 90_000))
    prune(lake, 1, now=NOW)
    assert rows_of(lake) == []
    assert not list(Path(lake.location).glob("date=*"))


def test_a_key_is_forgotten(lake):
    """Messages with the key are in no file any more, the others stay; the history does not name the key."""
    (lake.state.checkpoint / "commits/11").write_text("v1\n{}\n")
    digest = (*row("one", 903, 0)[:3], "digest", "people/jo", b'{"length": 5000000, "sha256": "abcd"}')
    archive(
        lake,
        12,
        [row("one", 900, 0, "people/jo", b"private"), row("one", 901, 0, "people/al"), row("one", 902, 1), digest],
    )
    compact(lake, now=NOW)
    before = rows_of(lake)
    assert forget(lake, b"people/jo").dropped == 2
    assert rows_of(lake) == [each for each in before if each[4] != "people/jo"]
    for path in (*Path(lake.location).rglob("*"), *lake.state.directory.rglob("*")):
        assert not path.is_file() or b"people/jo" not in path.read_bytes()
    assert forget(lake, b"people/").dropped == 1
    assert forget(lake, b"people/").dropped == 0


def test_forgetting_leaves_a_batch_that_is_not_done(lake):
    """Its file would come back; it is counted instead, so that the operator runs the command again."""
    archive(lake, 11, [row("one", 900, 0, "people/jo")], done=False)
    outcome = forget(lake, b"people/jo")
    assert (outcome.dropped, outcome.left) == (0, 1)


# --- kills --------------------------------------------------------------------------------------

_COUNTED = {
    "open",
    "os.rename",
    "os.link",
    "os.mkdir",
    "os.remove",
    "os.rmdir",
    "os.chmod",
    "ctypes.dlopen",
    "os.listdir",
}


def in_child(work: Callable[[], None], operations: int) -> bool:
    """Run something in a process that is killed before a file operation; return whether it was."""
    pid = os.fork()
    if pid == 0:
        left = [operations]

        def count(event: str, args: tuple[object, ...]) -> None:
            if event in _COUNTED:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 13])
@pytest.mark.parametrize("name", ["compact", "forget", "prune"])
def test_kill_9_at_every_file_operation(tmp_path, name, step):
    """A child process is killed at each of its file operations in turn. Every time a reader finds each row once, and
    the same command finishes the work afterwards.
    """
    base = filled(tmp_path / "base", first=8)
    archive(base, 11, [row("one", 900, 0, "secret")])
    archive(base, 12, [row("one", 901, 1, "other")], done=False)
    before = rows_of(base)
    todo: dict[str, tuple[Callable[[PlainTable], object], Callable[[Row], bool]]] = {
        "compact": (lambda table: compact(table, now=NOW), lambda each: True),
        "forget": (lambda table: forget(table, b"secret"), lambda each: each[4] != "secret"),
        "prune": (
            lambda table: prune(table, 1, now=Hour("2026-02-01", 2).start.timestamp()),
            lambda each: each[2].hour > 1 or each[4] == "other",
        ),
    }
    work, stays = todo[name]
    after = [each for each in before if stays(each)]
    operations = 0
    was_killed = True
    while was_killed:
        directory = tmp_path / str(operations)
        for suffix in ("", ".sbus"):
            shutil.copytree(f"{base.location}{suffix}", f"{directory}{suffix}")
        table = PlainTable(directory)
        was_killed = in_child(lambda table=table: work(table), operations)  # type: ignore[arg-type, misc]
        found = rows_of(table)
        assert set(after) <= set(found) <= set(before)
        assert len(found) == len(set(found))
        work(table)
        assert rows_of(table) == after
        table.vacuum(0)
        places = directory, table.state.directory
        kept = [path for each in places for path in each.rglob("*.parquet") if path.name != "deleted.parquet"]
        assert len(kept) == len(table.files())
        for place in places:
            shutil.rmtree(place)
        operations += step
    assert operations > 20


class Killed(BaseException):
    """Stands for SIGKILL: no code of the package catches it."""


class Compaction(RuleBasedStateMachine):
    """Batches, kills, repetitions and maintenance in any order, and one inside the other."""

    @initialize()
    def start(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.table = PlainTable(self.directory / "lake")
        self.expected: list[Row] = []
        self.batch = 0
        self.open_batch: list[Row] | None = None
        self.seq = 0

    def teardown(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def _next(self, hours: list[int]) -> list[Row]:
        found = []
        for hour in hours:
            found.append(row("j", self.seq, hour, "gone" if self.seq % 4 == 0 else "kept"))
            self.seq += 1
        return found

    def _commit(self, hours: list[int]) -> None:
        """The next batch, or the one that was killed, once more."""
        rows = self.open_batch if self.open_batch is not None else self._next(hours)
        archive(self.table, self.batch, rows)
        self.expected += rows
        self.batch += 1
        self.open_batch = None

    @rule(hours=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def commit(self, hours: list[int]) -> None:
        self._commit(hours)

    @rule(hours=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    @precondition(lambda self: self.open_batch is None)
    def commit_that_is_killed(self, hours: list[int]) -> None:
        """All its files are there, and Spark's mark is not."""
        self.open_batch = self._next(hours)
        archive(self.table, self.batch, self.open_batch, done=False)

    @rule(at=st.integers(0, 12), hours=st.lists(st.integers(0, 2), min_size=1, max_size=2), is_killed=st.booleans())
    def compact(self, at: int, hours: list[int], is_killed: bool) -> None:
        """At one of its operations it is killed, or a batch is committed."""
        left = [at]

        def counting(operation):
            def run(*args):
                left[0] -= 1
                if left[0] == -1:
                    if is_killed:
                        raise Killed
                    if not self.locked_for_commits():
                        self._commit(hours)
                return operation(*args)

            return run

        with mock.patch.multiple(
            plain,
            _move=counting(plain._move),
            _link=counting(plain._link),
            _sync=counting(plain._sync),
            _exchange=counting(plain._exchange),
        ):
            try:
                compact(self.table, now=NOW, limits=Limits(min_bytes=1 << 20))
            except Killed:
                pass

    def locked_for_commits(self) -> bool:
        """Whether the archive would have to wait now."""
        found: list[bool] = []

        def look() -> None:
            try:
                with self.table.state.locked("commit.lock", "held"):
                    found.append(False)
            except LakeError:
                found.append(True)

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return found[0]

    @rule()
    def forget(self) -> None:
        left = forget(self.table, b"gone").left
        gone = [each for each in self.expected if each[4] == "gone"]
        assert left or self.open_batch is None or not any(each[4] == "gone" for each in self.open_batch)
        self.expected = [each for each in self.expected if each not in gone]

    @rule(grace=st.sampled_from([0, GRACE]))
    def vacuum(self, grace: float) -> None:
        self.table.vacuum(grace)

    @invariant()
    def each_row_is_there_once(self) -> None:
        assert rows_of(self.table) == sorted(self.expected + (self.open_batch or []))


TestCompaction = Compaction.TestCase
TestCompaction.settings = settings(
    max_examples=examples(80), stateful_step_count=12, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.fixture(scope="module", autouse=True)
def _no_waiting_for_the_disk():
    """A killed process loses no written data, so the tests need not wait for the disk."""
    with mock.patch.object(os, "fsync", return_value=None):
        yield


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_a_disk_that_is_really_full(tmp_path):
    """On a small file system with no space left, compaction fails at whichever operation, and changes no row; with
    space again it succeeds.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", disk], check=False).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        table = filled(disk / "lake")
        before = rows_of(table)
        filler = disk / "filler"
        failures: list[int | None] = []
        for left in range(0, 160, 4):  # KiB
            with open(filler, "wb") as file:
                status = os.statvfs(disk)
                os.posix_fallocate(file.fileno(), 0, max(1, status.f_bavail * status.f_frsize - left * 1024))
            try:
                compact(table, now=NOW)
            except OSError as e:
                failures.append(e.errno)
            assert rows_of(table) == before
            filler.unlink()
        assert len(failures) > 3
        assert set(failures) == {errno.ENOSPC}
        compact(table, now=NOW)
        assert rows_of(table) == before
    finally:
        subprocess.run(["umount", disk], check=True)
