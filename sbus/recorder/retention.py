"""The recorder's schedule for deleting old segments.

It deletes at the start, when a segment is closed, at intervals, and on a full disk. `sbus.journal.retention` decides
which segments may go.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from twisted.logger import Logger

from sbus.errors import JournalError
from sbus.journal.clock import now
from sbus.journal.retention import retain
from sbus.recorder.settings import Settings

if TYPE_CHECKING:
    from sbus.journal.writer import JournalWriter

__all__ = ["RetentionTrigger", "delete_old_segments"]

_log = Logger(namespace="sbus.recorder")

_INTERVAL = 60.0
"""Seconds between two runs while no segment is closed: consumers may have taken more by then."""


class RetentionTrigger:
    """Runs retention when there is a reason to.

    The journal's thread calls it after each job.

    :param interval: the seconds between two runs while no segment is closed.
    :ivar journal: the journal; another one if it was replaced.
    """

    def __init__(self, journal: JournalWriter, settings: Settings, interval: float = _INTERVAL) -> None:
        self.journal = journal
        self._settings = settings
        self._interval = interval
        self._segments_closed = -1  # at the last run
        self._last_run = 0.0  # on the monotonic clock

    def __call__(self, disk_failed: bool = False) -> None:
        """Run retention, if there is a reason to.

        :param disk_failed: whether the journal cannot be written; deleted segments may free the space for it.
        """
        if self._settings.keeps_all:
            return
        monotonic = time.monotonic()
        closed = self.journal.segments_closed
        if not disk_failed and closed == self._segments_closed and monotonic - self._last_run < self._interval:
            return
        self._segments_closed, self._last_run = closed, monotonic
        delete_old_segments(self.journal.directory, self._settings, self.journal.now)


def delete_old_segments(directory: str, settings: Settings, clock: Callable[[], int] = now) -> bool:
    """Delete the segments that a journal need not keep; log which ones.

    :param clock: returns the time, in µs since the epoch.
    :returns: whether a segment was deleted.
    """
    try:
        deleted = retain(
            directory,
            keep_bytes=settings.keep_bytes,
            keep_days=settings.keep_days,
            force=settings.force,
            clock=clock,
            warn=lambda text: _log.warn("{text}", text=text),
        )
    except (OSError, JournalError) as error:
        _log.warn("old segments of {journal} cannot be deleted: {reason}", journal=directory, reason=error)
        return False
    if deleted:
        _log.info(
            "deleted {count} old segments of {journal}: {first} to {last}",
            count=len(deleted),
            journal=directory,
            first=deleted[0],
            last=deleted[-1],
        )
    return bool(deleted)
