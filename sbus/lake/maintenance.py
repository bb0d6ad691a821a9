"""Compaction, ``prune`` and ``forget``: changes to the hours of a lake, in any table format.

Theory of operation
-------------------

Each of the three reads the files of an hour, merges the rows that stay into new files in ``work``, and puts these in
the place of the old ones with one `Table.replace`. Merging needs no lock but that of maintenance: the files that it
reads never change, because only settled ones are read. So archive and readers continue meanwhile.

A process may be killed at any operation. Before `Table.replace` has done its one step, the new files are leftovers in
``work`` or orphans that no reader sees, and the next maintenance removes them. After it, all is done. Running it again
is always right: it leaves compact hours alone.

*An hour is closed* when it is over by the clock of this machine, and `_CLOSED_AFTER` seconds more for batches in hand;
an hour ahead of the clock, when none of its files has changed for an hour. Rows that come to a closed hour later are
in a file of their own until the next compaction. A large file is never read again.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from sbus.errors import LakeError, UsageError
from sbus.journal.digests import is_message
from sbus.journal.keytext import from_text
from sbus.lake.cube import clean
from sbus.lake.merge import Limits, Merged, iter_rows, merge
from sbus.lake.table import DataFile, Hour, Table, open_parquet
from sbus.protocol.keys import matches_open
from sbus.protocol.recorded import check_recorded

__all__ = ["Outcome", "by_hour", "compact", "forget", "is_closed", "is_due", "prune"]

_HOUR = 3600.0
_CLOSED_AFTER = 300.0
"""Seconds after the end of an hour from which on it is closed."""
_DAY = 86400.0

Progress = Callable[[str], None]
Matcher = Callable[[pa.RecordBatch], pa.BooleanArray]


@dataclass(slots=True)
class Outcome:
    """The result of maintenance.

    :ivar hours: hours that were changed.
    :ivar before: files that were replaced.
    :ivar after: files in their place.
    :ivar rows: rows in these.
    :ivar dropped: rows that are gone.
    :ivar left: files that could not be changed, because their batch is not done, or because another process may be
        writing them or has replaced them meanwhile.
    """

    hours: int = 0
    before: int = 0
    after: int = 0
    rows: int = 0
    dropped: int = 0
    left: int = 0


def by_hour(files: Sequence[DataFile]) -> Iterator[tuple[Hour, list[DataFile]]]:
    """Yield the files of each hour."""
    ordered = sorted(files, key=lambda file: (file.hour, file.name))
    for hour, found in itertools.groupby(ordered, lambda file: file.hour):
        yield hour, list(found)


def is_due(files: Sequence[DataFile], now: float, settled: int, limits: Limits | None = None) -> bool:
    """Return whether the files of an hour should be compacted.

    :param now: in seconds since the epoch.
    :param settled: the last batch that cannot be written again.
    """
    small = _small(files, limits or Limits())
    return is_closed(files, now) and sum(_is_settled(file, settled) for file in small) > 1


def is_closed(files: Sequence[DataFile], now: float) -> bool:
    """Return whether an hour is over.

    :param now: in seconds since the epoch.
    """
    start = files[0].hour.start.timestamp()
    if start > now:
        return now - max(file.changed for file in files) > _HOUR
    return now >= start + _HOUR + _CLOSED_AFTER


def _is_settled(file: DataFile, settled: int) -> bool:
    return file.batch is None or file.batch <= settled


def _small(files: Sequence[DataFile], limits: Limits) -> list[DataFile]:
    return [file for file in files if file.size < limits.min_bytes]


def compact(
    table: Table,
    *,
    now: float | None = None,
    limits: Limits | None = None,
    progress: Progress = lambda text: None,
) -> Outcome:
    """Merge the small files of each closed hour into sorted ones.

    :param now: in seconds since the epoch; None: the clock.
    :param progress: called with the hour in hand.
    :raises sbus.errors.LakeError: if another process maintains the lake; or, when all other hours are done, if a file
        is damaged or a row is there twice.
    :raises OSError: if a file cannot be read or written; the lake is then as before, but for hours that are done.
    """
    now = time.time() if now is None else now
    limits = limits or Limits()
    outcome = Outcome()
    problem: LakeError | None = None
    with _maintaining(table) as work:
        settled = table.state.settled()
        for hour, files in by_hour(table.files()):
            if not is_due(files, now, settled, limits):
                continue
            progress(hour.directory)
            small = _small(files, limits)
            done = [file for file in small if _is_settled(file, settled)]
            outcome.left += len(small) - len(done)
            try:
                merged = _merge(table, done, work, limits)
            except LakeError as e:
                problem = problem or e
                continue
            note = f"{hour.directory}: {len(done)} files into {len(merged.paths)}, {merged.rows} rows"
            if table.replace(done, {hour: merged.paths}, "compact", note):
                _count(outcome, done, merged)
            else:
                outcome.left += len(done)
    if problem is not None:
        raise problem
    return outcome


def prune(table: Table, keep_days: float, *, now: float | None = None) -> Outcome:
    """Remove the hours that are older than a number of days.

    An hour ahead of the clock goes by the age of its files, because the clock was wrong when they were recorded.

    :param keep_days: how many days to keep.
    :param now: in seconds since the epoch; None: the clock.
    :raises sbus.errors.LakeError: if another process maintains the lake.
    """
    now = time.time() if now is None else now
    limit = now - keep_days * _DAY
    outcome = Outcome()
    with _maintaining(table):
        settled = table.state.settled()
        due: dict[Hour, list[DataFile]] = {}
        for hour, files in by_hour(table.files()):
            start = hour.start.timestamp()
            end = start + _HOUR if start <= now else max(file.changed for file in files)
            if end > limit:
                continue
            done = [file for file in files if _is_settled(file, settled)]
            outcome.left += len(files) - len(done)
            if done:
                due[hour] = done
        old = [file for files in due.values() for file in files]
        if old:
            rows = 0
            for file in old:
                with contextlib.suppress(LakeError):  # a damaged one goes, too
                    rows += _rows(table, file)
            note = f"{len(due)} hours up to {max(due).directory}, {len(old)} files, {rows} rows"
            if table.replace(old, dict.fromkeys(due, ()), "prune", note):
                outcome.hours, outcome.before, outcome.dropped = len(due), len(old), rows
            else:
                outcome.left += len(old)
    return outcome


def forget(table: Table, pattern: bytes, *, progress: Progress = lambda text: None) -> Outcome:
    """Remove the messages with certain keys, and the files that had them.

    It is complete if nothing is left (`Outcome.left`): no file in the lake or its state has such a message any longer.
    Journals and copies of the lake still have the messages. So has a query that is running, until its process ends.

    :param pattern: a pattern of the bus, which a key has to match.
    :raises sbus.errors.UsageError: if the pattern is empty, forbidden or secret.
    :raises sbus.errors.LakeError: if another process maintains the lake; or, when all else is done, if a file is
        damaged, which may have such messages.
    """
    matches = _matcher(pattern)
    outcome = Outcome()
    problem: LakeError | None = None
    with _maintaining(table) as work:
        settled = table.state.settled()
        for hour, files in by_hour(table.files()):
            progress(hour.directory)
            hit = []
            for file in files:
                try:
                    if _has_match(table, file, matches):
                        hit.append(file)
                except LakeError as e:
                    problem = problem or e
            done = [file for file in hit if _is_settled(file, settled)]
            outcome.left += len(hit) - len(done)
            if not done:
                continue
            try:
                merged = _merge(table, done, work, Limits(), lambda rows: pc.invert(matches(rows)))
            except LakeError as e:
                problem = problem or e
                continue
            # The history must not keep what is to be forgotten, so the key is not in it.
            note = f"{hour.directory}: {merged.dropped} of {merged.rows + merged.dropped} rows"
            if table.replace(done, {hour: merged.paths}, "forget", note):
                _count(outcome, done, merged)
            else:
                outcome.left += len(done)
        # Also if nothing was found: a process may have been killed just before this.
        table.vacuum(0)
        outcome.left += _sweep(table, matches)
    if problem is not None:
        raise problem
    return outcome


def _sweep(table: Table, matches: Matcher) -> int:
    """Delete what killed processes have left; return the number of files that may have such rows and had to stay.

    A process that is killed leaves staged files, and files that the table does not name. They look the same as those of
    an archive that is running, so they go only if there is none.
    """
    staging = table.state.staging
    try:
        with table.state.locked("lock", "an archive is running"):
            with contextlib.suppress(FileNotFoundError), table.state.inside("staging") as found:
                for staged in found.iterdir():
                    shutil.rmtree(staged, ignore_errors=True)
            unnamed = table.sweep()
    except LakeError:
        unnamed = table.unnamed()
    count = sum(path.suffix == ".parquet" for path in staging.rglob("*"))
    return count + sum(_may_match(table, file, matches) for file in unnamed)


def _may_match(table: Table, file: DataFile, matches: Matcher) -> bool:
    try:
        return _has_match(table, file, matches)
    except FileNotFoundError:
        return False  # its process has ended, and tidied up
    except (OSError, LakeError):
        return True  # it is incomplete, and nobody knows what it has


def _matcher(pattern: bytes) -> Matcher:
    if not pattern:
        raise UsageError("an empty pattern matches every key: to remove everything, remove the directory of the lake")
    check_recorded(pattern)
    known: dict[str, bool] = {}

    def matches(rows: pa.RecordBatch) -> pa.BooleanArray:
        keys = rows.column("key").dictionary_encode()
        found = []
        for key in keys.dictionary.to_pylist():
            if key not in known:
                known[key] = matches_open(pattern, from_text(key))
            found.append(known[key])
        return pc.and_(is_message(rows.column("kind")), pa.array(found, pa.bool_()).take(keys.indices))

    return matches


def _has_match(table: Table, file: DataFile, matches: Matcher) -> bool:
    with open_parquet(table, file) as parquet:
        return any(pc.any(matches(rows)).as_py() for rows in iter_rows(parquet, Limits(), ["kind", "key"]))


def _merge(
    table: Table,
    files: Sequence[DataFile],
    work: Path,
    limits: Limits,
    keep: Callable[[pa.RecordBatch], pa.BooleanArray] | None = None,
) -> Merged:
    directory = work / uuid.uuid4().hex
    directory.mkdir()
    sources = [lambda file=file: open_parquet(table, file) for file in files]
    merged = merge(sources, directory, sum(file.size for file in files), limits, keep)
    expected = sum(_rows(table, file) for file in files)
    if merged.rows + merged.dropped != expected:
        raise LakeError(
            f"{table.location}: {files[0].hour.directory} has {expected} rows, and {merged.rows + merged.dropped} came "
            "out of merging them: nothing was changed; run sbus lake check"
        )
    return merged


def _rows(table: Table, file: DataFile) -> int:
    with open_parquet(table, file) as parquet:
        return int(parquet.metadata.num_rows)


def _count(outcome: Outcome, old: Sequence[DataFile], merged: Merged) -> None:
    outcome.hours += 1
    outcome.before += len(old)
    outcome.after += len(merged.paths)
    outcome.rows += merged.rows
    outcome.dropped += merged.dropped


@contextlib.contextmanager
def _maintaining(table: Table) -> Iterator[Path]:
    """Hold the lock; yield an empty directory for new files."""
    work = table.state.directory / "work"
    with table.state.maintaining():
        shutil.rmtree(work, ignore_errors=True)
        table.state.make_directories(work)
        table.vacuum(table.grace)
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)
        clean(table, dict(by_hour(table.files())))
