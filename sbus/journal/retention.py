"""Retention: deletes old segments that every consumer has taken, the oldest first.

Retention takes no locks; it runs beside the writer and the readers. Invariants:

* The newest segment that has a sync record stays, and so does every segment after it. It states which row of the
  journal is the last one, and after a power cut it may be all that does: of a segment that was never synced, nothing
  may be left.
* A segment of which a consumer still needs a row stays, unless deletion is forced. Without any consumer every segment
  stays: an archive that was never started must not lose rows to a limit on size.
* Of each segment the ``.arrows`` is removed first, and that removal is synced before the index and the summary go. A
  power cut can then leave an index or a summary alone, which readers ignore and the writer removes; never rows without
  an index.
* The age of a row is the time that has really passed since then, as far as the journal shows it. Times of two epochs
  cannot be compared, so `_ages` adds up the epochs one by one; the step between two of them counts as no time. A clock
  that was wrong therefore makes segments look younger than they are, by at most the time of which nothing was recorded.
* A reader that has opened a segment reads it to the end: the kernel keeps the content of an open file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from sbus.journal import disk
from sbus.journal.clock import DAY, now
from sbus.journal.consumers import consumers
from sbus.journal.index import last_sync
from sbus.journal.layout import ARROWS, INDEX, SUMMARY, Segment, list_segments, read_identity

__all__ = ["retain"]

_log = logging.getLogger("sbus.journal")

_last_warnings: dict[str, str] = {}
"""By directory: the last warning about what keeps segments there, so that it is not repeated."""


def retain(
    directory: str | os.PathLike[str],
    *,
    keep_bytes: int | None = None,
    keep_days: float | None = None,
    force: bool = False,
    clock: Callable[[], int] = now,
    warn: Callable[[str], object] = _log.warning,
) -> list[str]:
    """Delete the oldest segments of a journal that exceeds a limit.

    A segment that a consumer has not wholly taken stays; without any consumer all of them do.

    :param keep_bytes: the limit on the size of all segments together, in bytes; None: no limit.
    :param keep_days: the limit on the age of a row, in days; a segment is deleted when all its rows are older. None: no
        limit.
    :param force: delete segments that no consumer has taken, too.
    :param clock: returns the time, in µs since the epoch.
    :param warn: called with a sentence about what keeps segments beyond a limit; once until that changes.
    :returns: the names of the deleted segments, the oldest first.
    :raises JournalError: if there is no journal, or the file of a consumer is damaged.
    :raises OSError: if a segment cannot be deleted.
    """
    directory = os.path.abspath(directory)
    read_identity(directory)
    segments = list_segments(directory)
    count = _count_due(segments, keep_bytes, None if keep_days is None else int(keep_days * DAY), clock)
    due = segments[: min(count, _count_removable(segments))]
    needed_seq, reason = (None, "") if force or not due else _first_needed(directory)
    doomed: list[Segment] = []
    for segment, following in zip(due, segments[1:], strict=False):
        if not segment.closed or (needed_seq is not None and following.first_seq > needed_seq):
            break
        doomed.append(segment)
    _delete(directory, doomed)
    warning = reason if len(doomed) < len(due) and due[len(doomed)].closed else ""
    if warning and warning != _last_warnings.get(directory):
        warn(warning)
    _last_warnings[directory] = warning
    return [segment.name for segment in doomed]


def _count_removable(segments: list[Segment]) -> int:
    """Count the segments that are not needed to know the last row of the journal."""
    for at in range(len(segments) - 1, 0, -1):
        try:
            # A power cut may leave nothing of a segment that was never synced, and numbering would start again at 0.
            if last_sync(segments[at]):
                return at
        except FileNotFoundError:
            pass
    return 0


def _count_due(
    segments: list[Segment], keep_bytes: int | None, keep_micros: int | None, clock: Callable[[], int]
) -> int:
    """Count the segments beyond the limits.

    :param keep_micros: the greatest age of a row, in µs.
    """
    count = 0
    if keep_micros is not None:
        # All rows of a segment were recorded before the first row of the next one.
        count = sum(age > keep_micros for age in _ages(segments, clock())[1:])
    if keep_bytes is not None:
        sizes = [_size(segment) for segment in segments]
        total = sum(sizes)
        over = 0
        while over < len(segments) - 1 and total > keep_bytes:
            total -= sizes[over]
            over += 1
        count = max(count, over)
    return count


def _ages(segments: list[Segment], time: int) -> list[int]:
    """Return how long ago the first row of each segment was recorded, in µs.

    :param time: the time now, in µs since the epoch.
    """
    ages: list[int] = []
    after = 0  # since the first row of the following epoch
    ended, came_back_to = time, time  # the last time of the epoch, and the first of the following one
    following: Segment | None = None
    for segment in reversed(segments):
        if following is not None and following.epoch != segment.epoch:
            after = ages[-1]
            ended, came_back_to = _last_time(segment), following.first_time
        passed = max(ended - segment.first_time, 0)
        if came_back_to > segment.first_time:
            # The clock came back to this time, so anything beyond it was wrong.
            passed = min(passed, came_back_to - segment.first_time)
        ages.append(after + passed)
        following = segment
    return ages[::-1]


def _last_time(segment: Segment) -> int:
    try:
        sync = last_sync(segment)
    except FileNotFoundError:
        sync = None
    return sync.max_time if sync else segment.first_time


def _size(segment: Segment) -> int:
    total = 0
    for suffix in (ARROWS, INDEX, SUMMARY):
        try:
            total += os.stat(segment.path(suffix)).st_size
        except FileNotFoundError:
            pass
    return total


def _first_needed(directory: str) -> tuple[int, str]:
    """Return the first row that a consumer needs, and the warning about it.

    The warning is for a segment that this keeps beyond a limit.
    """
    known = consumers(directory)
    exceeds = "the journal exceeds its limits, but"
    if not known:
        return 0, (
            f"{directory}: {exceeds} nothing is deleted, as no consumer has taken anything: archive it, or delete by "
            "force"
        )
    slowest = min(known, key=lambda name: known[name])
    return known[slowest], (
        f"{directory}: {exceeds} the consumer {slowest!r} has not taken the oldest segment yet: check that it runs, or "
        f"run 'sbus journal release {directory} {slowest}' if it is gone for good"
    )


def _delete(directory: str, segments: list[Segment]) -> None:
    for suffixes in ((ARROWS,), (INDEX, SUMMARY)):
        for segment in segments:
            for suffix in suffixes:
                disk.remove(segment.path(suffix))
        if segments:
            disk.sync_directory(directory)
