"""The hourly cube: counts of the closed hours of a lake, kept beside it, so that a long report need not read its rows.

Theory of operation
-------------------

For each closed hour there are two small files in the state of the lake::

    cube/2026-01-31T07-<digest>.counts.parquet    messages by journal, key, payload size and publisher
    cube/2026-01-31T07-<digest>.rows.parquet      the rows that are not messages, and those beside them

The digest covers the names of the hour's files and the columns of both. A name always stands for the same rows, so
counts with the digest of the current files are correct. Others are left over from before a compaction, a ``forget`` or
a new version of sbus, and are removed. The counts are a cache, made again when a report needs them. One lock is held
while an hour is counted and while counts are removed, so that no process adds counts of rows that ``forget`` has just
removed: what it counts later, it finds gone.

*Counts* have the number of messages and bytes, and the first and last time, of each key, payload size and publisher.
Sizes keep six significant bits: up to 63 they are exact, and above that at most 1.6 % too small. A publisher is the
UID of a user, `PROGRAM` or `UNKNOWN`.

*Rows* are all that a report needs of the others: gaps with the rows before and after them, and of each journal the
rows with the least and greatest time and number.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sbus.journal.digests import is_message, payload_lengths
from sbus.journal.schema import COLUMN_NAMES, Kind
from sbus.lake.merge import Limits, sorted_rows
from sbus.lake.table import DataFile, Hour, Table, open_parquet
from sbus.ownership import replacing

__all__ = ["PROGRAM", "UNKNOWN", "build", "clean", "publishers", "update"]

PROGRAM, UNKNOWN = -1, -2
"""Publishers that are not users: the program around the bus, and unknown publishers."""

_LOCK = "cube.lock"
_KEYS = ["journal", "key", "size", "publisher"]
_SUMS = [("n", "sum"), ("bytes", "sum"), ("first", "min"), ("last", "max")]
_SIZE_BITS = 6


def update(table: Table, hours: dict[Hour, list[DataFile]]) -> dict[Hour, tuple[str, str]]:
    """Make the counts of some hours, unless they are there.

    :param hours: closed hours, with all their files.
    :returns: for each hour the paths of its counts and of its rows.
    :raises FileNotFoundError: if a file has been replaced meanwhile.
    :raises OSError: if the state cannot be written.
    """
    directory = table.state.directory / "cube"
    table.state.make_directories(directory)
    found = {}
    for hour, files in hours.items():
        base = _base(directory, hour, files)
        paths = f"{base}.counts.parquet", f"{base}.rows.parquet"
        if not all(map(os.path.exists, paths)):
            with table.state.locked(_LOCK):
                build(table, files, directory, paths)
        found[hour] = paths
    return found


def clean(table: Table, hours: dict[Hour, list[DataFile]]) -> None:
    """Remove the counts of files that are no longer there, and what killed processes have left.

    :param hours: all hours of the lake.
    """
    directory = table.state.directory / "cube"
    if not directory.exists():
        return
    valid = {os.path.basename(_base(directory, hour, files)) for hour, files in hours.items()}
    with table.state.locked(_LOCK), table.state.inside("cube") as found:
        for path in found.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.split(".")[0] not in valid or path.suffix != ".parquet":
                path.unlink(missing_ok=True)


def _base(directory: Path, hour: Hour, files: Sequence[DataFile]) -> str:
    names = "\n".join([*_KEYS, *COLUMN_NAMES, *sorted(file.name for file in files)])
    return str(directory / f"{hour.date}T{hour.hour:02}-{hashlib.sha256(names.encode()).hexdigest()[:32]}")


def build(table: Table, files: Sequence[DataFile], directory: Path, paths: tuple[str, str]) -> None:
    """Count the rows of an hour.

    :param files: all files of the hour.
    :param directory: for temporary files.
    :param paths: where to write the counts, and the rows.
    :raises sbus.errors.LakeError: if a row is there twice.
    :raises FileNotFoundError: if a file has been replaced meanwhile.
    :raises OSError: if a file cannot be written.
    """
    work = directory / f"building-{os.getpid()}"
    table.state.make_directories(work)
    parts: list[pa.Table] = []
    kept = _Kept()
    try:
        sources = [lambda file=file: open_parquet(table, file) for file in files]
        for rows in sorted_rows(sources, work, Limits()):
            kept.add(rows)
            parts.append(_count(rows))
            if len(parts) > 64:
                parts = [_sum(parts)]
        for made, path in ((_sum(parts), paths[0]), (kept.table(), paths[1])):
            with replacing(path, table.state.file_mode) as file:
                pq.write_table(made, file, compression="zstd", store_schema=False)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _count(rows: pa.RecordBatch) -> pa.Table:
    messages = rows.filter(is_message(rows.column("kind")))
    length = payload_lengths(messages)
    times = messages.column("time").cast(pa.int64())
    table = pa.table(
        {
            "journal": messages.column("journal"),
            "key": messages.column("key"),
            "size": _rounded(length),
            "publisher": publishers(messages),
            "n": pa.repeat(pa.scalar(1, pa.int64()), messages.num_rows),
            "bytes": length,
            "first": times,
            "last": times,
        }
    )
    return _grouped(table)


def publishers(messages: pa.RecordBatch) -> pa.Array:
    """Return the publisher of each message: the UID of a user, `PROGRAM` or `UNKNOWN`."""
    is_program = pc.equal(messages.column("sender_number"), 0)
    return pc.coalesce(messages.column("sender_uid"), pc.if_else(is_program, PROGRAM, UNKNOWN), UNKNOWN)


def _rounded(sizes: pa.Array) -> pa.Array:
    """Clear all but the first bits of each size."""
    bits = pc.cast(pc.floor(pc.log2(pc.max_element_wise(sizes, 1))), pa.int64())
    shift = pc.max_element_wise(pc.subtract(bits, _SIZE_BITS - 1), 0)
    return pc.shift_left(pc.shift_right(sizes, shift), shift)


def _sum(parts: Sequence[pa.Table]) -> pa.Table:
    return _grouped(pa.concat_tables(parts))


def _grouped(table: pa.Table) -> pa.Table:
    grouped = table.group_by(_KEYS, use_threads=False).aggregate(_SUMS)
    return grouped.select([*_KEYS, *(f"{name}_{how}" for name, how in _SUMS)]).rename_columns(
        [*_KEYS, *(name for name, _ in _SUMS)]
    )


class _Kept:
    """The rows that a report needs one by one, out of rows in order."""

    def __init__(self) -> None:
        self._parts: list[pa.RecordBatch] = []
        self._before: pa.RecordBatch | None = None  # the last row so far
        self._extremes: dict[tuple[str, str], tuple[int, pa.RecordBatch]] = {}
        self._takes_next = False
        self._schema: pa.Schema | None = None

    def add(self, rows: pa.RecordBatch) -> None:
        """Look at the next rows, all of one journal."""
        self._schema = rows.schema
        journal = rows.column("journal")[0].as_py()
        is_special = pc.invert(is_message(rows.column("kind")))
        wanted: set[int] = {0} if self._takes_next else set()
        for at in pc.indices_nonzero(is_special).to_pylist():
            wanted |= {at - 1, at, at + 1}
        if -1 in wanted and self._before is not None:
            self._parts.append(self._before)
        inside = sorted(at for at in wanted if 0 <= at < rows.num_rows)
        if inside:
            self._parts.append(rows.take(pa.array(inside)))
        self._takes_next = rows.num_rows in wanted
        self._before = _copied(rows.slice(rows.num_rows - 1))
        for name in ("time", "seq"):
            values = rows.column(name).cast(pa.int64())
            for sign, found in ((1, pc.max(values).as_py()), (-1, pc.min(values).as_py())):
                place = (journal, f"{name}{sign}")
                if place not in self._extremes or sign * found > self._extremes[place][0]:
                    at = pc.index(values, found).as_py()
                    self._extremes[place] = (sign * found, _copied(rows.slice(at, 1)))

    def table(self) -> pa.Table:
        """Return the rows, each once."""
        parts = [*self._parts, *(row for _, row in self._extremes.values())]
        rows = pa.Table.from_batches(parts, schema=self._schema)
        return pa.Table.from_pylist(list(_unique(rows)), schema=self._schema)


def _unique(rows: pa.Table) -> Iterator[dict[str, object]]:
    seen = set()
    for row in rows.sort_by([("journal", "ascending"), ("seq", "ascending")]).to_pylist():
        place = row["journal"], row["seq"]
        if place not in seen:
            seen.add(place)
            yield row if row["kind"] != Kind.MESSAGE else row | {"payload": b""}


def _copied(row: pa.RecordBatch) -> pa.RecordBatch:
    """Copy a row, so that it does not keep its batch in memory."""
    return row.take(pa.array([0]))
