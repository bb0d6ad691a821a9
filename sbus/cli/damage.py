"""Damaged journals in commands on several: each is named, and the others do not wait for it."""

from __future__ import annotations

import click

from sbus.cli.output import Progress, pluralize, printable_text
from sbus.errors import JournalError

__all__ = ["Damage"]


class Damage:
    """The damaged journals of one command: each is named on standard error when it is found, with the remedy.

    :param progress: the line to clear before that.
    """

    def __init__(self, progress: Progress) -> None:
        self._directories: list[str] = []
        self._progress = progress

    def __call__(self, directory: str, error: JournalError) -> None:
        """Note that a journal is damaged; only the first damage of each is printed."""
        if directory not in self._directories:
            self._directories.append(directory)
            self._progress.clear()
            click.echo(printable_text(f"sbus: {error}"), err=True)

    def check(self, done: str) -> None:
        """Check that no journal was damaged.

        :param done: what is done nevertheless, such as ``the report is written``.
        :raises JournalError: if one was.
        """
        if self._directories:
            count = len(self._directories)
            are_damaged = f"{pluralize(count, 'journal')} {'is' if count == 1 else 'are'} damaged"
            raise JournalError(f"{done}, but {are_damaged}: {', '.join(self._directories)}")
