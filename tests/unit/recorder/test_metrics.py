"""The metrics of a recorder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families
from twisted.internet import defer
from twisted.internet.task import Clock

from sbus.daemon.metrics import INTERVAL
from sbus.daemon.service import Service
from sbus.recorder.metrics import writer
from sbus.recorder.pipeline import Counters
from sbus.recorder.service import RecorderService
from sbus.recorder.twistd import Options


class FakeRecorder(Service):
    """The part of a recorder that its metrics use."""

    def __init__(self, directory: str = "/journal") -> None:
        self.directory = directory
        self.counters = Counters(rows=3, bytes=30, gaps=1, lag=0.25, synced_at=1000.0)
        self.stopped: defer.Deferred[None] = defer.succeed(None)

    def stopService(self) -> defer.Deferred[None]:
        super().stopService()
        return self.stopped


def read(path: str) -> dict[str, float]:
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(Path(path).read_text())
        for sample in family.samples
    }


def test_the_file(tmp_path: Path) -> None:
    """The file is there at once, is replaced every ten seconds, and says at the end that the recorder is down."""
    clock, recorder, path = Clock(), FakeRecorder(), str(tmp_path / "recorder.prom")
    metrics = writer(cast(Any, clock), cast(RecorderService, recorder), path)
    metrics.startService()
    found = read(path)
    assert (found["sbus_recorder_up"], found["sbus_recorder_rows_total"]) == (1, 3)
    assert (found["sbus_recorder_lag_seconds"], found["sbus_recorder_last_sync_timestamp_seconds"]) == (0.25, 1000)
    recorder.counters.rows = 4
    clock.advance(INTERVAL)
    assert read(path)["sbus_recorder_rows_total"] == 4
    metrics.stopService()
    assert read(path)["sbus_recorder_up"] == 0
    assert not clock.getDelayedCalls()


def test_the_last_file(tmp_path: Path) -> None:
    """It comes when the recorder has stopped, and has what was written, or lost, until then."""
    clock, recorder, path = Clock(), FakeRecorder(), str(tmp_path / "recorder.prom")
    recorder.stopped = defer.Deferred()
    metrics = writer(cast(Any, clock), cast(RecorderService, recorder), path)
    metrics.startService()
    stopping = metrics.stopService()
    assert not recorder.running
    assert not clock.getDelayedCalls()
    recorder.counters.rows, recorder.counters.lost = 7, 2
    recorder.stopped.callback(None)
    found = read(path)
    assert stopping.called
    assert (found["sbus_recorder_up"], found["sbus_recorder_rows_total"]) == (0, 7)
    assert found["sbus_recorder_lost_messages_total"] == 2


def test_two_recorders(tmp_path: Path) -> None:
    """Two recorders have no series in common: the label ``journal`` tells them apart."""
    found = []
    for name in ("/one", "/two"):
        path = str(tmp_path / "recorder.prom")
        writer(cast(Any, Clock()), cast(RecorderService, FakeRecorder(name)), path).startService()
        families = text_string_to_metric_families(Path(path).read_text())
        found.append({(s.name, *s.labels.items()) for family in families for s in family.samples})
    assert found[0]
    assert not found[0] & found[1]


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """A directory that goes away does not end the recorder; the file is back when the directory is."""
    clock, path = Clock(), str(tmp_path / "there" / "recorder.prom")
    os.mkdir(tmp_path / "there")
    metrics = writer(cast(Any, clock), cast(RecorderService, FakeRecorder()), path)
    metrics.startService()
    os.unlink(path)
    os.rmdir(tmp_path / "there")
    clock.advance(INTERVAL)
    os.mkdir(tmp_path / "there")
    clock.advance(INTERVAL)
    assert read(path)["sbus_recorder_up"] == 1
    metrics.stopService()


def test_a_bad_option() -> None:
    """A file in a directory that does not exist is refused before the recorder starts."""
    with pytest.raises(SystemExit, match="make it first"):
        Options().parseOptions(["--journal=/tmp/j", "--metrics-file=/no/such/dir/file"])
