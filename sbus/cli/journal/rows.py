"""Rows of a journal: how ``sbus journal cat`` and ``tail`` find and print them."""

from __future__ import annotations

import json
import select
from collections import deque
from collections.abc import Collection, Iterator
from datetime import datetime
from itertools import starmap
from typing import BinaryIO, NamedTuple, NoReturn

import click
import pyarrow as pa

from sbus.cli.messages import MessageFormat, ReceivedMessage, json_fields
from sbus.cli.output import escape
from sbus.client.core import Message
from sbus.client.losses import parse_lost
from sbus.client.senders import kind_of
from sbus.journal import clock
from sbus.journal.reader import JournalReader, read
from sbus.journal.schema import GAPS, MESSAGES, Kind
from sbus.journal.senders import TYPES
from sbus.protocol.keys import matches_open

__all__ = ["Rows"]

_FOLLOW_INTERVAL = 0.05
"""Seconds between two looks for new rows."""
_FIRST_STEP_ROWS = 100
"""Rows that `Rows.print_tail` reads first: the rows that match are often the last ones."""
_MAX_STEP_ROWS = 100_000
"""Rows that it reads at once, at most; each step is twice the one before."""
_CACHED_KEYS = 100_000
"""Keys for which it is known whether they match."""
_COLUMNS = ("seq", "time", "kind", "key", "payload")
_NOBODY = b"0 -"
"""The text for an unknown publisher."""


class _Row(NamedTuple):
    """A row; the time is in µs since the epoch, the sender is the bus's text, or empty if it is not known."""

    seq: int
    time: int
    kind: str
    key: bytes
    payload: bytes
    sender: bytes = b""


class Rows:
    """The rows of one journal, and how they are printed.

    :param message_format: how messages are printed. In raw output and in the user's formats there are no gaps.
    :param patterns: print only messages whose key matches one of these; empty for all messages.
    :param only_gaps: print no messages.
    :param sender: print who published each message.
    :raises click.UsageError: if the format contradicts itself.
    :raises sbus.errors.JournalError: if the directory is not a journal.
    """

    def __init__(
        self, directory: str, message_format: MessageFormat, patterns: Collection[bytes], only_gaps: bool, sender: bool
    ) -> None:
        if sender and message_format.raw:
            raise click.UsageError("--sender is not for --raw, which prints payloads alone.")
        self._print_message = message_format.printer()
        is_text = not message_format.json and message_format.template is None
        self._needs_sender = sender or not is_text
        self._unknown = _NOBODY if sender and is_text else b""
        self._reader = JournalReader(directory)
        self._patterns = patterns
        self._json = message_format.json
        has_gaps = not message_format.raw and message_format.template is None
        self._kinds = GAPS if only_gaps else None if has_gaps else frozenset({Kind.MESSAGE})
        self._is_match: dict[bytes, bool] = {}
        self._min_time: int | None = None
        self._max_time: int | None = None

    def range_of(
        self, since: datetime | None, until: datetime | None, first: int | None, last: int | None
    ) -> tuple[int, int]:
        """Return the sequence number of the first row, and the one after the last row.

        From now on only rows between the two times are printed.
        """
        start, end = self._reader.start(), self._reader.end()
        if since:
            start = max(start, self._reader.seq_at_time(clock.from_datetime(since)))
            self._min_time = clock.from_datetime(since)
        if until:
            # Not a row to stop at: if the clock was set back, earlier rows follow later ones.
            self._max_time = clock.from_datetime(until) - 1
        if first is not None:
            start = max(start, first)
        if last is not None:
            end = min(end, last + 1)
        return start, end

    def print_range(self, start: int, end: int, output: BinaryIO) -> None:
        """Print the rows from sequence number `start` up to, but not including, `end`."""
        for row in self._select(start, end):
            output.write(self._format(row))
        output.flush()

    def print_tail(self, count: int, output: BinaryIO, *, follow: bool) -> None:
        """Print the last rows, at most `count`, then new ones as they come.

        :raises BrokenPipeError: if the reader of the output has gone.
        """
        end = self._reader.end()
        for row in self._last(count, end):
            output.write(self._format(row))
        output.flush()
        if follow:
            self._follow(end, output)

    def _follow(self, end: int, output: BinaryIO) -> NoReturn:
        poll = select.poll()
        poll.register(output, 0)  # errors and hang-ups are always reported
        while True:
            start, end = end, max(end, self._reader.end())
            if start < end:
                self.print_range(start, end, output)
            elif poll.poll(_FOLLOW_INTERVAL * 1000):
                raise BrokenPipeError

    def _last(self, count: int, end: int) -> list[_Row]:
        found: list[_Row] = []
        first = self._reader.start()
        step = _FIRST_STEP_ROWS
        while len(found) < count and end > first:
            start = max(first, end - step)
            found[:0] = deque(self._select(start, end), maxlen=count - len(found))
            end, step = start, min(2 * step, _MAX_STEP_ROWS)
        return found

    def _select(self, start: int, end: int) -> Iterator[_Row]:
        for part in self._reader.plan(start, end, kinds=self._kinds, min_time=self._min_time, max_time=self._max_time):
            for batch in read(part, (*_COLUMNS, *TYPES) if self._needs_sender else _COLUMNS):
                columns = [
                    (batch.column("time").cast(pa.int64()) if name == "time" else batch.column(name)).to_pylist()
                    for name in _COLUMNS
                ]
                if self._needs_sender:
                    columns.append(_senders(batch))
                for row in starmap(_Row, zip(*columns, strict=True)):
                    if self._is_in_time(row.time) and (row.kind not in MESSAGES or self._matches(row.key)):
                        yield row

    def _is_in_time(self, time: int) -> bool:
        return (self._min_time is None or time >= self._min_time) and (self._max_time is None or time <= self._max_time)

    def _matches(self, key: bytes) -> bool:
        if not self._patterns:
            return True
        known = self._is_match.get(key)
        if known is None:
            if len(self._is_match) >= _CACHED_KEYS:
                self._is_match.clear()
            known = self._is_match[key] = any(matches_open(pattern, key) for pattern in self._patterns)
        return known

    def _format(self, row: _Row) -> bytes:
        sender = row.sender or self._unknown
        message = (kind_of(sender) if sender and row.kind in MESSAGES else Message)(row.key, row.payload)
        received = ReceivedMessage(row.seq, row.time, message)
        if self._json:
            fields: dict[str, object] = {"time": clock.to_seconds(row.time)}
            if row.kind in MESSAGES:
                fields = json_fields(received)
            if row.kind != Kind.MESSAGE:
                fields.pop("payload", None)
                fields.pop("encoding", None)
                fields["details"] = _details(row)
            return json.dumps({"seq": row.seq, "kind": row.kind} | fields).encode() + b"\n"
        if row.kind == Kind.MESSAGE:
            return self._print_message(received)
        key = f"{escape(row.key)} " if row.key else ""
        return f"# {row.kind} {clock.format_local(row.time)} {key}{escape(row.payload)}\n".encode()


def _senders(batch: pa.RecordBatch) -> list[bytes]:
    """Return the publisher of each row in the bus's text form; empty if it is not known."""
    columns = (batch.column(name).to_pylist() for name in TYPES)
    return [
        b""
        if number is None
        else _NOBODY
        if uid is None
        else f"{number} {f'{chain}/' if chain else ''}!/cred/{gid}/{uid}/{pid}".encode()
        for uid, gid, pid, number, chain in zip(*columns, strict=True)
    ]


def _details(row: _Row) -> object:
    """Return what is known about a gap, for JSON."""
    lost = parse_lost(row.payload) if row.kind == Kind.LOST else None
    return json.loads(row.payload) if lost is None else lost._asdict()
