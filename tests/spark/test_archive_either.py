"""``sbus archive`` and ``sbus spark archive`` write the same lakes: either goes on where the other was."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pyarrow.parquet as pq
import pytest

from sbus.errors import LakeError, SparkError
from sbus.journal.consumers import consumers
from sbus.lake.archive import Archive
from sbus.lake.checkpoint import Checkpoint
from sbus.lake.opening import open_table
from sbus.lake.plain import PlainTable
from sbus.lake.table import Table
from sbus.spark.jobs.archive import Archive as SparkArchive
from sbus.spark.jobs.lake import Lake
from tests.support.archived import archived, files, recorded


def by_itself(journal, lake: Path) -> None:
    """Archive the rows that are there now, without Spark."""
    with Archive([journal.directory], open_table(str(lake)), max_rows=40) as job:
        while not job.wait():
            pass


def on_spark(spark, journal, lake: Path) -> None:
    with SparkArchive(spark, [journal.directory], Lake(lake), max_rows=40) as job:
        while not job.wait(30):
            pass


def record(journal) -> None:
    journal.append([(b"a/\xff/%d" % number, b"%d" % number) for number in range(100)])
    journal.sync()


@pytest.mark.slow
def test_they_take_turns(spark, new_journal, tmp_path):
    """A lake is begun by either and goes on with the other, several times; each row is there once. A batch that one of
    them has planned and not done is done by the other, with the same rows.
    """
    journal = new_journal()
    for name, order in (("one", "sasa"), ("two", "asas")):
        lake = tmp_path / name
        for who in order:
            record(journal)
            if who == "a":
                by_itself(journal, lake)
                record(journal)
                with (
                    mock.patch.object(PlainTable, "commit", side_effect=OSError(5, "broken")),
                    pytest.raises(OSError, match="broken"),
                ):
                    by_itself(journal, lake)
            else:
                on_spark(spark, journal, lake)
                record(journal)
                with (
                    mock.patch.object(PlainTable, "commit", side_effect=OSError(5, "broken")),
                    pytest.raises(SparkError, match="broken"),
                ):
                    on_spark(spark, journal, lake)
            checkpoint = Checkpoint(Lake(lake).checkpoint)
            assert checkpoint.is_planned(checkpoint.last_done() + 1)
            (Path(journal.directory) / "consumers" / "archive.json").rename(tmp_path / "kept")
            record(journal)
            (tmp_path / "kept").rename(Path(journal.directory) / "consumers" / "archive.json")
        by_itself(journal, lake)
        assert archived(lake) == recorded(journal.directory)
        schemas = {tuple(map(str, pq.read_schema(path))) for path in files(lake)}
        assert len(schemas) == 1
        assert consumers(journal.directory) == {"archive": journal.next_seq}
        (Path(journal.directory) / "consumers" / "archive.json").unlink()


def test_both_at_once(new_journal, tmp_path):
    """While one archive writes to a lake, the other is refused, whichever was first."""
    journal = new_journal()
    record(journal)
    lake = tmp_path / "lake"
    with (
        Archive([journal.directory], open_table(str(lake)), every=10.0),
        pytest.raises(LakeError, match="another job writes to this lake"),
    ):
        SparkArchive(mock.Mock(), [journal.directory], Lake(lake)).start()
    table: Table = Lake(lake).table
    with table.writing(), pytest.raises(LakeError, match="another job writes to this lake"):
        by_itself(journal, lake)
