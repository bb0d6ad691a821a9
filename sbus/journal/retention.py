"""Deleting old segments: whole ones, oldest first, and only what every consumer has taken.

It takes no locks. The newest segment of which something is safe always stays, and what follows it, as it tells how far
the journal has come; whoever reads a segment that is deleted meanwhile reads it to its end.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from sbus.journal import disk
from sbus.journal.consumers import consumers
from sbus.journal.index import last_sync
from sbus.journal.layout import ARROWS, CLOSED, INDEX, Segment, identity, list_segments
from sbus.journal.writer import now

__all__ = ["retain"]

_log = logging.getLogger("sbus.journal")

_DAY = 86_400_000_000  # µs
_held: dict[str, str] = {}  # by directory: what was said last of what holds segments there


def retain(
    directory: str | os.PathLike[str],
    *,
    keep_bytes: int | None = None,
    keep_days: float | None = None,
    force: bool = False,
    clock: Callable[[], int] = now,
    warn: Callable[[str], object] = _log.warning,
) -> list[str]:
    """Delete the oldest segments of a journal that is larger or older than it may be.

    A segment that a consumer has not wholly taken stays; and with no consumer at all, all of them.

    :param keep_bytes: how much its segments may take in all.
    :param keep_days: how old a row may get. A segment is deleted when all its rows are older.
    :param force: delete also what was not taken.
    :param clock: tells the time in µs since 1970.
    :param warn: is told, in a sentence and once until it changes, what keeps segments that are due.
    :returns: the names of the segments that were deleted, oldest first.
    :raises JournalError: if there is no journal, or what a consumer has taken cannot be told.
    :raises OSError: if a segment cannot be deleted.
    """
    directory = os.path.abspath(directory)
    identity(directory)
    segments = list_segments(directory)
    count = _due(segments, keep_bytes, None if keep_days is None else clock() - int(keep_days * _DAY))
    due = segments[: min(count, _dispensable(segments))]
    taken, why = (None, "") if force or not due else _taken(directory)
    gone: list[Segment] = []
    for segment, following in zip(due, segments[1:], strict=False):
        if not segment.closed or (taken is not None and following.first_seq > taken):
            break
        gone.append(segment)
    _delete(directory, gone)
    held = why if len(gone) < len(due) and due[len(gone)].closed else ""
    if held and held != _held.get(directory):
        warn(held)
    _held[directory] = held
    return [segment.name for segment in gone]


def _dispensable(segments: list[Segment]) -> int:
    """How many of these segments are not needed to tell how far the journal has come, also after a power cut."""
    for at in range(len(segments) - 1, 0, -1):
        try:
            # Of a segment that was never synced a power cut may leave nothing, and the numbers would begin anew.
            if last_sync(segments[at]):
                return at
        except FileNotFoundError:
            pass
    return 0


def _due(segments: list[Segment], keep_bytes: int | None, oldest: int | None) -> int:
    """How many of these segments are more than may be kept, were they not needed."""
    count = 0
    if oldest is not None:
        # No row is later than the first of the segment that follows.
        count = sum(following.first_time < oldest for following in segments[1:])
    if keep_bytes is not None:
        sizes = [_size(segment) for segment in segments]
        total = sum(sizes)
        over = 0
        while over < len(segments) - 1 and total > keep_bytes:
            total -= sizes[over]
            over += 1
        count = max(count, over)
    return count


def _size(segment: Segment) -> int:
    total = 0
    for suffix in (ARROWS, INDEX, CLOSED):
        try:
            total += os.stat(segment.path(suffix)).st_size
        except FileNotFoundError:
            pass
    return total


def _taken(directory: str) -> tuple[int, str]:
    """The first seq that somebody still needs, and what there is to say of it."""
    known = consumers(directory)
    more = "more is there than is to be kept, but"
    if not known:
        return 0, (
            f"{directory}: {more} nothing is deleted, as no consumer has taken anything: archive it, or delete by force"
        )
    slowest = min(known, key=lambda name: known[name])
    return known[slowest], f"{directory}: {more} the consumer {slowest!r} has not taken it yet: see whether that runs"


def _delete(directory: str, segments: list[Segment]) -> None:
    # First what segments are known by, for good: an index must not go while a power cut could bring its rows back.
    for suffixes in ((ARROWS,), (INDEX, CLOSED)):
        for segment in segments:
            for suffix in suffixes:
                disk.remove(segment.path(suffix))
        if segments:
            disk.sync_directory(directory)
