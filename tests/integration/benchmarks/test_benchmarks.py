"""The benchmarks themselves: what they count, which errors they notice, and the one command that runs them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from benchmarks import clients, measure, report, targets
from benchmarks.micro import compare
from benchmarks.servers import SERVERS, SOURCES, Failed, Running, Workshop, running
from benchmarks.workloads import WORKLOADS, Case, Kind, Scale
from sbus.protocol.keys import matches_open
from tests.support import ROOT
from tests.support.harness import TIMEOUT, Client

YARDSTICK = SERVERS["yardstick"]

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CC", "gcc")) is None, reason="there is no C compiler for the generators"
)


# --- figures ----------------------------------------------------------------------------------------


def record(server: str, number: int, per_second: float, **more: Any) -> dict[str, Any]:
    return {"server": server, "case": "1-1/pipelined", "round": number, "per_second": per_second, **more}


ABOUT = {"machine": {"CPU": "a fast one"}, "date": "today", "load": 0.0, "rounds": 3, "seconds": 0.5, "whole": True}


def results(*records: dict[str, Any], **about: Any) -> measure.Results:
    return measure.Results([{**ABOUT, **about}, *records])


def test_median() -> None:
    """A figure is the median of the rounds; failed runs do not count and are listed."""
    failed = record("sbus", 3, 1e9, error="lost 3")
    found = results(*(record("sbus", i, value) for i, value in enumerate([30, 10, 20])), failed)
    assert found.median("sbus", "1-1/pipelined", "per_second") == 20
    assert found.failures == [failed]
    assert found.median("redis", "1-1/pipelined", "per_second") is None


def test_ratio() -> None:
    """A ratio compares two runs of one round; a round with only one of them does not count."""
    found = results(
        record("sbus", 0, 10),
        record("yardstick", 0, 5),
        record("sbus", 1, 90),
        record("yardstick", 1, 30),
        record("sbus", 2, 8),
        record("yardstick", 2, 2),
        record("sbus", 3, 1000),
    )
    assert found.ratio("sbus", "1-1/pipelined", "per_second") == 3
    assert found.ratio("yardstick", "1-1/pipelined", "per_second", "sbus") == pytest.approx(1 / 3)
    assert found.ratio("sbus", "1-1/pipelined", "cpu_us") is None


def test_times() -> None:
    """Each quantile is the median of the rounds too."""
    found = results(*(record("sbus", i, 1, times_us=[i, 10 * i]) for i in (1, 5, 3)))
    assert found.times("sbus", "1-1/pipelined") == [3, 30]


def test_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a round, every case runs on all servers, beginning with another one each time."""
    monkeypatch.setattr(measure, "run", lambda shop, server, case, scale: {"server": server.name, "case": case.name})
    servers = [SERVERS["sbus"], YARDSTICK, SERVERS["zmq"]]
    cases = [*WORKLOADS["1-1"].cases, Case("once", "", Kind.EMPTY, rounds=1)]
    no_workshop: Any = None
    made = list(measure.measure(no_workshop, servers, cases, Scale(), 2))
    assert [(r["round"], r["case"], r["server"]) for r in made] == [
        (0, "1-1/unbatched", "sbus"),
        (0, "1-1/unbatched", "yardstick"),
        (0, "1-1/pipelined", "sbus"),
        (0, "1-1/pipelined", "yardstick"),
        (0, "1-1/pipelined", "zmq"),
        (0, "once/", "sbus"),
        (0, "once/", "yardstick"),
        (1, "1-1/unbatched", "yardstick"),
        (1, "1-1/unbatched", "sbus"),
        (1, "1-1/pipelined", "yardstick"),
        (1, "1-1/pipelined", "zmq"),
        (1, "1-1/pipelined", "sbus"),
    ]


@pytest.mark.parametrize("case", [case for w in WORKLOADS.values() for case in w.cases], ids=lambda case: case.name)
def test_bounded(case: Case) -> None:
    """No run publishes more than servers can hold, or asks for more connections than there are files."""
    for scale in (Scale(), Scale(60), Scale(0.1, whole=False, files=1024)):
        settings = case.scaled(scale)
        assert settings.get("idle", 0) < scale.files
        if case.kind is Kind.FLOW:
            copies = settings.get("publishers", 1) * settings.get("subscribers", 1)
            assert settings["limit"] * copies * settings.get("size", 64) < 1 << 30
        if case.kind in (Kind.FLOW, Kind.TRIP, Kind.SPARSE):
            assert settings["seconds"] <= 40 * scale.seconds


@pytest.mark.parametrize(
    ("at_least", "value", "verdict"),
    [
        (True, 2.0, "met"),
        (True, 1.91, "met, within 5 %"),
        (True, 1.89, "**missed**"),
        (False, 2.0, "met"),
        (False, 2.09, "met, within 5 %"),
        (False, 2.11, "**missed**"),
    ],
)
def test_verdict(at_least: bool, value: float, verdict: str) -> None:
    """A target is met at its bound, with a tolerance of 5 %."""
    target = targets.Target("speed", 2.0, "×", lambda results: value, at_least)
    assert target.verdict(value) == verdict


def test_every_target_can_be_measured() -> None:
    """Each target finds its figure in the records of the existing cases."""
    figures = {"per_second": 2, "cpu_us": 2, "p50_us": 2, "p99_us": 2, "rss_kb": 2, "before_kb": 1, "held": 1}
    made = [
        {"server": server, "case": case.name, "round": 0, "start_seconds": 2, **figures}
        for workload in WORKLOADS.values()
        for case in workload.cases
        for server in ("sbus", "bundles", "yardstick", "redis")
    ]
    assert [target.what for target in targets.TARGETS if target.measure(results(*made)) is None] == []


# --- tables -----------------------------------------------------------------------------------------


def test_table() -> None:
    """A table has the same content in reStructuredText and in Markdown."""
    table = report.Table("speed", "How fast", ["", "1→1", "1→8"], [["sbus", "1.00M", "×2"], ["other", "–", "17.5k"]])
    assert table.rst().splitlines() == [
        ".. list-table:: How fast",
        "   :header-rows: 1",
        "   :stub-columns: 1",
        "",
        "   * -",
        "     - 1→1",
        "     - 1→8",
        "   * - sbus",
        "     - 1.00M",
        "     - ×2",
        "   * - other",
        "     - –",
        "     - 17.5k",
    ]
    assert table.markdown().splitlines() == [
        "**How fast**",
        "",
        "|       |   1→1 |   1→8 |",
        "|-------|------:|------:|",
        "| sbus  | 1.00M |    ×2 |",
        "| other |     – | 17.5k |",
    ]


def test_tables_say_what_there_is() -> None:
    """Tables contain only what was measured, and name the servers that are ahead of sbus."""
    found = results(record("sbus", 0, 500_000), record("yardstick", 0, 250_000), record("redis", 0, 1_500_000))
    tables = {table.name: table for table in (*report.tables(found), *report.ahead(found))}
    assert set(tables) == {"throughput-pipelined", "ahead"}
    assert [row[:2] for row in tables["throughput-pipelined"].rows] == [
        ["sbus", "500k (×2.00)"],
        ["yardstick (plain C)", "250k"],
        ["redis", "1.50M (×6.00)"],
    ]
    assert tables["ahead"].rows == [["1→1, pipelined", "redis ×3.00", "yardstick (plain C) ×0.50"]]


@pytest.mark.parametrize(
    ("about", "noted"),
    [({}, False), ({"whole": False}, True), ({"load": 1.5}, True)],
    ids=["whole", "quick", "busy"],
)
def test_notes(about: dict[str, Any], noted: bool) -> None:
    """A report names the machine, the failed runs, and whether its figures are of little worth."""
    notes = report.notes(results(record("redis", 1, 1, error="it has\nended"), **about))
    assert "a fast one" in notes
    assert "* 1-1/pipelined, redis, round 2: it has ended" in notes
    assert (".. note::" in notes) == noted


def test_slow_down() -> None:
    """A step that takes longer than its baseline is reported; a slower machine is not."""
    then = {compare.CALIBRATION: 100.0, "parse": 10.0, "route": 20.0, "gone": 1.0}
    found = compare.ratios({compare.CALIBRATION: 200.0, "parse": 20.0, "route": 60.0, "new": 1.0}, then)
    assert found == {"parse": 1.0, "route": 1.5}
    assert compare.slower(found) == ["route"]


def test_baselines() -> None:
    """Both implementations have a baseline, with the same steps."""
    stored = compare.stored()
    assert set(stored) == {"compiled", "plain"}
    assert stored["compiled"]["times"].keys() == stored["plain"]["times"].keys()


# --- the yardstick ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("b"))


@pytest.fixture
def yardstick(workshop: Workshop) -> Iterator[Running]:
    workshop.prepare(YARDSTICK)
    with running(workshop, YARDSTICK) as there:
        workshop.generate(YARDSTICK, "wait", there.address, {})
        yield there


@needs_compiler
def test_yardstick_delivers(yardstick: Running) -> None:
    """The yardstick delivers messages byte for byte, one copy to each client with a matching pattern."""
    keys = [b"a/b", b"a/b/c", b"a", b"", b"a/bc", b"x/a"]
    patterns = [b"a/b", b"a/", b"a/*", b"", b"*/a", b"a/b*", b"*/b/", b"a/*b"]
    with Client(yardstick.address) as publisher:
        for pattern in patterns:
            with Client(yardstick.address) as client:
                client.sub(pattern, pattern)
                assert client.echo() == []
                sent = [publisher.msg(key, b"with\0nul") for key in keys]
                assert publisher.echo() == []
                expected = [p for key, p in zip(keys, sent, strict=True) if matches_open(pattern, key)]
                assert [p for p in client.echo() if p in sent] == expected, pattern


@needs_compiler
def test_yardstick_unsubscribes(yardstick: Running) -> None:
    """Two equal subscriptions need two UNSUB in the yardstick."""
    with Client(yardstick.address) as client, Client(yardstick.address) as other:
        client.sub(b"a", b"b", b"a")
        client.unsub(b"a")
        first = client.msg(b"a")
        client.unsub(b"a")
        client.msg(b"a")
        last = client.msg(b"b")
        assert client.echo() == [first, last]
        other.msg(b"a")
        assert other.echo() == []
        assert client.echo() == []


# --- the generators -------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("source", sorted(SOURCES.glob("*.c")), ids=lambda path: path.name)
def test_sources(source: Path) -> None:
    """The C files compile without a warning, if their libraries are installed."""
    compiler = os.environ.get("CC", "gcc")
    for header in ("zmq.h", "systemd/sd-bus.h"):
        if f"<{header}>" in source.read_text():
            there = subprocess.run(
                [compiler, "-E", "-x", "c", "-"], input=f"#include <{header}>", text=True, capture_output=True
            )
            if there.returncode:
                pytest.skip(f"{header} is not installed")
    command = [compiler, "-O2", "-Wall", "-Wextra", "-fsyntax-only", str(source)]
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""


Fault = Callable[[int, bytes], list[bytes]]


class FaultyBus:
    """A bus with a fault: a function decides by number what happens to packets under ``flow/``."""

    def __init__(self, address: str, fault: Fault) -> None:
        self.address = address
        self._fault = fault
        self._numbers = itertools.count()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(address)
        self._listener.listen()
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> FaultyBus:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.close()
        self._thread.join(TIMEOUT)
        self._stopped.close()
        self._listener.close()

    def _serve(self) -> None:
        patterns: dict[socket.socket, set[bytes]] = {}
        while True:
            sources = [self._stopped, self._listener, *patterns]
            ready = wait(sources)
            if self._stopped in ready:
                break
            for sock in [source for source in sources if source in ready]:
                if sock is self._listener:
                    patterns[sock.accept()[0]] = set()
                    continue
                try:
                    packet = sock.recv(65536)
                except ConnectionResetError:  # It left with packets unread.
                    packet = b""
                verb, _, rest = packet.partition(b" ")
                if not packet:
                    patterns.pop(sock)
                    sock.close()
                elif verb == b"SUB":
                    patterns[sock].add(rest)
                elif verb == b"UNSUB":
                    patterns[sock].discard(rest)
                else:
                    key = rest.partition(b"\0")[0]
                    out = self._fault(next(self._numbers), packet) if key.startswith(b"flow/") else [packet]
                    for receiver, wanted in patterns.items():
                        if any(matches_open(pattern, key) for pattern in wanted):
                            with contextlib.suppress(ConnectionError):  # It has left, which is seen when it is read.
                                for copy in out:
                                    receiver.send(copy)
        for sock in patterns:
            sock.close()


def swapped() -> Fault:
    """The fourth packet comes after the fifth."""
    kept: list[bytes] = []

    def fault(number: int, packet: bytes) -> list[bytes]:
        if number == 3:
            kept.append(packet)
            return []
        return [packet, *kept] if number == 4 else [packet]

    return fault


MESSAGES = 200
"""What is published, before the word that there is no more."""

FAULTS: dict[str, tuple[Fault, int, int]] = {
    "none": (lambda n, p: [p], 0, 0),
    "lost": (lambda n, p: [] if n % 10 == 9 else [p], 20, 0),
    "repeated": (lambda n, p: [p, p] if n % 50 == 25 else [p], 0, 4),
    "cut": (lambda n, p: [p[:-1]] if n == 7 else [p], 1, 1),
    "swapped": (swapped(), 1, 1),
    "end-lost": (lambda n, p: [] if n == MESSAGES else [p], 0, 0),
}
"""A fault of a bus, and the messages that each subscriber then misses and finds wrong."""


@needs_compiler
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "end-lost" else n for n in FAULTS])
def test_generator_notices(name: str, workshop: Workshop, directory: Path) -> None:
    """The load generator counts what is lost, repeated, cut off or out of order."""
    fault, lost, wrong = FAULTS[name]
    # If the end is lost, the generator waits for its whole patience: no pause of a busy machine is that long.
    settings = {"subscribers": 2, "limit": MESSAGES, "seconds": TIMEOUT, "batch": 8, "patience": TIMEOUT / 2}
    with FaultyBus(str(directory / "bus"), fault) as bus:
        found = workshop.generate(YARDSTICK, "flow", bus.address, settings, most=2 * TIMEOUT)
    assert (found["published"], found["lost"], found["wrong"]) == (MESSAGES, 2 * lost, 2 * wrong)
    assert found["delivered"] == 2 * (MESSAGES - lost)


@needs_compiler
def test_generator_fails_in_bounds(workshop: Workshop, directory: Path) -> None:
    """Without a server, the generator gives up and reports why."""
    with pytest.raises(Failed, match="cannot connect"):
        workshop.generate(YARDSTICK, "flow", str(directory / "nobody"), {"patience": 0.1}, most=TIMEOUT)


@needs_compiler
def test_server_that_ends(workshop: Workshop) -> None:
    """A run fails if its server ends by itself."""
    workshop.prepare(YARDSTICK)

    def kill(there: Running) -> None:
        assert there.process is not None
        os.kill(there.pid, signal.SIGKILL)
        there.process.wait(TIMEOUT)

    with pytest.raises(Failed, match="ended by itself"), running(workshop, YARDSTICK) as there:
        kill(there)


@needs_compiler
@pytest.mark.parametrize(
    "case",
    [
        Case("flow", "beside", Kind.FLOW, {"idle": 40, "patterns": 100, "churn": 2, "rate": 1000, "pair": 1}),
        Case("flow", "churn", Kind.FLOW, {"publishers": 2, "churn": 1, "rate": 1000, "keys": 10}),
        Case("sparse", "", Kind.SPARSE, {"publishers": 20, "rate": 2000}),
        Case("trip", "", Kind.TRIP),
        Case("hold", "", Kind.HOLD, {"idle": 50}),
    ],
    ids=lambda case: f"{case.workload}-{case.variant}".rstrip("-"),
)
def test_run(case: Case, workshop: Workshop) -> None:
    """Every kind of run produces its figures and loses nothing."""
    workshop.prepare(YARDSTICK)
    found = measure.run(workshop, YARDSTICK, case, Scale(0.05))
    assert "error" not in found
    assert found["start_seconds"] > 0
    assert found["rss_kb"] > 0
    if case.kind is Kind.HOLD:
        assert found["held"] == 50
    else:
        assert found["delivered"] > 0
        assert found["cpu_us"] > 0
    if case.kind in (Kind.SPARSE, Kind.TRIP) or case.settings.get("pair"):
        assert found["times_us"] == sorted(found["times_us"])
        assert found["p50_us"] > 0
    if case.settings.get("churn"):
        assert found["churned"] > 0


@pytest.mark.slow
@needs_compiler
def test_run_with_bundles(workshop: Workshop) -> None:
    """Clients with bundles lose nothing, with many small or a few large messages in a bundle."""
    server = SERVERS["bundles"]
    workshop.prepare(server)
    for settings in ({"publishers": 2, "subscribers": 2, "keys": 3, "batch": 64}, {"size": 40_000, "batch": 64}):
        found = measure.run(workshop, server, Case("flow", "", Kind.FLOW, settings), Scale(0.05))
        assert "error" not in found
        assert found["delivered"] > 0


# --- the command ------------------------------------------------------------------------------------------


def bench(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "run.py"), *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@needs_compiler
@pytest.mark.slow
def test_command(tmp_path: Path) -> None:
    """The command measures, prints and saves its results; from the saved data it produces the same tables."""
    first, second = tmp_path / "first", tmp_path / "second"
    done = bench(
        *("--quick", "--secs", "0.02", "--only", "yardstick,kernel", "--workloads", "1-1,trip", "--out"), first
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (first / "data" / "runs.jsonl").read_text().splitlines()]
    measured = ["1-1/unbatched", "1-1/unbatched", "1-1/pipelined", "1-1/pipelined", "trip/free", "trip/free"]
    assert [line.get("case") for line in lines] == [None, *measured]
    assert [line for line in lines if "error" in line] == []
    again = bench("--from", first / "data" / "runs.jsonl", "--out", second)
    assert again.returncode == 0, again.stderr
    assert again.stdout == done.stdout
    tables = {"machine", "throughput-unbatched", "throughput-pipelined", "cpu-unbatched", "cpu-pipelined", "latency"}
    assert {path.stem for path in first.glob("*.inc")} == tables
    pictures = {"throughput", "cpu", "latency"} if find_spec("matplotlib") else set()
    assert {path.stem for path in first.glob("*.svg")} == pictures
    for path in first.iterdir():
        if path.is_file():
            assert (second / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize(
    "programs",
    [["blocking-lists"], pytest.param(["blocking-lists", "asyncio", "twisted-turns"], marks=pytest.mark.slow)],
    ids=len,
)
@pytest.mark.slow
def test_clients_are_measured(tmp_path: Path, programs: list[str]) -> None:
    """Publisher and receiver agree on the messages for each way of use; the saved data gives the same table."""
    command = [sys.executable, str(ROOT / "benchmarks" / "clients.py")]
    only = ["--only", ",".join(programs), "--rounds", "1", "--secs", "0.02"]
    done = subprocess.run([*command, *only, "--out", str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    about, *records = map(json.loads, (tmp_path / "data" / "python.jsonl").read_text().splitlines())
    assert about["machine"]["Python"]
    assert [record["program"] for record in records] == programs
    for record in records:
        assert record["messages"] > 0, record
        assert all(record[figure] > 0 for figure in ("per_second", "publisher_us", "server_us", "receiver_us"))
    assert clients.table([about, *records, {"program": "redis", "error": "lost"}]).markdown() in done.stdout
    assert clients.main(["--from", str(tmp_path / "data" / "python.jsonl"), "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "python.inc").read_bytes() == (tmp_path / "python.inc").read_bytes()


@pytest.mark.slow
def test_large_messages_are_measured() -> None:
    """There is a row for each case and library, with no message wrong or lost; a missing library is left out."""
    command = [sys.executable, str(ROOT / "benchmarks" / "payloads.py"), "--rounds", "1", "--seconds", "0.01"]
    done = subprocess.run(
        [*command, "--only", "sbus copied", "--cases", "64k-1,1m-8"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split("|") for line in done.stdout.splitlines() if ", sbus" in line]
    assert [row[0].strip() for row in rows] == ["64 KiB 1→1, sbus copied", "1 MiB 1→8, sbus copied"]
    assert all([int(cell) for cell in row[-3:]] == [0, 0, 0] for row in rows)
    assert "| copy to new memory " in done.stdout


def test_command_without_compiler(tmp_path: Path) -> None:
    """Servers that cannot be measured are left out with a note, without an error."""
    done = bench("--only", "redis,yardstick", "--workloads", "1-1", "--out", tmp_path, CC=str(tmp_path / "none"))
    assert done.returncode == 0, done.stderr
    assert "without yardstick: there is no C compiler" in done.stderr
    assert "without redis: " in done.stderr


def test_command_refuses() -> None:
    """Unknown servers and workloads are refused."""
    done = bench("--only", "carrier-pigeon")
    assert done.returncode == 2
    assert "no carrier-pigeon: there are sbus, bundles, policy, yardstick" in done.stderr
