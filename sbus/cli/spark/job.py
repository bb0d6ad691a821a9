"""What the jobs of ``sbus spark`` share: the options that say which data and which Spark, and how they end."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sbus.errors import UsageError
from sbus.extras import needs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Duration", "Job", "Progress", "Stop", "Time", "end_by_signals", "to_run", "watched", "with_job"]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(slots=True)
class Job:
    """Which journals and lake a job is about, and which Spark runs it."""

    journal: list[str] = field(default_factory=list)
    lake: str | None = None
    master: str = "local[*]"
    conf: list[str] = field(default_factory=list)

    def need_journals(self) -> list[str]:
        """
        :raises UsageError: without any.
        :raises JournalError: if one is not there, which is known long before Spark has started.
        """
        if not self.journal:
            raise UsageError("say which journal with --journal=DIR (or several, or a pattern such as '/shared/*')")
        with needs("spark"):
            from sbus.journal.reader import find_journals
        find_journals(self.journal)
        return self.journal

    def need_lake(self) -> str:
        """
        :raises UsageError: without one.
        """
        if self.lake is None:
            raise UsageError("say where the lake is with --lake=DIR")
        return self.lake

    @contextlib.contextmanager
    def session(self, name: str) -> Iterator[SparkSession]:
        """A session for the job, which is stopped behind it; what Spark raises meanwhile becomes an error of ours.

        :param name: what Spark's own pages call the job.
        :raises UsageError: if Spark or Java is not installed, or `conf` is not understood.
        :raises SbusError: for what has failed in Spark, in one line.
        """
        with needs("spark"):
            from py4j.protocol import Py4JError

            from sbus.spark.runtime.errors import translate_errors
            from sbus.spark.runtime.session import get_session, parse_conf
        conf = parse_conf(self.conf)
        with translate_errors():
            session = get_session(f"sbus {name}", master=self.master, conf=conf)
            try:
                yield session
            finally:
                with contextlib.suppress(Py4JError):  # the JVM is gone, and the session with it
                    session.stop()


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    job = ctx.ensure_object(Job)
    assert param.name is not None
    if isinstance(value, tuple):
        getattr(job, param.name).extend(value)
    elif value is not None:
        setattr(job, param.name, value)


with_job = click.make_pass_decorator(Job, ensure=True)
"""Call the command with the `Job` as its first argument."""


def to_run(command: F) -> F:
    """Give a command the options that all jobs have; they may stand before or behind its name."""
    common: dict[str, Any] = {"expose_value": False, "callback": _remember}
    options = (
        click.option(
            "--journal",
            "-j",
            multiple=True,
            metavar="DIR",
            help="A journal, or a pattern such as '/shared/*' for many; may be given several times.",
            **common,
        ),
        click.option("--lake", "-l", metavar="DIR", help="The lake: the Parquet files that the archive is.", **common),
        click.option(
            "--master", metavar="URL", help="Where Spark runs: spark://HOST:PORT, ...  [default: local[*]]", **common
        ),
        click.option(
            "--conf",
            multiple=True,
            metavar="KEY=VALUE",
            help="A setting of Spark's; may be given several times.",
            **common,
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


class Duration(click.ParamType[float]):
    """A time such as ``500ms``, ``10s`` or ``1h``, in seconds.

    :param least: seconds.
    """

    name = "time"

    def __init__(self, least: float = 0.0) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        from sbus.daemon.options import duration

        name = param.name if param is not None and param.name else self.name
        return duration(name, self.least)(value)


class Time(click.ParamType[datetime]):
    """A time of ISO 8601, in UTC unless it says another zone."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is no time: write it as in 2026-01-31 or 2026-01-31T12:00:00", param, ctx)
        try:
            return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
        except OverflowError:
            self.fail(f"{value!r} is no time: in UTC it is not in the years 1 to 9999", param, ctx)


class Progress:
    """A line on standard error that is written over and over; nothing at all where that is no terminal."""

    def __init__(self) -> None:
        self._shows = sys.stderr.isatty()
        self._is_open = False

    def show(self, text: str) -> None:
        if self._shows:
            click.echo(f"\r\x1b[K{text}", nl=False, err=True)
            self._is_open = True

    def clear(self) -> None:
        """Take the line away; what is printed next stands where it was."""
        if self._is_open:
            click.echo("\r\x1b[K", nl=False, err=True)
            self._is_open = False


@contextlib.contextmanager
def watched(spark: SparkSession) -> Iterator[None]:
    """Meanwhile, show on a terminal how many tasks of the stage in hand are done."""
    progress = Progress()
    is_over = threading.Event()

    def watch() -> None:
        tracker = spark.sparkContext.statusTracker()
        while not is_over.wait(0.5):
            stages = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
            told = [f"{stage.numCompletedTasks} of {stage.numTasks}" for stage in stages if stage]
            progress.show(f"tasks done: {', '.join(told)}" if told else "")
        progress.clear()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


class Stop:
    """Whether somebody wants this process to end.

    :ivar is_wanted: true from the first signal on.
    """

    def __init__(self) -> None:
        self.is_wanted = False
        self._done = 0

    def is_due(self, *, is_busy: bool, done: int) -> bool:
        """Whether to end now, as no batch is in hand, or the one is done that was when the end was wanted.

        To be called now and then from the start on. While there is much to do, one batch follows another at once, and
        a moment between them is hardly ever seen.

        :param is_busy: whether a batch is in hand.
        :param done: how many batches are done.
        """
        if not self.is_wanted:
            self._done = done
            return False
        return not is_busy or done > self._done


@contextlib.contextmanager
def end_by_signals() -> Iterator[Stop]:
    """SIGINT and SIGTERM ask for an end in order, and a second one for an end at once (KeyboardInterrupt)."""
    stop = Stop()

    def on_signal(*_: object) -> None:
        if stop.is_wanted:
            raise KeyboardInterrupt
        stop.is_wanted = True

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
