#!/usr/bin/env python3
"""Take many rows through the whole pipeline, and say what each stage costs: archive, queries, compaction, report.

    python benchmarks/scale.py                                               # a million rows, half a minute
    python benchmarks/scale.py --rows 100000000 --directory /srv/tmp --save  # 14 GB of disk

The rows are numbered messages of 4,000 keys, with payloads of 8 to 60 bytes, over some hours of the past, so that
compaction has closed hours. The journal's own writer writes them. With ``--recorded`` they come from a bus: a publisher
sends them as fast as a recorder takes them, whose clock runs fast. Then come the real commands, one after the other.
After each stage that writes rows, every row is counted: in the journal by the numbers in the payloads, in the lake by
``sbus lake check``. A row that is missing, or is there twice, ends the run. So does a command that takes much longer
than expected, and a disk without room.

In the end it reports on a month of hours, archived in one batch: for the first time, again, and after one more hour.

A peak is the VmHWM of one process (proc(5)), read four times a second; it includes the mapped pages of files that the
kernel had in memory anyway. CPU time is that of all processes of a stage. ``--save`` writes the table of the
documentation, ``docs/performance/scale.inc``, with what follows for a terabyte.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

import pyarrow as pa  # noqa: E402
import pyarrow.compute as pc  # noqa: E402

from benchmarks import keeping, raw, recording  # noqa: E402
from benchmarks.attacks.kernel import cpu, peak  # noqa: E402
from benchmarks.report import NONE, Table  # noqa: E402
from sbus.journal.clock import HOUR, now  # noqa: E402
from sbus.journal.reader import JournalReader  # noqa: E402
from sbus.journal.retention import retain  # noqa: E402
from sbus.journal.senders import Senders  # noqa: E402
from sbus.journal.writer import JournalWriter  # noqa: E402

_SBUS = [sys.executable, "-P", "-m", "sbus.cli"]
_EXPECTED_RATE = 300_000
"""Rows a second, to choose how fast the recorder's clock runs; if it is slower, the rows cover more hours."""
_KEEP_BYTES = 256 << 20
"""The recorder's limit: a journal that no archive has read grows beyond it all the same."""
_ROW_BYTES = 160
"""Bytes of disk a row: in the journal, in the lake, and in the lake once more while it is compacted."""
_PATIENCE, _ROW_PATIENCE = 120.0, 40e-6
"""Seconds that a command may take, and seconds more for each row: ten times those of a quiet machine."""
_TIME_ROWS = 16
"""Rows that came at the same moment."""
_TERABYTE = 1e12
_INCLUDE = ROOT / "docs" / "performance" / "scale.inc"
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
        return (
            f"{name:18} {rows:>13,} {self.seconds:>8.1f} {rows / self.seconds:>11,.0f} "
            f"{self.cpu / rows * 1e6:>8.2f} {stored / 1e6:>9,.0f} {stored / rows:>7.1f}  {self.peak()}"
        )

    def peak(self) -> str:
        return ", ".join(f"{program} {peak / 1e6:.0f}" for program, peak in self.peaks.items())


Line = tuple[str, Stage, int]
"""The name of a stage, its costs, and the bytes of what it has written."""

NAMES = {
    "recording": "recording, from a bus",
    "writing": "the journal's writer alone",
    "report of journal": "``sbus report --journal``",
    "archive": "``sbus archive --once``",
    "compaction": "``sbus lake compact``",
    "query of all": "DuckDB: messages and bytes of each key",
    "query of a minute": "DuckDB: the same, of the last minute",
    "report of lake": "``sbus report --lake``",
}
"""The name of each stage in the documentation."""


def program_of(pid: int) -> str:
    """Return what a process is, in a word."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return os.path.basename(words[0]).decode().rstrip("0123456789.")


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
                    self._peaks[program] = max(self._peaks.get(program, 0), peak(pid))
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


def run(rows: int, *words: object) -> tuple[Stage, str]:
    """Run a command; return its costs, and what it printed.

    :param rows: rows that it handles, by which it may take longer.
    :raises SystemExit: if it fails, or takes too long.
    """
    began = time.monotonic()
    with subprocess.Popen(
        list(map(str, words)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        watch = Watch(process.pid)
        watch.start()
        try:
            text, _ = process.communicate(timeout=_PATIENCE + rows * _ROW_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            raise SystemExit(f"{' '.join(map(str, words))}: it takes too long") from None
        stage = watch.end(time.monotonic() - began)
    if process.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}: {text}")
    return stage, text


def command(rows: int, *words: object) -> tuple[Stage, str]:
    """Run a command of ``sbus``, as `run` does."""
    return run(rows, *_SBUS, *words)


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


def generate(journal: Path, rows: int, hours: float) -> Stage:
    """Write the rows with the journal's writer, evenly over some hours that have ended."""
    samples = list(raw.samples())
    keys = pa.array([key for key, _ in samples], pa.binary())
    rests = pa.array([rest for _, rest in samples], pa.binary())
    step = len(samples) // 4
    start, span = now() - int((hours + 2) * HOUR), hours * HOUR / rows
    before, began = time.process_time(), time.monotonic()
    with JournalWriter.open(journal, clock=lambda: start) as writer:
        for first in range(0, rows, step):
            count, at = min(step, rows - first), first % len(samples)
            numbers = pa.py_buffer(array("q", range(first, first + count)))
            offsets = pa.py_buffer(array("i", range(0, 8 * count + 8, 8)))
            heads = pa.Array.from_buffers(pa.binary(), count, [None, offsets, numbers])
            payloads = pc.binary_join_element_wise(heads, rests.slice(at, count), pa.scalar(b"", pa.binary()))
            ends = [*range(_TIME_ROWS, count, _TIME_ROWS), count]
            times = [start + int((first + end) * span) for end in ends]
            sender = Senders(pa.array([b"1 !/cred/0/0/4711"], pa.binary()), pa.array([count], pa.int32()))
            writer.append_columns(keys.slice(at, count), payloads, times, ends, sender)
    expect("messages in the journal, misplaced ones, gaps", recording.check(journal), (rows, 0, 0))
    return Stage(time.monotonic() - began, time.process_time() - before)


def check_lake(lake: Path, rows: int) -> None:
    found = json.loads(command(rows, "lake", "check", "--json", lake)[1])
    expect(
        "rows in the lake, problems, missing rows", (found["rows"], found["problems"], found["missing"]), (rows, [], {})
    )


def query(lake: Path, rows: int, where: str = "") -> Stage:
    """Count messages and bytes by key with DuckDB, in a process of its own."""
    program = (
        "import duckdb; duckdb.sql('SET enable_progress_bar = false'); "
        'print(len(duckdb.sql("SELECT key, count(*), sum(octet_length(payload)) FROM '
        f"read_parquet('{lake}/*/*/*.parquet') WHERE kind = 'message' {where} GROUP BY key\").fetchall()))"
    )
    stage, text = run(rows, sys.executable, "-c", program)
    if not where:
        expect("keys in the lake", int(text), len(raw.KEYS))
    return stage


def report(source: str, last: str, page: Path, rows: int, messages: int | None = None) -> Stage:
    stage, text = command(rows, "report", source, f"--last={last}", f"--output={page}")
    found = re.search(r"([\d,]+) messages? of", text)
    if messages is not None:
        expect("messages in the report", found and int(found[1].replace(",", "")), messages)
    return stage


def pipeline(home: Path, rows: int, hours: float, batch_rows: int | None, *, recorded: bool) -> list[Line]:
    """Take the rows through all stages, and print a line for each."""
    journal, lake, page = home / "journal", home / "lake", home / "report.html"
    lines: list[Line] = []
    print(
        "stage                       rows  seconds      rows/s   µs CPU MB on disk B a row  peaks of memory, MB",
        flush=True,
    )

    def show(name: str, stage: Stage, stored: int) -> None:
        lines.append((name, stage, stored))
        print(stage.line(name, rows, stored), flush=True)

    stage = record(home, journal, rows, hours) if recorded else generate(journal, rows, hours)
    show("recording" if recorded else "writing", stage, size_of(journal))
    all_rows = JournalReader(journal).end()
    show("report of journal", report(f"--journal={journal}", "24h", page, rows, rows), page.stat().st_size)
    limit = [] if batch_rows is None else [f"--max-rows={batch_rows}"]
    stage, _ = command(rows, "archive", f"--journal={journal}", f"--lake={lake}", "--once", "--no-compact", *limit)
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
    stage, _ = command(rows, "lake", "compact", lake)
    command(rows, "lake", "vacuum", "--older-than=0s", lake)
    show("compaction", stage, size_of(lake))
    check_lake(lake, all_rows)
    print(f"compaction: {files} files into {len(list(lake.glob('date=*/*/*.parquet')))}", flush=True)
    show("query of all", query(lake, rows), 0)
    some = JournalReader(journal).extent(now())[1]
    assert some is not None
    show("query of a minute", query(lake, rows, f"AND time >= make_timestamptz({some - 60_000_000})"), 0)
    show("report of lake", report(f"--lake={lake}", "24h", page, rows, rows), page.stat().st_size)
    return lines


def save(lines: Sequence[Line], rows: int) -> None:
    """Write the table of the documentation, and what follows for a terabyte."""
    found = {name: (stage, stored) for name, stage, stored in lines}
    table = Table(
        "scale",
        f"{rows:,} rows of {len(raw.KEYS):,} keys",
        ["Stage", "Seconds", "Rows a second", "CPU time a row", "On disk", "Peak memory"],
        [
            [
                NAMES[name],
                f"{stage.seconds:,.1f}",
                f"{rows / stage.seconds:,.0f}",
                f"{stage.cpu / rows * 1e6:.2f} µs",
                f"{stored / 1e6:,.0f} MB" if stored >= 10_000_000 else NONE,
                f"{stage.peak()} MB".replace("python ", "") if stage.peaks else NONE,
            ]
            for name, stage, stored in lines
        ],
    )
    journal = found.get("recording", found.get("writing"))
    assert journal is not None
    many = _TERABYTE / journal[1]

    def cost(name: str) -> list[str]:
        stage, stored = found[name]
        hours = stage.cpu * many / 3600
        return [NAMES[name], f"{hours:,.1f}", f"{stored * many / 1e9:,.0f} GB" if stored >= 10_000_000 else NONE]

    terabyte = Table(
        "terabyte",
        f"By arithmetic: a journal of 1 TB, {many * rows / 1e9:.1f} billion rows",
        ["Stage", "Hours of one core", "On disk"],
        [cost(name) for name in ("archive", "compaction", "query of all", "report of lake")],
    )
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}, load average {os.getloadavg()[2]:.1f}"
    _INCLUDE.write_text(f"{table.rst()}\nMeasured with {machine}.\n\n{terabyte.rst()}")


def month(home: Path, rows_an_hour: int) -> None:
    """Report on a month of hours: for the first time, again, and after one more hour."""
    journal, lake, page = home / "month-journal", home / "month-lake", home / "month.html"
    start = (now() // HOUR - _MONTH - 1) * HOUR
    samples = list(raw.samples(rows_an_hour))
    rows = _MONTH * rows_an_hour

    def add(first: int, hours: int) -> None:
        with JournalWriter.open(journal, clock=lambda: start) as writer:
            for hour in range(first, first + hours):
                at = start + hour * HOUR
                writer.append(samples, [at + n * HOUR // len(samples) for n in range(len(samples))])
        command(rows, "archive", f"--journal={journal}", f"--lake={lake}", "--once", "--no-compact")

    add(0, _MONTH - 1)
    for name in ("first", "again", "an hour on"):
        if name == "an hour on":
            add(_MONTH - 1, 1)
        stage = report(f"--lake={lake}", "30d", page, rows)
        print(
            f"month, {name:10}: {_MONTH} hours of {rows_an_hour} rows: {stage.seconds:.1f} s, CPU {stage.cpu:.1f} s, "
            f"peaks {stage.peak()} MB",
            flush=True,
        )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="messages; 0: none (1000000)")
    parser.add_argument("--hours", type=float, default=6.0, help="hours of recorded time, about (6)")
    parser.add_argument("--recorded", action="store_true", help="send the messages over a bus to a recorder")
    parser.add_argument("--batch-rows", type=int, help="rows in a batch of the archive (the archive's default)")
    parser.add_argument("--month-rows", type=int, default=0, help="rows an hour of the month; 0: no month (0)")
    parser.add_argument("--directory", help="where to work (a temporary directory)")
    parser.add_argument("--save", action="store_true", help="write the table of the documentation")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sbus-scale-", dir=given.directory) as name:
        home = Path(name)
        if shutil.disk_usage(home).free < given.rows * _ROW_BYTES:
            raise SystemExit(f"{home}: {given.rows:,} rows need {given.rows * _ROW_BYTES / 1e9:,.0f} GB free there")
        if given.rows:
            lines = pipeline(home, given.rows, given.hours, given.batch_rows, recorded=given.recorded)
            if given.save:
                save(lines, given.rows)
        if given.month_rows:
            month(home, given.month_rows)


if __name__ == "__main__":
    main()
