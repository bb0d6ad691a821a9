"""How ``sbus journal cat`` and ``tail`` find rows and print them."""

from __future__ import annotations

import json
import select
from collections import deque
from collections.abc import Collection, Iterator
from datetime import datetime
from typing import BinaryIO, NamedTuple, NoReturn

import pyarrow as pa

from sbus.cli.output import Printer, ReceivedMessage, shown
from sbus.client.core import Message
from sbus.journal.reader import JournalReader, read
from sbus.journal.schema import GAPS, Kind
from sbus.protocol.keys import matches_open

__all__ = ["Rows"]

_INTERVAL = 0.05  # seconds between two looks for new rows
_STEP = 100_000  # rows that are looked for at once, at most
_FIRST_STEP = 100  # as many at first: the rows that are wanted are often the last ones
_COLUMNS = ("seq", "time", "kind", "key", "payload")


class _Row(NamedTuple):
    seq: int
    time: int
    kind: str
    key: bytes
    payload: bytes


class Rows:
    """Rows of one journal, and how they are printed.

    :param show: how messages are.
    :param patterns: messages whose keys match none of them are left out; without any, none is.
    :param only_gaps: leave out all messages.
    :param is_json: whether `show` prints JSON.
    :param has_gaps: whether gaps are printed at all.
    """

    def __init__(
        self,
        directory: str,
        show: Printer,
        patterns: Collection[bytes],
        only_gaps: bool,
        *,
        is_json: bool,
        has_gaps: bool,
    ) -> None:
        self._reader = JournalReader(directory)
        self._show = show
        self._patterns = patterns
        self._is_json = is_json
        self._kinds = GAPS if only_gaps else None if has_gaps else frozenset({Kind.MESSAGE})
        self._matching: dict[bytes, bool] = {}

    def between(
        self, since: datetime | None, until: datetime | None, first: int | None, last: int | None
    ) -> tuple[int, int]:
        """The seq of the first row and the one behind the last, in these bounds and in what is there."""
        start, end = self._reader.start(), self._reader.end()
        if since:
            start = max(start, self._reader.seq_at_time(_microseconds(since)))
        if until:
            end = min(end, self._reader.seq_at_time(_microseconds(until)))
        if first is not None:
            start = max(start, first)
        if last is not None:
            end = min(end, last + 1)
        return start, end

    def copy(self, start: int, end: int, output: BinaryIO) -> None:
        """Print the rows from one up to another."""
        for row in self._wanted(start, end):
            output.write(self._line(row))
        output.flush()

    def tail(self, count: int, output: BinaryIO, *, follow: bool) -> None:
        """Print so many of the last rows that are wanted, and then those that come.

        :raises BrokenPipeError: if nobody reads the output any more.
        """
        end = self._reader.end()
        for row in self._last(count, end):
            output.write(self._line(row))
        output.flush()
        if follow:
            self._follow(end, output)

    def _follow(self, end: int, output: BinaryIO) -> NoReturn:
        poll = select.poll()
        poll.register(output, 0)  # an error or a hang-up is always told
        while True:
            start, end = end, max(end, self._reader.end())
            if start < end:
                self.copy(start, end, output)
            elif poll.poll(_INTERVAL * 1000):
                raise BrokenPipeError

    def _last(self, count: int, end: int) -> list[_Row]:
        found: list[_Row] = []
        first = self._reader.start()
        step = _FIRST_STEP
        while len(found) < count and end > first:
            start = max(first, end - step)
            found[:0] = deque(self._wanted(start, end), maxlen=count - len(found))
            end, step = start, min(2 * step, _STEP)
        return found

    def _wanted(self, start: int, end: int) -> Iterator[_Row]:
        for part in self._reader.plan(start, end, kinds=self._kinds):
            for batch in read(part, _COLUMNS):
                columns = (
                    batch.column("time").cast(pa.int64()) if name == "time" else batch.column(name) for name in _COLUMNS
                )
                for row in map(_Row._make, zip(*(column.to_pylist() for column in columns), strict=True)):
                    if row.kind != Kind.MESSAGE or self._matches(row.key):
                        yield row

    def _matches(self, key: bytes) -> bool:
        if not self._patterns:
            return True
        known = self._matching.get(key)
        if known is None:
            if len(self._matching) >= _STEP:
                self._matching.clear()
            known = self._matching[key] = any(matches_open(pattern, key) for pattern in self._patterns)
        return known

    def _line(self, row: _Row) -> bytes:
        arrival = ReceivedMessage(row.seq, row.time / 1_000_000, Message(row.key, row.payload))
        if row.kind == Kind.MESSAGE:
            line = self._show(arrival)
            return b'{"seq": %d, "kind": "message", %b' % (row.seq, line[1:]) if self._is_json else line
        if self._is_json:
            told = {
                "seq": row.seq,
                "kind": row.kind,
                "time": round(arrival.time, 6),
                "details": json.loads(row.payload),
            }
            return json.dumps(told).encode() + b"\n"
        when = datetime.fromtimestamp(arrival.time).astimezone().isoformat(timespec="milliseconds")
        return f"# {row.kind} {when} {shown(row.payload)}\n".encode()


def _microseconds(time: datetime) -> int:
    return round(time.timestamp() * 1_000_000)
