"""Metrics of a recorder: a file for Prometheus's textfile collector, replaced every few seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import Metric
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger

from sbus.daemon.service import Service
from sbus.metrics_file import MetricsFile, counter, gauge
from sbus.recorder.service import RecorderService

__all__ = ["INTERVAL", "RecorderMetrics", "families"]

INTERVAL = 10.0
"""Seconds between two files."""


def families(recorder: RecorderService, is_up: bool = True) -> Iterator[Metric]:
    """Yield the metrics of a recorder."""
    counters = recorder.counters
    yield gauge("sbus_recorder_up", "Whether the recorder runs. 0: it was stopped, see its log.", float(is_up))
    yield counter("sbus_recorder_rows", "Messages in the journal since the recorder was started.", counters.rows)
    yield counter("sbus_recorder_bytes", "Bytes in their keys and payloads.", counters.bytes)
    yield counter(
        "sbus_recorder_gaps",
        "Gaps in the journal, of any kind. More than one for each start: see sbus journal rows --kind.",
        counters.gaps,
    )
    yield counter(
        "sbus_recorder_dropped_messages",
        "Messages that the bus dropped for the recorder. If it rises, the disk is too slow: see --hard and --max-lag.",
        counters.dropped,
    )
    yield counter(
        "sbus_recorder_lost_messages",
        "Messages that were received and not written. The disk is full, or the recorder has failed: see its log.",
        counters.lost,
    )
    yield gauge("sbus_recorder_lag_seconds", "Time from the arrival of a message to the journal, lately.", counters.lag)
    yield gauge("sbus_recorder_lag_longest_seconds", "The longest such time since the start.", counters.longest_lag)
    yield gauge(
        "sbus_recorder_last_sync_timestamp_seconds",
        "When the journal was last written to the disk for good. A silent bus is synced every minute; older than five "
        "minutes: the disk hangs or is full.",
        counters.synced_at,
    )


class RecorderMetrics(Service):
    """Writes the metrics of a recorder while it runs, and once more at the end.

    :param reactor: an `IReactorTime`.
    :param path: where the file is.
    :raises sbus.errors.UsageError: if the file cannot be there.
    """

    _log = Logger(namespace="sbus.recorder")

    def __init__(self, reactor: Any, recorder: RecorderService, path: str) -> None:
        self._reactor = reactor
        self._recorder = recorder
        self._file = MetricsFile(path, {"journal": recorder.directory})
        self._timer: IDelayedCall | None = None
        self._has_failed = False

    def startService(self) -> None:
        """Write the first file at once."""
        super().startService()
        self._write()

    def stopService(self) -> None:
        """Write the last file, which says that the recorder is down."""
        super().stopService()
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._write()

    def _write(self) -> None:
        if self.running:
            self._timer = self._reactor.callLater(INTERVAL, self._write)
        try:
            self._file.write(families(self._recorder, bool(self.running)))
        except OSError as e:
            if not self._has_failed:
                self._log.error("{problem}", problem=self._file.problem(e))
            self._has_failed = True
        else:
            self._has_failed = False
