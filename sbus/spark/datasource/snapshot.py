"""Journals as they are at one moment: their directories are listed once for all that is asked, and seldom again.

A stream asks what is new many times a second, and a journal may have ten thousand segments.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping

from sbus.errors import JournalError
from sbus.journal.layout import Segment
from sbus.journal.reader import JournalReader, find_journals

__all__ = ["Snapshot", "open_journals"]

_SETTLED = 1_000_000_000
"""Nanoseconds after a change of a directory in which another one may leave its time as it is (a tick of the clock)."""


class Snapshot(JournalReader):
    """A journal whose segments are those of one moment; rows that are added to the last of them are seen.

    :param before: an earlier one, whose list holds if the directory has not changed since.
    """

    def __init__(self, directory: str, before: Snapshot | None = None) -> None:
        super().__init__(directory)
        self._changed = os.stat(self.directory).st_mtime_ns  # looked at first: what comes later shows next time
        self._segments: list[Segment]
        if before is not None and before._holds(self):
            self._segments = before._segments
            self._is_settled = True
        else:
            self._is_settled = time.time_ns() - self._changed > _SETTLED
            self._segments = super().segments()

    def _holds(self, later: Snapshot) -> bool:
        return self._is_settled and (self.id, self._changed) == (later.id, later._changed)

    def segments(self) -> list[Segment]:
        """What there was, oldest first."""
        return self._segments


def open_journals(paths: Iterable[str], before: Mapping[str, Snapshot] | None = None) -> dict[str, Snapshot]:
    """The journals that these paths and globs lead to, by their ids.

    :param before: what was found earlier.
    :raises sbus.errors.JournalError: if one is missing, or two are the same.
    """
    earlier = {journal.directory: journal for journal in (before or {}).values()}
    found: dict[str, Snapshot] = {}
    for directory in find_journals(paths):
        journal = Snapshot(directory, earlier.get(directory))
        other = found.setdefault(journal.id, journal)
        if other is not journal:
            raise JournalError(
                f"{other.directory} and {directory} are the same journal ({journal.id}): leave out the copy"
            )
    return found
