"""Compare what the recorder and JetStream's file store keep, for ``recorder.py --jetstream``.

Other benchmarks publish with `pour`.

A run counts only if nothing is lost: the journal is read back, number by number, and nats-server is asked what it has.
The recorder's time ends when readers see the last message, so when it is synced; JetStream's when it acknowledges the
last message, which it syncs later (`SYNC_INTERVAL`).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks import jetstream, raw, recording  # noqa: E402

__all__ = ["Kept", "compare", "keep_in_jetstream", "keep_in_journal", "pour"]

_PATIENCE = 60.0
"""Seconds after the last message was sent until the journal must have it."""


class Kept(NamedTuple):
    """Messages that were kept, all of them.

    :ivar rate: messages a second, from the first that was sent to the last that was kept.
    :ivar cpu: µs of CPU time for each message, of the servers.
    """

    rate: float
    cpu: float


def _pour(*words: object) -> tuple[float, float]:
    """Publish in a process of its own; return when it began and ended."""
    command = [sys.executable, __file__, "--pour", *map(str, words)]
    began, ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    return float(began), float(ended)


def pour(address: Path, journal: Path, total: int, *, bundled: bool) -> tuple[float, float]:
    """Publish as fast as a recorder takes it.

    :returns: when the first message was sent, and when readers of the journal saw the last, on the monotonic clock.
    """
    from sbus.journal.reader import JournalReader

    began, _ = _pour("sbus", address, total, int(bundled))
    reader = JournalReader(journal)
    end = time.monotonic() + _PATIENCE
    while reader.end() <= total:  # the start is a row, too
        if time.monotonic() > end:
            raise SystemExit(f"the journal has {reader.end()} of {total + 1} rows after {_PATIENCE:.0f} s")
        time.sleep(0.01)  # a journal announces nothing to other processes
    return began, time.monotonic()


def keep_in_journal(folder: Path, total: int, *, bundled: bool) -> Kept:
    """Record with a bus and a recorder that blocks publishers rather than lose a message."""
    address, journal = folder / "bus", folder / "journal"
    command = [*recording.TWISTD, "sbus-recorder", f"--socket={address}", f"--journal={journal}", "--hard=block"]
    with (
        recording.running([*recording.TWISTD, "sbus", f"--socket={address}"], folder / "bus.log", "listens on") as bus,
        recording.running(command, folder / "recorder.log", "recording") as writer,
    ):
        before = bus.cpu() + writer.cpu()
        began, ended = pour(address, journal, total, bundled=bundled)
        spent = bus.cpu() + writer.cpu() - before
        writer.stop()
    if (found := recording.check(journal)) != (total, 0, 0):
        raise SystemExit(f"messages, misplaced ones, gaps: {found}, of {total}")
    return Kept(total / (ended - began), spent / total * 1e6)


def keep_in_jetstream(folder: Path, total: int, *, pipelined: bool, sync_interval: str) -> Kept:
    """Store in a stream of a nats-server."""
    from tests.support.nats import free_ports, nats_server

    port, monitor = free_ports(2)
    config = jetstream.configure(folder, port, monitor, sync_interval)
    with recording.running([nats_server(), "-c", str(config)], folder / "nats.log", "Server is ready") as server:
        before = server.cpu()
        began, ended = _pour("jetstream", port, total, int(pipelined))
        spent = server.cpu() - before
        found = jetstream.state(monitor)
    if (found["messages"], found["first_seq"], found["last_seq"]) != (total, 1, total):
        raise SystemExit(f"JetStream has {found}, of {total}")
    return Kept(total / (ended - began), spent / total * 1e6)


def compare(messages: int, rounds: int, sync_interval: str, directory: str | None) -> None:
    """Measure both in turn, plain and bundled, and print ratios of the medians.

    :param messages: of a plain run; a bundled one has four times as many.
    :param directory: where to keep them for the time; None: a temporary directory.
    """
    found: dict[tuple[bool, str], list[Kept]] = {}
    for number in range(rounds):
        for bundled in (False, True):
            total = messages * (4 if bundled else 1)
            for server in ("recorder", "JetStream") if number % 2 == 0 else ("JetStream", "recorder"):
                with tempfile.TemporaryDirectory(prefix="sbus-", dir=directory) as name:
                    folder = Path(name)
                    if server == "recorder":
                        one = keep_in_journal(folder, total, bundled=bundled)
                    else:
                        one = keep_in_jetstream(folder, total, pipelined=bundled, sync_interval=sync_interval)
                found.setdefault((bundled, server), []).append(one)
                how = "bundled" if bundled else "plain"
                print(f"{how:8} {server:10} {total:>10,}  {one.rate:>10,.0f}/s  {one.cpu:.2f} µs a message", flush=True)
    for bundled in (False, True):
        rates, costs = (
            [median(getattr(one, what) for one in found[bundled, server]) for server in ("recorder", "JetStream")]
            for what in ("rate", "cpu")
        )
        print(
            f"medians, {'bundled' if bundled else 'plain'}: recorder {rates[0]:,.0f}/s at {costs[0]:.2f} µs, "
            f"JetStream {rates[1]:,.0f}/s at {costs[1]:.2f} µs: "
            f"{rates[0] / rates[1]:.2f} times the rate, {costs[0] / costs[1]:.2f} times the CPU"
        )


def _publish(kind: str, address: str, total: str, how: str) -> None:
    if kind == "sbus":
        print(*raw.publish(address, int(total), bundled=how == "1"))
    else:
        print(*jetstream.publish(int(address), int(total), pipelined=how == "1"))


if __name__ == "__main__":
    _publish(*sys.argv[2:])
