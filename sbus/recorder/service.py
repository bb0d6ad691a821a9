"""The recorder as a Twisted service: ``RecorderService(reactor, directory).setServiceParent(application)``."""

from __future__ import annotations

from collections.abc import Callable
from errno import EDQUOT, ENOSPC
from typing import Any

from twisted.internet import defer
from twisted.logger import Logger

from sbus.client.connecting import Backoff, find_address
from sbus.daemon.service import Service
from sbus.errors import JournalError
from sbus.journal.writer import JournalWriter
from sbus.recorder.pipeline import Counters, Recording
from sbus.recorder.retention import delete_old
from sbus.recorder.settings import Settings
from sbus.seqpacket.endpoints import SeqpacketClientEndpoint

__all__ = ["RecorderService", "open_journal"]

_log = Logger(namespace="sbus.recorder")
_FULL = (ENOSPC, EDQUOT)


def open_journal(directory: str, settings: Settings) -> JournalWriter:
    """Open the journal that a recorder with these settings writes.

    :raises sbus.errors.JournalLocked: if another recorder writes it.
    :raises sbus.errors.JournalError: if it cannot be written, with the reason and the remedy.
    """
    try:
        try:
            return _open(directory, settings)
        except OSError as error:
            # What is to be put right after a crash needs space, and what need not be kept any more may take it.
            if error.errno not in _FULL or settings.keeps_all or not delete_old(directory, settings):
                raise
            return _open(directory, settings)
    except OSError as error:
        if error.errno in _FULL:
            remedy = "free space on that file system, then start again"
        else:
            remedy = "name another directory (--journal), or let this user write there"
        raise JournalError(f"the journal {directory} cannot be written: {error.strerror}: {remedy}") from error


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
    """Records a bus into a journal for as long as it runs, also if the bus is not there at first, or goes and returns.

    :param directory: of the journal; it is made if it is not there.
    :param address: of the bus, as for `sbus.client.tx.connect`.
    :param on_failure: called when it cannot go on, and when messages that it had received could not be written; the
        log says why.
    :param backoff: the pauses between attempts to connect.

    Starting fails with `sbus.errors.JournalError` if the journal cannot be written, and with
    `sbus.errors.JournalLocked` if another recorder writes it. It can be started and stopped any number of times.
    """

    def __init__(
        self,
        reactor: Any,
        directory: str,
        address: str | None = None,
        settings: Settings | None = None,
        *,
        on_failure: Callable[[], Any] = lambda: None,
        backoff: Backoff | None = None,
    ) -> None:
        self.directory = directory
        self.address = find_address(address)
        self.settings = settings or Settings()
        self._reactor = reactor
        self._on_failure = on_failure
        self._backoff = backoff
        self._recording: Recording | None = None
        SeqpacketClientEndpoint(reactor, self.address)  # says what is wrong with the address, if anything is

    @property
    def counters(self) -> Counters:
        """What has been recorded since it was started."""
        return self._recording.counters if self._recording is not None else Counters()

    def log_counters(self) -> None:
        """Say in the log what has been recorded since it was started."""
        if self._recording is not None:
            self._recording.log_counters()

    def startService(self) -> None:
        """Open the journal, and begin.

        :raises sbus.errors.JournalError: if it cannot be written.
        """
        journal = open_journal(self.directory, self.settings)
        super().startService()
        self._recording = Recording(
            self._reactor, journal, self.address, self.settings, self._on_failure, backoff=self._backoff
        )
        self._recording.start()

    def stopService(self) -> defer.Deferred[None]:
        """Write everything that the bus has for us, and close the journal; fires when that is done."""
        super().stopService()
        return defer.Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        if self._recording is not None:
            await self._recording.stop()
            if self._recording.counters.lost:
                self._on_failure()
