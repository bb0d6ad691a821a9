"""What ``sbus archive`` and ``sbus spark archive`` have in common: their options, and how they run, retry and stop."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from sbus.cli.combined import combined
from sbus.cli.job_metrics import ArchiveMetrics
from sbus.cli.output import Progress, describe_os_error, pluralize, printable_text
from sbus.cli.stopping import StopRequest, stop_on_signals
from sbus.cli.types import COUNT, Duration, Mode, Size
from sbus.errors import JournalError, JournalMissing, SparkError, StorageError

if TYPE_CHECKING:
    from sbus.lake.job import ArchiveJob

__all__ = ["Choices", "archive_options", "run"]

_POLL_INTERVAL = 0.25
"""Seconds between two looks at the job's progress."""
_MIN_RETRY = 1.0
"""Seconds until the first try after a failure."""
_MAX_RETRY = 300.0
"""Seconds until the next try after many."""


@dataclass(slots=True)
class Choices:
    """The values of the common options."""

    once: bool
    every: float
    max_rows: int | None
    max_bytes: int | None
    consumer: str | None
    allow_loss: bool
    table_format: str | None
    mode: int | None
    no_compact: bool
    no_retry: bool

    def settings(self) -> dict[str, Any]:
        """Return the arguments of an archive that have a value."""
        given = {"max_rows": self.max_rows, "max_bytes": self.max_bytes, "consumer": self.consumer}
        return {
            "every": None if self.once else self.every,
            "fail_on_data_loss": not self.allow_loss,
            "compacts": not self.no_compact,
            **{name: value for name, value in given.items() if value is not None},
        }


archive_options = combined(
    click.option(
        "--once/--follow",
        default=False,
        help="Archive the rows that are there, and exit; or continue with new ones.  [default: --follow]",
    ),
    click.option(
        "--every",
        type=Duration(),
        metavar="TIME",
        default="10s",
        show_default=True,
        help="Time from one batch to the next, such as 500ms, 10s or 1m.",
    ),
    click.option(
        "--max-rows",
        type=COUNT,
        metavar="N",
        help="Maximum number of rows in a batch; with as many waiting it starts before its time.  [default: 10000000]",
    ),
    click.option(
        "--max-bytes",
        type=Size(1),
        metavar="SIZE",
        help="About the maximum size of a batch in the journals, such as 512M; likewise.",
    ),
    click.option(
        "--consumer",
        metavar="NAME",
        help="Name under which the journals keep the archive's position; each lake of a journal needs its own.  "
        "[default: archive]",
    ),
    click.option(
        "--allow-loss",
        is_flag=True,
        help="Continue if journals or rows were deleted before they were archived, or are damaged.",
    ),
    click.option(
        "--format",
        "table_format",
        type=click.Choice(["parquet", "delta"]),
        help="Table format of a new lake.  [default: parquet; of a URL, delta]",
    ),
    click.option(
        "--mode",
        "-m",
        type=Mode(),
        metavar="MODE",
        help="Permissions of new files of the lake, octal, such as 0640; users who may read them may enter the "
        "directories.  [default: as the lake has them; of a new one, 0600]",
    ),
    click.option("--no-compact", is_flag=True, help="Leave the small files of closed hours to sbus lake compact."),
    click.option("--no-retry", is_flag=True, help="Exit at the first failure, as with --once."),
)
"""The common options; a command gets their values as `Choices`."""


def run(
    new_archive: Callable[[], ArchiveJob],
    choices: Choices,
    metrics: ArchiveMetrics,
    *,
    room: str,
    is_alive: Callable[[], bool] = lambda: True,
) -> None:
    """Run an archive to its end, or until a signal; after a failure try again with another one.

    :param new_archive: makes an archive that has not begun, always of one table, which knows the lake that it wrote.
    :param room: what to make room for if the disk is full.
    :param is_alive: whether another archive could run after a failure.
    :raises sbus.errors.SbusError: if it may not try again, or that would be of no use.
    """
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_PrintableFormatter())
    total = _Total()
    backoff = _Backoff()
    progress = Progress()
    has_run = False
    with stop_on_signals() as stop:
        while True:
            running: ArchiveJob | None = None
            try:
                running = new_archive()
                with running:
                    has_run = True
                    _watch(running, stop, total, progress, metrics)
                break
            except (SparkError, StorageError, JournalMissing, OSError) as e:
                # A service manager often signals all processes of a service, so Spark may be gone before this one.
                if stop.is_made:
                    break
                if choices.once or choices.no_retry or not has_run or not is_alive():
                    if isinstance(e, OSError | StorageError):
                        raise StorageError(_with_remedy(e, room)) from e
                    raise
                progress.clear()
                seconds = backoff.next(did_work=running is not None and running.batches > 0)
                metrics.retries += 1
                text = f"sbus: {_with_remedy(e, room)}; trying again in {seconds:.0f} s"
                click.echo(printable_text(text), err=True)
                metrics.update(running, is_up=False, now=True)
                _wait(seconds, stop)
                if stop.is_made:
                    break
                if running is not None:
                    metrics.carry(running)
            finally:
                progress.clear()
                if running is not None:
                    total.add(running)
        if choices.once and running is not None and running.upkeep is not None and not stop.is_made:
            running.upkeep.run()
    metrics.update(running, is_up=False, now=True)
    click.echo(total.text(), err=True)
    if running is not None and (damaged := running.damaged):
        count = pluralize(len(damaged), "journal")
        raise JournalError(f"{count} could not be archived beyond damage: {', '.join(damaged)}")


class _PrintableFormatter(logging.Formatter):
    """Makes the lines of the log safe to print: they name directories of other users."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_text(super().format(record))


def _with_remedy(error: Exception, room: str) -> str:
    """Return the text of a failure after which the archive tries again."""
    text = describe_os_error(error) if isinstance(error, OSError) else str(error)
    if os.strerror(errno.ENOSPC) in text or os.strerror(errno.EDQUOT) in text:
        text = f"{text}: make room for {room}"
    return text


def _watch(running: ArchiveJob, stop: StopRequest, total: _Total, progress: Progress, metrics: ArchiveMetrics) -> None:
    """Wait until the archive ends, or a signal has asked it to."""
    while not running.wait(_POLL_INTERVAL):
        if stop.is_due(is_busy=running.is_busy, done=running.batches):
            break
        progress.show(total.text(running))
        metrics.update(running)


def _wait(seconds: float, stop: StopRequest) -> None:
    """Wait, but not longer than until a signal."""
    until = time.monotonic() + seconds
    while not stop.is_made and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, _POLL_INTERVAL))


class _Backoff:
    """How long to wait after a failure: longer each time, until something worked."""

    def __init__(self) -> None:
        self._seconds = _MIN_RETRY

    def next(self, *, did_work: bool) -> float:
        """Return the seconds until the next try.

        :param did_work: whether a batch was done since the last failure.
        """
        if did_work:
            self._seconds = _MIN_RETRY
        seconds = self._seconds
        self._seconds = min(_MAX_RETRY, 2 * seconds)
        return seconds


class _Total:
    """The sums of all archives of this command."""

    def __init__(self) -> None:
        self._rows = self._batches = self._lost = 0
        self._start = time.monotonic()

    def add(self, ended: ArchiveJob) -> None:
        """Add an archive that has ended."""
        self._rows += ended.rows
        self._batches += ended.batches
        self._lost += ended.lost

    def text(self, running: ArchiveJob | None = None) -> str:
        """Return the progress in words, with an archive that runs."""
        rows, batches, lost = self._rows, self._batches, self._lost
        if running is not None:
            rows, batches, lost = rows + running.rows, batches + running.batches, lost + running.lost
        seconds = time.monotonic() - self._start
        and_lost = f", {pluralize(lost, 'row')} lost" if lost else ""
        return (
            f"archived {pluralize(rows, 'row')} in {pluralize(batches, 'batch')}, {seconds:.0f} s "
            f"({rows / max(seconds, 1e-3):,.0f} rows/s){and_lost}"
        )
