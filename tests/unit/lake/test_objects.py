"""Lakes in object storage, on a real server: each batch is there once, also after kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("deltalake", reason="the extra delta is not installed")

from deltalake import DeltaTable

from sbus.errors import StorageError
from sbus.lake.delta import DeltaLake
from sbus.lake.maintenance import compact, forget
from sbus.lake.opening import open_table
from sbus.lake.table import Hour
from tests.support.lakes import archive, row, rows_of
from tests.support.objects import object_storage

NOW = Hour("2026-02-02", 0).start.timestamp()

# It archives batches of ten rows, and begins where Spark would begin: behind the last batch that is done.
ARCHIVE = """
import sys
from pathlib import Path
from sbus.lake.delta import DeltaLake
from tests.support.lakes import archive, row
table = DeltaLake(sys.argv[1], Path(sys.argv[2]))
for batch in range(table.state.settled() + 1, 8):
    archive(table, batch, [row("one", 10 * batch + n, (batch + n) // 5) for n in range(10)])
    print(batch, flush=True)
"""


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with object_storage() as url:
        yield url


@pytest.mark.slow
def test_a_lake_in_a_bucket(bucket, tmp_path):
    """Batches, a repeated batch, compaction and forgetting work on a URL as in a directory; the state is local."""
    table = open_table(f"{bucket}/one", state=tmp_path / "state")
    assert isinstance(table, DeltaLake)
    for batch in (0, 1, 1, 2):
        archive(table, batch, [row("one", 10 * batch + n, n // 5, f"k/{n}") for n in range(10)])
    before = rows_of(table)
    assert len(before) == 30
    assert compact(table, now=NOW).after == 2
    assert rows_of(table) == before
    assert forget(table, b"k/3").dropped == 3
    assert rows_of(table) == [each for each in before if each[4] != "k/3"]
    assert (tmp_path / "state/checkpoint/commits/2").exists()
    with pytest.raises(StorageError, match="check the address and the credentials"):
        archive(DeltaLake(bucket.replace("bucket", "nobody") + "/x", tmp_path / "other"), 0, [row("one", 0, 0)])


@pytest.mark.slow
def test_kills_between_upload_and_commit(bucket, tmp_path):
    """The archive of a bucket is killed at many moments; at last each row is there once."""
    location, state = f"{bucket}/kills", tmp_path / "state"
    command = [sys.executable, "-c", ARCHIVE, location, str(state)]
    for life in range(12):
        with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": "."}) as process:
            try:
                process.wait(0.5 + life * 0.13)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": "."}, stdout=subprocess.DEVNULL)
    assert rows_of(DeltaLake(location, state)) == sorted(
        row("one", 10 * batch + n, (batch + n) // 5) for batch in range(8) for n in range(10)
    )


@pytest.mark.slow
def test_a_killed_commit_is_found_in_the_log(bucket, tmp_path, monkeypatch):
    """Killed behind the upload, the batch is uploaded again; killed behind the commit, it is not added again."""
    table = DeltaLake(f"{bucket}/killed", tmp_path / "state")

    class Killed(BaseException):
        pass

    rows = [row("one", n, n // 5) for n in range(10)]
    real = DeltaTable.create_write_transaction

    def before(*args, **kwargs):
        raise Killed

    def behind(*args, **kwargs):
        real(*args, **kwargs)
        raise Killed

    for moment in (before, behind):
        monkeypatch.setattr(DeltaTable, "create_write_transaction", moment)
        with pytest.raises(Killed):
            archive(table, 0, rows)
    monkeypatch.setattr(DeltaTable, "create_write_transaction", real)
    archive(table, 0, rows)
    assert rows_of(table) == rows
    assert Path(table.state.directory) == tmp_path / "state"
