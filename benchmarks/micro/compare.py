#!/usr/bin/env python3
"""Run the micro-benchmarks and warn of steps that are slower than the stored baseline; a slow-down is no failure.

    python benchmarks/micro/compare.py [--save] [-k EXPRESSION]

Times are the shortest of many, and scaled by a piece of plain Python (the calibration), so that a baseline of one
machine says something on another. A step that looks slower is measured a second time before it is reported.
``--save`` makes the measured times the baseline; there is one for the compiled helper and one for plain Python
(``SBUS_PURE=1``).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BASELINE = HERE / "baseline.json"
CALIBRATION = "test_calibration"
SLOWER = 1.25
"""The ratio to the baseline above which a step is reported; smaller ones are within a machine's variation."""

Times = dict[str, float]
"""Nanoseconds that a step takes, by the name of its benchmark."""


def measure(expression: str = "") -> Times:
    """Run the benchmarks.

    :raises SystemExit: with pytest's status, if they cannot be run.
    """
    with tempfile.TemporaryDirectory(prefix="sbus-bench-") as folder:
        found = Path(folder, "found.json")
        command = [
            sys.executable,
            "-m",
            "pytest",
            str(HERE),
            "-q",
            "-p",
            "no:cacheprovider",
            f"--benchmark-json={found}",
        ]
        command += ["--benchmark-disable-gc", "--benchmark-warmup=on", "--benchmark-max-time=0.3", "--benchmark-quiet"]
        if expression:
            command += ["-k", f"({expression}) or {CALIBRATION}"]
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        done = subprocess.run(command, cwd=HERE.parent.parent, env=environment, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            print(done.stdout, file=sys.stderr)
            raise SystemExit(done.returncode)
        benchmarks = json.loads(found.read_text())["benchmarks"]
    return {benchmark["name"]: benchmark["stats"]["min"] * 1e9 for benchmark in benchmarks}


def ratios(now: Mapping[str, float], then: Mapping[str, float]) -> Times:
    """How many times longer each step takes that both have, as if both were measured on one machine."""
    scale = then[CALIBRATION] / now[CALIBRATION]
    return {name: now[name] * scale / then[name] for name in now if name in then and name != CALIBRATION}


def slower(found: Mapping[str, float]) -> list[str]:
    """The steps that have become slower."""
    return [name for name, ratio in found.items() if ratio > SLOWER]


def backend() -> str:
    """Which of the two implementations is measured."""
    from sbus.syscalls.batch import COMPILED

    return "compiled" if COMPILED else "plain"


def stored() -> dict[str, Any]:
    """The baselines."""
    found: dict[str, Any] = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Compare the micro-benchmarks with their baseline.")
    parser.add_argument("--save", action="store_true", help="make what is measured the baseline")
    parser.add_argument("-k", metavar="EXPRESSION", default="", help="only these benchmarks, as for pytest")
    options = parser.parse_args(argv)
    now = measure(options.k)
    baselines = stored()
    kind = backend()
    if options.save:
        old = baselines.get(kind, {}).get("times", {}) if options.k else {}
        times = {name: round(time, 1) for name, time in {**old, **now}.items()}
        baselines[kind] = {"python": platform.python_version(), "machine": platform.machine(), "times": times}
        BASELINE.write_text(json.dumps(baselines, indent=1, sort_keys=True) + "\n")
        print(f"{BASELINE} holds the times of {len(now)} steps ({kind})")
        return 0
    if kind not in baselines:
        print(f"There is no baseline for {kind}: --save makes one.")
        return 0
    then = baselines[kind]
    if then["python"].rpartition(".")[0] != platform.python_version().rpartition(".")[0]:
        print(f"The baseline is of Python {then['python']}: another version has other times.")
    found = ratios(now, then["times"])
    if suspects := slower(found):
        again = ratios(measure(" or ".join({name.partition("[")[0] for name in suspects})), then["times"])
        found.update({name: min(found[name], again[name]) for name in suspects})
    for name, ratio in found.items():
        print(f"{name:32} {then['times'][name]:12,.0f} ns  ->  {now[name]:12,.0f} ns   ×{ratio:.2f}")
    for name in slower(found):
        print(f"warning: {name} takes {found[name]:.2f} times as long as it did", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
