"""The recorder as a Twisted service.

Use it with ``RecorderService(reactor, directory).setServiceParent(application)``.
"""

from __future__ import annotations

from collections.abc import Callable
from errno import EDQUOT, EFBIG, ENOSPC
from typing import Any

from twisted.internet import defer
from twisted.logger import Logger

from sbus.client.connecting import Backoff, find_address
from sbus.daemon.service import Service
from sbus.errors import JournalError
from sbus.journal.writer import JournalWriter
from sbus.recorder.pipeline import Counters, Recording
from sbus.recorder.retention import delete_old_segments
from sbus.recorder.settings import Settings
from sbus.seqpacket.endpoints import SeqpacketClientEndpoint

__all__ = ["RecorderService", "open_journal"]

_log = Logger(namespace="sbus.recorder")
_DISK_FULL = (ENOSPC, EDQUOT)


def open_journal(directory: str, settings: Settings) -> JournalWriter:
    """Open the journal of a recorder for writing.

    :raises sbus.errors.JournalLocked: if another recorder writes it.
    :raises sbus.errors.JournalError: if it cannot be written; the message has the reason and the remedy.
    """
    try:
        try:
            return _open(directory, settings)
        except OSError as error:
            # To repair a journal after a crash takes space; deleting old segments may free it.
            if error.errno not in _DISK_FULL or settings.keeps_all or not delete_old_segments(directory, settings):
                raise
            return _open(directory, settings)
    except OSError as error:
        if error.errno in _DISK_FULL:
            remedy = ": free space on that file system, then start again"
        elif error.errno == EFBIG:
            remedy = ", then start again"  # the error's text names the rest of the remedy
        else:
            remedy = ": name another directory (--journal), or let this user write there"
        raise JournalError(f"the journal {directory} cannot be written: {error.strerror}{remedy}") from error


def _open(directory: str, settings: Settings) -> JournalWriter:
    return JournalWriter.open(
        directory,
        segment_bytes=settings.segment_bytes,
        segment_seconds=settings.segment_age,
        directory_mode=settings.directory_mode,
        file_mode=settings.mode,
        warn=lambda text: _log.warn("{text}", text=text),
    )


class RecorderService(Service):
    """Records a bus into a journal while it runs, also while the bus comes and goes.

    It can be started and stopped any number of times.

    :param reactor: the reactor to connect with.
    :param directory: the directory of the journal; created if there is none.
    :param address: the address of the bus, as for `sbus.client.tx.connect`.
    :param settings: how to record; None: the defaults.
    :param on_failure: called when a bug ends the recording, and when messages that were received could not be written;
        the log has the reason.
    :param backoff: the pauses between attempts to connect.
    """

    def __init__(
        self,
        reactor: Any,
        directory: str,
        address: str | None = None,
        settings: Settings | None = None,
        *,
        on_failure: Callable[[], object] = lambda: None,
        backoff: Backoff | None = None,
    ) -> None:
        self.directory = directory
        self.address = find_address(address)
        self.settings = settings or Settings()
        self._reactor = reactor
        self._on_failure = on_failure
        self._backoff = backoff
        self._recording: Recording | None = None
        SeqpacketClientEndpoint(reactor, self.address)  # raises if the address is wrong

    @property
    def counters(self) -> Counters:
        """The counters since the last start."""
        return self._recording.counters if self._recording is not None else Counters()

    def log_counters(self) -> None:
        """Log the counters since the last start."""
        if self._recording is not None:
            self._recording.log_counters()

    def startService(self) -> None:
        """Open the journal, and start recording.

        :raises sbus.errors.JournalLocked: if another recorder writes the journal.
        :raises sbus.errors.JournalError: if the journal cannot be written.
        """
        journal = open_journal(self.directory, self.settings)
        super().startService()
        self._recording = Recording(
            self._reactor,
            journal,
            self.address,
            self.settings,
            self._on_failure,
            backoff=self._backoff,
            reopen=lambda: open_journal(self.directory, self.settings),
        )
        self._recording.start()

    def stopService(self) -> defer.Deferred[None]:
        """Write all that the bus has queued for the recorder, and close the journal.

        :returns: fires when that is done.
        """
        super().stopService()
        return defer.Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        if self._recording is not None:
            await self._recording.stop()
            if self._recording.counters.lost:
                self._on_failure()
