"""When old segments are deleted: at the start, when a segment was closed, now and then, and when the disk is full."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from twisted.logger import Logger

from sbus.errors import JournalError
from sbus.journal.retention import retain
from sbus.recorder.settings import Settings

if TYPE_CHECKING:
    from sbus.journal.writer import JournalWriter

__all__ = ["RetentionTrigger", "delete_old"]

_log = Logger(namespace="sbus.recorder")

_INTERVAL = 60.0


class RetentionTrigger:
    """Keeps a journal within its limits; called by the journal's thread whenever it has done something.

    :param interval: seconds between two looks when no segment is closed. Whatever consumers have taken meanwhile may
        be deleted then.
    """

    def __init__(self, journal: JournalWriter, settings: Settings, interval: float = _INTERVAL) -> None:
        self._journal = journal
        self._settings = settings
        self._interval = interval
        self._closed = -1
        self._looked = 0.0

    def __call__(self, in_need: bool = False) -> None:
        """Look whether something is to be deleted, if there is a reason to.

        :param in_need: there is no space on the disk.
        """
        if self._settings.keeps_all:
            return
        now = time.monotonic()
        if not in_need and self._journal.segments_closed == self._closed and now - self._looked < self._interval:
            return
        self._closed, self._looked = self._journal.segments_closed, now
        delete_old(self._journal.directory, self._settings)


def delete_old(directory: str, settings: Settings) -> bool:
    """Delete what a journal need not keep any more; the log tells of it, and of what is in the way.

    :returns: whether anything was deleted.
    """
    try:
        deleted = retain(
            directory,
            keep_bytes=settings.keep_bytes,
            keep_days=settings.keep_days,
            force=settings.force,
            warn=lambda text: _log.warn("{text}", text=text),
        )
    except (OSError, JournalError) as error:
        _log.warn("old segments of {journal} cannot be deleted: {why}", journal=directory, why=error)
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
