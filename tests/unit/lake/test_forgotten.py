"""``forget`` is complete or says so: if nothing is left, no file has a message with the key, whatever was killed."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sbus.lake.cube import update
from sbus.lake.maintenance import by_hour, forget
from sbus.lake.opening import open_table
from sbus.lake.plain import PlainTable
from sbus.lake.table import Hour, Table
from tests.support import ROOT, nursery
from tests.support.lakes import archive, row

SECRET = "people/jo"
NOW = Hour("2026-02-02", 0).start.timestamp()

# It is killed before one of its file operations; compaction comes first, so that both leave something.
KILLED = """
import os, signal, sys
from sbus.lake.maintenance import compact
from sbus.lake.opening import open_table
from tests.unit.lake.test_forgotten import NOW, rows
from tests.support.lakes import archive

table, left = open_table(sys.argv[1]), [int(sys.argv[2])]

def count(event, args):
    if event in ("os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "ctypes.dlopen") or (
        event == "open" and isinstance(args[0], str) and args[0].startswith(os.path.dirname(sys.argv[1]))
    ):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(count)
if sys.argv[3] == "compact":
    compact(table, now=NOW)
else:
    archive(table, 3, rows(3))
"""


def rows(batch: int) -> list:
    return [row("one", 10 * batch + n, n // 5, SECRET if n % 3 == 0 else "people/al") for n in range(10)]


def fill(location: Path, format_: str) -> Table:
    table = open_table(str(location), format=format_)
    for batch in range(3):
        archive(table, batch, rows(batch))
    return table


def traces(table: Table) -> Iterator[Path]:
    """All files of a lake and its state in which the key is, or that cannot be read."""
    for place in (Path(table.location), table.state.directory):
        for path in place.rglob("*"):
            if not path.is_file():
                continue
            if path.suffix != ".parquet" or "_delta_log" in path.parts or not path.stat().st_size:
                has_key = SECRET.encode() in path.read_bytes()
            else:
                has_key = SECRET in pq.read_table(path, columns=["key"])["key"].to_pylist()
            if has_key:
                yield path


@pytest.mark.parametrize(
    ("format_", "step", "what"),
    [
        # A process for each kill: make test has few, each format and each work with one of them.
        pytest.param(format_, step, what, marks=[] if (format_, what) in quick else pytest.mark.slow)
        for step, quick in ((1, ()), (19, (("delta", "archive"),)))
        for format_ in ("parquet", "delta")
        for what in ("archive", "compact")
    ],
)
def test_what_a_killed_process_leaves_is_forgotten(tmp_path: Path, format_: str, step: int, what: str) -> None:
    """An archive or a compaction is killed at any of its operations. If ``forget`` reports that nothing is left, that
    is so; and when the archive is done with its batch, nothing is.
    """
    if format_ == "delta":
        pytest.importorskip("deltalake", reason="the extra delta is not installed")
    base = fill(tmp_path / "base", format_)
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    operations, was_killed = 0, True
    while was_killed:
        lake = tmp_path / f"lake-{operations}"
        for suffix in ("", ".sbus"):
            shutil.copytree(f"{base.location}{suffix}", f"{lake}{suffix}")
        command = [str(script), str(lake), str(operations), what]
        done = nursery.run(command, env=environ)
        was_killed = done.returncode == -signal.SIGKILL
        assert was_killed or done.returncode == 0
        table = open_table(str(lake))
        assert list(traces(table))
        if forget(table, SECRET.encode()).left == 0:
            assert not list(traces(table))
        if table.state.settled() < 3:
            archive(table, 3, rows(3))
        assert forget(table, SECRET.encode()).left == 0
        assert not list(traces(table))
        for suffix in ("", ".sbus"):
            shutil.rmtree(f"{lake}{suffix}")
        operations += step
    assert operations > 9


@pytest.mark.parametrize("format_", ["parquet", "delta"])
def test_beside_an_archive_that_runs(tmp_path: Path, format_: str) -> None:
    """What an archive may be writing stays, and is counted: staged files, and files with the key that no commit names.
    When the archive has ended, they go.
    """
    if format_ == "delta":
        pytest.importorskip("deltalake", reason="the extra delta is not installed")
    table = fill(tmp_path / "lake", format_)
    staged = table.state.staging / "0000000003-half" / "date=2026-01-31/hour=00/part-0.parquet"
    staged.parent.mkdir(parents=True)
    staged.write_bytes(b"PAR1 half a file")
    expected = 1
    if format_ == "delta":
        named = Path(table.location) / table.files()[0].name
        shutil.copy(named, named.with_name("0000000003-uploaded.parquet"))
        named.with_name("0000000003-broken.parquet").write_bytes(b"PAR1")
        expected += 2
    with table.state.locked("lock"):
        assert forget(table, SECRET.encode()).left == expected
        assert staged.exists()
    assert forget(table, SECRET.encode()).left == 0
    assert not list(traces(table))


def test_counts_that_are_made_meanwhile(tmp_path: Path) -> None:
    """A report that counts an hour keeps ``forget`` waiting, and cannot count rows that it has listed before: they are
    gone. What a killed report has left goes, too.
    """
    table = fill(tmp_path / "lake", "parquet")
    assert isinstance(table, PlainTable)
    hours = dict(by_hour(table.files()))
    update(table, hours)
    left = table.state.directory / "cube/building-1/spilled-0"
    left.parent.mkdir()
    left.write_text(SECRET)
    forget(table, SECRET.encode())
    with pytest.raises(FileNotFoundError):
        update(table, hours)
    assert not list(traces(table))
