"""Metrics of a recorder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import Metric

from sbus.daemon.metrics import MetricsWriter
from sbus.daemon.metrics_file import MetricsFile, counter, gauge
from sbus.recorder.service import RecorderService

__all__ = ["families", "writer"]


def families(recorder: RecorderService, is_up: bool = True) -> Iterator[Metric]:
    """Yield the metrics of a recorder."""
    counters = recorder.counters
    yield gauge("sbus_recorder_up", "Whether the recorder runs. 0: it was stopped, see its log.", float(is_up))
    yield counter("sbus_recorder_rows", "Messages in the journal since the recorder was started.", counters.rows)
    yield counter("sbus_recorder_bytes", "Bytes in their keys and payloads.", counters.bytes)
    yield counter(
        "sbus_recorder_gaps",
        "Gaps in the journal, of any kind. More than one for each start: see sbus journal cat.",
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


def writer(reactor: Any, recorder: RecorderService, path: str) -> MetricsWriter:
    """Return the service that runs a recorder, and writes its metrics.

    :param path: where the file is.
    :raises sbus.errors.UsageError: if the file cannot be there.
    """
    file = MetricsFile(path, {"journal": recorder.directory})
    metrics = MetricsWriter(reactor, file, lambda is_up: families(recorder, is_up))
    recorder.setServiceParent(metrics)
    return metrics
