"""A running archive whose lake goes away for a while: it says so, tries again, and its metrics show it."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from sbus.cli.main import cli
from sbus.journal.consumers import consumers
from sbus.spark.jobs.archive import Archive
from sbus.spark.jobs.lake import Lake
from tests.support.archived import MIDNIGHT, archived, files, recorded
from tests.support.journals import Clock
from tests.support.waiting import wait_until

TIMEOUT = 60.0

pytestmark = pytest.mark.slow


def figures(path: Path) -> dict[str, float]:
    """The figures of a metrics file, without their prefix; none before it is there."""
    text = path.read_text() if path.exists() else ""
    return {
        sample.name.removeprefix("sbus_archive_"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def fast_clock(times: float) -> SimpleNamespace:
    """The module `time` as a job sees it whose seconds pass so many times as fast; the time of day is the right one."""
    return SimpleNamespace(monotonic=lambda: time.monotonic() * times, time=time.time)


class Operator(threading.Thread):
    """Does to a running archive what a test says, and ends it with SIGINT; its failure is that of the test.

    :ivar over: set when the archive has ended by itself.
    """

    def __init__(self, steps: Any) -> None:
        super().__init__()
        self._steps = steps
        self.problem: BaseException | None = None
        self.over = threading.Event()

    def run(self) -> None:
        try:
            self._steps()
        except BaseException as problem:
            self.problem = problem
        if not self.over.is_set():
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("replaced", ["directory", "file"])
def test_it_goes_on_when_the_lake_is_back(spark, new_journal, tmp_path, monkeypatch, replaced):
    """Each failure is one line: what, why, and when the next try is, after twice the time. When the lake is back, the
    rows are there once. The metrics are those of each moment: lag, rows and the last batch while it runs, and that it
    waits.
    """
    monkeypatch.setattr(type(spark), "stop", lambda self: None)  # it is everybody's
    monkeypatch.setattr("sbus.cli.job_metrics.time", fast_clock(200))  # 10 s between two files
    journal = new_journal(clock=Clock(MIDNIGHT))
    lake, away, file = tmp_path / "lake", tmp_path / "away", tmp_path / "sbus.prom"

    def record(rows: int) -> None:
        journal.append([(b"a/%d" % number, b"x") for number in range(rows)])
        journal.sync()

    def until(**wanted: float) -> dict[str, float]:
        return wait_until(lambda: figures(file), lambda found: wanted.items() <= found.items(), timeout=TIMEOUT)

    def until_tried(retries: int) -> dict[str, float]:
        """Wait until the archive waits for the lake; on a busy machine, it may have tried more often."""
        return wait_until(
            lambda: figures(file),
            lambda found: found.get("up") == 0 and found["retries_total"] >= retries,
            timeout=TIMEOUT,
        )

    def steps() -> None:
        running = until(up=1, rows_total=10, batches_total=1, lag_rows=0, retries_total=0)
        assert time.time() - running["last_batch_timestamp_seconds"] < TIMEOUT
        lake.rename(away)
        if replaced == "directory":
            lake.mkdir()
        else:
            lake.write_text("not mounted")
        record(5)
        assert until_tried(1)["lag_rows"] == 5  # its state is beside it, and still there
        until_tried(2)
        if replaced == "directory":
            lake.rmdir()
        else:
            lake.unlink()
        away.rename(lake)
        again = until(up=1, rows_total=15, batches_total=2, lag_rows=0)
        assert again["last_batch_timestamp_seconds"] > running["last_batch_timestamp_seconds"]

    record(10)
    operator = Operator(steps)
    operator.start()
    options = [f"--journal={journal.directory}", f"--lake={lake}", "--every=0.1s", f"--metrics-file={file}"]
    done = CliRunner().invoke(cli, ["spark", "archive", *options])
    operator.over.set()
    operator.join()
    assert operator.problem is None, (operator.problem, done.output)
    assert done.exit_code == 0, done.output
    lines = [line for line in done.stderr.splitlines() if "trying again" in line]
    assert len(lines) >= 2, done.stderr
    for line, seconds in zip(lines, (1, 2, 4, 8), strict=False):
        assert re.fullmatch(rf"sbus: .*: its rows are gone, .*; trying again in {seconds} s", line), line
    assert "archived 15 rows in 2 batches" in done.stderr
    assert archived(lake) == recorded(journal.directory)
    assert consumers(journal.directory) == {"archive": 15}
    assert figures(file)["up"] == 0


def test_closed_hours_are_compacted_meanwhile(spark, new_journal, tmp_path, monkeypatch, caplog):
    """A running archive merges the files of a closed hour by itself. If it cannot, because another process maintains
    the lake, one line says so, the archive goes on, and compaction is tried again.
    """
    monkeypatch.setattr("sbus.lake.upkeep.time", fast_clock(3000))  # five minutes between two looks
    journal = new_journal(clock=Clock(MIDNIGHT))
    lake = tmp_path / "lake"

    def record() -> None:
        journal.append([(b"a/%d" % number, b"x") for number in range(20)])
        journal.sync()

    record()
    with Archive(spark, [journal.directory], Lake(lake), every=0.05, max_rows=10, compacts=True) as archive:
        upkeep = archive.upkeep
        assert upkeep is not None

        def work_until(is_right: Callable[[], bool]) -> None:
            """Let the archive work: it may take any time on a slow machine, but no single step may take a minute."""
            seen, deadline = (-1, 0, 0), 0.0
            while not is_right():
                if seen != (found := (archive.rows, upkeep.failed, upkeep.done)):
                    seen, deadline = found, time.monotonic() + TIMEOUT
                assert not archive.wait(0.05)
                assert time.monotonic() < deadline, seen

        with Lake(lake).table.state.maintaining():
            work_until(lambda: bool(upkeep.failed) and archive.rows >= 20)
            assert upkeep.done == 0
            assert len(files(lake)) == 2
        record()
        work_until(lambda: bool(upkeep.done) and archive.rows >= 40 and len(files(lake)) == 1)
    assert archived(lake) == recorded(journal.directory)
    assert {event.what for event in Lake(lake).table.history()} == {"compact"}
    warnings = [record.getMessage() for record in caplog.records if "compaction failed" in record.getMessage()]
    assert warnings
    assert "another process compacts or prunes this lake" in warnings[0]
    assert "the archive goes on, and it is tried again in" in warnings[0]
