"""A service that writes the metrics of its process: a file for Prometheus's textfile collector."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client.core import Metric
from twisted.internet import defer
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger

from sbus.daemon.metrics_file import MetricsFile
from sbus.daemon.service import MultiService

__all__ = ["INTERVAL", "MetricsWriter"]

INTERVAL = 10.0
"""Seconds between two files."""


class MetricsWriter(MultiService):
    """Writes metrics while it runs, and once more at the end.

    The services that it measures are those within it: they work until they have stopped, and the last file comes then.

    :param reactor: an `IReactorTime`.
    :param file: the file.
    :param families: returns the metrics; called with False at the end.
    """

    _log = Logger(namespace="sbus.daemon")

    def __init__(self, reactor: Any, file: MetricsFile, families: Callable[[bool], Iterable[Metric]]) -> None:
        super().__init__()
        self._reactor = reactor
        self._file = file
        self._families = families
        self._timer: IDelayedCall | None = None
        self._has_failed = False

    def startService(self) -> None:
        """Start the services, and write the first file at once."""
        super().startService()
        self._write()

    def stopService(self) -> defer.Deferred[None]:
        """Stop the services, and write the last file, which says that the process is down."""
        stopping = super().stopService()
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        return stopping.addCallback(lambda _: self._write())

    def _write(self) -> None:
        if self.running:
            self._timer = self._reactor.callLater(INTERVAL, self._write)
        try:
            self._file.write(self._families(bool(self.running)))
        except OSError as e:
            if not self._has_failed:
                self._log.error("{problem}", problem=self._file.problem(e))
            self._has_failed = True
        else:
            self._has_failed = False
