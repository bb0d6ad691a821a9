#!/usr/bin/env python3
"""Measure large messages from one Python program to another, beside a relay of plain sockets.

``--sbus NAME=PYTHON`` names the interpreter of an installation; give several, say one from before a change and one with
it, to compare them. They and the relay take turns within a round; figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks.attacks.kernel import cpu  # noqa: E402
from benchmarks.clients import await_true, read_line, started  # noqa: E402
from benchmarks.report import Table, thousands, two  # noqa: E402
from benchmarks.servers import Failed, Server, Workshop, running  # noqa: E402

__all__ = ["main", "table"]

SIZES = (4_096, 65_536, 400_000)
_PROGRAM = str(Path(__file__).with_name("large_programs.py"))
_RELAY = "relay"


class Run(NamedTuple):
    """What one run found: messages a second, and CPU time of the publisher, between the two, and of the receiver.

    CPU time is in µs a message.
    """

    rate: float
    publisher: float
    between: float
    receiver: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="how often everything is measured [5]")
    parser.add_argument("--secs", type=float, default=0.5, metavar="S", help="for how long a run publishes [0.5]")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES", help="of payloads [%(default)s]"
    )
    parser.add_argument("--sbus", action="append", metavar="NAME=PYTHON", help="an installation [this one]")
    options = parser.parse_args(argv)
    pythons = {_RELAY: sys.executable}
    for each in options.sbus or [f"sbus={sys.executable}"]:
        name, _, python = each.partition("=")
        pythons[name] = str(Path(python).absolute())  # each server has a directory of its own
    runs: defaultdict[tuple[int, str], list[Run]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="sbus-bench-") as folder:
        for _ in range(options.rounds):
            for size in options.sizes:
                for name, python in pythons.items():
                    runs[size, name].append(_run(Workshop(Path(folder)), name, python, size, options.secs))
    print(table(runs).markdown())
    return 0


def _run(workshop: Workshop, name: str, python: str, size: int, seconds: float) -> Run:
    if name == _RELAY:
        command: tuple[str, ...] = python, _PROGRAM, _RELAY, "{address}", str(size), str(seconds)
        publish, receive = "send", "take"
    else:
        twistd = str(Path(python).with_name("twistd"))
        command = python, twistd, "-n", "--pidfile=", "sbus", "--socket={address}"
        publish, receive = "publish", "receive"
    with running(workshop, Server(name, name, "", command)) as server:
        await_true(Path(server.address).exists)
        with started(python, _PROGRAM, receive, server.address, size, seconds) as receiver:
            if read_line(receiver) != "ready":
                raise Failed(f"{name}: the receiver does not begin with 'ready'")
            between = cpu(server.pid)
            with started(python, _PROGRAM, publish, server.address, size, seconds) as publisher:
                published = json.loads(read_line(publisher))
                received = json.loads(read_line(receiver))
                between = cpu(server.pid) - between
    count = received["received"]
    if count != published["published"]:
        raise Failed(f"{name}: {published['published']} were published and {count} received")
    return Run(
        count / received["seconds"], *(cpu * 1e6 / count for cpu in (published["cpu"], between, received["cpu"]))
    )


def table(runs: dict[tuple[int, str], list[Run]]) -> Table:
    """Summarize the runs, by size and name; a ratio compares runs of one round."""
    rows = []
    for (size, name), found in runs.items():
        part = median(run.rate / relay.rate for run, relay in zip(found, runs[size, _RELAY], strict=True))
        figures = [median(each) for each in zip(*found, strict=True)]
        rows.append([f"{size:,}", name, thousands(figures[0]), two(part), *map(two, figures[1:])])
    return Table(
        "large",
        "Large messages a second, one publisher, one receiver; CPU in µs a message",
        ["bytes", "through", "messages/s", "of the relay's", "CPU: publisher", "between", "receiver"],
        rows,
    )


if __name__ == "__main__":
    sys.exit(main())
