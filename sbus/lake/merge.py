"""Merge Parquet files of recorded rows into few sorted ones, with bounded memory.

Theory of operation
-------------------

Rows are sorted by journal and ``seq``. The archive writes each batch nearly so: the rows of one journal are in order,
within a batch and from one batch to the next. So merging is mostly joining *runs*: pieces of one journal, sorted.

1. *Find the runs.* A file with one journal is a run, by the statistics in its footer. The rows of another file are
   sorted in pieces of `Limits.chunk_bytes` and spilled to an uncompressed Arrow file; each journal in a piece is a run.
2. *Sweep.* Journal by journal, the runs are opened in the order of their first ``seq``. At any time a run has one batch
   of rows in memory. All rows up to the least end of these batches are final: they are sorted and handed on.
3. *Write.* Rows go to a new file until it is large enough. A row group ends at `Limits.group_bytes`.

A file whose rows are not in order after all is found in step 2, and everything is done again with each file spilled.
The same ``seq`` twice is an error: the lake is damaged, and merging must not hide that.

Memory is bounded by a chunk, a row group, and one batch of rows for each run that overlaps another one. Those of a
healthy lake do not overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sbus.errors import LakeError
from sbus.lake.encoding import LATER, RowWriter

__all__ = ["Limits", "Merged", "iter_rows", "merge", "sorted_rows"]

_MIB = 1 << 20
_MAX_BATCH_ROWS = 1 << 16

Opener = Callable[[], AbstractContextManager[pq.ParquetFile]]
Keep = Callable[[pa.RecordBatch], pa.BooleanArray]
"""Says for each row whether it is kept."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes, in bytes.

    :ivar min_bytes: a file with fewer bytes is small, and is merged with others.
    :ivar max_bytes: about how long a file gets at most.
    :ivar group_bytes: rows of a row group, uncompressed.
    :ivar chunk_bytes: rows that are sorted in memory, uncompressed.
    :ivar batch_bytes: rows of a batch, uncompressed.
    """

    min_bytes: int = 128 * _MIB
    max_bytes: int = 256 * _MIB
    group_bytes: int = 64 * _MIB
    chunk_bytes: int = 64 * _MIB
    batch_bytes: int = 8 * _MIB


@dataclass(slots=True)
class Merged:
    """The result of a merge.

    :ivar paths: the new files, in order, synced.
    :ivar rows: their rows.
    :ivar dropped: rows that were not kept.
    """

    paths: list[Path] = field(default_factory=list)
    rows: int = 0
    dropped: int = 0


class _UnsortedError(Exception):
    """A file whose rows were taken for sorted."""


@dataclass(slots=True)
class _Run:
    """Sorted rows of one journal.

    :ivar batches: opens it, and yields its rows.
    :ivar rows: the rows that are in memory.
    """

    journal: str
    first: int
    batches: Callable[[], Iterator[pa.RecordBatch]]
    rows: pa.RecordBatch | None = None
    _source: Iterator[pa.RecordBatch] | None = None

    def fill(self) -> None:
        """Put the next rows into memory; after the last, `rows` is None."""
        if self._source is None:
            self._source = self.batches()
        before = self.last if self.rows is not None else self.first - 1
        self.rows = next(self._source, None)
        if self.rows is not None:
            seqs = self.rows.column("seq")
            if seqs[0].as_py() < before or pc.all(pc.greater_equal(seqs[1:], seqs[:-1])).as_py() is False:
                raise _UnsortedError

    @property
    def last(self) -> int:
        """The last ``seq`` that is in memory."""
        assert self.rows is not None
        return int(self.rows.column("seq")[-1].as_py())

    def take(self, bound: int) -> pa.RecordBatch:
        """Return the rows in memory up to a ``seq``, and keep the others."""
        rows = self.rows
        assert rows is not None
        if self.last <= bound:
            self.fill()
            return rows
        count = pc.sum(pc.less_equal(rows.column("seq"), bound)).as_py() or 0
        self.rows = rows.slice(count)
        return rows.slice(0, count)


def merge(
    sources: Sequence[Opener], directory: Path, size: int, limits: Limits | None = None, keep: Keep | None = None
) -> Merged:
    """Write the rows of files into new ones, sorted by journal and ``seq``.

    :param sources: open the files; each may be called several times.
    :param directory: an empty directory of this process, for the new files and for spilled rows.
    :param size: the bytes of all sources.
    :param keep: which rows to keep; None: all.
    :raises sbus.errors.LakeError: if a row is there twice.
    :raises OSError: if a file cannot be read or written, as on a full disk.
    """
    limits = limits or Limits()
    for spills in (False, True):
        result = Merged()
        writer = _new_writer(directory, size, limits, result.paths)
        try:
            for rows in _sweep(_all_runs(sources, directory, limits, spills)):
                kept = rows if keep is None else rows.filter(keep(rows))
                result.rows += kept.num_rows
                result.dropped += rows.num_rows - kept.num_rows
                if kept.num_rows:
                    writer.write(kept)
            writer.finish()
            return result
        except _UnsortedError:
            if spills:
                raise AssertionError("rows that were sorted are not") from None
        finally:
            writer.close()
            for path in directory.glob("spilled-*"):
                path.unlink()
    raise AssertionError


def _new_writer(directory: Path, size: int, limits: Limits, paths: list[Path]) -> RowWriter:
    """Return a writer of sorted rows.

    :param size: the bytes of all sources.
    :param paths: the path of each new file is added to it.
    """

    def new_path() -> Path:
        paths.append(directory / f"part-{len(paths):05}.parquet")
        return paths[-1]

    def is_full(written: int) -> bool:
        # Two files of half the size are better than a large one and a tiny one.
        return written + limits.group_bytes // 4 > limits.max_bytes or (
            written >= limits.min_bytes and size - writer.ended_bytes - written >= limits.min_bytes
        )

    writer = RowWriter(new_path, limits.group_bytes, is_full, is_sorted=True)
    return writer


def sorted_rows(sources: Sequence[Opener], directory: Path, limits: Limits) -> Iterator[pa.RecordBatch]:
    """Yield the rows of files in order, in batches of one journal each.

    :param sources: open the files; each may be called several times.
    :param directory: an empty directory of this process, for spilled rows.
    :raises sbus.errors.LakeError: if a row is there twice.
    """
    spill = any(not _is_sorted(source, limits) for source in sources)
    yield from _sweep(_all_runs(sources, directory, limits, spill))


def _is_sorted(source: Opener, limits: Limits) -> bool:
    """Return whether the rows of a file with one journal are in order."""
    with source() as file:
        if _extent(file.metadata) is None:
            return True  # it is sorted when it is spilled
        last = -1
        for rows in iter_rows(file, limits, ["seq"]):
            seqs = rows.column("seq")
            if seqs[0].as_py() < last or pc.all(pc.greater_equal(seqs[1:], seqs[:-1])).as_py() is False:
                return False
            last = seqs[-1].as_py()
    return True


# --- runs ---------------------------------------------------------------------------------------


def iter_rows(file: pq.ParquetFile, limits: Limits, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file in batches of bounded size.

    Columns that a file of an earlier version lacks are null. So files of any age can be merged, and none is written
    again for a new column.

    :param columns: the names of the columns, in the order of a journal; None: all.
    """
    metadata = file.metadata
    size = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    # Plain columns repeat what a dictionary says once, hence the constant.
    per_row = size / max(1, metadata.num_rows) + 100
    rows = max(1, min(_MAX_BATCH_ROWS, int(limits.batch_bytes / per_row)))
    for batch in file.iter_batches(batch_size=rows, columns=columns, use_threads=False):
        if batch.num_rows:
            for name, type_ in LATER.items():
                if name not in batch.schema.names and (columns is None or name in columns):
                    batch = batch.append_column(name, pa.nulls(batch.num_rows, type_))
            yield batch


def _all_runs(sources: Sequence[Opener], directory: Path, limits: Limits, spills: bool) -> list[_Run]:
    """Return the runs of files.

    :param spills: whether each file is sorted and spilled, even if its footer says that it is sorted.
    """
    return [
        run
        for number, source in enumerate(sources)
        for run in _find_runs(source, directory / f"spilled-{number}", limits, spills)
    ]


def _find_runs(source: Opener, spill: Path, limits: Limits, spills: bool) -> list[_Run]:
    with source() as file:
        if not file.metadata.num_rows:
            return []
        extent = None if spills else _extent(file.metadata)
        if extent is not None:
            return [_Run(*extent, lambda: _rows_of(source, limits))]
        return _spill(file, spill, limits)


def _rows_of(source: Opener, limits: Limits) -> Iterator[pa.RecordBatch]:
    with source() as file:
        yield from iter_rows(file, limits)


def _extent(metadata: pq.FileMetaData) -> tuple[str, int] | None:
    """Return the journal and the first ``seq`` of a file, if it has one journal."""
    names = metadata.schema.names
    journals: set[str] = set()
    firsts: list[int] = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        journal = group.column(names.index("journal")).statistics
        seq = group.column(names.index("seq")).statistics
        if journal is None or seq is None or not (journal.has_min_max and seq.has_min_max):
            return None
        journals |= {journal.min, journal.max}
        firsts.append(seq.min)
    return (journals.pop(), min(firsts)) if len(journals) == 1 else None


def _spill(file: pq.ParquetFile, path: Path, limits: Limits) -> list[_Run]:
    """Sort the rows of a file in pieces, and return the runs in these."""
    found: list[tuple[str, int, int, int, int]] = []
    schema = file.schema_arrow
    for name, type_ in LATER.items():
        if name not in schema.names:
            schema = schema.append(pa.field(name, type_))
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for number, rows in enumerate(_chunks(iter_rows(file, limits), limits.chunk_bytes)):
            ordered = rows.sort_by([("journal", "ascending"), ("seq", "ascending")]).combine_chunks()
            (batch,) = ordered.to_batches()
            writer.write_batch(batch)
            runs = pc.run_end_encode(batch.column("journal"))
            start = 0
            for journal, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
                found.append((journal, batch.column("seq")[start].as_py(), number, start, end))
                start = end
    return [
        _Run(journal, first, lambda number=number, start=start, end=end: _spilled(path, limits, number, start, end))  # type: ignore[misc]
        for journal, first, number, start, end in found
    ]


def _spilled(path: Path, limits: Limits, number: int, start: int, end: int) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(str(path)) as source:
        batch = pa.ipc.open_file(source).get_batch(number)
        per_row = batch.nbytes / max(1, batch.num_rows) + 1
        rows = max(1, min(_MAX_BATCH_ROWS, int(limits.batch_bytes / per_row)))
        for at in range(start, end, rows):
            yield batch.slice(at, min(rows, end - at))


def _chunks(batches: Iterable[pa.RecordBatch], size: int) -> Iterator[pa.Table]:
    waiting: list[pa.RecordBatch] = []
    filled = 0
    for batch in batches:
        waiting.append(batch)
        filled += batch.nbytes
        if filled >= size:
            yield pa.Table.from_batches(waiting)
            waiting, filled = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting)


def _sweep(runs: Sequence[_Run]) -> Iterator[pa.RecordBatch]:
    """Yield all rows in order.

    :raises sbus.errors.LakeError: if a row is there twice.
    """
    waiting = sorted(runs, key=lambda run: (run.journal, run.first), reverse=True)
    while waiting:
        journal = waiting[-1].journal
        active: list[_Run] = []
        last = -1
        while active or (waiting and waiting[-1].journal == journal):
            if not active:
                active.append(_opened(waiting.pop()))
            bound = min(run.last for run in active)
            while waiting and waiting[-1].journal == journal and waiting[-1].first <= bound:
                active.append(_opened(waiting.pop()))
                bound = min(bound, active[-1].last)
            parts = [rows for run in active if (rows := run.take(bound)).num_rows]
            active = [run for run in active if run.rows is not None]
            rows = parts[0] if len(parts) == 1 else _sorted(parts)
            seqs = rows.column("seq")
            if seqs[0].as_py() <= last or pc.all(pc.less(seqs[:-1], seqs[1:])).as_py() is False:
                raise LakeError(
                    f"the lake has rows of journal {journal} twice, at about row {seqs[0].as_py()}: "
                    "see sbus lake check, and restore it from a copy"
                )
            last = seqs[-1].as_py()
            yield rows


def _opened(run: _Run) -> _Run:
    run.fill()
    return run


def _sorted(parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    table = pa.Table.from_batches(parts).sort_by([("seq", "ascending")])
    (batch,) = table.combine_chunks().to_batches()
    return batch
