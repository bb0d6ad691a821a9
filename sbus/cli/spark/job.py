"""Jobs of ``sbus spark``: common options, and the Spark session."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from sbus.cli.combined import combined
from sbus.cli.job_metrics import JobMetrics
from sbus.cli.journal.options import journals_option
from sbus.cli.output import Progress
from sbus.distribution import needs
from sbus.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Job", "job_options", "pass_job", "show_tasks"]

_PROGRESS_INTERVAL = 0.5
"""Seconds between two updates of the number of tasks."""


@dataclass(slots=True)
class Job:
    """The journals and the lake that a job is about, and the Spark that runs it.

    :ivar journal: directories, or patterns of them.
    :ivar lake: a directory or a URL that Spark understands, or None.
    :ivar master: where Spark runs.
    :ivar conf: settings of Spark, each ``KEY=VALUE``.
    :ivar state: the state directory of a lake in object storage, or None.
    :ivar metrics_file: where to write metrics, or None.
    """

    journal: list[str] = field(default_factory=list)
    lake: str | None = None
    master: str = "local[*]"
    conf: list[str] = field(default_factory=list)
    state: str | None = None
    metrics_file: str | None = None
    _is_measured: bool = field(default=False, init=False, repr=False)

    def need_journals(self) -> list[str]:
        """Return the journals; check that they exist, long before Spark has started.

        :raises UsageError: if none is named.
        :raises JournalError: if one does not exist.
        """
        if not self.journal:
            raise UsageError("no journal is named: give --journal=DIR, or a pattern such as --journal='/shared/*'")
        with needs("spark"):
            from sbus.journal.reader import find_journals
        find_journals(self.journal)
        return self.journal

    def need_lake(self) -> str:
        """Return the lake.

        :raises UsageError: if none is named.
        """
        if self.lake is None:
            raise UsageError("no lake is named: give --lake=DIR")
        return self.lake

    def labels(self) -> dict[str, str]:
        """Return what tells the metrics of this job from those of the same job elsewhere: its lake, or its journals."""
        if self.lake is not None:
            return {"lake": self.lake if "://" in self.lake else os.path.abspath(self.lake)}
        return {"journal": ",".join(map(os.path.abspath, self.journal))}

    @contextlib.contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """Write the metrics of a job when the block ends; a block within it, such as `session`, writes none.

        :raises UsageError: if the file of the metrics cannot be where it should.
        """
        if self._is_measured:
            yield
            return
        self._is_measured = True
        try:
            with JobMetrics(name, self.metrics_file, self.labels()).measured():
                yield
        finally:
            self._is_measured = False

    @contextlib.contextmanager
    def session(self, name: str) -> Iterator[SparkSession]:
        """Start a Spark session, and stop it at the end of the block.

        :param name: the job's name on Spark's own pages.
        :raises UsageError: if Spark or Java is not installed, or `conf` is malformed.
        :raises SbusError: if Spark fails within the block; the text is one line.
        """
        with needs("spark"):
            from py4j.protocol import Py4JError

            from sbus.spark.runtime.errors import translate_errors
            from sbus.spark.runtime.session import get_session, parse_conf
        conf = parse_conf(self.conf)
        # Spark starts its Python workers with -m, which would import modules of the current directory.
        os.environ.setdefault("PYTHONSAFEPATH", "1")
        with self.measured(name), translate_errors():
            session = get_session(f"sbus {name}", master=self.master, conf=conf)
            try:
                yield session
            finally:
                with contextlib.suppress(Py4JError, OSError):  # the JVM has gone, and the session with it
                    session.stop()


def _store(ctx: click.Context, param: click.Parameter, value: object) -> None:
    job = ctx.ensure_object(Job)
    assert param.name is not None
    if isinstance(value, tuple):
        getattr(job, param.name).extend(value)
    elif value is not None:
        setattr(job, param.name, value)


pass_job = click.make_pass_decorator(Job, ensure=True)
"""Call the command with the `Job` as its first argument."""


_COMMON: dict[str, Any] = {"expose_value": False, "callback": _store}
job_options = combined(
    journals_option(**_COMMON),
    click.option(
        "--lake",
        "-l",
        metavar="DIR",
        help="Lake: the directory, or the URL, of the archived Parquet files.",
        **_COMMON,
    ),
    click.option(
        "--state",
        metavar="DIR",
        help="State directory of a lake in object storage.  [default: below ~/.local/state/sbus]",
        **_COMMON,
    ),
    click.option(
        "--metrics-file",
        metavar="FILE",
        help="File to write metrics to, in Prometheus's text format.",
        **_COMMON,
    ),
    click.option(
        "--master",
        metavar="URL",
        help="Where Spark runs, such as spark://HOST:PORT.  [default: local[*]]",
        **_COMMON,
    ),
    click.option(
        "--conf",
        multiple=True,
        metavar="KEY=VALUE",
        help="Spark setting, such as spark.driver.memory=4g; repeatable.",
        **_COMMON,
    ),
)
"""The options of every job. They are accepted before and after its name."""


@contextlib.contextmanager
def show_tasks(spark: SparkSession) -> Iterator[None]:
    """Show on a terminal, while a block runs, how many Spark tasks are done."""
    progress = Progress()
    is_over = threading.Event()

    def watch() -> None:
        tracker = spark.sparkContext.statusTracker()
        while not is_over.wait(_PROGRESS_INTERVAL):
            stages = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
            counts = [f"{stage.numCompletedTasks} of {stage.numTasks}" for stage in stages if stage]
            progress.show(f"tasks done: {', '.join(counts)}" if counts else "")
        progress.clear()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()
