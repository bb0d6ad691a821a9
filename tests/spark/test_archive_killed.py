"""Kill the archive and the writer of the journal while both run: no row is lost, and none is in the lake twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from click.testing import CliRunner

from sbus.cli.main import cli
from sbus.cli.spark.job import Job
from sbus.cli.stopping import stop_on_signals
from sbus.journal.consumers import consumers
from sbus.journal.reader import JournalReader
from sbus.journal.writer import JournalWriter
from sbus.lake.checkpoint import Checkpoint
from sbus.spark.jobs.archive import Archive
from sbus.spark.jobs.lake import Lake
from tests.support.archived import archived, files, recorded

SEED = int(os.environ.get("SBUS_KILLS_SEED", "1"))
LIVES = int(os.environ.get("SBUS_KILLS", "2"))
"""The number of kills of each; raise it for a long run by hand."""
TIMEOUT = 600.0

# It writes without end, in small batches and segments, with clocks that make an hour pass every few seconds.
RECORDER = """
import itertools, sys, time
from sbus.journal.writer import JournalWriter
began = int(sys.argv[2])
clock = lambda: began + 500 * (time.time_ns() // 1000 - began)
journal = JournalWriter.open(sys.argv[1], segment_bytes=200_000, clock=clock)
for number in itertools.count():
    journal.append([(b"a/%d" % (row % 7), b"%d %d" % (number, row)) for row in range(50)])
    if number % 3 == 0:
        journal.sync()
    time.sleep(0.02)
"""


@contextmanager
def running(*command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block."""
    with subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def recording(journal: Path, began: int):
    return running(sys.executable, "-c", RECORDER, journal, str(began))


def archive(journal: Path, lake: Path):
    return running(
        sys.executable, "-m", "sbus.cli", "spark", "archive", f"--journal={journal}", f"--lake={lake}",
        "--master=local[2]", "--every=0.05s",
    )  # fmt: skip


def until_done(checkpoint: Checkpoint, batch: int, archiver: subprocess.Popen[bytes]) -> None:
    """Wait until a batch of the archive is done."""
    deadline = time.monotonic() + TIMEOUT
    while checkpoint.last_done() < batch:
        if archiver.poll() is not None:
            assert archiver.stderr is not None
            pytest.fail(f"it has ended: {archiver.stderr.read().decode()}")
        assert time.monotonic() < deadline
        time.sleep(0.01)


def java_of(process: subprocess.Popen[bytes]) -> int:
    """The process ID of the JVM of a driver."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return next(int(pid) for pid in children if "java" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0])


@pytest.mark.slow
def test_whatever_is_killed_every_row_is_archived_once(spark, tmp_path):
    """The writer of the journal is killed again and again, and so is the archive at any moment of its batches: the
    driver, or its JVM. At last both run to their end, and the lake has the rows of the journal.
    """
    chance = random.Random(SEED)
    journal, lake = tmp_path / "journal", tmp_path / "lake"
    checkpoint = Checkpoint(Lake(lake).checkpoint)
    JournalWriter.open(journal).close()
    began = time.time_ns() // 1000
    for life in range(LIVES):
        with archive(journal, lake) as archiver:
            with recording(journal, began) as recorder:
                until_done(checkpoint, checkpoint.last_done() + 1, archiver)
                time.sleep(chance.uniform(0, 0.3))
                recorder.send_signal(signal.SIGKILL)
            with recording(journal, began):
                until_done(checkpoint, checkpoint.last_done() + 1, archiver)
                time.sleep(chance.uniform(0, 0.5))
                os.kill(archiver.pid if life % 2 else java_of(archiver), signal.SIGKILL)
            assert archiver.wait(TIMEOUT) in (-signal.SIGKILL, 1)
    JournalWriter.open(journal).close()
    before = len(files(lake))
    with Archive(spark, [str(journal)], Lake(lake)) as job:
        assert job.wait(TIMEOUT)
    assert archived(lake) == recorded(journal)
    assert len(files(lake)) > before > LIVES
    assert consumers(journal) == {"archive": JournalReader(journal).end()}


def test_a_signal_ends_it_behind_the_batch_in_hand():
    """A job that is asked to end finishes the running batch, and ends immediately between batches."""
    with stop_on_signals() as stop:
        assert not stop.is_due(is_busy=False, done=0)
        assert not stop.is_due(is_busy=True, done=3)
        signal.raise_signal(signal.SIGTERM)
        assert not stop.is_due(is_busy=True, done=3)
        assert stop.is_due(is_busy=False, done=3)
        assert stop.is_due(is_busy=True, done=4)


def test_a_signal_ends_an_archive_that_never_rests(monkeypatch, tmp_path):
    """With a backlog, the batch that runs when the signal comes is the last one."""
    JournalWriter.open(tmp_path / "journal").close()
    running = NeverAtRest()
    monkeypatch.setattr(Job, "session", lambda *_: nullcontext())
    monkeypatch.setattr("sbus.spark.jobs.archive.Archive", lambda *_, **how: running)
    result = CliRunner().invoke(cli, ["spark", "archive", f"--journal={tmp_path}/journal", f"--lake={tmp_path}/lake"])
    assert (result.exit_code, running.batches) == (0, 3)


class NeverAtRest:
    """An archive with a batch for every two polls; the signal comes in the middle of the third."""

    rows = lost = 0
    damaged = ()
    is_busy = True

    def __init__(self) -> None:
        self.looks = 0

    @property
    def batches(self) -> int:
        return self.looks // 2

    def wait(self, seconds: float) -> bool:
        self.looks += 1
        if self.looks == 5:
            signal.raise_signal(signal.SIGTERM)
        return self.looks == 100

    def __enter__(self) -> NeverAtRest:
        return self

    def __exit__(self, *_: object) -> None:
        pass
