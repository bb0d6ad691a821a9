"""The script of the demo: each step, and what it reports."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from pyspark.sql import SparkSession

from sbus.client.blocking import connect
from sbus.client.core import Message
from sbus.daemon.launcher import twistd_command
from sbus.errors import ConnectError, Disconnected, SbusError, TimedOut
from sbus.journal.reader import JournalReader
from sbus.report import LakeRows, Report, measure, render
from sbus.spark.demo import alerts
from sbus.spark.demo.plant import LIMIT, SITES
from sbus.spark.demo.processes import Process, python, running
from sbus.spark.jobs.archive import Archive
from sbus.spark.jobs.lake import Lake
from sbus.syscalls.socket_directory import fits_socket, new_socket_directory

__all__ = ["Outcome", "run"]

_CRASH_AT = 0.62
"""The time at which the recorder is killed, as a part of the two days."""
_STEP_TIMEOUT = 60.0
"""Seconds for a step that takes a moment on a fast machine."""
_POLL_INTERVAL = 0.05
"""Seconds between two looks at a condition."""
_MAX_ALERTS_SHOWN = 4
"""Alerts that are printed."""

Say = Callable[[str, str], None]
"""Called with the name of a part of the demo and a sentence about it."""


@dataclass
class Outcome:
    """The result of the demo.

    :ivar alerts: the messages of the query that a subscriber received.
    :ivar archived: rows in the lake.
    :ivar figures: the figures of the report; None if the demo was stopped before.
    :ivar report: the file of the page; None if the demo was stopped before.
    """

    directory: Path
    alerts: list[Message] = field(default_factory=list)
    archived: int = 0
    figures: Report | None = None
    report: Path | None = None


def run(
    spark: SparkSession,
    directory: Path,
    *,
    seconds: float = 80.0,
    say: Say = lambda part, text: None,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run the demo.

    :param directory: an existing directory for all files.
    :param seconds: the real time that the two days of the plant take.
    :param say: called with each step.
    :param stop: called many times a second; when it returns true, the demo ends in order.
    :raises sbus.errors.SbusError: if a part fails; the text has the end of its log.
    """
    outcome = Outcome(directory)
    journal, address = directory / "journal", os.fspath(directory / "bus")
    with ExitStack() as stack:
        if not fits_socket(address):
            elsewhere = new_socket_directory()
            stack.callback(shutil.rmtree, elsewhere, ignore_errors=True)
            address = os.path.join(elsewhere, "bus")
        bus = stack.enter_context(running("bus", twistd_command("sbus", f"--socket={address}"), directory / "bus.log"))
        _wait(lambda: _accepts(address), bus, stop, "the bus to listen")
        say("bus", f"twistd sbus --socket={address} (process {bus.pid})")
        recorder = _start_recorder(address, journal, directory)
        stack.callback(lambda: recorder.end())
        _wait(lambda: _rows(journal) > 0, recorder, stop, "the recorder to write")
        say("recorder", f"twistd sbus-recorder --journal={journal} (process {recorder.pid})")
        window = max(1.0, seconds / 40)
        query = alerts.start(
            spark, os.fspath(journal), address, os.fspath(directory / "checkpoint"), limit=LIMIT, window=window
        )
        stack.callback(query.stop)
        say(
            "query",
            f"Spark reads the journal as it grows: an alert for each bearing above {LIMIT:.0f} °C goes to the bus",
        )
        stack.enter_context(_subscribed(address, outcome.alerts, say))
        start = time.time()
        for site, machines in SITES.items():
            command = python("-m", "sbus.spark.demo.plant", address, site, str(start), str(seconds))
            stack.enter_context(running(f"plant in {site}", command, directory / f"{site}.log"))
            say("plant", f"{site}: {machines} machines start to send; their two days take {seconds:.0f} seconds")

        done = {"day": False, "crash": False}
        while not stop():
            passed = time.time() - start
            if passed >= seconds and (outcome.alerts or passed >= seconds + _STEP_TIMEOUT):
                break
            if passed >= seconds / 2 and not done["day"]:
                done["day"] = True
                say("plant", f"the second day begins; {_rows(journal):,} rows are recorded")
            if passed >= seconds * _CRASH_AT and not done["crash"]:
                done["crash"] = True
                recorder.kill()
                say("recorder", "kill -9: the rows that it had synced are safe, and the bus and its clients go on")
                pause = time.monotonic() + min(1.5, seconds / 30)
                while time.monotonic() < pause and not stop():
                    time.sleep(_POLL_INTERVAL)
                recorder = _start_recorder(address, journal, directory)
                say("recorder", "started again: it removes the torn end of the journal, records the gap, and goes on")
            bus.check()
            if (failure := query.exception()) is not None:
                raise SbusError(f"the streaming query has failed: {failure}")
            time.sleep(_POLL_INTERVAL)
        recorder.check()
        end = time.time()
    # The exit stack has stopped all parts in reverse order: plant, subscriber, query, recorder, bus.
    say("", f"stopped in order: plant, query, recorder, bus; {len(outcome.alerts)} alerts came over the bus")
    if stop():
        return outcome
    _evaluate(spark, outcome, journal, start, end, say)
    return outcome


def _start_recorder(address: str, journal: Path, directory: Path) -> Process:
    options = (f"--socket={address}", f"--journal={journal}", "--sync=200ms", "--batch-time=50ms")
    return Process("recorder", twistd_command("sbus-recorder", *options), directory / "recorder.log")


def _evaluate(spark: SparkSession, outcome: Outcome, journal: Path, start: float, end: float, say: Say) -> None:
    lake = Lake(outcome.directory / "lake")
    with Archive(spark, [os.fspath(journal)], lake) as archive:
        archive.wait()
    outcome.archived = archive.rows
    say("archive", f"{archive.rows:,} rows are in a lake of Parquet files: {lake.location}")
    # Both halves are days unless the alert took longer.
    half, until = (datetime.fromtimestamp(at, UTC) for at in ((start + end) / 2, end))
    outcome.figures = measure(LakeRows(lake.table), start=half, end=until)
    outcome.report = outcome.directory / "report.html"
    page = render(outcome.figures, source=os.fspath(lake.location), title="A day of a plant")
    outcome.report.write_text(page, "utf-8")
    say("report", f"the second day, compared with the first: {outcome.report}")
    for silence in outcome.figures.silences:
        if silence.end is None:
            say("report", f"the page lists the sensor that fell silent: {silence.scope}")


def _rows(journal: Path) -> int:
    try:
        return JournalReader(os.fspath(journal)).end()
    except SbusError:
        return 0  # the journal does not exist yet


def _accepts(address: str) -> bool:
    try:
        connect(address, timeout=1).close()
    except ConnectError:
        return False
    return True


def _wait(is_there: Callable[[], bool], process: Process, stop: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _STEP_TIMEOUT
    while not is_there() and not stop():
        process.check()
        if time.monotonic() > deadline:
            raise TimedOut(f"waited {_STEP_TIMEOUT:.0f} seconds for {what}: see {process.log}")
        time.sleep(_POLL_INTERVAL)


@contextlib.contextmanager
def _subscribed(address: str, found: list[Message], say: Say) -> Iterator[None]:
    """During the block, subscribe to the alerts like any other client, and show them."""
    with connect(address) as bus:
        bus.subscribe("alerts/")
        bus.fence()
        over = threading.Event()

        def show() -> None:
            while not over.is_set():
                try:
                    messages = bus.get_many(0.2)
                except TimedOut:
                    continue
                except Disconnected:
                    return
                for message in messages:
                    found.append(message)
                    if len(found) <= _MAX_ALERTS_SHOWN:
                        say("alert", _format_alert(message))
                    elif len(found) == _MAX_ALERTS_SHOWN + 1:
                        say("alert", "... and so on")

        thread = threading.Thread(target=show, name="alerts")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _format_alert(message: Message) -> str:
    alert = json.loads(message.payload)
    rise = alert.get("rise")
    trend = f", {'rising' if rise > 0 else 'falling'} {abs(rise):.1f} °C a second" if rise else ""
    return f"{message.key.decode()}: {alert['degrees']:.1f} °C{trend}"
