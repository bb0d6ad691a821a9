"""Batches of rows in a good size, for programs to which each batch costs a fixed time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

__all__ = ["resized"]

_MIN_BATCH_ROWS = 16_384
"""Rows below which a batch is joined to the next one: each batch costs a fixed time."""
_MIN_BATCH_BYTES = 4 << 20
"""Bytes from which a batch is large enough, however few rows it has."""
_MAX_BATCH_BYTES = 16 << 20
"""Bytes above which a batch is cut: Spark holds a whole batch in memory, several times."""
_MAX_BATCH_JOURNALS = 127
"""Journals in a batch: the index of a row's journal is one byte (see `sbus.journal.schema`)."""


def resized(
    batches: Iterable[pa.RecordBatch],
    *,
    min_rows: int = _MIN_BATCH_ROWS,
    min_bytes: int = _MIN_BATCH_BYTES,
    max_bytes: int = _MAX_BATCH_BYTES,
) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in batches of a good size.

    Small batches are joined, and large ones cut.

    :param min_rows: rows below which a batch is joined to the next one.
    :param min_bytes: bytes from which a batch is large enough, however few rows it has.
    :param max_bytes: bytes above which a batch is cut.
    """
    waiting: list[pa.RecordBatch] = []
    journals: set[str] = set()
    rows = size = 0
    for batch in batches:
        more = batch.nbytes
        journals |= _journals(batch)
        if rows and (
            rows + batch.num_rows > 4 * min_rows or size + more > max_bytes or len(journals) > _MAX_BATCH_JOURNALS
        ):
            yield pa.concat_batches(waiting)
            waiting, journals, rows, size = [], _journals(batch), 0, 0
        if not rows and (batch.num_rows >= min_rows or more >= min_bytes):
            step = -(-batch.num_rows // -(-more // max_bytes))
            for start in range(0, batch.num_rows, step):
                yield batch.slice(start, step)
            continue
        waiting.append(batch)
        rows += batch.num_rows
        size += more
        if rows >= min_rows or size >= min_bytes:
            yield pa.concat_batches(waiting)
            waiting, journals, rows, size = [], set(), 0, 0
    if rows:
        yield pa.concat_batches(waiting)


def _journals(batch: pa.RecordBatch) -> set[str]:
    """Return the journals that a batch names, if it has that column."""
    return set(batch.column("journal").dictionary.to_pylist()) if "journal" in batch.schema.names else set()
