"""Make a new journal of rows, whole or not at all.

The journal is built beside its place, under a hidden name, and renamed when it is complete and synced. So an import
never changes a journal that exists. An import after a killed one removes what that left; the writer's lock tells
whether another import still runs. A directory that another user has put under the hidden name is refused: the journal
would be that user's.

Rows are numbered from 0 again. Gaps, digests and steps of the clock keep their places and contents. A row of the kind
``damaged`` takes the numbers of all rows that it stands for, as in the journal that was damaged.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa

from sbus import ownership
from sbus.errors import JournalError, JournalLocked, UsageError
from sbus.interchange.rows import Row
from sbus.journal import clock, disk
from sbus.journal.layout import LATEST, is_journal
from sbus.journal.lock import locked
from sbus.journal.schema import KINDS, MESSAGES, Kind
from sbus.journal.senders import Senders, is_sender
from sbus.journal.writer import JournalWriter

__all__ = ["append", "new_journal"]

_BATCH_ROWS = 8192
_BATCH_BYTES = 4 << 20
"""Limits of a batch, which can also be one longer row: readers decode a whole batch at once."""


@contextlib.contextmanager
def new_journal(directory: str, host: str, warn: Callable[[str], object]) -> Iterator[JournalWriter]:
    """Yield the writer of a new journal. When the block ends, the journal is in its place; if it fails, there is none.

    :param host: the name of the machine that the rows come from; empty if unknown.
    :param warn: called with a sentence when the clock goes back.
    :raises JournalError: if something is in its place, or another process imports into it.
    """
    directory = os.path.abspath(directory)
    if os.path.lexists(directory) and not (os.path.isdir(directory) and not os.listdir(directory)):
        what = "a journal" if is_journal(directory) else "something else"
        raise JournalError(f"{directory}: there is {what} already: name a directory that is new or empty")
    parent, name = os.path.split(directory)
    building = os.path.join(parent, f".{name}.importing")
    _begin(building)
    try:
        # Not the system's clock as it is: rows that are appended now are no sign of its steps.
        with JournalWriter.open(building, clock=lambda: clock.now(), warn=warn, host=host) as writer:
            yield writer
        os.rename(building, directory)
    except JournalLocked:
        raise  # it is the other import's
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    disk.sync_directory(parent)


def _begin(building: str) -> None:
    """Make the directory in which the journal is built, or take over the one of an import that was killed.

    :raises JournalLocked: if that import still runs.
    :raises JournalError: if something else has the name.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.lstat(building).st_mode) or _is_planted(building):
            raise JournalError(
                f"{building}: this has the name of an unfinished import, but is not this user's: remove it, or name "
                "a journal in another directory"
            )
        if not is_journal(building):
            return  # that import has no row yet; the lock, which the writer takes, tells whether it still runs
        with locked(building):
            shutil.rmtree(building)
    disk.make_directories(os.path.dirname(building), 0o755)
    try:
        ownership.make_directory(building, 0o700)
    except FileExistsError:
        raise JournalLocked(f"{building}: another import has begun at the same time: try again") from None


def _is_planted(building: str) -> bool:
    """Return whether just any user may have put a directory there.

    Where all may write, that is also the owner of the directory above, who could read the imported rows.
    """
    is_open = bool(os.stat(os.path.dirname(building)).st_mode & stat.S_IWOTH)
    return is_open and os.lstat(building).st_uid != os.geteuid()


def append(writer: JournalWriter, rows: Iterable[Row], where: str) -> int:
    """Append rows; return their number.

    :param where: the file that they come from, for errors.
    :raises UsageError: if a row cannot be in a journal.
    :raises OSError: if they cannot be written.
    """
    count = size = 0
    waiting: list[Row] = []
    for row in rows:
        if problem := _problem(row):
            raise UsageError(f"{where}: row {count + 1}: {problem}")
        if waiting and (
            row.kind != waiting[-1].kind
            or row.kind in (Kind.CLOCK, Kind.DAMAGED)
            or len(waiting) >= _BATCH_ROWS
            or size + len(row.payload) > _BATCH_BYTES
            or row.time < waiting[-1].time
        ):
            _append(writer, waiting)
            waiting, size = [], 0
        waiting.append(row)
        size += len(row.key) + len(row.payload)
        count += 1
    if waiting:
        _append(writer, waiting)
    return count


def _problem(row: Row) -> str | None:
    """Return why a row cannot be in a journal, with the remedy; None if it can."""
    if row.kind not in KINDS:
        return f"there are no rows of the kind {row.kind!r}: install a newer version of sbus"
    if not 0 <= row.time <= LATEST:
        return f"its time is {row.time} µs after 1970, but a journal has times from 1970 to 2286: correct it"
    if b"\0" in row.key or (not row.key and row.kind in MESSAGES):
        return f"{row.key!r} is no key: a key has at least one byte, and no NUL"
    if row.sender and not is_sender(row.sender):
        return f"{row.sender!r} is no publisher: correct its number, IDs and chain, or leave it out"
    return None


def _append(writer: JournalWriter, rows: list[Row]) -> None:
    """Append rows of one kind."""
    senders = None
    if any(row.sender for row in rows):
        runs = [(name or None, len(list(run))) for name, run in itertools.groupby(row.sender for row in rows)]
        ends = itertools.accumulate(length for _, length in runs)
        senders = Senders(pa.array([name for name, _ in runs], pa.binary()), pa.array(list(ends), pa.int32()))
    writer.append_copies(
        Kind(rows[0].kind),
        [row.key for row in rows],
        [row.payload for row in rows],
        [row.time for row in rows],
        senders,
    )
