"""Rows of a journal: how ``sbus journal cat`` and ``tail`` find and print them."""

from __future__ import annotations

import json
import select
from collections import deque
from collections.abc import Collection
from datetime import datetime
from functools import partial
from typing import BinaryIO, NoReturn

import click

from sbus.cli.messages import MessageFormat, ReceivedMessage
from sbus.cli.output import escape
from sbus.client.core import Message
from sbus.client.senders import kind_of
from sbus.errors import JournalMissing
from sbus.interchange.jsonl import row_fields
from sbus.interchange.rows import Row, Selection
from sbus.journal import clock
from sbus.journal.layout import read_identity
from sbus.journal.schema import GAPS, MESSAGES, Kind

__all__ = ["Rows"]

_FOLLOW_INTERVAL = 0.05
"""Seconds between two looks for new rows."""
_FIRST_STEP_ROWS = 100
"""Rows that `Rows.print_tail` reads first: the rows that match are often the last ones."""
_MAX_STEP_ROWS = 100_000
"""Rows that it reads at once, at most; each step is twice the one before."""
_NOBODY = b"0 -"
"""The text for an unknown publisher."""


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
        self._unknown = _NOBODY if sender and is_text else b""
        self._json = message_format.json
        has_gaps = not message_format.raw and message_format.template is None
        self._choose = partial(
            Selection,
            directory,
            patterns,
            kinds=GAPS if only_gaps else None if has_gaps else frozenset({Kind.MESSAGE}),
            sender=sender or not is_text,
        )
        self._chosen = self._choose()

    def limit(self, since: datetime | None, until: datetime | None, first: int | None, last: int | None) -> None:
        """Choose rows by their times and numbers, as `Selection.limit` does."""
        self._chosen.limit(since, until, first, last)

    def print_chosen(self, output: BinaryIO) -> None:
        """Print the chosen rows."""
        self._print_range(self._chosen.start, self._chosen.end, output)

    def _print_range(self, start: int, end: int, output: BinaryIO) -> None:
        for row in self._chosen.rows(start, end):
            output.write(self._format(row))
        output.flush()

    def print_tail(self, count: int, output: BinaryIO, *, follow: bool) -> None:
        """Print the last rows, at most `count`, then new ones as they come.

        :raises BrokenPipeError: if the reader of the output has gone.
        """
        end = self._chosen.end
        for row in self._last(count, end):
            output.write(self._format(row))
        output.flush()
        if follow:
            self._follow(end, output)

    def _follow(self, end: int, output: BinaryIO) -> NoReturn:
        poll = select.poll()
        poll.register(output, 0)  # errors and hang-ups are always reported
        while True:
            start, end = end, self._print_new(end, output)
            if start >= end and poll.poll(_FOLLOW_INTERVAL * 1000):
                raise BrokenPipeError

    def _print_new(self, start: int, output: BinaryIO) -> int:
        """Print the rows from a number on; return the number behind the last one.

        When another journal has taken the place of this one, which was moved away, its rows follow.
        """
        try:
            reader = self._chosen.reader
            if read_identity(reader.directory).id != reader.id:
                self._chosen = self._choose()
                start = self._chosen.start
            end = max(start, self._chosen.reader.end())
            if start < end:
                self._print_range(start, end, output)
        except (JournalMissing, FileNotFoundError):
            return start  # it is just being moved, or begun
        return end

    def _last(self, count: int, end: int) -> list[Row]:
        found: list[Row] = []
        first = self._chosen.start
        step = _FIRST_STEP_ROWS
        while len(found) < count and end > first:
            start = max(first, end - step)
            found[:0] = deque(self._chosen.rows(start, end), maxlen=count - len(found))
            end, step = start, min(2 * step, _MAX_STEP_ROWS)
        return found

    def _format(self, row: Row) -> bytes:
        sender = row.sender or self._unknown
        if self._json:
            return json.dumps(row_fields(row)).encode() + b"\n"
        message = (kind_of(sender) if sender and row.kind in MESSAGES else Message)(row.key, row.payload)
        received = ReceivedMessage(row.seq, row.time, message)
        if row.kind == Kind.MESSAGE:
            return self._print_message(received)
        key = f"{escape(row.key)} " if row.key else ""
        return f"# {row.kind} {clock.format_local(row.time)} {key}{escape(row.payload)}\n".encode()
