"""Open journals as they are at one moment.

Their directories are listed as seldom as possible.

Theory of operation
-------------------

A stream asks for the end of its journals several times a second, and a journal can have ten thousand segments. A
`Snapshot` therefore lists the directory once, and all questions about one plan get answers from that list. The next
`Snapshot` takes the list over if the directory has not changed, which costs one ``stat``.

Invariants:

* The segments of a `Snapshot` are those of one moment. Rows that the recorder appends to the newest of them are seen,
  because their number is in the segment and not in its name.
* A list is taken over only if it was made after the time stamp of the directory had settled. A change within one tick
  of the kernel's clock can leave the time stamp as it is; so a directory that changed less than a second ago is listed
  again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping

from sbus.errors import JournalError, JournalMissing
from sbus.journal.layout import Segment
from sbus.journal.reader import JournalReader, find_journals

__all__ = ["OnDamage", "Snapshot", "open_journals"]

OnDamage = Callable[[str, JournalError], None]
"""Called with the directory of a damaged journal, and the damage."""

_SETTLE_NS = 1_000_000_000
"""Nanoseconds after a change of a directory from which on another change must show in its time stamp."""


class Snapshot(JournalReader):
    """A journal with the segments of one moment.

    Rows that are added to the newest segment are seen.

    :param before: an earlier `Snapshot`, whose list is used if the directory has not changed since.
    :param skip_damaged: as for `JournalReader`.
    """

    def __init__(self, directory: str, before: Snapshot | None = None, *, skip_damaged: bool = False) -> None:
        super().__init__(directory, skip_damaged=skip_damaged)
        # Before the list is made, so that a later change shows the next time.
        self._changed_ns = os.stat(self.directory).st_mtime_ns
        self._segments: list[Segment]
        if before is not None and before._is_valid_for(self):
            self._segments = before._segments
            self._is_settled = True
        else:
            self._is_settled = time.time_ns() - self._changed_ns > _SETTLE_NS
            self._segments = super().segments()

    def _is_valid_for(self, later: Snapshot) -> bool:
        return self._is_settled and (self.id, self._changed_ns) == (later.id, later._changed_ns)

    def segments(self) -> list[Segment]:
        """Return the segments of the moment, oldest first."""
        return self._segments


def open_journals(
    paths: Iterable[str],
    before: Mapping[str, Snapshot] | None = None,
    *,
    skip_damaged: bool = False,
    on_damage: OnDamage | None = None,
) -> dict[str, Snapshot]:
    """Open the journals that paths and globs name, by their IDs.

    :param before: each earlier `Snapshot`, by ID.
    :param skip_damaged: whether a row of the kind ``damaged`` stands in place of rows that cannot be read.
    :param on_damage: called for each journal that is damaged so that it cannot be opened, which is then left out;
        None: that is an error.
    :raises sbus.errors.JournalError: if a journal is missing, or two directories have the same one.
    """
    earlier = {journal.directory: journal for journal in (before or {}).values()}
    found: dict[str, Snapshot] = {}
    for directory in find_journals(paths):
        try:
            journal = Snapshot(directory, earlier.get(directory), skip_damaged=skip_damaged)
        except JournalError as e:
            if on_damage is None or isinstance(e, JournalMissing):
                raise
            on_damage(directory, e)
            continue
        other = found.setdefault(journal.id, journal)
        if other is not journal:
            raise JournalError(
                f"{other.directory} and {directory} are the same journal ({journal.id}): leave out the copy"
            )
    return found
