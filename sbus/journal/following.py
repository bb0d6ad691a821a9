"""Plan the batches of a program that follows journals: from which row to which, in each of them.

Theory of operation
-------------------

A program that moves rows elsewhere takes them in batches. An *offset* is ``{"<journal id>": <next seq>}``: for each
journal the number of the first row that is not read yet. `Follower.next` returns the offset up to which the next batch
reads. The program keeps that durably before it reads, so that a batch that is repeated has the same rows.

Invariants:

* *The offsets decide everything.* A `Follower` keeps nothing between two batches but lists of segments, and the time of
  the next batch.
* *A journal joins without rows.* The first offset that names a journal says where reading starts in it; its rows come
  with later offsets. So the start is kept before the first row is read; later, "the latest" would mean another row.
* *Only safe rows are read.* An offset never passes the end of what the recorder has synced, so a power cut cannot take
  back a row that was read.
* *Loss is an error*, unless the program allows it. Then one warning names each loss, and a row of the kind ``damaged``
  stands in place of damaged ones.
* *A damaged journal delays no other one*, if the program asks for that: rows are checked before a batch is planned.

With a limit, `share` divides rows among the journals that are behind.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from sbus.errors import JournalError, JournalMissing
from sbus.journal.slices import read_with_ends
from sbus.journal.snapshot import Snapshot, open_journals

__all__ = ["Follower", "Offset", "share"]

_log = logging.getLogger("sbus.journal")

Offset = dict[str, int]
"""For each journal, by its ID, the number of the first row that is not read yet."""

_ALLOW = "or go on without them with failOnDataLoss=false (the archive: --allow-loss)"
_NAME = f"name its directory as well, restore it from a copy, {_ALLOW}"
_AGAIN = (
    "restore a newer copy; or move it elsewhere, so that the recorder begins a new journal with its own row numbers, "
    f"{_ALLOW}"
)
_RESTORE = (
    f"restore from a copy, {_ALLOW}; retention keeps rows until a consumer has read them: name one with the option "
    "consumer"
)


def _from_the_first(journal: Snapshot, is_new: bool) -> int:
    return journal.start()


@dataclass(slots=True)
class Follower:
    """Plans batches of rows of journals while they are written.

    :ivar paths: directories and globs of journals.
    :ivar max_rows: the largest number of rows in a batch; None: no limit.
    :ivar max_bytes: about the largest number of bytes of journals in a batch; None: no limit.
    :ivar max_delay: the seconds after a batch from which on the next one starts with whatever is there; before that, it
        starts only if it is as large as it may be. None: a batch starts whenever there are rows.
    :ivar fail_on_data_loss: whether it is an error if rows are gone before they are read, or are damaged.
    :ivar start_of: returns where reading starts in a journal, given whether the journal joins later than the first
        ones.
    :ivar leaves_damaged: whether a damaged journal waits in front of the damage while the others continue; else damage
        is an error.
    :ivar target: the offset to read up to, and no further; None: follow the journals.
    :ivar damaged: the directories of the journals that wait, and what is damaged.
    """

    paths: Sequence[str]
    max_rows: int | None = None
    max_bytes: int | None = None
    max_delay: float | None = None
    fail_on_data_loss: bool = True
    start_of: Callable[[Snapshot, bool], int] = _from_the_first
    leaves_damaged: bool = False
    target: Offset | None = None
    damaged: dict[str, str] = field(default_factory=dict)
    _known: dict[str, Snapshot] = field(default_factory=dict)
    _next_at: float = -math.inf  # when a batch may start with fewer rows than it could have
    _reported: set[str] = field(default_factory=set)  # losses: every batch meets the same one again

    def journals(self) -> dict[str, Snapshot]:
        """Return the journals as they are now, by ID.

        :raises sbus.errors.JournalError: if one is missing, or two directories have the same one.
        """
        closed: list[str] = []

        def leave(directory: str, error: JournalError) -> None:
            self._leave(directory, error)
            closed.append(directory)

        self._known = open_journals(self.paths, self._known, skip_damaged=not self.fail_on_data_loss, on_damage=leave)
        present = {*closed, *(journal.directory for journal in self._known.values())}
        self.damaged = {directory: what for directory, what in self.damaged.items() if directory in present}
        return self._known

    def ends(self) -> Offset:
        """Return how far the journals can be read; a damaged one whose end is not known is left out."""
        ends: Offset = {}
        for journal_id, journal in sorted(self.journals().items()):
            try:
                ends[journal_id] = journal.end()
            except JournalError as e:
                self._leave(journal.directory, e)
        return ends

    def _leave(self, directory: str, error: JournalError) -> None:
        """Let a damaged journal wait, and warn once.

        :raises sbus.errors.JournalError: if that is not to be, or the whole journal is gone.
        """
        if not self.leaves_damaged or isinstance(error, JournalMissing):
            raise error
        if self.damaged.get(directory) != str(error):
            self.damaged[directory] = str(error)
            _log.warning("%s; the rows of this journal from there on wait for that", error)

    def next(self, start: Offset, *, is_limited: bool = True) -> Offset:
        """Return the offset up to which to read now; `start`, if there is nothing to do.

        :param start: the offset up to which everything is read.
        :param is_limited: whether the limits on rows and bytes hold.
        :raises sbus.errors.JournalError: if rows are gone before they were read, unless that is allowed.
        """
        journals = self.journals()
        offset = dict(start)
        behind: dict[str, tuple[int, int]] = {}
        for journal_id, journal in journals.items():
            try:
                end = journal.end()
            except JournalError as e:
                self._leave(journal.directory, e)
                continue
            if not self.fail_on_data_loss:
                self.damaged.pop(journal.directory, None)  # no damaged row holds it up
            if self.target is not None:
                if journal_id not in self.target:
                    continue  # it appeared after this run began
                end = min(end, self.target[journal_id])
            if journal_id not in start:
                offset[journal_id] = min(self.start_of(journal, bool(start)), end)
                continue
            if end < start[journal_id] and journal.is_older_than(start[journal_id]):
                seen = f"ends before row {start[journal_id]}, up to which it was read before"
                self._report_loss(f"the journal in {journal.directory} {seen}: it is an older copy", _AGAIN)
            offset[journal_id] = first = self._without_loss(journal, start[journal_id])
            if first < end:
                behind[journal_id] = (first, end)
            else:
                self.damaged.pop(journal.directory, None)
        self._check_missing({name: row for name, row in sorted(start.items()) if name not in journals})
        if behind and not self._is_due(journals, behind):
            behind = {}
        if is_limited:
            ends = self._limited(journals, behind)
        else:
            ends = {journal_id: end for journal_id, (_, end) in behind.items()}
        if self.leaves_damaged and self.fail_on_data_loss:
            ends = {name: self._whole_end(journals[name], behind[name][0], end) for name, end in ends.items()}
        offset.update(ends)
        return dict(sorted(offset.items()))

    def _check_missing(self, missing: Offset) -> None:
        """Report journals that are missing; each that cannot be opened may be any one of them."""
        closed = len(self._closed())
        if len(missing) <= closed:
            return
        what = [f"the journal {name} is missing; it was read up to row {row}" for name, row in missing.items()]
        if closed:
            what.append(f"{closed} of them may be among those that cannot be opened")
        self._report_loss("; ".join(what), _NAME)

    def _closed(self) -> list[str]:
        """Return the damage of the journals that cannot be opened."""
        opened = {journal.directory for journal in self._known.values()}
        return [what for directory, what in self.damaged.items() if directory not in opened]

    def _whole_end(self, journal: Snapshot, first: int, end: int) -> int:
        """Return how far the rows of a range can be read: their end, or the first damaged row.

        They are read before they are planned, because the plan of a batch never changes.
        """
        whole = first
        try:
            for part in journal.plan(first, end):
                for read_to, _ in read_with_ends(part, ["seq", "time"]):
                    whole = read_to
        except JournalError as e:
            self._leave(journal.directory, e)
            return whole
        self.damaged.pop(journal.directory, None)
        return end

    def ranges(self, start: Offset, end: Offset) -> Iterator[tuple[Snapshot, int, int]]:
        """Yield each journal with rows between two offsets, its first row, and the row after the last.

        :raises sbus.errors.JournalError: if some of these rows are gone, unless that is allowed.
        """
        ranges = {journal_id: (start.get(journal_id, last), last) for journal_id, last in end.items()}
        ranges = {journal_id: (first, last) for journal_id, (first, last) in ranges.items() if first < last}
        journals = self.journals() if ranges else {}
        for journal_id, (first, last) in ranges.items():
            if journal_id not in journals:
                if closed := self._closed():
                    raise JournalError(closed[0])  # it may be that one, whose rows are not lost
                self._report_loss(
                    f"the journal {journal_id} is missing; its rows {first} to {last - 1} were not read", _NAME
                )
                continue
            journal = journals[journal_id]
            yield journal, self._without_loss(journal, first), last

    def _without_loss(self, journal: Snapshot, seq: int) -> int:
        """Return the next row to read, after reporting deleted rows before it."""
        first = journal.start()
        if first <= seq:
            return seq
        self._report_loss(f"the rows {seq} to {first - 1} of the journal in {journal.directory} are deleted", _RESTORE)
        return first

    def _report_loss(self, what: str, remedy: str) -> None:
        if self.fail_on_data_loss:
            raise JournalError(f"{what}: {remedy}")
        if what not in self._reported:
            self._reported.add(what)
            _log.warning("%s; going on without them (failOnDataLoss=false)", what)

    def _is_due(self, journals: dict[str, Snapshot], behind: dict[str, tuple[int, int]]) -> bool:
        """Return whether to start a batch now; if so, the time until the next one begins."""
        if self.max_delay is None or self.target is not None:
            return True
        now = time.monotonic()
        if now < self._next_at and not self._is_full(journals, behind):
            return False
        self._next_at = now + self.max_delay
        return True

    def _is_full(self, journals: dict[str, Snapshot], behind: dict[str, tuple[int, int]]) -> bool:
        """Return whether the rows that wait make a batch of the largest size."""
        # Of a damaged journal any number of rows can wait, and none of them may be readable.
        behind = {name: rows for name, rows in behind.items() if journals[name].directory not in self.damaged}
        rows, most = self.max_rows, self.max_bytes
        if rows is not None and sum(end - first for first, end in behind.values()) >= rows:
            return True
        return most is not None and any(
            self._limit(journals[journal_id], first, end, max(1, most // len(behind))) < end
            for journal_id, (first, end) in behind.items()
        )

    def _limited(self, journals: dict[str, Snapshot], behind: dict[str, tuple[int, int]]) -> Offset:
        """Return where to stop reading each journal that is behind, under the limits.

        :param behind: for each, the next row and the end.
        """
        ends: Offset = {}
        rows = {journal_id: end - first for journal_id, (first, end) in behind.items()}
        if self.max_rows is not None:
            rows = share(self.max_rows, rows)
        for journal_id, count in rows.items():
            first, end = behind[journal_id]
            ends[journal_id] = min(end, first + count)
            if self.max_bytes is not None and count:
                allowed = max(1, self.max_bytes // len(rows))
                ends[journal_id] = self._limit(journals[journal_id], first, ends[journal_id], allowed)
        return ends

    def _limit(self, journal: Snapshot, first: int, end: int, max_bytes: int) -> int:
        """Return how far a read of limited size reaches; `end`, if damage hides that."""
        try:
            return min(end, journal.limit(first, max_bytes=max_bytes))
        except JournalError as e:
            if self.fail_on_data_loss or isinstance(e, JournalMissing):
                self._leave(journal.directory, e)
            return end


def share(total: int, wishes: dict[str, int]) -> dict[str, int]:
    """Divide a number fairly.

    Small requests are met in full, and the others share the rest evenly.

    :param wishes: what each can use at most.
    :returns: what each gets; the sum is `total`, or the sum of all wishes if that is less.
    """
    shares = dict.fromkeys(wishes, 0)
    waiting = sorted(wishes, key=lambda name: wishes[name])
    while waiting and total:
        name = waiting.pop(0)
        shares[name] = min(wishes[name], total // (len(waiting) + 1))
        total -= shares[name]
    return shares
