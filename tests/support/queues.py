"""Real services of queues for tests, and workers that are processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import sbus
from tests.support.harness import ALL_LINES, Process

__all__ = ["QueueProcess", "WorkerProcess", "ask"]

_WORKER = """
import os, sys
import sbus, sbus.client.blocking
if len(sys.argv) > 4:  # after the imports: the other user may not be able to read this Python
    uid, gid = map(int, sys.argv[4:])
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
with sbus.connect(sys.argv[1], reconnect=True) as bus:
    for job in bus.work(sys.argv[2], credit=int(sys.argv[3])):
        print(job.id, flush=True)
"""


class QueueProcess(Process):
    """A real ``twistd sbus-queue``, with its stores in a directory."""

    def __init__(self, directory: Path, bus: str | Path, *options: str) -> None:
        self._place, self._options = (directory, bus), options
        stores = f"--directory={directory}"
        super().__init__(
            directory,
            ["-n", "--pidfile=", "sbus-queue", f"--socket={bus}", stores, f"--log-rate={ALL_LINES}", *options],
        )

    def wait_started(self) -> QueueProcess:
        self.wait_log("queue .*: ready")
        return self

    def again(self) -> QueueProcess:
        """Start a service in place of this one, which has ended."""
        return QueueProcess(*self._place, *self._options)


class WorkerProcess:
    """A process with the blocking client, which prints each job's number and never answers; leaving a block ends it."""

    def __init__(self, bus: str | Path, queue: str, credit: int = 1, user: tuple[int, ...] = ()) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(bus), queue, str(credit), *map(str, user)], stdout=subprocess.PIPE
        )

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def next_job(self) -> int:
        """Wait for a job, and return its number."""
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def ask(bus: str | Path, verb: str, queue: str = "jobs", **what: Any) -> Any:
    """Ask a service as its operator does."""
    with sbus.connect(str(bus)) as connection:
        return json.loads(connection.request(f"queue/{queue}/admin/{verb}", json.dumps(what).encode()))
