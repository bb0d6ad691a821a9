"""Lakes for tests, without Spark: batches as the archive would commit them, and their rows as readers find them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sbus.journal.senders import TYPES
from sbus.lake.table import Hour, Table, open_parquet

__all__ = ["Row", "archive", "row", "rows_of"]

_TYPES = pa.schema(
    [
        ("journal", pa.string()),
        ("seq", pa.int64()),
        ("time", pa.timestamp("us", tz="UTC")),
        ("kind", pa.string()),
        ("key", pa.string()),
        ("payload", pa.binary()),
    ]
)
_START = datetime(2026, 1, 31, tzinfo=UTC)

Row = tuple[str, int, datetime, str, str, bytes]


def row(journal: str, seq: int, hour: int, key: str = "a/b", payload: bytes = b"x") -> Row:
    """A message in an hour, counted from 2026-01-31 00:00."""
    return journal, seq, _START + timedelta(hours=hour, microseconds=seq), "message", key, payload


def archive(
    table: Table,
    batch: int,
    rows: Iterable[Row],
    *,
    done: bool = True,
    sender: Sequence[object] | None = None,
    host: str | None = None,
) -> None:
    """Do to a lake what the archive does with a batch.

    :param sender: who published the rows, in the order of `TYPES`; None: files from before publishers were recorded.
    :param host: where they were recorded; None: files of a version that did not say that.
    """
    state = table.state
    state.make_directories(state.staging)
    state.make_checkpoint()
    (state.checkpoint / "metadata").write_text('{"id": "1"}')
    (state.checkpoint / "offsets" / str(batch)).write_text("v1\n{}\n{}\n")
    staged = Path(tempfile.mkdtemp(dir=state.staging))
    hours: dict[Hour, list[Row]] = {}
    for each in rows:
        hours.setdefault(Hour.of(each[2]), []).append(each)
    for hour, found in hours.items():
        path = staged / hour.directory / "part-0.parquet"
        path.parent.mkdir(parents=True)
        columns = [list(column) for column in zip(*found, strict=True)]
        written = pa.table(dict(zip(_TYPES.names, columns, strict=True)), schema=_TYPES)
        if sender is not None:
            for (name, type_), value in zip(TYPES.items(), sender, strict=True):
                written = written.append_column(name, pa.array([value] * len(found), type_))
        if host is not None:
            written = written.append_column("host", pa.array([host] * len(found)))
        pq.write_table(written, path)
    table.commit(batch, staged)
    if done:
        (state.checkpoint / "commits" / str(batch)).write_text("v1\n{}\n")


def rows_of(table: Table) -> list[Row]:
    """The rows that a reader finds, sorted, with duplicates; each must be in a file of its hour."""
    found: list[Row] = []
    for file in table.files():
        with open_parquet(table, file) as parquet:
            for each in parquet.read().to_pylist():
                assert Hour.of(each["time"]) == file.hour
                found.append(tuple(each[name] for name in _TYPES.names))
    return sorted(found)
