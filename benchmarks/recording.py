"""What all measurements of the recorder need: processes whose CPU time is measured, and a check of the journal."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.attacks import kernel

__all__ = ["PATIENCE", "TWISTD", "Process", "check", "running", "turns_of"]

TWISTD = [sys.executable, "-c", "from twisted.scripts.twistd import run; run()", "--nodaemon", "--pidfile="]
PATIENCE = 30.0
"""Seconds until a process must have started, or done its work."""
_IDLE = 0.002
"""Seconds of CPU time within 0.3 s up to which a process counts as idle: its timers."""


class Process:
    """A measured process, which ends with the block."""

    def __init__(self, command: list[str], log: Path, ready: str) -> None:
        self._log = log
        with log.open("w") as file:
            self._popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        self._wait_log(ready)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def _wait_log(self, text: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while text not in self.log:
            if self._popen.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{self._log.name} did not start:\n{self.log}")
            time.sleep(0.01)

    def cpu(self) -> float:
        """Return the CPU time of all threads so far, in seconds."""
        return kernel.cpu(self.pid)

    def memory(self) -> int:
        """Return the peak of the resident memory, in bytes."""
        return kernel.peak(self.pid)

    def settle(self) -> None:
        """Wait until the process is idle."""
        deadline = time.monotonic() + PATIENCE
        before, now = -1.0, self.cpu()
        while now - before > _IDLE and time.monotonic() < deadline:
            time.sleep(0.3)
            before, now = now, self.cpu()

    def stop(self) -> None:
        self._popen.terminate()
        self._popen.wait(PATIENCE)

    def end(self) -> None:
        self._popen.kill()
        self._popen.wait()


@contextlib.contextmanager
def running(command: list[str], log: Path, ready: str) -> Iterator[Process]:
    process = Process(command, log, ready)
    try:
        yield process
    finally:
        process.end()


def check(journal: Path) -> tuple[int, int, int]:
    """Count the messages, the messages that do not follow the one before, and the gaps."""
    import pyarrow as pa
    import pyarrow.compute as pc

    rows = misplaced = gaps = 0
    last = -1
    for path in sorted(journal.glob("*.arrows")):
        with pa.memory_map(str(path)) as source:
            for batch in pa.ipc.open_stream(source):
                kinds = batch.column("kind").cast(pa.string())
                gaps += pc.sum(pc.is_in(kinds, pa.array(["reconnect", "full", "lost"]))).as_py() or 0
                payloads = batch.column("payload").filter(pc.equal(kinds, "message"))
                if not len(payloads):
                    continue
                heads = pc.binary_slice(payloads, 0, 8)
                numbers = pa.Array.from_buffers(pa.int64(), len(heads), [None, heads.buffers()[2]])
                steps = pc.pairwise_diff(pa.concat_arrays([pa.array([last], pa.int64()), numbers])).drop_null()
                misplaced += pc.sum(pc.not_equal(steps, 1)).as_py() or 0
                last = numbers[-1].as_py()
                rows += len(numbers)
    return rows, misplaced, gaps


def turns_of(journal: Path) -> float:
    """Return how many messages of one publisher came in a row, on average."""
    import pyarrow as pa

    rows = turns = 0
    for path in sorted(journal.glob("*.arrows")):
        with pa.memory_map(str(path)) as source:
            for batch in pa.ipc.open_stream(source):
                runs = batch.column("sender").values
                if not runs.null_count:
                    rows += batch.num_rows
                    turns += len(runs)
    return rows / max(1, turns)
