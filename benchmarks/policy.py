#!/usr/bin/env python3
"""Measure what a policy costs besides messages: to load it, and to reload it while a user makes round trips.

    sudo python benchmarks/policy.py [--rules 10000] [--clients 1000] [--patterns 16384] [--reloads 10] [--seconds 4]

A bystander of a user of its own makes round trips all the time; the clients of another user hold the patterns. Each
reload changes the policy: a rule less, then a rule more. The longest round trip of each reload counts, from the request
until the new policy is in force. Messages under a policy: ``run.py --only sbus,policy --workloads 1-1,1-8,8-1``.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks.attacks.server import serving  # noqa: E402
from benchmarks.policies import policy  # noqa: E402
from benchmarks.servers import allow_many_files  # noqa: E402

__all__ = ["main"]

_TWISTD = (sys.executable, "-c", "from twisted.scripts.twistd import run; run()")
_OTHER = 1_500
"""The UID of the user with the patterns."""
_BEFORE = 2_000
"""Round trips before a reload, to compare with."""


def _bystander(address: str, until: float, results: Connection) -> None:
    """Make round trips as a user of its own; send when each began, and its seconds."""
    os.setresuid(_OTHER + 1, _OTHER + 1, _OTHER + 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(address)
        sock.send(b"SUB by/stander")
        trips: list[tuple[float, float]] = []
        while (began := time.monotonic()) < until:
            if len(trips) == _BEFORE:
                results.send(None)
            sock.send(b"MSG by/stander\0x")
            sock.recv(100)
            trips.append((began, time.monotonic() - began))
    results.send(trips)


class _Admin(http.client.HTTPConnection):
    """HTTP over the admin socket."""

    def __init__(self, path: str) -> None:
        super().__init__("bus")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self._path)


def _reload(path: str) -> float:
    """Reload the policy; return the seconds until it is in force."""
    began = time.monotonic()
    connection = _Admin(path)
    connection.request("POST", "/v1/policy/reload", headers={"Connection": "close"})
    answer = json.loads(connection.getresponse().read())
    assert "generation" in answer, answer
    return time.monotonic() - began


def _hold(address: str, clients: int, patterns: int) -> list[socket.socket]:
    """Connect clients of one user, which share the patterns."""
    held = []
    for number in range(clients):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(address)
        for at in range(number, patterns, clients):
            sock.send(b"SUB area/%d/*/%d" % (at % 97, at))
        sock.send(b"CMSG !/cred/whoami")
        sock.recv(200)
        held.append(sock)
    return held


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rules", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=1_000)
    parser.add_argument("--patterns", type=int, default=16_384)
    parser.add_argument("--reloads", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=4.0, help="of round trips around each reload [4]")
    options = parser.parse_args()
    allow_many_files()
    with tempfile.TemporaryDirectory(prefix="sbus-policy-") as folder:
        os.chmod(folder, 0o711)
        file = Path(folder) / "policy.toml"
        file.write_text(policy(options.rules))
        loads = [_load(file) for _ in range(3)]
        print(f"to load {options.rules} rules: {statistics.median(loads):.2f} s (median of {len(loads)})")
        bounds = ("--user-accepts=100000", "--user-patterns=100000")
        with serving(_TWISTD, (f"--policy={file}", "--admin=auto", *bounds)) as server:
            _measure(options, file, server.address)


def _load(file: Path) -> float:
    code = "import sys, time, sbus.policy; began = time.perf_counter(); sbus.policy.load(sys.argv[1]);"
    code += "print(time.perf_counter() - began)"
    return float(subprocess.check_output([sys.executable, "-c", code, str(file)], cwd=ROOT))


def _measure(options: argparse.Namespace, file: Path, address: str) -> None:
    os.seteuid(_OTHER)  # the kernel notes the effective IDs at connect(2)
    try:
        held = _hold(address, options.clients, options.patterns)
    finally:
        os.seteuid(0)
    fork = multiprocessing.get_context("fork")
    worst, quiet, times = [], [], []
    for number in range(options.reloads):
        file.write_text(policy(options.rules - number % 2))
        ours, theirs = multiprocessing.Pipe()
        child = fork.Process(target=_bystander, args=(address, time.monotonic() + options.seconds, theirs))
        child.start()
        ours.recv()
        began = time.monotonic()
        took = _reload(f"{address}.admin")
        trips = ours.recv()
        child.join()
        during = [trip for at, trip in trips if began - 0.001 <= at + trip and at <= began + took]
        quiet.append(max(trip for at, trip in trips if at + trip < began) * 1e3)
        worst.append(max(during) * 1e3)
        times.append(took)
    print(f"until it is in force: {statistics.median(times):.2f} s (median of {len(times)})")
    print(
        "longest round trip of another user, ms: "
        f"{statistics.median(worst):.1f} (median), {max(worst):.1f} (worst) of {len(worst)} reloads; "
        f"{statistics.median(quiet):.1f} before each: {' '.join(f'{each:.1f}' for each in worst)}"
    )
    for sock in held:
        sock.close()


if __name__ == "__main__":
    main()
