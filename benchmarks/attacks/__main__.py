#!/usr/bin/env python3
"""Attack a bus as one unprivileged user, and measure the effect on the clients of another user; see README.rst."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks.attacks import measure, memory, tables  # noqa: E402
from benchmarks.attacks.catalogue import ATTACKS  # noqa: E402
from benchmarks.servers import allow_many_files  # noqa: E402

__all__ = ["main"]

PASSING = ROOT / "build" / "benchmarks"
_MEMORY = "memory"
_OWN = shlex.join([sys.executable, "-c", "from twisted.scripts.twistd import run; run()"])
_NAMES = (*ATTACKS, _MEMORY)
_USUAL = [*(attack.name for attack in ATTACKS.values() if attack.is_usual), _MEMORY]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attacks", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help=f"names or globs, of {' '.join(_NAMES)}; [{len(_USUAL)} of them]"
    )
    parser.add_argument("--secs", type=float, default=3.0, metavar="S", help="seconds of each measurement [3]")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="how often everything is measured [1]")
    parser.add_argument("--rate", type=float, default=200.0, metavar="N", help="round trips a second [200]")
    parser.add_argument("--setup", type=float, default=20.0, metavar="S", help="limit of an attack's set-up [20]")
    parser.add_argument(
        "--patience", type=float, default=30.0, metavar="S", help="seconds from SIGTERM until a server is killed [30]"
    )
    parser.add_argument("--pure", action="store_true", help="run the servers in plain Python (SBUS_PURE=1)")
    parser.add_argument(
        "--sbus",
        action="append",
        default=[],
        metavar="[NAME=]COMMAND",
        help="the twistd of an installation to measure; repeat it to compare several [this one]",
    )
    parser.add_argument("--options", default="", help="more options of twistd sbus, in one argument")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the records, one in a line")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="measure nothing, read such a file")
    parser.add_argument("--out", type=Path, default=PASSING, metavar="FOLDER", help="for tables [build/benchmarks]")
    options = parser.parse_args(argv)
    wanted = options.only or _USUAL
    for pattern in wanted:
        if not fnmatch.filter(_NAMES, pattern):
            parser.error(f"no attack matches {pattern}: there are {', '.join(_NAMES)}")
    options.names = [name for name in _NAMES if any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted)]
    if options.source is None and os.geteuid() != 0:
        parser.error("attackers and bystanders are other users, and only root can become them; run this as root")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = _arguments(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    records: list[measure.Record] = []
    if options.source is not None:
        records = [json.loads(line) for line in options.source.read_text().splitlines()]
        _write_tables(records, options.out)
    else:
        for record in _measure(options):
            records.append(record)
            if options.json is not None:
                options.json.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in records))
            _write_tables(records, options.out)  # a run that is interrupted leaves the tables so far
    for table in tables.tables(records):
        print(table.markdown())
    _say(f"tables are in {options.out}")
    return 0


def _write_tables(records: Sequence[measure.Record], folder: Path) -> None:
    for table in tables.tables(records):
        (folder / f"{table.name}.inc").write_text(table.rst())
    (folder / f"conditions{tables.suffix(records)}.inc").write_text(tables.conditions(records))


def _installations(options: argparse.Namespace) -> list[measure.Installation]:
    """Return the servers to measure.

    :raises SystemExit: if there is no such command.
    """
    found = []
    for number, text in enumerate(options.sbus or [f"sbus={_OWN}"], 1):
        name, separator, command = text.partition("=")
        if not separator or " " in name or "/" in name:
            name, command = f"sbus {number}", text
        words = shlex.split(command)
        if not words or (program := shutil.which(words[0])) is None:
            raise SystemExit(f"--sbus={text} names no program; write --sbus=NAME=/path/of/twistd")
        words[0] = os.path.abspath(program)  # each server has a directory of its own
        found.append(measure.Installation(name, tuple(words), tuple(shlex.split(options.options)), options.pure))
    return found


def _measure(options: argparse.Namespace) -> Iterator[measure.Record]:
    """Yield a record of the machine, then every row; the servers take turns."""
    plan = measure.Plan(options.secs, options.rate, options.setup, options.patience, allow_many_files())
    installations = _installations(options)
    yield {
        "machine": {"CPUs": len(os.sched_getaffinity(0)), "kernel": os.uname().release, "load": os.getloadavg()[0]},
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "secs": options.secs,
        "pure": options.pure,
        "servers": {each.name: list(each.command) for each in installations},
    }
    for number in range(options.rounds):
        turns = installations[number % len(installations) :] + installations[: number % len(installations)]
        for name in options.names:
            for installation in turns:
                for record in _rows(installation, name, plan):
                    record["round"] = number
                    record["load"] = os.getloadavg()[0]
                    _say(tables.describe(record))
                    yield record


def _rows(installation: measure.Installation, name: str, plan: measure.Plan) -> Iterator[measure.Record]:
    if name == _MEMORY:
        for kind in memory.KINDS:
            yield memory.run(installation, kind, plan)
    else:
        yield measure.run(installation, ATTACKS[name], plan)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
