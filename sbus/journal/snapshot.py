"""Open journals as they are at one moment.

Theory of operation
-------------------

A stream asks for the end of its journals several times a second, and a journal can have ten thousand segments. A
`Snapshot` therefore lists the directory once, and all questions about one plan get answers from that list. The next
`Snapshot` takes the list over if the directory has not changed, which costs one ``stat``.

The segments of a `Snapshot` are those of one moment. Rows that the recorder appends to the newest of them are seen,
because their number is in the segment and not in its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from sbus.errors import JournalError, JournalMissing
from sbus.journal.layout import Segment
from sbus.journal.reader import JournalReader, find_journals

__all__ = ["OnDamage", "Snapshot", "open_journals"]

OnDamage = Callable[[str, JournalError], None]
"""Called with the directory of a damaged journal, and the damage."""


class Snapshot(JournalReader):
    """A journal with the segments of one moment.

    Rows that are added to the newest segment are seen.

    :param before: an earlier `Snapshot`, whose list is used if the directory has not changed since.
    :param skip_damaged: as for `JournalReader`.
    """

    def __init__(self, directory: str, before: Snapshot | None = None, *, skip_damaged: bool = False) -> None:
        super().__init__(directory, skip_damaged=skip_damaged)
        if before is not None and before.id == self.id:
            self._listed, self._listed_at = before._listed, before._listed_at
        self._segments = super().segments()

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
