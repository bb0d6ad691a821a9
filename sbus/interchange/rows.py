"""Rows as plain Python objects, and the selection of a journal's rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from datetime import datetime
from itertools import starmap
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from sbus.journal import clock
from sbus.journal.digests import is_message
from sbus.journal.reader import JournalReader, read
from sbus.journal.senders import TYPES
from sbus.protocol.keys import OpenPattern

__all__ = ["SENDER_COLUMNS", "Row", "Selection", "sender_text"]

_COLUMNS = ("seq", "time", "kind", "key", "payload")
"""The columns of a row, without its sender."""
SENDER_COLUMNS = ("sender_number", "sender_uid", "sender_gid", "sender_pid", "sender_chain")
"""The columns of its sender, in the order of `sender_text`."""
_CACHED_KEYS = 100_000
"""Size of the cache of keys that match or do not, in keys."""


class Row(NamedTuple):
    """A row.

    :ivar seq: its number.
    :ivar time: in µs since the epoch.
    :ivar kind: the value of its `Kind`.
    :ivar sender: its publisher in the bus's text form; empty if unknown.
    """

    seq: int
    time: int
    kind: str
    key: bytes
    payload: bytes
    sender: bytes = b""


class Selection:
    """Select rows of one journal: all that it has now, or those that `limit` chooses.

    :param directory: the directory of the journal.
    :param patterns: leave out messages whose key matches none of these; empty for all messages.
    :param kinds: leave out rows of other kinds; None: all kinds.
    :param sender: whether to read the publishers of rows.
    :ivar reader: the reader of the journal.
    :ivar start: the number of the first row; `end`: that after the last row.
    """

    def __init__(
        self,
        directory: str,
        patterns: Collection[bytes] = (),
        *,
        kinds: Collection[str] | None = None,
        sender: bool = True,
    ) -> None:
        """
        :raises JournalError: if the directory is not a journal.
        """
        self.reader = JournalReader(directory)
        self.start, self.end = self.reader.start(), self.reader.end()
        self.has_senders = sender
        self._patterns = [OpenPattern(pattern) for pattern in patterns]
        self._kinds = kinds
        self._is_match: dict[bytes, bool] = {}
        self._min_time: int | None = None
        self._max_time: int | None = None

    def limit(
        self,
        since: datetime | None = None,
        until: datetime | None = None,
        first: int | None = None,
        last: int | None = None,
    ) -> None:
        """Choose rows by time, from `since` until before `until`, and by number, `first` to `last` inclusive."""
        if since:
            self._min_time = clock.from_datetime(since)
            self.start = max(self.start, self.reader.seq_at_time(self._min_time))
        if until:
            # Not a row to stop at: if the clock was set back, earlier rows follow later ones.
            self._max_time = clock.from_datetime(until) - 1
        if first is not None:
            self.start = max(self.start, first)
        if last is not None:
            self.end = min(self.end, last + 1)

    def rows(self, start: int | None = None, end: int | None = None) -> Iterator[Row]:
        """Yield the chosen rows, or those of them between two numbers.

        :raises JournalError: if they are damaged, or retention has deleted some.
        """
        for batch in self.batches((*_COLUMNS, *TYPES) if self.has_senders else _COLUMNS, start, end):
            columns = [
                (batch.column("time").cast(pa.int64()) if name == "time" else batch.column(name)).to_pylist()
                for name in _COLUMNS
            ]
            if self.has_senders:
                columns.append(_senders(batch))
            yield from starmap(Row, zip(*columns, strict=True))

    def batches(
        self, columns: Collection[str], start: int | None = None, end: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the same rows as batches.

        :param columns: the names of the columns; ``time``, ``kind`` and ``key`` are among them.
        :raises JournalError: as `rows` does.
        """
        start, end = self.start if start is None else start, self.end if end is None else end
        for part in self.reader.plan(start, end, kinds=self._kinds, min_time=self._min_time, max_time=self._max_time):
            for batch in read(part, tuple(columns)):
                batch = self._matching(self._in_time(batch))
                if batch.num_rows:
                    yield batch

    def _in_time(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows within the chosen times."""
        times = batch.column("time").cast(pa.int64())
        if self._min_time is not None:
            batch = batch.filter(pc.greater_equal(times, self._min_time))
            times = batch.column("time").cast(pa.int64())
        return batch if self._max_time is None else batch.filter(pc.less_equal(times, self._max_time))

    def _matching(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows that match the patterns, and those without a key."""
        if not self._patterns:
            return batch
        keys = batch.column("key").dictionary_encode()
        known = pa.array([self._matches(key) for key in keys.dictionary.to_pylist()], pa.bool_())
        is_gap = pc.invert(is_message(batch.column("kind").cast(pa.utf8())))
        return batch.filter(pc.or_(known.take(keys.indices), is_gap))

    def _matches(self, key: bytes) -> bool:
        known = self._is_match.get(key)
        if known is None:
            if len(self._is_match) >= _CACHED_KEYS:
                self._is_match.clear()
            known = self._is_match[key] = any(pattern.matches(key) for pattern in self._patterns)
        return known


def sender_text(number: int | None, uid: int | None, gid: int | None, pid: int | None, chain: str | None) -> bytes:
    """Return a publisher in the bus's text form; empty if unknown."""
    if number is None:
        return b""
    if uid is None:
        return b"%d -" % number
    return f"{number} {f'{chain}/' if chain else ''}!/cred/{gid}/{uid}/{pid}".encode()


def _senders(batch: pa.RecordBatch) -> Iterable[bytes]:
    """Return the publisher of each row."""
    columns = [batch.column(name) for name in SENDER_COLUMNS]
    if columns[0].null_count == batch.num_rows:
        return [b""] * batch.num_rows
    return list(starmap(sender_text, zip(*(column.to_pylist() for column in columns), strict=True)))
