"""A queue whose service, workers and bus are killed at random moments, and what became of its numbered jobs.

Publishers put batches, and repeat a batch with the same IDs until each of its jobs is confirmed. Workers note when they
begin and end a job, in a file to which all append.

    python -m tests.support.queue_chaos SEED KILLS [RATE [OPTION-OF-THE-QUEUE ...]]
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from sbus.errors import SbusError
from sbus.protocol.bundles import MAX_BUNDLE, pack, unbundle
from sbus.syscalls.socket_directory import new_socket_directory
from tests.support.harness import Bus
from tests.support.queues import QueueProcess, ask
from tests.support.waiting import wait_until

__all__ = ["Outcome", "suffer"]

_KEYS = 500
_BATCH = 64
_PUBLISHERS, _WORKERS = 10, 3
_UNCONFIRMED = 0.5
"""Seconds after which a publisher repeats a batch."""
_PATIENCE = 200.0
"""Seconds in which all jobs are done, at the latest."""
_WORKER = """
import os, sys, time, sbus
notes = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def note(what, job):
    os.write(notes, b"%b %b %d %d\\n" % (what, job.payload, os.getpid(), time.monotonic_ns()))
with sbus.connect(sys.argv[1], reconnect=True, timeout=None) as bus:
    for job in bus.work("jobs", credit=_BATCH):
        note(b"begin", job)
        note(b"end", job)
        job.ack()
""".replace("_BATCH", str(_BATCH))


class Outcome(NamedTuple):
    """What became of the jobs.

    :ivar kills: by kind.
    :ivar confirmed: jobs that the service has confirmed.
    :ivar rate: of these, each second.
    :ivar lost: jobs that were confirmed and are neither done nor dead.
    :ivar shared: jobs that a worker began while another one, alive, was at it, though no lease ran out.
    :ivar again: jobs that were done more than once.
    :ivar disordered: jobs that began before an earlier one of their key was done.
    :ivar dead: jobs that are dead.
    :ivar expired: leases that ran out, as far as services lived to tell.
    """

    kills: dict[str, int]
    confirmed: int
    rate: float
    lost: list[int]
    shared: list[int]
    again: int
    disordered: list[int]
    dead: int
    expired: int


class _Publisher(threading.Thread):
    """Puts numbered jobs at a rate until it is stopped."""

    def __init__(self, address: Path, first: int, rate: float) -> None:
        super().__init__(daemon=True)
        self._address, self._numbers, self._rate = str(address), itertools.count(first, _PUBLISHERS), rate
        self._inbox = b"!/cred/%d/%d/%d/sbus/reply/%d/" % (os.getegid(), os.geteuid(), os.getpid(), first)
        self.confirmed: list[int] = []
        self.is_stopped = False

    def run(self) -> None:
        due = time.monotonic()
        while not self.is_stopped:
            missing = set(itertools.islice(self._numbers, _BATCH))
            while missing and not self.is_stopped:
                try:
                    self._put_all(missing)
                except OSError:  # the bus is gone
                    time.sleep(0.02)
            due = max(due + _BATCH / self._rate, time.monotonic() - 1.0)
            time.sleep(max(0.0, due - time.monotonic()))

    def _put_all(self, missing: set[int]) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(self._address)
            sock.settimeout(_UNCONFIRMED)
            sock.send(b"CMSG bundle/on")
            sock.send(b"SUB " + self._inbox)
            packets = [
                b"MSG queue/jobs/put/k%d\0%b%d\0id=%d\0%d" % (number % _KEYS, self._inbox, number, number, number)
                for number in sorted(missing)
            ]
            for packet in pack(packets, MAX_BUNDLE, len(packets))[0]:
                sock.send(packet)
            while missing:  # the time-out of the socket ends it
                received = sock.recv(1 << 18)
                if not received:
                    raise OSError
                for packet in unbundle([received]):
                    if packet.startswith(b"MSG ") and b"\0+" in packet:
                        number = int(packet.partition(b"\0")[0].rpartition(b"/")[2])
                        missing.discard(number)
                        self.confirmed.append(number)


def _stop(publishers: list[_Publisher]) -> None:
    """End the publishers; jobs that are not confirmed yet stay unconfirmed."""
    for publisher in publishers:
        publisher.is_stopped = True
    for publisher in publishers:
        if publisher.is_alive():
            publisher.join()


def suffer(
    directory: Path,
    spawn: Callable[..., Any],
    seed: int,
    kills: list[str],
    *options: str,
    rate: float = 5000.0,
    pause: float = 1.5,
) -> Outcome:
    """Kill processes, one after another, under load, and wait until all jobs are done.

    :param spawn: starts a process, as the fixture does.
    :param kills: what to kill: ``bus``, ``service`` or ``worker``.
    :param options: of the queue, such as ``ordered=key``.
    :param rate: jobs each second.
    :param pause: the most seconds between two kills, while all is well.
    """
    chance = random.Random(seed)
    notes = directory / "notes"
    bus = spawn(Bus, directory).wait_started()
    queue = f"--queue={','.join(['jobs', 'lease=10s', 'deliveries=50', *options])}"
    service = spawn(QueueProcess, directory, bus.address, queue).wait_started()

    def new_worker() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", _WORKER, str(bus.address), str(notes)])

    workers = [new_worker() for _ in range(_WORKERS)]
    publishers = [_Publisher(bus.address, first, rate / _PUBLISHERS) for first in range(_PUBLISHERS)]
    ended: dict[int, int] = {}
    start = time.monotonic()
    try:
        for publisher in publishers:
            publisher.start()
        for kind in kills:
            if chance.random() < 0.7:  # else what was killed last may still be starting
                wait_until(lambda: _left(directory), lambda count: count is not None, pause=0.1)
            time.sleep(chance.uniform(0.05, pause))
            if kind == "worker":
                at = chance.randrange(_WORKERS)
                ended[workers[at].pid] = time.monotonic_ns()  # at the earliest: this process may then be preempted
                workers[at].kill()
                workers[at].wait()
                workers[at] = new_worker()
            elif kind == "service":
                service.kill(signal.SIGKILL)
                service.wait()
                service = spawn(service.again)
            else:
                bus.kill(signal.SIGKILL)
                bus.wait()
                bus = spawn(Bus, directory, "--reuse")
        _stop(publishers)
        seconds = time.monotonic() - start
        wait_until(lambda: _left(directory), lambda count: count == 0, timeout=_PATIENCE, pause=0.1)
        dead, expired = ask(bus.address, "peek", dead=True), ask(bus.address, "ls")["events"].get("expired", 0)
    finally:
        _stop(publishers)
        for worker in workers:
            worker.kill()
            worker.wait()
    confirmed = {number for publisher in publishers for number in publisher.confirmed}
    return _judge(notes, kills, confirmed, seconds, ended, {int(job["payload"]) for job in dead}, expired)


def _left(directory: Path) -> int | None:
    """Return the number of jobs that are neither done nor dead; None if no service answers."""
    try:
        counts: dict[str, int] = ask(directory / "bus", "ls")["jobs"]
    except SbusError:
        return None
    return sum(counts.values()) - counts["dead"]


def _judge(
    notes: Path,
    kills: list[str],
    confirmed: set[int],
    seconds: float,
    ended: dict[int, int],
    dead: set[int],
    expired: int,
) -> Outcome:
    events = sorted(
        (int(when), what, int(number), int(pid))
        for what, number, pid, when in (line.split() for line in notes.read_bytes().splitlines())
    )
    at_it: dict[int, set[int]] = {}
    done: Counter[int] = Counter()
    shared, disordered = [], []
    latest: dict[tuple[int, int], int] = {}
    for when, what, number, pid in events:
        if what == b"begin":
            others = at_it.setdefault(number, set())
            if any(other != pid and ended.get(other, when + 1) > when for other in others):
                shared.append(number)
            others.add(pid)
            line = number % _KEYS, number % _PUBLISHERS  # one publisher's jobs of a key are in order
            before = latest.get(line)
            if before is not None and before < number and not done[before] and before not in dead:
                disordered.append(number)
            if before is None or before < number:
                latest[line] = number
        else:
            at_it[number].discard(pid)
            done[number] += 1
    return Outcome(
        dict(Counter(kills)),
        len(confirmed),
        len(confirmed) / seconds,
        sorted(confirmed - set(done) - dead),
        shared,
        sum(count > 1 for count in done.values()),
        disordered,
        len(dead),
        expired,
    )


def main() -> None:
    """Run by hand."""
    seed, count = int(sys.argv[1]), int(sys.argv[2])
    rate = float(sys.argv[3]) if len(sys.argv) > 3 else 5000.0
    chance = random.Random(seed)
    kills = [chance.choice(["worker", "worker", "service", "bus"]) for _ in range(count)]
    directory = Path(new_socket_directory())
    processes: list[Any] = []

    def spawn(kind: Any, *args: Any) -> Any:
        processes.append(kind(*args))
        return processes[-1]

    try:
        print(seed, suffer(directory, spawn, seed, kills, *sys.argv[4:], rate=rate))
    finally:
        for process in processes:
            process.ensure_gone()
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
