"""A recorder without a bus, and a disk that fails."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pyarrow as pa
import pytest
from twisted.internet import defer
from twisted.internet.task import Clock

from sbus.journal import disk
from sbus.journal.senders import Senders
from sbus.recorder.buffer import Batch, BatchBuffer
from sbus.recorder.pipeline import Recording
from sbus.recorder.service import open_journal
from sbus.recorder.settings import Settings
from tests.support.journals import rows

TIMEOUT = 10.0


def make(clock: Clock, sent: list[Any], **limits: Any) -> BatchBuffer:
    limits = {"rows": 4, "size": 100, "seconds": 0.1, **limits}
    return BatchBuffer(clock, sent.append, **limits, now=lambda: round(clock.seconds() * 1e6))


class Loop(Clock):
    """A reactor without I/O: the test advances the time, and `until` runs the calls from threads."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: SimpleQueue[Callable[[], Any]] = SimpleQueue()

    def callFromThread(self, call: Callable[..., Any], *args: Any) -> None:
        self._calls.put(lambda: call(*args))

    def until(self, condition: Callable[[], Any]) -> None:
        """Run the calls of threads until the condition holds."""
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            self._calls.get(timeout=max(0.0, deadline - time.monotonic()))()

    def run_pending(self) -> None:
        """Run the calls that threads have made so far."""
        while not self._calls.empty():
            self._calls.get()()


FULL = os.strerror(errno.ENOSPC)


def full() -> OSError:
    return OSError(errno.ENOSPC, FULL)


def batch(count: int) -> Batch:
    nobody = Senders(pa.nulls(1, pa.binary()), pa.array([count], pa.int32()))
    return Batch(pa.array([b"k"] * count), pa.array([b"p"] * count), [0], [count], nobody)


class FakeConnection:
    """A connection in whose place the test adds messages."""

    newest: FakeConnection

    def __init__(self, *args: Any) -> None:
        FakeConnection.newest = self
        self.gap: dict[str, Any] | None = None
        self.resumed = 0
        self.stopped: float | None = None

    def start(self) -> None:
        pass

    def resume(self) -> None:
        self.resumed += 1

    async def stop(self, timeout: float) -> None:
        self.stopped = timeout


class Recorder:
    """A recording with a real journal and thread, but without a bus."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.loop = Loop()
        self.directory = directory
        self.failures: list[str] = []
        self.settings = Settings(**{"batch_time": 0.1, "sync": 1.0, **settings})
        journal = open_journal(str(directory), self.settings)
        self.recording = Recording(
            self.loop, journal, "/run/bus", self.settings, lambda: self.failures.append("failed"), retry=0.01
        )
        self.connection = FakeConnection.newest
        self.recording.start()
        self.recording.recording_started(None)

    def appended(self, count: int) -> None:
        """Wait until `count` messages are in the journal."""
        self.loop.until(lambda: self.recording.counters.rows >= count)

    def stop(self) -> list[dict[str, Any]]:
        """Stop the recording; return the rows of the journal."""
        stopped = defer.Deferred.fromCoroutine(self.recording.stop())
        self.loop.until(lambda: stopped.called)
        assert stopped.result is None
        return rows(self.directory)


def numbered(start: int, stop: int) -> list[bytes]:
    return [b"MSG key\0%d" % number for number in range(start, stop)]


class Disk:
    """Wraps the functions that write, and makes them fail while `errors` has an entry."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.errors: dict[str, int] = {}
        for name in ("write", "sync"):
            monkeypatch.setattr(disk, name, self._wrapped(name, getattr(disk, name)))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if number := self.errors.get(name):
                raise OSError(number, os.strerror(number))
            return real(*args)

        return call
