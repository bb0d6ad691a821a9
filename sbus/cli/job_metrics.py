"""Metrics of ``sbus archive`` and of ``sbus spark``: a file for Prometheus, replaced while and when a job runs."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from sbus.errors import SbusError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from sbus.daemon.metrics_file import MetricsFile
    from sbus.lake.job import ArchiveJob

__all__ = ["ArchiveMetrics", "JobMetrics"]

_WRITE_INTERVAL = 10.0
"""Seconds from one file to the next."""

_log = logging.getLogger("sbus.lake")


class JobMetrics:
    """How a job ended: the same figures for every job.

    :param job: its name, the label of each figure.
    :param path: the file; None: no metrics.
    :param labels: as for `MetricsFile`.
    :raises sbus.errors.UsageError: if the file cannot be there.
    """

    def __init__(self, job: str, path: str | None, labels: Mapping[str, str]) -> None:
        self._job = job
        self._file = _open(path, labels)

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Write the figures when the block ends, and whether it failed."""
        start = time.monotonic()
        ok = False
        try:
            yield
            ok = True
        finally:
            # The archive writes a file of its own as long as it runs.
            if self._file is not None and (self._job != "archive" or not ok):
                _write(self._file, self.figures(ok, time.monotonic() - start))

    def figures(self, ok: bool, seconds: float) -> list[Metric]:
        """Return the figures of a run that has ended just now, well or not, after some seconds."""

        from sbus.daemon.metrics_file import gauge

        def figure(name: str, text: str, value: float) -> Metric:
            return gauge(f"sbus_job_{name}", text, {self._job: value}, "job")

        return [
            figure("success", "1 if the last run ended well, 0 if it failed: see its error.", ok),
            figure("end_timestamp_seconds", "When the last run ended.", time.time()),
            figure("duration_seconds", "How long it took.", seconds),
        ]


class ArchiveMetrics:
    """The figures of an archive that runs.

    :param path: the file; None: no metrics.
    :param labels: as for `MetricsFile`.
    """

    def __init__(self, path: str | None, labels: Mapping[str, str]) -> None:
        self.retries = 0
        self._file = _open(path, labels)
        self._next = 0.0
        self._rows = self._batches = self._lost = self._compactions = self._failures = 0
        self._last_batch = self._checked = 0.0

    def update(self, archive: ArchiveJob | None, *, is_up: bool = True, now: bool = False) -> None:
        """Write the file, if it is time.

        :param archive: None if it could not even be made.
        :param is_up: whether the archive runs; false between a failure and the next try.
        :param now: write it in any case.
        """
        if self._file is None or (not now and time.monotonic() < self._next):
            return
        self._next = time.monotonic() + _WRITE_INTERVAL
        _write(self._file, self.figures(archive, is_up=is_up))

    def figures(self, archive: ArchiveJob | None, *, is_up: bool) -> list[Metric]:
        """Return the figures; see `update`."""
        from sbus.daemon.metrics_file import counter, gauge

        lag = -1
        rows = batches = lost = compactions = failures = damaged = 0
        if archive is not None:
            damaged = len(archive.damaged)
            rows, batches, lost = archive.rows, archive.batches, archive.lost
            if archive.upkeep is not None:
                compactions, failures = archive.upkeep.done, archive.upkeep.failed
            with contextlib.suppress(SbusError, OSError):  # a journal or the lake is gone; the archive itself says so
                self._last_batch = archive.done_at or self._last_batch
                lag = archive.lag
                self._checked = time.time()
        return [
            gauge("sbus_archive_up", "1 while the archive runs, 0 while it waits for its next try.", is_up),
            counter("sbus_archive_rows", "Rows archived since the start.", self._rows + rows),
            counter("sbus_archive_batches", "Batches that they came in.", self._batches + batches),
            counter("sbus_archive_retries", "Failures after which the archive tried again.", self.retries),
            counter(
                "sbus_archive_lost_rows",
                "Rows that were deleted before they were archived (--allow-loss), or are damaged; the log names them.",
                self._lost + lost,
            ),
            gauge("sbus_archive_lag_rows", "Rows in journals that are not in the lake; -1 if unknown.", lag),
            gauge(
                "sbus_archive_damaged_journals",
                "Journals whose rows wait until damage is repaired; the log names them.",
                damaged,
            ),
            gauge("sbus_archive_last_batch_timestamp_seconds", "When the last batch was done.", self._last_batch),
            gauge(
                "sbus_archive_checked_timestamp_seconds",
                "When the archive last compared the lake with the journals. Older than 15 minutes: it does not run.",
                self._checked,
            ),
            counter("sbus_archive_compactions", "Runs of the compaction.", self._compactions + compactions),
            counter(
                "sbus_archive_compaction_failures",
                "Compactions that failed; the log says why.",
                self._failures + failures,
            ),
        ]

    def carry(self, archive: ArchiveJob) -> None:
        """Take over the figures of an archive that has ended, so that its successor counts on."""
        self._rows += archive.rows
        self._batches += archive.batches
        self._lost += archive.lost
        if archive.upkeep is not None:
            self._compactions += archive.upkeep.done
            self._failures += archive.upkeep.failed


def _open(path: str | None, labels: Mapping[str, str]) -> MetricsFile | None:
    if path is None:
        return None
    from sbus.daemon.metrics_file import MetricsFile  # imports prometheus_client, which takes as long as a short job

    return MetricsFile(path, labels)


def _write(file: MetricsFile, figures: list[Metric]) -> None:
    try:
        file.write(figures)
    except OSError as e:
        _log.warning("%s", file.problem(e))
