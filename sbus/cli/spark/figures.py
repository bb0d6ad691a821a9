"""The figures of a report: from hourly counts if these are enough, or else from the rows, with Spark."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TypedDict

from sbus.cli.output import Progress
from sbus.cli.spark.job import Job
from sbus.journal.keytext import as_text

if TYPE_CHECKING:
    from sbus.spark.report import Report

__all__ = ["Subject", "figures_of"]

_HOURLY_FROM = timedelta(days=6)
"""The length of a period from which on its windows can be whole hours, so that counts by the hour are enough."""
_ATTEMPTS = 3
"""Attempts to read counts, of which compaction may remove some meanwhile."""


class _Settings(TypedDict):
    start: datetime | None
    end: datetime | None
    last: timedelta
    pattern: str
    depth: int | None
    top: int
    progress: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Subject:
    """What to report on.

    :ivar first: the start of the period before, if it is known.
    :ivar since: the start of the period; None: `length` before its end.
    :ivar until: its end; None: that of the last row.
    :ivar length: its length, if `since` is None.
    :ivar pattern: selects the messages that count by their keys.
    :ivar depth: the number of segments that make a prefix; None: chosen by the keys.
    :ivar top: the largest length of a list.
    """

    first: datetime | None
    since: datetime | None
    until: datetime | None
    length: timedelta
    pattern: bytes
    depth: int | None
    top: int

    def settings(self, progress: Progress) -> _Settings:
        """Return the arguments that `measure` and `measure_counted` have in common."""
        return {
            "start": self.since,
            "end": self.until,
            "last": self.length,
            "pattern": as_text(self.pattern),
            "depth": self.depth,
            "top": self.top,
            "progress": lambda step: progress.show(f"measuring: {step}"),
        }


def figures_of(job: Job, subject: Subject) -> Report:
    """Return the figures of a report; Spark starts only if counts are not enough.

    :raises sbus.errors.UsageError: if there are no rows in the period, or the period is not valid.
    """
    figures = None
    if job.lake is not None and not job.journal and _about(subject) >= _HOURLY_FROM:
        figures = _by_counts(job, job.lake, subject)
    return _by_spark(job, subject) if figures is None else figures


def _about(subject: Subject) -> timedelta:
    """Return about how long the period will be."""
    if subject.since is None:
        return subject.length
    return (subject.until or datetime.now(UTC)) - subject.since


def _by_counts(job: Job, lake: str, subject: Subject) -> Report | None:
    """Return the figures, from counts of the lake's hours; those of closed hours are made if they are missing.

    :returns: None if it takes rows: no windows of whole hours, or a lake that cannot be written.
    """
    from sbus.lake.hourly import hourly
    from sbus.lake.opening import open_table
    from sbus.spark.jobs.tables import key_filter
    from sbus.spark.report import measure_counted
    from sbus.spark.runtime.session import parse_conf

    parse_conf(job.conf)  # refused here too, though it is for Spark
    table = open_table(lake, state=job.state)
    progress = Progress()
    for _ in range(_ATTEMPTS):
        progress.show("counting: hours that are not counted yet")
        with (
            contextlib.suppress(FileNotFoundError),
            hourly(table, subject.since, subject.until, subject.length) as counts,
        ):
            if counts is None:
                break
            figures = measure_counted(counts, wanted=key_filter(subject.pattern), **subject.settings(progress))
            progress.clear()
            return figures
    progress.clear()
    return None


def _by_spark(job: Job, subject: Subject) -> Report:
    """Return the figures, computed by Spark from the rows."""
    with job.session("report") as spark:
        from sbus.spark.jobs.tables import key_matches, load_rows
        from sbus.spark.report import measure

        rows = load_rows(
            spark,
            journals=job.journal,
            lake=job.lake,
            state=job.state,
            since=subject.first,
            until=subject.until,
            senders=True,
        )
        progress = Progress()
        figures = measure(rows, wanted=key_matches(subject.pattern), **subject.settings(progress))
        progress.clear()
        return figures
