"""When old segments are deleted: at the start, when a segment was closed, now and then, and while the disk is full."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from twisted.logger import Logger

from sbus.errors import JournalError
from sbus.journal.retention import retain
from sbus.recorder.settings import Settings

if TYPE_CHECKING:
    from sbus.journal.writing import Journal

__all__ = ["Keeper"]

_INTERVAL = 60.0


class Keeper:
    """Keeps a journal within its limits; called by the journal's thread whenever it has done something.

    :param interval: seconds between two looks when no segment is closed. Whatever consumers have taken meanwhile may
        be deleted then.
    """

    _log = Logger()

    def __init__(self, journal: Journal, settings: Settings, interval: float = _INTERVAL) -> None:
        self._journal = journal
        self._settings = settings
        self._interval = interval
        self._is_limited = settings.keep_bytes is not None or settings.keep_days is not None
        self._closed = -1
        self._looked = 0.0

    def __call__(self, in_need: bool = False) -> None:
        """Look whether something is to be deleted, if there is a reason to.

        :param in_need: there is no space on the disk.
        """
        if not self._is_limited:
            return
        now = time.monotonic()
        if not in_need and self._journal.closed == self._closed and now - self._looked < self._interval:
            return
        self._closed, self._looked = self._journal.closed, now
        settings = self._settings
        try:
            deleted = retain(
                self._journal.directory,
                keep_bytes=settings.keep_bytes,
                keep_days=settings.keep_days,
                force=settings.force,
                warn=lambda text: self._log.warn("{text}", text=text),
            )
        except (OSError, JournalError) as error:
            self._log.warn(
                "old segments of {journal} cannot be deleted: {why}", journal=self._journal.directory, why=error
            )
            return
        if deleted:
            self._log.info(
                "deleted {count} old segments of {journal}: {first} to {last}",
                count=len(deleted),
                journal=self._journal.directory,
                first=deleted[0],
                last=deleted[-1],
            )
