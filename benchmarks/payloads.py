#!/usr/bin/env python3
"""Measure large messages from Python: sbus by copying and in sealed memory, beside zenoh and iceoryx2.

    pip install 'sbusd[bench-payloads]'
    python benchmarks/payloads.py [--rounds 5] [--seconds 1] [--only "sbus payloads,zenoh"] [--cases camera]

One process publishes and others receive, each written as its library recommends (``payload_programs.py``). A receiver
reads a byte of every page of a message, and a publisher is never more than 8 messages ahead of one. The libraries take
turns in each round; the figures are medians of the rounds, and a ratio is the median of the ratios within each round.
The camera publishes images of 1920 × 1080 × 3 bytes, 30 a second, to three receivers.

A message is *late* if the publisher began with it more than 1/30 s after its time, which the machine decides; *wrong*
if it arrived with another length or other bytes; and *lost* if a receiver got a later one instead.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.attacks.kernel import cpu
from benchmarks.payload_programs import LIBRARIES, WINDOW, touch
from benchmarks.report import Table, two
from sbus.syscalls.memfd import Memfd
from sbus.testing import running_bus

_PROGRAM = str(Path(__file__).with_name("payload_programs.py"))
_MODULES = {"zenoh": "zenoh", "iceoryx2": "iceoryx2"}
_BASE = "sbus payloads"
_ROOM: dict[str, Any] = {"queue_bytes": 100_000_000, "total_queue_bytes": 1_000_000_000}
"""Room for the messages under way of any case, also where they are copied."""
_KI, _MI = 1 << 10, 1 << 20
_POOL = 32 * _MI
"""Bytes of memory that is used again and again, as by the other libraries."""
_SIDES = ("publisher", "server", "receiver")
_BAD = ("late", "wrong", "lost")


class Case(NamedTuple):
    """What is sent.

    :ivar size: bytes of a payload.
    :ivar rate: messages a second; 0: as many as possible.
    """

    title: str
    size: int
    receivers: int
    rate: float = 0.0


CASES = {
    "64k-1": Case("64 KiB 1→1", 64 * _KI, 1),
    "128k-1": Case("128 KiB 1→1", 128 * _KI, 1),
    "128k-8": Case("128 KiB 1→8", 128 * _KI, 8),
    "256k-1": Case("256 KiB 1→1", 256 * _KI, 1),
    "256k-8": Case("256 KiB 1→8", 256 * _KI, 8),
    "384k-1": Case("384 KiB 1→1", 384 * _KI, 1),
    "384k-8": Case("384 KiB 1→8", 384 * _KI, 8),
    "1m-1": Case("1 MiB 1→1", _MI, 1),
    "1m-8": Case("1 MiB 1→8", _MI, 8),
    "camera": Case("camera 30/s 1→3", 1920 * 1080 * 3, 3, 30.0),
}
"""The cases of the tables, and those that choose `sbus.protocol.packets.LEAST_PAYLOAD`."""
TABLE = "64k-1,1m-1,1m-8,camera"
_SPEED = {
    "64k-1": 10_000,
    "128k-1": 6_000,
    "128k-8": 1_500,
    "256k-1": 4_000,
    "256k-8": 1_000,
    "384k-1": 3_000,
    "384k-8": 700,
    "1m-1": 1_000,
    "1m-8": 400,
    "camera": 30,
}
"""Messages that make about a second."""

Figures = dict[str, float]


@contextmanager
def _address(library: str) -> Iterator[tuple[str, int]]:
    """Yield an address, and the PID of the server at it; 0 without one."""
    if library.startswith("sbus"):
        with running_bus(**_ROOM) as bus:
            yield bus.address, bus.pid
    else:
        with tempfile.TemporaryDirectory() as directory:
            yield f"{directory}/socket", 0


def measure(library: str, case: Case, count: int) -> Figures:
    """Send a number of messages.

    :returns: messages a second; messages that were late, wrong, and lost, of all receivers; and the CPU time for a
        message, in µs, of the publisher, the server and one receiver; of the camera, in percent of a processor.
    """
    with _address(library) as (address, server), ExitStack() as stack:
        environment = {**os.environ, "RECEIVERS": str(case.receivers)}

        def start(side: str, *pipes: int) -> subprocess.Popen[str]:
            words = [library, side, address, case.size, count, case.rate, *pipes]
            process = subprocess.Popen(
                [sys.executable, _PROGRAM, *map(str, words)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=pipes,
                env=environment,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        acknowledged, receivers = [], []
        pipes = [os.pipe() for _ in range(case.receivers)]
        publisher = start("publish", *(reading for reading, _ in pipes))
        for reading, writing in pipes:
            receivers.append(start("receive", writing))
            os.close(writing)
            acknowledged.append(reading)
        for reading in acknowledged:
            os.close(reading)
        for receiver in receivers:
            if _line(receiver) != "ready":
                raise SystemExit(f"{library}: a receiver has failed")
        assert publisher.stdin is not None
        print(file=publisher.stdin, flush=True)
        if not _line(publisher):
            raise SystemExit(f"{library}: the publisher has failed")
        before = cpu(server) if server else 0.0
        text = _line(publisher)
        if not text:
            raise SystemExit(f"{library}: a receiver has not got all messages")
        sent = json.loads(text)
        served = cpu(server) - before if server else 0.0
        got = [json.loads(_line(receiver)) for receiver in receivers]
    scale = 100 / sent["seconds"] if case.rate else 1e6 / count
    return {
        "rate": count / sent["seconds"],
        "late": sent["late"],
        "wrong": sum(one["wrong"] for one in got),
        "lost": sum(one["lost"] for one in got),
        "publisher": sent["cpu"] * scale,
        "server": served * scale,
        "receiver": statistics.median(one["cpu"] for one in got) * scale,
    }


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _huge() -> str:
    """Return the kernel's setting that decides most about the price of new shared memory."""
    try:
        setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except OSError:
        return "unknown"
    return setting.partition("[")[2].partition("]")[0]


def _row(case: Case, library: str, rounds: Sequence[Figures], base: Sequence[Figures]) -> list[str]:
    median = {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}
    ratios = [mine["rate"] / its["rate"] for mine, its in zip(base, rounds, strict=True)] if base else []
    cpu = [f"{median[side]:.1f} %" if case.rate else f"{median[side]:.0f}" for side in _SIDES]
    bad = [f"{sum(figures[kind] for figures in rounds):.0f}" for kind in _BAD]
    return [
        f"{case.title}, {library}",
        f"{median['rate']:,.0f}",
        two(statistics.median(ratios)) if ratios else "",
        *cpu,
        *bad,
    ]


def _kernel(rounds: int) -> Table:
    """Measure what the kernel takes for one payload of 1 MiB, in this process and without a bus."""
    content, reused = bytearray(b"x" * _MI), bytearray(_POOL)
    steps: dict[str, list[float]] = {}

    def step(name: str, began: int) -> int:
        steps.setdefault(name, []).append((time.thread_time_ns() - began) / 1000)
        return time.thread_time_ns()

    under_way: deque[Memfd] = deque()  # so that no page is used again while it is in the cache
    for number in range(rounds):
        at = number % (_POOL // _MI) * _MI
        now = time.thread_time_ns()
        reused[at : at + _MI] = content
        now = step("copy to memory in use", now)
        memory = Memfd.create()
        os.pwrite(memory.fileno(), content, 0)
        now = step("copy to new memory", now)
        memory.seal()
        now = step("seal", now)
        assert memory.fault() is None
        now = step("check", now)
        mapped = memory.map()
        touch(mapped)
        now = step("map, and read a byte of each page", now)
        mapped.close()
        step("unmap", now)
        under_way.append(memory)
        del memory
        if len(under_way) > WINDOW:
            now = time.thread_time_ns()
            under_way.popleft()
            step("free", now)
    rows = [[name, f"{statistics.median(found):.0f}"] for name, found in steps.items()]
    return Table("payloads-kernel", "What the kernel takes for 1 MiB, µs of CPU time", ("step", "µs"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="about the length of a run")
    parser.add_argument("--only", default=",".join(LIBRARIES), help="libraries, separated by commas")
    parser.add_argument("--cases", default=TABLE, help="cases, separated by commas [%(default)s]")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also write the tables payloads*.inc there")
    options = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    libraries = []
    for library in options.only.split(","):
        if importlib.util.find_spec(_MODULES.get(library, "sbus")) is None:
            print(f"{library} is not installed: pip install 'sbusd[bench-payloads]'", file=sys.stderr)
        else:
            libraries.append(library)
    found: dict[tuple[str, str], list[Figures]] = {}
    for number in range(options.rounds):
        for name in options.cases.split(","):
            by = number % len(libraries)
            for library in [*libraries[by:], *libraries[:by]]:
                figures = measure(library, CASES[name], max(16, round(options.seconds * _SPEED[name])))
                found.setdefault((name, library), []).append(figures)
    title = (
        f"Large messages: medians of {options.rounds}, Linux {os.uname().release.partition('-')[0]}, "
        f"{len(os.sched_getaffinity(0))} CPUs, huge pages of shared memory: {_huge()}, load average before: {load:.1f}"
    )
    header = ("", "messages/s", f"{_BASE} / this", *(f"{side}, µs" for side in _SIDES), *_BAD)
    rows = [
        _row(CASES[name], library, found[name, library], found.get((name, _BASE), []))
        for name in options.cases.split(",")
        for library in libraries
    ]
    for table in (Table("payloads", title, header, rows), _kernel(200)):
        print(table.markdown())
        if options.out is not None:
            (options.out / f"{table.name}.inc").write_text(table.rst())


if __name__ == "__main__":
    main()
