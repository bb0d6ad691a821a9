"""Single runs, and the medians of several."""

from __future__ import annotations

import os
import platform
import resource
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import twisted
from benchmarks.servers import OURS, SERVERS, Failed, Running, Server, Workshop, running, twistd
from benchmarks.workloads import Case, Kind, Pin, Scale, Who
from sbus import __version__
from sbus.syscalls.batch import COMPILED

__all__ = ["BASE", "Results", "machine", "measure", "rotated", "run"]

BASE = "yardstick"
"""The server that all others are compared with."""

Record = dict[str, Any]
T = TypeVar("T")


# --- running --------------------------------------------------------------------------------------


def concerns(case: Case, server: Server) -> bool:
    """Return whether a server is measured in a case."""
    if server.gathers and case.variant == "unbatched":
        return False
    if case.needs_root and os.geteuid():
        return False
    if case.needs_priority and not _may_have_priority():
        return False
    return {
        Who.ALL: True,
        Who.SERVERS: server.runs,
        Who.OWN: server.own,
        Who.OURS: server.name == "sbus",
        Who.BOTH: server.name in OURS,
    }[case.who]


def _may_have_priority() -> bool:
    return os.geteuid() == 0 or resource.getrlimit(resource.RLIMIT_RTPRIO)[1] != 0


def measure(
    workshop: Workshop,
    servers: Sequence[Server],
    cases: Sequence[Case],
    scale: Scale,
    rounds: int,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Iterator[Record]:
    """Perform all runs, for a number of rounds; each case of a round begins with another server."""
    per_round = [
        [
            (case, server)
            for case in cases
            for server in rotated(servers, number)
            if number < case.rounds and concerns(case, server)
        ]
        for number in range(rounds)
    ]
    total = sum(map(len, per_round))
    done = 0
    for number, plan in enumerate(per_round):
        for case, server in plan:
            yield {"round": number, **run(workshop, server, case, scale)}
            done += 1
            progress(done, total)


def rotated(items: Sequence[T], number: int) -> list[T]:
    """Return the items in the order of one round: from round to round, another one comes first."""
    at = number % max(len(items), 1)
    return [*items[at:], *items[:at]]


def run(workshop: Workshop, server: Server, case: Case, scale: Scale) -> Record:
    """Perform one run with a fresh server; a failed run has its reason under ``error``."""
    record: Record = {"server": server.name, "case": case.name, "load": os.getloadavg()[0]}
    settings = case.scaled(scale)
    server_cpus, client_cpus = _cpus(case.pin)
    # With their usual limits, as it is these that are to bound the memory.
    command = twistd() if case.kind is Kind.STALL else None
    most = 20 + 4 * settings.get("seconds", 0)
    try:
        with running(workshop, server, cpus=server_cpus, command=command) as there:
            if server.runs:
                served = workshop.generate(server, "wait", there.address, {"patience": 15}, most=20)["served"]
                record["start_seconds"] = round(served - there.started, 4)
            if case.kind is Kind.EMPTY:
                record.update(there.memory())
            elif case.kind is Kind.HOLD:
                record.update(_with_clients(workshop, server, there, settings))
            elif case.kind is Kind.STALL:
                record.update(_with_clients(workshop, server, there, settings, "stall"))
            elif case.kind is not Kind.START:
                settings["server"] = there.pid
                found = workshop.generate(server, case.kind.value, there.address, settings, cpus=client_cpus, most=most)
                record.update(found, **there.memory())
                record.update(_derived(found))
                if found["lost"] or found["wrong"]:
                    raise Failed(f"{found['lost']} messages were lost, {found['wrong']} were wrong")
    except Failed as e:
        record["error"] = str(e)
    return record


def _with_clients(
    workshop: Workshop, server: Server, there: Running, settings: dict[str, Any], mode: str = "hold"
) -> Record:
    """Measure the server's resident memory, with clients and before they connect."""
    before = there.memory()["rss_kb"]
    with workshop.generating(server, mode, there.address, settings) as read:
        said = read()
        return {**said, "before_kb": before, **there.memory()}


def _cpus(pin: Pin) -> tuple[set[int] | None, set[int] | None]:
    first, *others = sorted(os.sched_getaffinity(0))
    if pin is Pin.ONE:
        return {first}, {first}
    if pin is Pin.APART and others:
        return {first}, set(others)
    return None, None


def _derived(found: Record) -> Record:
    delivered = found["delivered"]
    more: Record = {}
    if delivered:
        more["per_second"] = round(delivered / max(found["seconds"], 1e-9))
        more["cpu_us"] = round(found["cpu_seconds"] * 1e6 / delivered, 4)
    if times := found.get("times_us"):
        more["p50_us"], more["p99_us"] = times[50], times[99]
    return more


# --- the machine ----------------------------------------------------------------------------------


def machine(workshop: Workshop, servers: Iterable[Server], *, rounds: int, scale: Scale) -> Record:
    """Describe the machine and the versions that the figures are from."""
    return {
        "machine": {
            "CPU": _cpu_model(),
            "CPUs used": len(os.sched_getaffinity(0)),
            "Memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
            "Kernel": f"{platform.system()} {platform.release()}",
            "Python": f"{platform.python_implementation()} {platform.python_version()}",
            "Twisted": twisted.__version__,
            "sbus": f"{_revision()}, {'compiled helper' if COMPILED else 'plain Python'}",
            "C compiler": _first_line([os.environ.get("CC", "gcc"), "--version"]),
            **{s.title: v for s in servers if (v := workshop.version(s))},
        },
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "load": os.getloadavg()[0],
        "rounds": rounds,
        "seconds": scale.seconds,
        "whole": scale.whole,
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Processor")):
            return line.partition(":")[2].strip()
    return platform.machine()


def _revision() -> str:
    git = ["git", "-C", str(Path(__file__).parent.parent)]
    if not (revision := _first_line([*git, "rev-parse", "--short", "HEAD"])):
        return __version__
    # What a measurement writes itself is no change of what is measured.
    is_changed = _first_line([*git, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/performance"])
    return f"{__version__} ({revision}{'-dirty' if is_changed else ''})"


def _first_line(command: list[str]) -> str:
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.partition("\n")[0]


# --- results --------------------------------------------------------------------------------------


class Results:
    """Records and their medians; failed runs are listed, and do not count.

    :ivar about: the description of the machine.
    :ivar failures: the records with an ``error``.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        self.about: Record = {}
        self.failures: list[Record] = []
        self._good: defaultdict[tuple[str, str], dict[int, Record]] = defaultdict(dict)
        for record in records:
            if "machine" in record:
                self.about = record
            elif "error" in record:
                self.failures.append(record)
            else:
                self._good[record["server"], record["case"]][record["round"]] = record

    @property
    def servers(self) -> list[str]:
        """The servers with at least one good run."""
        found = {server for server, _ in self._good}
        return [*(name for name in SERVERS if name in found), *sorted(found - SERVERS.keys())]

    def has(self, server: str, case: str) -> bool:
        return (server, case) in self._good

    def runs(self, server: str, case: str) -> list[Record]:
        return list(self._good.get((server, case), {}).values())

    def median(self, server: str, case: str, figure: str) -> float | None:
        """Return the median over the rounds, or None if no run has this figure."""
        return _median(record.get(figure) for record in self.runs(server, case))

    def ratio(
        self, server: str, case: str, figure: str, base: str = BASE, base_case: str | None = None
    ) -> float | None:
        """Return the median ratio to another server (or case) in the same round."""
        bases = self._good.get((base, base_case or case), {})
        ratios = []
        for number, record in self._good.get((server, case), {}).items():
            if (other := bases.get(number)) and other.get(figure) and record.get(figure) is not None:
                ratios.append(record[figure] / other[figure])
        return _median(ratios)

    def times(self, server: str, case: str) -> list[float] | None:
        """Return the quantiles of times at 0, 1, ... 99, 99.5, 99.9 and 100 %, as medians."""
        found = [record["times_us"] for record in self.runs(server, case) if "times_us" in record]
        return [statistics.median(values) for values in zip(*found, strict=True)] if found else None


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None
