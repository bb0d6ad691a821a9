"""Rows of a journal: how ``sbus journal cat`` and ``tail`` find and print them."""

from __future__ import annotations

import json
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
from sbus.errors import JournalError, JournalMissing
from sbus.interchange.jsonl import row_fields
from sbus.interchange.rows import Row, Selection
from sbus.journal import clock
from sbus.journal.layout import read_identity
from sbus.journal.schema import GAPS, MESSAGES, Kind
from sbus.syscalls.polling import has_hung_up

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
        self._next = 0  # the number of the next row to follow

    def limit(self, since: datetime | None, until: datetime | None, first: int | None, last: int | None) -> None:
        """Choose rows by their times and numbers, as `Selection.limit` does."""
        self._chosen.limit(since, until, first, last)

    def print_chosen(self, output: BinaryIO) -> None:
        """Print the chosen rows."""
        self._print_range(self._chosen.start, self._chosen.end, output)

    def _print_range(self, start: int, end: int, output: BinaryIO) -> None:
        for row in self._chosen.rows(start, end):
            output.write(self._format(row))
            self._next = row.seq + 1
        output.flush()
        self._next = end

    def print_tail(self, count: int, output: BinaryIO, *, follow: bool) -> None:
        """Print the last rows, at most `count`, then new ones as they come.

        :raises BrokenPipeError: if the reader of the output has gone.
        """
        self._next = self._chosen.end
        for row in self._last(count, self._next):
            output.write(self._format(row))
        output.flush()
        if follow:
            self._follow(output)

    def _follow(self, output: BinaryIO) -> NoReturn:
        is_away = False
        while True:
            before = self._next
            try:
                self._print_new(output)
                is_away = False
            except (JournalError, FileNotFoundError) as e:
                if self._is_in_place():
                    raise
                if not is_away:
                    click.echo(f"sbus: {e}; waiting for a journal", err=True)
                is_away = True
            if self._next == before and has_hung_up(output, _FOLLOW_INTERVAL):
                raise BrokenPipeError

    def _is_in_place(self) -> bool:
        """Return whether the journal is where it was, and not moved away."""
        reader = self._chosen.reader
        try:
            return read_identity(reader.directory).id == reader.id
        except JournalMissing:
            return False

    def _print_new(self, output: BinaryIO) -> None:
        """Print the rows that are new; when another journal has taken the place of this one, its rows follow."""
        if not self._is_in_place():
            self._chosen = self._choose()
            self._next = self._chosen.start
        end = self._chosen.reader.end()
        if self._next < end:
            self._print_range(self._next, end, output)

    def _last(self, count: int, end: int) -> list[Row]:
        found: list[Row] = []
        first = self._chosen.start
        step = _FIRST_STEP_ROWS
        while len(found) < count and end > first:
            start = max(first, end - step)
            found[:0] = deque(self._chosen.rows(start, end), maxlen=min(count - len(found), step))
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
