"""Compact a lake beside its archive.

Every `_LOOK_INTERVAL` it looks whether a closed hour has small files. If so, it runs ``sbus lake compact`` as a process
of its own: its memory is its own, the archive's Python does not wait for it, and it may be killed at any time. A
failure is logged, and the next look comes later.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
import time
from typing import IO

from sbus.errors import LakeError
from sbus.lake.maintenance import by_hour, is_due
from sbus.lake.table import Table

__all__ = ["Upkeep"]

_LOOK_INTERVAL = 300.0
"""Seconds from one look at the lake to the next."""
_MAX_INTERVAL = 3600.0
"""Seconds until the next try after many failures."""
_STOP_TIMEOUT = 5.0
"""Seconds that the process gets to end; after that it is killed, which does no harm."""

_log = logging.getLogger("sbus.lake")


class Upkeep:
    """Compacts closed hours while an archive runs.

    :param table: the lake.
    :ivar done: how often it has compacted the lake.
    :ivar failed: how often that failed.
    """

    def __init__(self, table: Table) -> None:
        self.done = 0
        self.failed = 0
        self._table = table
        self._interval = _LOOK_INTERVAL
        self._next = time.monotonic() + _LOOK_INTERVAL
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None

    def poll(self) -> None:
        """Look after the process, and start it if it is time and there is work.

        Call this regularly; it takes no time but once in five minutes.
        """
        if self._process is not None:
            status = self._process.poll()
            if status is not None:
                self._end(status)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + self._interval
            if self._has_work():
                self._start()

    def run(self) -> None:
        """Compact now, and wait for it."""
        if self._process is None and self._has_work():
            self._start()
        if self._process is not None:
            self._end(self._process.wait())

    def stop(self) -> None:
        """End the process, if it runs; the next one does its work."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._close()

    def _has_work(self) -> bool:
        now = time.time()
        try:
            settled = self._table.state.settled()
            return any(is_due(files, now, settled) for _, files in by_hour(self._table.files()))
        except (OSError, LakeError) as e:
            self._fail(str(e))
            return False

    def _start(self) -> None:
        command = [sys.executable, "-P", "-m", "sbus.cli", "lake", "compact", self._table.location]
        if "://" in self._table.location:
            command.append(f"--state={self._table.state.directory}")
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._output
        )

    def _end(self, status: int) -> None:
        assert self._output is not None
        self._output.seek(0)
        text = self._output.read().decode(errors="replace").strip()
        self._close()
        if status:
            self._fail(text.splitlines()[-1] if text else f"it ended with status {status}")
        else:
            self.done += 1
            self._interval = _LOOK_INTERVAL

    def _close(self) -> None:
        assert self._output is not None
        self._output.close()
        self._process = self._output = None

    def _fail(self, why: str) -> None:
        self.failed += 1
        self._interval = min(_MAX_INTERVAL, 2 * self._interval)
        self._next = time.monotonic() + self._interval
        _log.warning(
            "%s: compaction failed (%s); the archive goes on, and it is tried again in %.0f minutes",
            self._table.location,
            why,
            self._interval / 60,
        )
