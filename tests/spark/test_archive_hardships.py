"""The real archive beside what goes wrong around it: retention, a journal that is moved away, full disks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from sbus.client.blocking import Bus as Client
from sbus.client.blocking import connect
from sbus.journal.consumers import consumers
from sbus.journal.reader import JournalReader
from sbus.journal.writer import JournalWriter
from tests.integration.recorder.conftest import Recorder
from tests.support.archived import archived, recorded
from tests.support.disks import filled, mounted
from tests.support.harness import Bus
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow
TIMEOUT = 400.0
"""Seconds for what an archive does on a busy machine; its start alone may take twenty."""


class Archiver:
    """A real ``sbus spark archive``; its standard error goes to a file."""

    def __init__(self, process: subprocess.Popen[bytes], path: Path) -> None:
        self.process = process
        self._path = path

    @property
    def log(self) -> str:
        return self._path.read_text()

    def wait_log(self, pattern: str, count: int = 1) -> None:
        wait_until(
            lambda: (self.log, self.process.poll()),
            lambda found: len(re.findall(pattern, found[0])) >= count,
            timeout=TIMEOUT,
        )

    def stop(self) -> None:
        """Stop it between two batches; that is a success."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(TIMEOUT) == 0, self.log


@contextmanager
def archiving(journal: Path, lake: Path, *options: str) -> Iterator[Archiver]:
    command = [
        *(sys.executable, "-m", "sbus.cli", "spark", "archive", f"--journal={journal}", f"--lake={lake}"),
        *("--master=local[2]", "--every=100ms", *options),
    ]
    path = lake.with_name("archive.log")
    with path.open("wb") as log, subprocess.Popen(command, stderr=log, stdout=subprocess.DEVNULL) as process:
        try:
            yield Archiver(process, path)
        finally:
            process.kill()


def taken(journal: Path) -> int:
    """Return the first row that the archive has not confirmed."""
    return consumers(journal).get("archive", 0)


def wait_taken(journal: Path) -> None:
    """Wait until the archive has confirmed all rows of a journal."""
    wait_until(lambda: (taken(journal), JournalReader(journal).end()), lambda at: at[0] == at[1], timeout=TIMEOUT)


def publish(bus: Client, first: int, count: int = 100) -> int:
    """Publish numbered messages; return the next number."""
    bus.publish_many([(b"key/%d" % (n % 7), b"%040d" % n) for n in range(first, first + count)])
    return first + count


def finish(bus: Client, recorder: Recorder, archiver: Archiver, journal: Path) -> None:
    """Stop the recorder when it has everything, and the archive when it has that."""
    bus.fence(TIMEOUT)
    assert recorder.stop() == 0
    wait_taken(journal)
    archiver.stop()


RETAINED = ("--sync=50ms", "--batch-time=20ms", "--segment-bytes=40000", "--keep-bytes=60000")


@pytest.fixture
def recorder(spawn, directory: Path):
    """Start a bus and a recorder with a small limit on its journal."""

    def start(*options: str) -> Recorder:
        spawn(Bus, directory).wait_started()
        started = spawn(Recorder, directory, directory / "bus", directory / "journal", *RETAINED, *options)
        return started.wait_recording()

    return start


def test_retention_beside_a_live_archive(recorder, directory, tmp_path):
    """While segments are deleted all the time, no row goes that is not confirmed, and each is archived once."""
    journal, lake = directory / "journal", tmp_path / "lake"
    process = recorder()
    with archiving(journal, lake, "--max-rows=3000") as archiver, connect(str(directory / "bus")) as bus:
        wait_until(lambda: taken(journal) > 0, bool, timeout=TIMEOUT)
        count = 0

        def go_on() -> int:
            """Publish, but not too far ahead of the archive; return the number of rows that were deleted."""
            nonlocal count
            deleted = JournalReader(journal).start()
            confirmed = taken(journal)  # after the other: both only rise
            assert deleted <= confirmed
            assert archiver.process.poll() is None, archiver.log
            if count < confirmed + 10_000:
                count = publish(bus, count)
            return deleted

        wait_until(go_on, lambda deleted: deleted >= 20_000, timeout=2 * TIMEOUT)
        finish(bus, process, archiver, journal)
    rows = archived(lake)
    assert [row["seq"] for row in rows] == list(range(JournalReader(journal).end()))
    assert [row["payload"] for row in rows if row["kind"] == "message"] == [b"%040d" % n for n in range(count)]
    assert "trying again" not in archiver.log


def test_retention_by_force_beside_a_live_archive(recorder, directory, tmp_path):
    """If rows are deleted before they are archived, the archive names exactly these; all others are there once."""
    journal, lake = directory / "journal", tmp_path / "lake"
    process = recorder("--force")
    with archiving(journal, lake, "--allow-loss", "--every=2s") as archiver, connect(str(directory / "bus")) as bus:
        wait_until(lambda: taken(journal) > 0, bool, timeout=TIMEOUT)
        numbers = iter(range(0, 20_100, 100))
        wait_until(lambda: publish(bus, next(numbers)), lambda count: count >= 20_000, timeout=TIMEOUT)
        finish(bus, process, archiver, journal)
    there: set[int] = set()
    gone: set[int] = set()
    for row in archived(lake):
        assert row["seq"] not in there
        if row["kind"] == "damaged":  # deleted between the plan of a batch and its reading
            gone |= set(range(row["seq"], json.loads(row["payload"])["last"] + 1))
        else:
            there.add(row["seq"])
    for first, last in re.findall(r"the rows (\d+) to (\d+) of the journal in .* are deleted", archiver.log):
        gone |= set(range(int(first), int(last) + 1))
    assert gone
    assert not gone & there
    assert gone | there == set(range(JournalReader(journal).end()))


def test_a_journal_that_is_moved_away(tmp_path):
    """The archive says so, tries again, and goes on when it is back; with a new one in its place it ends, and names
    what it lacks. Both are archived by a glob.
    """
    journal, lake, away = tmp_path / "journal", tmp_path / "lake", tmp_path / "journal.old"
    writer = JournalWriter.open(journal)

    def add(count: int = 10) -> None:
        writer.append([(b"a/b", b"%d" % n) for n in range(count)])
        writer.sync()

    add()
    with archiving(journal, lake) as archiver:
        wait_taken(journal)
        os.rename(journal, away)
        archiver.wait_log(r"journal: this is no journal \(it has no journal.json\).*; trying again in 1 s")
        archiver.wait_log("trying again in 2 s")  # and not at once
        os.rename(away, journal)
        add()
        wait_taken(journal)
        os.rename(journal, away)
        writer.follow()
        add()
        writer.close()
        with JournalWriter.open(journal) as writer:
            add()
            assert archiver.process.wait(TIMEOUT) == 1
    assert re.search(
        f"the journal [0-9a-f]+ is missing; it was read up to row {taken(away)}: .*--allow-loss", archiver.log
    )
    assert archived(lake) == recorded(away)[:20]
    with archiving(tmp_path / "journal*", lake) as archiver:
        wait_taken(away)
        wait_taken(journal)
        archiver.stop()
    assert archived(lake) == recorded(away, journal)


def test_full_disks(tmp_path):
    """With no space for data files, offsets, or commits, the archive says so and tries again; a reader sees no part of
    a batch, and with space again every row is there once.
    """
    journal, lake = tmp_path / "journal", tmp_path / "lake"
    with ExitStack() as stack:
        disks = [stack.enter_context(mounted(lake, "8m"))]
        for log in ("offsets", "commits"):
            disks.append(stack.enter_context(mounted(lake / "_sbus" / "checkpoint" / log, "1m")))
        writer = stack.enter_context(JournalWriter.open(journal))

        def add() -> None:
            writer.append([(b"a/%d" % (n % 3), os.urandom(60)) for n in range(1000)])
            writer.sync()

        add()
        with archiving(journal, lake) as archiver:
            wait_taken(journal)
            for disk in disks:
                before = archived(lake)
                failures = archiver.log.count("trying again")
                with filled(disk):
                    add()
                    archiver.wait_log(
                        "No space left on device: make room for the lake .*; trying again in", failures + 1
                    )
                    # Of the batch whose commit failed, all rows are there already.
                    assert archived(lake) in (before, recorded(journal))
                wait_taken(journal)
                assert archived(lake) == recorded(journal)
            archiver.stop()
        assert archived(lake) == recorded(journal)
        assert not list((lake / "_sbus" / "staging").iterdir())
