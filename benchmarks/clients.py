#!/usr/bin/env python3
"""Measure this package's clients beside redis-py, nats-py and pyzmq: one publisher, one receiver, all in Python.

Programs take turns within a round, and each round begins with another one; figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks.attacks.kernel import cpu  # noqa: E402
from benchmarks.client_programs import PROGRAMS, SIZE, Program  # noqa: E402
from benchmarks.report import Table, thousands, two  # noqa: E402
from benchmarks.servers import SERVERS, Failed, Server, Workshop, running, twistd  # noqa: E402
from sbus.syscalls.polling import is_readable  # noqa: E402

__all__ = ["await_true", "main", "read_line", "started", "table"]

COMMITTED = ROOT / "docs" / "performance"
PASSING = ROOT / "build" / "benchmarks"
PROGRAM = Path(__file__).with_name("client_programs.py")
_PATIENCE = 60.0
_PROXY = """\
import sys, zmq
context = zmq.Context()
ends = []
for kind, name in ((zmq.XSUB, "in"), (zmq.XPUB, "out")):
    end = context.socket(kind)
    end.setsockopt(zmq.SNDHWM, 0)
    end.setsockopt(zmq.RCVHWM, 0)
    end.bind("ipc://%s.%s" % (sys.argv[1], name))
    ends.append(end)
zmq.proxy(*ends)
"""
_SERVERS = {
    # With its usual limits: these clients choose to block the publisher rather than to lose anything.
    "sbus": Server("sbus", "sbus", "", twistd()),
    "redis": SERVERS["redis"],
    "nats": SERVERS["nats"],
    "zmq-proxy": Server("zmq-proxy", "zmq proxy", "", (sys.executable, "-c", _PROXY, "{address}")),
}

Record = dict[str, Any]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="how often everything is measured [5]")
    parser.add_argument("--secs", type=float, default=1.0, metavar="S", help="for how long a run publishes [1]")
    parser.add_argument("--only", metavar="NAMES", help=f"of: {' '.join(PROGRAMS)}")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where table and data go [docs/performance if all are measured]",
    )
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="measure nothing, take such data")
    options = parser.parse_args(argv)
    options.names = options.only.split(",") if options.only else list(PROGRAMS)
    if unknown := [name for name in options.names if name not in PROGRAMS]:
        parser.error(f"no {', '.join(unknown)}: there are {', '.join(PROGRAMS)}")
    options.out = options.out or (PASSING if options.only or options.source else COMMITTED)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = _arguments(argv)
    records = list(map(json.loads, options.source.read_text().splitlines())) if options.source else _measure(options)
    found = table(records)
    print(found.markdown())
    data = options.out / "data" / "python.jsonl"
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    (options.out / "python.inc").write_text(found.rst())
    _say(f"table and data are in {options.out}")
    return 0


def _measure(options: argparse.Namespace) -> list[Record]:
    records: list[Record] = [_about(options)]
    with tempfile.TemporaryDirectory(prefix="sbus-bench-") as folder:
        workshop = Workshop(Path(folder))
        names = [name for name in options.names if _is_there(name)]
        for number in range(options.rounds):
            by = number * max(1, len(names) // options.rounds) % max(1, len(names))
            for name in names[by:] + names[:by]:
                record = {"program": name, "round": number, **_run(workshop, name, options.secs)}
                _say(f"{number + 1:2} {name:16} {record.get('error') or record['per_second']}")
                records.append(record)
    return records


def _about(options: argparse.Namespace) -> Record:
    libraries = {
        name: version(name)
        for name in ("redis", "hiredis", "nats-py", "pyzmq", "Twisted")
        if importlib.util.find_spec({"nats-py": "nats", "pyzmq": "zmq", "Twisted": "twisted"}.get(name, name))
    }
    return {
        "machine": {
            "CPUs": len(os.sched_getaffinity(0)),
            "Kernel": platform.release(),
            "Python": platform.python_version(),
            **libraries,
        },
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "load": os.getloadavg()[0],
        "rounds": options.rounds,
        "seconds": options.secs,
    }


def _is_there(name: str) -> bool:
    """Return whether a program can run here; if not, print the reason."""
    program = PROGRAMS[name]
    if importlib.util.find_spec(program.needs) is None:
        _say(f"without {name}: the library {program.needs} is not installed (it is in the extra 'bench')")
        return False
    with tempfile.TemporaryDirectory(prefix="sbus-bench-") as folder:
        try:
            with running(Workshop(Path(folder)), _SERVERS[program.server]):
                return True
        except (Failed, FileNotFoundError) as e:
            _say(f"without {name}: {program.server} does not run here: {e}")
            return False


def _run(workshop: Workshop, name: str, seconds: float) -> Record:
    """Perform one run with a fresh server; a failed run has its reason under ``error``."""
    program = PROGRAMS[name]
    try:
        with running(workshop, _SERVERS[program.server]) as server:
            _await_server(program, server.address)
            with (
                started(sys.executable, PROGRAM, name, "receive", server.address, seconds) as receiver,
                started(sys.executable, PROGRAM, name, "publish", server.address, seconds) as publisher,
            ):
                if read_line(receiver) != "ready":
                    raise Failed("the receiver does not begin with 'ready'")
                server_cpu = cpu(server.pid)
                assert publisher.stdin is not None
                publisher.stdin.write(b"go\n")
                publisher.stdin.flush()
                received = json.loads(read_line(receiver))
                server_cpu = cpu(server.pid) - server_cpu
                published = json.loads(read_line(publisher))
    except Failed as e:
        return {"error": str(e)}
    count = received["received"]
    if count != published["published"]:
        return {"error": f"{published['published']} were published and {count} received"}
    return {
        "messages": count,
        "per_second": round(count / (received["ended"] - published["begun"])),
        **{
            f"{who}_us": round(cpu * 1e6 / count, 3)
            for who, cpu in (("publisher", published["cpu"]), ("server", server_cpu), ("receiver", received["cpu"]))
        },
    }


def _await_server(program: Program, address: str) -> None:
    """Wait until a server's socket exists in the file system; other clients wait themselves."""
    path = {"sbus": address, "redis": address, "zmq-proxy": f"{address}.out"}.get(program.server)
    await_true(lambda: _accepts(int(address)) if path is None else os.path.exists(path))


def await_true(has_begun: Callable[[], bool]) -> None:
    """Wait until a server listens.

    :raises Failed: if it does not begin.
    """
    deadline = time.monotonic() + _PATIENCE
    while not has_begun():
        if time.monotonic() > deadline:
            raise Failed("the server has not begun to listen")
        time.sleep(0.01)


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def started(*command: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run one of the two ends, and kill it in the end."""
    process = subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_line(process: subprocess.Popen[bytes]) -> str:
    """Return the next line that a program prints.

    :raises Failed: if it says nothing.
    """
    assert process.stdout is not None
    if not is_readable(process.stdout, _PATIENCE):
        raise Failed(f"{process.args!r} says nothing")
    line = process.stdout.readline().decode().strip()
    if not line:
        raise Failed(f"{process.args!r} has ended: {process.wait()}")
    return line


def table(records: Sequence[Record]) -> Table:
    """Summarize the records, in the order of the programs."""
    good: defaultdict[str, list[Record]] = defaultdict(list)
    for record in records:
        if "per_second" in record:
            good[record["program"]].append(record)

    def middle(name: str, figure: str) -> float:
        value: float = median(record[figure] for record in good[name])
        return value

    return Table(
        "python",
        f"Messages a second, one publisher, one receiver, payloads of {SIZE} bytes; CPU in µs a message",
        ["", "published with", "received with", "messages/s", "CPU: publisher", "server", "receiver"],
        [
            [
                program.library,
                program.publishing,
                program.receiving,
                thousands(middle(name, "per_second")),
                *(two(middle(name, f"{who}_us")) for who in ("publisher", "server", "receiver")),
            ]
            for name, program in PROGRAMS.items()
            if good[name]
        ],
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
