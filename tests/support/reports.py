"""Sources of reports for tests: rows that a test lists."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import pyarrow as pa

from sbus.lake.hourly import Hourly
from sbus.report.engine.sources import Extent
from sbus.report.spans import Span

__all__ = ["ListedRow", "ListedRows", "numbered"]


class ListedRow(NamedTuple):
    """A row of a journal; its time is in µs since the epoch."""

    journal: str
    seq: int
    time: int
    kind: str
    key: str
    payload: bytes
    uid: int | None = None


def numbered(
    journal: str, rows: Iterable[tuple[int, str, str | Mapping[str, object] | bytes]], size: int = 8
) -> list[ListedRow]:
    """Return rows of a journal in order of time: (time, ``message``, key), or (time, another kind, its details)."""
    found = []
    for seq, (time, kind, what) in enumerate(sorted(rows, key=lambda row: row[0])):
        if kind == "message":
            found.append(ListedRow(journal, seq, time, kind, str(what), bytes(size)))
        else:
            details = what if isinstance(what, bytes) else json.dumps(what).encode()
            found.append(ListedRow(journal, seq, time, kind, "", details))
    return found


class ListedRows:
    """Rows as a source.

    :param rows: in any order; each batch that it yields has at most `batch` of them, of one or more journals.
    :param hosts: the host of each journal.
    """

    def __init__(self, rows: Sequence[ListedRow], hosts: Mapping[str, str] | None = None, batch: int = 10_000) -> None:
        self._hosts = hosts or {}
        self._rows = rows
        self._batch = batch

    def extent(self, latest: int) -> Extent:
        times = [row.time for row in self._rows]
        good = [time for time in times if time <= latest]
        return Extent(min(times, default=None), max(good, default=None), len(times) - len(good))

    def rows(self, span: Span) -> Iterator[pa.RecordBatch]:
        for at in range(0, len(self._rows), self._batch):
            journal, seq, time, kind, key, payload, uid = zip(*self._rows[at : at + self._batch], strict=True)
            yield pa.RecordBatch.from_pydict(
                {
                    "journal": pa.array(journal),
                    "seq": pa.array(seq, pa.int64()),
                    "time": pa.array(time, pa.timestamp("us", tz="UTC")),
                    "kind": pa.array(kind),
                    "key": pa.array(key),
                    "payload": pa.array(payload, pa.binary()),
                    "sender_uid": pa.array(uid, pa.int64()),
                    "sender_number": pa.nulls(len(uid), pa.int64()),
                    "host": pa.array([self._hosts.get(each) for each in journal], pa.utf8()),
                }
            )

    def counted(self, period: Span) -> AbstractContextManager[Hourly | None]:
        return nullcontext()
