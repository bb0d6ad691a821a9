"""The attacks as a benchmark: what they count, which targets they judge, and that one command runs them."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks.attacks import bystander, kernel, tables
from benchmarks.attacks.__main__ import main
from benchmarks.attacks.attack import ALL
from benchmarks.attacks.attacker import bundle, filled
from benchmarks.attacks.catalogue import ATTACKS
from benchmarks.attacks.server import Server
from benchmarks.servers import Failed
from sbus.protocol.bundles import unbundle
from tests.support import ROOT

_CROWDED = "many-small-12-2-250-silent"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become the attacker and the bystander")


# --- figures ----------------------------------------------------------------------------------------


class Router:
    """Passes each packet of one client to the other, after standing still for a while."""

    def __init__(self, stall: float) -> None:
        self.first, self._near = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.second, self._far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.first.setblocking(False)
        self.second.setblocking(False)
        self._stall = stall
        self._threads = [
            threading.Thread(target=self._pass, args=ends, daemon=True)
            for ends in ((self._near, self._far), (self._far, self._near))
        ]

    def __enter__(self) -> Router:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.first.close()
        self.second.close()
        for thread in self._threads:
            thread.join()
        self._near.close()
        self._far.close()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        time.sleep(self._stall)  # the server stands still
        try:
            while packet := source.recv(4096):
                sink.send(packet)
        except OSError:
            pass


def measured(measurement: Any, stall: float, *arguments: Any, **more: Any) -> dict[str, Any]:
    """A measurement of the bystander's, on a router in this process."""
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs, Router(stall) as router:
        found: dict[str, Any] = measurement(bystander.Stop(theirs), router.first, router.second, *arguments, **more)
        return found


def test_trips_count_what_was_not_asked() -> None:
    """A server that stands still for 0.3 s spoils each of the round trips that were due meanwhile, not one."""
    found = measured(bystander.trips, 0.3, 100, 0.4)
    assert (found["count"], found["unanswered"]) == (40, 0)
    assert found["max_ms"] >= 250  # the server stops a moment after the first of them is due
    assert found["p50_ms"] >= 90


def test_trips_without_answer() -> None:
    """A message without an answer counts with the time that it has waited."""
    found = measured(bystander.trips, 0.5, 100, 0.1, grace=0.1)
    assert (found["count"], found["unanswered"]) == (10, 10)
    assert 190 <= found["max_ms"] < 500


def test_bulk() -> None:
    """Throughput is bounded in time and in messages, and nothing is under way afterwards."""
    found = measured(bystander.bulk, 0, 5.0, 10_000)
    assert found["lost"] == 0
    assert 9_500 < found["per_second"] * found["seconds"] < 11_000
    assert found["seconds"] < 5


@contextlib.contextmanager
def mirrors(count: int, silent: int = 0) -> Iterator[list[socket.socket]]:
    """Clients that get back what they send, the first `silent` ones nothing."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]

    def mirror(sock: socket.socket) -> None:
        while packet := sock.recv(4096):
            sock.send(packet)

    threads = [threading.Thread(target=mirror, args=(far,)) for _, far in pairs[silent:]]
    for thread in threads:
        thread.start()
    for near, _ in pairs:
        near.setblocking(False)
    yield [near for near, _ in pairs]
    for near, _ in pairs:
        near.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join()
    for near, far in pairs:
        near.close()
        far.close()


def test_rounds() -> None:
    """Each client of a crowd has one message under way; their number is the throughput."""
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs, mirrors(3) as clients:
        found = bystander.rounds(bystander.Stop(theirs), clients, 0.3)
        assert (found["unanswered"], found["lost"]) == (0, 0)
        assert found["per_second"] * found["seconds"] == pytest.approx(found["count"], rel=0.01)
        assert 0.3 <= found["seconds"] < 1
        ours.send("stop")
        assert bystander.rounds(bystander.Stop(theirs), clients, 60.0)["seconds"] < 2


def test_rounds_without_answer() -> None:
    """A client whose message stays without an answer sends another one, and the time counts."""
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs, mirrors(3, silent=1) as clients:
        found = bystander.rounds(bystander.Stop(theirs), clients, 0.5, grace=0.1)
    assert 2 <= found["unanswered"] <= 6
    assert found["max_ms"] >= 100
    assert found["per_second"] > 100


def test_summary() -> None:
    """The quantiles of seconds are in milliseconds."""
    found = bystander.summary([i / 1000 for i in range(200)], 3)
    assert found == {"p50_ms": 100, "p99_ms": 198, "max_ms": 199, "count": 200, "unanswered": 3}


def test_bundles() -> None:
    """The attackers' bundles are those of the protocol, and as large as wanted."""
    assert unbundle([bundle([b"SUB a", b"UNSUB a"])]) == [b"SUB a", b"UNSUB a"]
    packet, number = filled([b"SUB a", b"UNSUB a"], 200_000)
    assert len(unbundle([packet])) == number
    assert 199_900 < len(packet) <= 200_000


def test_catalogue() -> None:
    """There are twelve modes of silent readers; `all` has every part of the attacks of one user on the pair."""
    assert len([name for name in ATTACKS if name.startswith("readers-")]) == 12
    *single, last = ATTACKS.values()
    assert last.name == ALL
    assert last.parts == tuple(part for attack in single if attack.is_plain for part in attack.parts)
    assert all(not attack.users or len(attack.users) == len(attack.parts) for attack in single)


def test_usual_rows() -> None:
    """Without names, few of the combinations of bystanders and readers are measured; each has its name."""
    small = [attack for name, attack in ATTACKS.items() if name.startswith("many-small-")]
    assert (len(small), len([attack for attack in small if attack.is_usual])) == (36, 6)
    assert all(attack.is_usual for attack in ATTACKS.values() if attack not in small)
    crowd = ATTACKS["many-small-40-16-3900-eager"].crowd
    assert crowd is not None
    assert (crowd.clients, crowd.users) == (40, 16)


# --- the server from outside ------------------------------------------------------------------------


def test_connections(tmp_path: Path) -> None:
    """The kernel lists the server's open connections once they are accepted, and their unread bytes."""
    path = str(tmp_path / "bus")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server, contextlib.ExitStack() as stack:
        server.bind(path)
        server.listen()
        for _ in range(3):
            client = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            client.connect(path)
        first, second = (stack.enter_context(server.accept()[0]) for _ in range(2))
        assert kernel.connections(path) == (2, 0, 0)
        first.send(bytes(1000))
        assert kernel.connections(path).unread >= 1000
        first.shutdown(socket.SHUT_RDWR)
        second.shutdown(socket.SHUT_WR)
        assert kernel.connections(path) == (1, 0, 1)


@pytest.mark.parametrize(("command", "status"), [("exit 3", 3), ("kill $$", -15)])
def test_ended_by_itself(tmp_path: Path, command: str, status: int) -> None:
    """A server that has ended is noticed, with its status and its last words."""
    log = tmp_path / "log"
    log.write_text("a line\nMemoryError\n")
    process = subprocess.Popen(["sh", "-c", command])
    process.wait(10)
    with pytest.raises(Failed, match=rf"ended by itself \(status {status}\): a line MemoryError"):
        Server(process, str(tmp_path / "bus"), log).check()


def test_hanging_server(tmp_path: Path) -> None:
    """A server that ignores SIGTERM is killed when the patience is over."""
    command = ["sh", "-c", "trap '' TERM; echo ready; sleep 60 & wait; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        ending = Server(process, str(tmp_path / "bus"), tmp_path / "log").stop(0.3)
        assert (ending.gone, ending.status) == (None, None)
        assert process.poll() == -9
        os.killpg(process.pid, 9)


# --- tables -----------------------------------------------------------------------------------------


def phase(p99: float, per_second: float, *, log: int = 0, unanswered: int = 0) -> dict[str, Any]:
    trips = {"p50_ms": 1.0, "p99_ms": p99, "max_ms": p99, "count": 200, "unanswered": unanswered}
    bulk = {"per_second": per_second, "samples": [per_second]}
    return {"trips": trips, "newcomers": trips, "bulk": bulk, "cpu": 0.5, "log_per_second": log}


def row(attack: str = "subs", **changes: Any) -> dict[str, Any]:
    figures = {"rss_before": 1 << 20, "rss_peak": 2 << 20, "kernel_bytes": 0, "shut_s": 2.0, "gone_s": 2.5}
    figures |= {"processes": 1, "ready": 1, "attackers_failed": 0, "status": 0}
    phases = {"idle": phase(1, 100), "spinners": phase(10, 100), "attack_phase": phase(39.9, 51)}
    return {"attack": attack, "server": "sbus", **phases, **figures, **changes}


@pytest.mark.parametrize(
    ("record", "missed"),
    [
        (row(), []),
        (row(attack_phase=phase(40.1, 51)), ["round trip"]),
        (row(attack_phase=phase(1, 50)), ["throughput"]),
        (row(ALL, attack_phase=phase(1, 41)), []),
        (row(ALL, attack_phase=phase(1, 40)), ["throughput"]),
        (row(shut_s=2.01), ["SIGTERM"]),
        (row(shut_s=None, gone_s=None), ["SIGTERM"]),
        (row(attack_phase=phase(1, 100, log=10_001)), ["log"]),
        (row(attack_phase={**phase(1, 100), "trips": {"error": "end-of-file"}}), ["round trip"]),
        (row("held", attack_phase={**phase(1, 100), "bulk": {}}), []),
        (row("admin-storm", attack_phase=phase(1, 100, unanswered=1)), ["scrapes"]),
    ],
)
def test_targets(record: dict[str, Any], missed: list[str]) -> None:
    """Each target has an edge, and a row that misses it says so."""
    assert tables.missed(record) == missed
    table = next(tables.tables([record]))
    assert len(table.rows[0]) == len(table.header)
    assert all(name in table.rows[0][-1] for name in missed)


def test_failures_are_in_the_tables() -> None:
    """A server that has ended by itself has a row with the reason; a server that was killed has no time.

    So are attackers that failed or did not finish their set-up, and the status of a server that ended badly.
    """
    ended = {"attack": "keys", "server": "sbus", "error": "the server has ended by itself (status 1): MemoryError"}
    killed = row(shut_s=None, gone_s=None)
    table = next(tables.tables([ended, killed]))
    assert "MemoryError" in table.rows[0][-1]
    assert table.rows[1].count("**killed**") == 2
    broken = row(processes=3, ready=1, attackers_failed=2, status=1)
    remarks = "1 of 3 attackers finished their set-up; 2 attackers failed; exit status 1"
    assert next(tables.tables([broken])).rows[0][-1] == remarks


def test_medians() -> None:
    """A row has the medians of its rounds; a server that was killed is slower than any other; errors stay rows."""
    rounds = [row(shut_s=shut, attack_phase=phase(p99, 100)) for shut, p99 in ((None, 30.0), (1.0, 10.0), (3.0, 20.0))]
    ended = {"attack": "subs", "server": "sbus", "error": "status 1"}
    merged, other, failed = tables.medians([rounds[0], row("keys"), *rounds[1:], ended])
    assert (merged["attack"], merged["shut_s"], merged["attack_phase"]["trips"]["p99_ms"]) == ("subs", 3.0, 20.0)
    assert merged["attack_phase"]["bulk"]["samples"] == [100] * 3
    assert tables.medians([*rounds, rounds[0], rounds[0]])[0]["shut_s"] is None
    assert other["attack"] == "keys"
    assert failed == ended


def test_memory_table() -> None:
    """State that takes more than twice what the server counts is marked."""
    common = {"server": "sbus", "items": 10, "kernel": 0.0}
    records = [
        {"memory": "fair", "resident": 200.0, "counted": 100, **common},
        {"memory": "unfair", "resident": 201.0, "counted": 100, **common},
        {"memory": "uncounted", "resident": 201.0, "counted": 0, **common},
    ]
    table = next(tables.tables(records))
    assert [each[4] for each in table.rows] == ["×2.0", "**×2.0**", "–"]


def test_conditions() -> None:
    """The note says when, where and how it was measured; plain Python has files of its own."""
    about = {"machine": {"CPUs": 2, "kernel": "6.1", "load": 0.5}, "date": "today", "secs": 1.0, "pure": False}
    records = [about, row(load=3.25, round=1), row("keys", load=1.0, round=0)]
    note = tables.conditions(records)
    for words in ("today, compiled, Linux 6.1, 2 CPUs, 2 rounds", "``--secs 1``", "was 0.5 before, and up to 3.2"):
        assert words in note
    assert [table.name for table in tables.tables(records)] == ["attacks", "attacks-legend"]
    about["pure"] = True
    assert "plain Python" in tables.conditions(records)
    assert [table.name for table in tables.tables(records)] == ["attacks-pure", "attacks-legend"]


# --- the command ------------------------------------------------------------------------------------


def test_unknown_attack(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that matches no attack is an error, and the names are listed."""
    with pytest.raises(SystemExit):
        main(["--only", "tickle"])
    assert "no attack matches tickle" in capsys.readouterr().err


@needs_root
def test_no_such_server(tmp_path: Path) -> None:
    """A server to measure that does not exist is an error, with the form to write."""
    with pytest.raises(SystemExit, match=r"names no program; write --sbus=NAME=/path/of/twistd"):
        main(["--sbus", f"old={tmp_path}/twistd", "--only", "subs", "--out", str(tmp_path)])


@needs_root
def test_server_that_does_not_start(tmp_path: Path) -> None:
    """A server that ends at once is a row with the reason."""
    command = [sys.executable, "-m", "benchmarks.attacks", "--sbus", "bad=false", "--only", "subs"]
    command += ["--out", str(tmp_path)]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert made.returncode == 0, made.stderr
    assert "the server has ended by itself (status 1)" in (tmp_path / "attacks.inc").read_text()


@needs_root
@pytest.mark.slow
@pytest.mark.parametrize("names", [["subs", _CROWDED], ["whoami-read"]])
def test_attacks(tmp_path: Path, names: list[str]) -> None:
    """Attacks on a real server, one of them on a crowd of two users, have sane figures.

    The tables of their records are the same again.
    """
    data, out = tmp_path / "records.jsonl", tmp_path / "out"
    words = ["--only", *names, "--secs", "0.3", "--setup", "5", "--patience", "10"]
    command = [sys.executable, "-m", "benchmarks.attacks", *words, "--json", str(data), "--out", str(out)]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert made.returncode == 0, made.stderr
    about, *records = [json.loads(line) for line in data.read_text().splitlines()]
    assert "machine" in about
    assert [record["attack"] for record in records] == names
    for record in records:
        assert "error" not in record, made.stderr
        assert (record["ready"], record["attackers_failed"], record["status"]) == (record["processes"], 0, 0)
        assert record["actions"] > 100
        assert record["connections"] >= 3
        assert 0 <= record["shut_s"] <= record["gone_s"] < 10
        assert 10 << 20 < record["rss_before"] <= record["rss_peak"] < 1 << 30
        for name in ("idle", "spinners", "attack_phase"):
            found = record[name]
            assert found["trips"]["count"] >= 30
            assert 0 < found["trips"]["p50_ms"] <= found["trips"]["p99_ms"] <= found["trips"]["max_ms"]
            assert found["newcomers"]["count"] >= 1
            assert found["bulk"]["per_second"] == median(found["bulk"]["samples"]) > 0
            assert len(found["bulk"]["samples"]) == (1 if name == "idle" else 3)
            assert 0 < found["cpu"] < 2
    text = (out / "attacks.inc").read_text()
    assert f"* - {names[0]}" in text
    again = tmp_path / "again"
    assert main(["--from", str(data), "--out", str(again)]) == 0
    assert (again / "attacks.inc").read_text() == text
