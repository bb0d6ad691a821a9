"""Files with metrics."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sbus.cli.job_metrics import JobMetrics
from sbus.daemon.metrics_file import MetricsFile, counter, gauge
from sbus.errors import UsageError
from tests.support.disks import filled, mounted


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """All users can read the file, the parser reads it, and nothing else is left in the directory."""
    file = MetricsFile(str(tmp_path / "sbus.prom"))
    before = os.umask(0o077)
    try:
        for rows in (1, 2):
            file.write([counter("sbus_rows", "Rows.", rows), gauge("sbus_lag", "Lag.", {"a": 1.5}, "kind")])
    finally:
        os.umask(before)
    found = {f.name: f for f in text_string_to_metric_families(Path(file.path).read_text())}
    assert (found["sbus_rows"].samples[0].name, found["sbus_rows"].samples[0].value) == ("sbus_rows_total", 2)
    assert found["sbus_lag"].samples[0].labels == {"kind": "a"}
    assert stat.S_IMODE(os.stat(file.path).st_mode) == 0o644
    assert os.listdir(tmp_path) == ["sbus.prom"]
    file.remove()
    file.remove()
    assert not os.listdir(tmp_path)


def test_labels_tell_programs_apart(tmp_path: Path) -> None:
    """Each sample gets the labels of its program beside its own, in a text that the parser reads back."""
    labels = {"journal": '/a "b"\\c'}
    file = MetricsFile(str(tmp_path / "sbus.prom"), labels)
    file.write([counter("sbus_rows", "Rows.", 1), gauge("sbus_lag", "Lag.", {"a": 1.5}, "kind")])
    rows, lag = text_string_to_metric_families(Path(file.path).read_text())
    assert rows.samples[0].labels == labels
    assert lag.samples[0].labels == {**labels, "kind": "a"}


def test_a_file_that_cannot_be_written_stays(tmp_path: Path) -> None:
    """If writing fails, the old figures stay, and nothing half-written does."""
    file = MetricsFile(str(tmp_path / "sbus.prom"))
    file.write([gauge("sbus_up", "Up.", 1)])
    with pytest.raises(AttributeError):
        file.write([gauge("sbus_up", "Up.", 0), None])  # type: ignore[list-item]
    os.mkdir(f"{file.path}.{os.getpid()}.new")
    with pytest.raises(IsADirectoryError):
        file.write([gauge("sbus_up", "Up.", 0)])
    os.rmdir(f"{file.path}.{os.getpid()}.new")
    assert "sbus_up 1.0" in Path(file.path).read_text()
    assert os.listdir(tmp_path) == ["sbus.prom"]


def test_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On a full disk the old figures stay, a job ends as it would, and says what to do; with space it goes on."""
    with mounted(tmp_path / "disk", "64k") as disk:
        path = disk / "sbus.prom"
        job = JobMetrics("report", str(path), {})
        with job.measured():
            pass
        before = path.read_text()
        with filled(disk):
            with job.measured():
                pass
            assert path.read_text() == before
            assert f"cannot write the metrics to {path}: No space left on device: make room there" in caplog.text
        with job.measured():
            pass
        assert path.read_text() != before
        assert os.listdir(disk) == ["sbus.prom"]


@pytest.mark.parametrize("path", ["", "/no/such/directory/file", "/tmp"])
def test_bad_paths(path: str) -> None:
    """A path that cannot be a file is refused with the remedy."""
    with pytest.raises(UsageError, match=r"--metrics-file=.*: "):
        MetricsFile(path)
