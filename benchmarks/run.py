#!/usr/bin/env python3
"""Measure sbus beside other buses, and write tables and plots; see README.rst."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks import measure, plots, report  # noqa: E402
from benchmarks.servers import SERVERS, Unavailable, Workshop, allow_many_files  # noqa: E402
from benchmarks.workloads import WORKLOADS, Scale  # noqa: E402

__all__ = ["main"]

COMMITTED = ROOT / "docs" / "performance"
PASSING = ROOT / "build" / "benchmarks"


def _names(known: Sequence[str]) -> argparse._ActionType:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}: there are {', '.join(known)}")
        return names

    return parse


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, metavar="N", help="how often everything is measured [5; quick: 1]")
    parser.add_argument("--secs", type=float, metavar="S", help="for how long a run publishes [0.5; quick: 0.1]")
    parser.add_argument("--quick", action="store_true", help="a minute or two, to see that all works")
    parser.add_argument("--only", type=_names(list(SERVERS)), metavar="SERVERS", help=f"of: {' '.join(SERVERS)}")
    parser.add_argument("--workloads", type=_names(list(WORKLOADS)), metavar="NAMES", help=f"of: {' '.join(WORKLOADS)}")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where tables, pictures and data go [docs/performance if everything is measured, else build/benchmarks]",
    )
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="measure nothing, take such data")
    parser.add_argument("-v", "--verbose", action="store_true", help="say what every run found")
    options = parser.parse_args(argv)
    options.rounds = options.rounds or (1 if options.quick else 5)
    options.secs = options.secs or (0.1 if options.quick else 0.5)
    is_whole = not (options.quick or options.only or options.workloads)
    options.out = options.out or (COMMITTED if is_whole else PASSING)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = _arguments(argv)
    if options.source is not None:
        results = measure.Results(map(json.loads, options.source.read_text().splitlines()))
    else:
        results = _measure(options)
    for table in report.fragments(results, options.out):
        print(table.markdown())
    for failure in results.failures:
        print(f"failed: {report.describe(failure)}")
    try:
        plots.draw(results, options.out)
    except ImportError:
        _say("no pictures, as matplotlib is missing (it is in the extra 'bench')")
    _say(f"tables, pictures and data are in {options.out}")
    return 0


def _measure(options: argparse.Namespace) -> measure.Results:
    """Measure, and save each run as soon as it is over."""
    scale = Scale(options.secs, not options.quick, allow_many_files())
    cases = [case for name in options.workloads or WORKLOADS for case in WORKLOADS[name].cases]
    data = options.out / "data" / "runs.jsonl"
    data.parent.mkdir(parents=True, exist_ok=True)
    records = []
    with tempfile.TemporaryDirectory(prefix="sbus-bench-") as folder, data.open("w") as file:
        workshop = Workshop(Path(folder))
        servers = []
        for name in options.only or [name for name, server in SERVERS.items() if server.is_usual]:
            try:
                workshop.prepare(SERVERS[name])
            except Unavailable as e:
                _say(f"without {name}: {e}")
            else:
                servers.append(SERVERS[name])

        def keep(record: measure.Record) -> None:
            records.append(record)
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()

        keep(measure.machine(workshop, servers, rounds=options.rounds, scale=scale))
        start = shown = time.monotonic()
        total = 0

        def progress(done: int, of: int) -> None:
            nonlocal shown, total
            total = of
            if not options.verbose and (time.monotonic() - shown > 15 or done == of):
                shown = time.monotonic()
                _say(f"{done} of {of} runs, {shown - start:.0f} s")

        for record in measure.measure(workshop, servers, cases, scale, options.rounds, progress):
            keep(record)
            if options.verbose:
                _say(report.describe(record))
    return measure.Results(records)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
