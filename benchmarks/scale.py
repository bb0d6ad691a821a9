#!/usr/bin/env python3
"""Take many rows through the whole pipeline, and say what each stage costs: bus, recorder, archive, compaction, report.

    python benchmarks/scale.py                                        # a million rows, some minutes
    python benchmarks/scale.py --rows 100000000 --directory /srv/tmp  # 20 GB of disk, half an hour

A publisher sends numbered messages of 4,000 keys, with payloads of 8 to 60 bytes, as fast as the recorder takes them.
The recorder's clock runs fast, so that the rows cover some hours of the past, and compaction has closed hours. Then
come the real commands, one after the other. After each stage that writes rows, every row is counted: in the journal by
the numbers in the payloads, in the lake by ``sbus lake check``. A row that is missing, or is there twice, ends the run.

In the end it reports on a month of hours, archived in one batch: for the first time, again, and after one more hour.

A peak is the VmHWM of one process (proc(5)), read four times a second. CPU time is that of all processes of a stage.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks import keeping, raw, recording  # noqa: E402
from benchmarks.attacks.kernel import cpu  # noqa: E402
from sbus.journal.clock import HOUR, now  # noqa: E402
from sbus.journal.reader import JournalReader  # noqa: E402
from sbus.journal.retention import retain  # noqa: E402
from sbus.journal.writer import JournalWriter  # noqa: E402

_SBUS = [sys.executable, "-P", "-m", "sbus.cli"]
_EXPECTED_RATE = 300_000
"""Rows a second, to choose how fast the recorder's clock runs; if it is slower, the rows cover more hours."""
_KEEP_BYTES = 256 << 20
"""The recorder's limit: a journal that no archive has read grows beyond it all the same."""
_BATCH_ROWS = 2_000_000
_LOOK = 0.25
"""Seconds between two looks at the processes of a stage."""
_MONTH = 30 * 24
"""Hours."""
_FAST_CLOCK = """\
import time
from types import SimpleNamespace
import sbus.journal.clock
def fast(start, factor):
    began = time.monotonic_ns()
    return lambda *which: start + int((time.monotonic_ns() - began) * factor)
sbus.journal.clock._time = SimpleNamespace(
    time_ns=fast({start}, {factor}), clock_gettime_ns=fast(0, {factor}), CLOCK_BOOTTIME=time.CLOCK_BOOTTIME
)
from twisted.scripts.twistd import run
run()
"""


@dataclass
class Stage:
    """The costs of one stage.

    :ivar seconds: how long it took.
    :ivar cpu: CPU seconds of all its processes.
    :ivar peaks: for each program, the bytes that the largest of its processes had at most.
    """

    seconds: float = 0.0
    cpu: float = 0.0
    peaks: dict[str, int] = field(default_factory=dict)

    def line(self, name: str, rows: int, stored: int) -> str:
        peaks = ", ".join(f"{program} {peak / 1e6:.0f}" for program, peak in self.peaks.items())
        return (
            f"{name:12} {rows:>13,} {self.seconds:>8.1f} {rows / self.seconds:>11,.0f} "
            f"{self.cpu / rows * 1e6:>8.2f} {stored / 1e6:>9,.0f}  {peaks}"
        )


def program_of(pid: int) -> str:
    """Return what a process is, in a word."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    if words[0].endswith(b"java"):
        return "JVM"
    workers = (b"pyspark.daemon", b"early_worker")  # Spark's, and `sbus.spark.runtime.early_worker`
    return "worker" if any(worker in word for word in words for worker in workers) else "python"


class Watch(threading.Thread):
    """Looks at a process and its descendants until they are gone."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.is_over = threading.Event()
        self._pid = pid
        self._spent: dict[int, float] = {}
        self._peaks: dict[str, int] = {}

    def run(self) -> None:
        while not self.is_over.wait(_LOOK):
            for pid in self._family(self._pid):
                try:
                    program = program_of(pid)
                    self._spent[pid] = cpu(pid)
                    self._peaks[program] = max(self._peaks.get(program, 0), recording.peak_memory(pid))
                except (OSError, ValueError, IndexError):
                    pass  # it has ended

    def _family(self, pid: int) -> Iterator[int]:
        yield pid
        children: list[str] = []
        with suppress(OSError):  # it has ended
            for task in os.listdir(f"/proc/{pid}/task"):
                children += Path(f"/proc/{pid}/task/{task}/children").read_text().split()
        for child in children:
            yield from self._family(int(child))

    def end(self, seconds: float) -> Stage:
        self.is_over.set()
        self.join()
        return Stage(seconds, sum(self._spent.values()), self._peaks)


def command(*words: object) -> tuple[Stage, str]:
    """Run a command of ``sbus``; return its costs, and what it printed.

    :raises SystemExit: if it fails.
    """
    began = time.monotonic()
    with subprocess.Popen(
        [*_SBUS, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        watch = Watch(process.pid)
        watch.start()
        assert process.stdout is not None
        text = process.stdout.read()
        process.wait()
        stage = watch.end(time.monotonic() - began)
    if process.returncode:
        raise SystemExit(f"sbus {' '.join(map(str, words))}: {text}")
    return stage, text


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise SystemExit(f"{what}: {found}, not {expected}")


def record(home: Path, journal: Path, rows: int, hours: float) -> Stage:
    """Publish the rows, and wait until readers of the journal see all of them."""
    address = home / "bus"
    factor = hours * 3600 * _EXPECTED_RATE / rows
    # It ends in the past, even if recording is three times slower than expected.
    start = (now() - int((3 * hours + 2) * HOUR)) * 1000
    program = _FAST_CLOCK.format(start=start, factor=factor)
    fast = [sys.executable, "-c", program, "--nodaemon", "--pidfile=", "sbus-recorder"]
    # The lag goes by the fast clock, so it cannot say when to let publishers go on.
    options = [f"--socket={address}", f"--journal={journal}", "--hard=block", f"--keep-bytes={_KEEP_BYTES}"]
    with ExitStack() as stack:
        bus = stack.enter_context(
            recording.running([*recording.TWISTD, "sbus", f"--socket={address}"], home / "bus.log", "listens on")
        )
        writer = stack.enter_context(recording.running([*fast, *options], home / "recorder.log", "recording"))
        before = bus.cpu() + writer.cpu()
        began, ended = keeping.pour(address, journal, rows, bundled=True)
        stage = Stage(ended - began, bus.cpu() + writer.cpu() - before)
        stage.peaks = {"bus": bus.memory(), "recorder": writer.memory()}
        writer.stop()
    expect("messages in the journal, misplaced ones, gaps", recording.check(journal), (rows, 0, 0))
    return stage


def check_lake(lake: Path, rows: int) -> None:
    found = json.loads(command("lake", "check", "--json", lake)[1])
    expect(
        "rows in the lake, problems, missing rows", (found["rows"], found["problems"], found["missing"]), (rows, [], {})
    )


def report(lake: Path, last: str, messages: int | None = None) -> Stage:
    page = lake.parent / "report.html"
    stage, text = command("report", f"--lake={lake}", f"--last={last}", f"--output={page}")
    found = re.search(r"([\d,]+) messages? of", text)
    if messages is not None:
        expect("messages in the report", found and int(found[1].replace(",", "")), messages)
    return stage


def pipeline(home: Path, rows: int, hours: float, batch_rows: int) -> None:
    """Take the rows through all stages, and print a line for each."""
    journal, lake = home / "journal", home / "lake"
    print("stage                 rows  seconds      rows/s  µs CPU MB on disk  peaks of memory, MB", flush=True)

    def show(name: str, stage: Stage, stored: int) -> None:
        print(stage.line(name, rows, stored), flush=True)

    stage = record(home, journal, rows, hours)
    show("record", stage, size_of(journal))
    all_rows = JournalReader(journal).end()
    options = ("--once", "--no-compact", f"--max-rows={batch_rows}")
    stage, _ = command("spark", "archive", f"--journal={journal}", f"--lake={lake}", *options)
    show("archive", stage, size_of(lake))
    check_lake(lake, all_rows)
    began = time.monotonic()
    segments = len(JournalReader(journal).segments())
    deleted = retain(journal, keep_bytes=_KEEP_BYTES)
    print(
        f"retention: {len(deleted)} of {segments} segments deleted in {time.monotonic() - began:.1f} s, "
        f"{size_of(journal) / 1e6:,.0f} MB left",
        flush=True,
    )
    files = len(list(lake.glob("date=*/*/*.parquet")))
    stage, _ = command("lake", "compact", lake)
    command("lake", "vacuum", "--older-than=0s", lake)
    show("compact", stage, size_of(lake))
    check_lake(lake, all_rows)
    print(f"compaction: {files} files into {len(list(lake.glob('date=*/*/*.parquet')))}", flush=True)
    show("report", report(lake, "24h", rows), (home / "report.html").stat().st_size)


def month(home: Path, rows_an_hour: int) -> None:
    """Report on a month of hours: for the first time, again, and after one more hour."""
    journal, lake = home / "month-journal", home / "month-lake"
    start = (now() // HOUR - _MONTH - 1) * HOUR
    samples = list(raw.samples(rows_an_hour))

    def add(first: int, hours: int) -> None:
        with JournalWriter.open(journal, clock=lambda: start) as writer:
            for hour in range(first, first + hours):
                at = start + hour * HOUR
                writer.append(samples, [at + n * HOUR // len(samples) for n in range(len(samples))])
        command("spark", "archive", f"--journal={journal}", f"--lake={lake}", "--once", "--no-compact")

    add(0, _MONTH - 1)
    for name in ("first", "again", "an hour on"):
        if name == "an hour on":
            add(_MONTH - 1, 1)
        stage = report(lake, "30d")
        peaks = ", ".join(f"{program} {peak / 1e6:.0f}" for program, peak in stage.peaks.items())
        print(
            f"month, {name:10}: {_MONTH} hours of {rows_an_hour} rows: {stage.seconds:.1f} s, CPU {stage.cpu:.1f} s, "
            f"peaks {peaks} MB",
            flush=True,
        )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="messages (1000000)")
    parser.add_argument("--hours", type=float, default=6.0, help="hours of recorded time, about (6)")
    parser.add_argument("--batch-rows", type=int, help="rows in a batch of the archive (2000000, or a tenth of all)")
    parser.add_argument("--month-rows", type=int, default=3000, help="rows an hour of the month; 0: no month (3000)")
    parser.add_argument("--directory", help="where to work (a temporary directory)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sbus-scale-", dir=given.directory) as name:
        home = Path(name)
        if given.rows:
            pipeline(home, given.rows, given.hours, given.batch_rows or max(1, min(_BATCH_ROWS, given.rows // 10)))
        if given.month_rows:
            month(home, given.month_rows)


if __name__ == "__main__":
    main()
