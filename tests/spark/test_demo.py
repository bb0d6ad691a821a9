"""The whole demo, shortened, with real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sbus.cli.spark.demo import demo
from sbus.errors import SbusError, UsageError
from sbus.journal.reader import JournalReader
from sbus.journal.writer import JournalWriter
from sbus.spark.demo.plant import HOT_KEY, LIMIT, SILENT_KEY, SITES, Site
from sbus.spark.demo.processes import Process, python, running
from sbus.spark.demo.show import run


def _processes_in(directory: Path) -> list[str]:
    """The command lines of processes that name a directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # it has just ended
            if f"{directory}/" in command:
                found.append(command)
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.mark.slow
def test_all_of_it(spark: Any, place: Path) -> None:
    """The query publishes the fault, the recording survives a kill, and the report lists the silent sensor."""
    said: list[tuple[str, str]] = []
    # In 40 seconds the sensor is silent for 12, where a pause of 7 at night could be chance.
    outcome = run(spark, place, seconds=40, say=lambda part, text: said.append((part, text)))
    assert _processes_in(place) == []
    hot = HOT_KEY.split("/")
    assert outcome.alerts
    for message in outcome.alerts:
        assert message.key == f"alerts/{hot[1]}/{hot[2]}/bearing".encode()
        assert json.loads(message.payload)["degrees"] > LIMIT
    assert [text for part, text in said if part == "alert"]
    # The lake has exactly what the journal has.
    assert outcome.archived == JournalReader(os.fspath(place / "journal")).end()
    assert outcome.figures is not None
    assert [gap.ended for gap in outcome.figures.gaps if gap.is_loss] == ["crash"]
    changes = outcome.figures.changes
    assert changes is not None
    # Where the alert took its time, the report is about later days, on which the sensor was not heard at all.
    quiet = {silence.scope for silence in outcome.figures.silences} | {change.scope for change in changes.vanished}
    assert SILENT_KEY in quiet
    assert "alerts" in {change.scope.partition("/")[0] for change in changes.new}
    assert outcome.report is not None
    assert "A day of a plant" in outcome.report.read_text("utf-8")


@pytest.mark.slow
def test_it_ends_early_in_order(spark: Any, tmp_path: Path) -> None:
    """After a stop while the plant runs, there is no report, and no process is left."""
    over = threading.Event()

    def say(part: str, text: str) -> None:
        if part == "plant":
            over.set()

    outcome = run(spark, tmp_path, seconds=60, say=say, stop=over.is_set)
    assert outcome.report is None
    assert _processes_in(tmp_path) == []
    assert not (tmp_path / "bus").exists()
    assert JournalReader(os.fspath(tmp_path / "journal")).end() >= 2  # start and stop


def test_command_needs_a_directory_of_its_own(tmp_path: Path) -> None:
    """The demo refuses a directory that is not empty, and has no option for a lake."""
    (tmp_path / "file").touch()
    result = CliRunner().invoke(demo, ["--directory", str(tmp_path)])
    assert isinstance(result.exception, UsageError)
    assert "not empty" in str(result.exception)
    result = CliRunner().invoke(demo, ["--lake", str(tmp_path)])
    assert isinstance(result.exception, UsageError)


def test_a_failed_demo_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the demo fails, its temporary directory is removed; a directory that was named stays."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    assert isinstance(CliRunner().invoke(demo, []).exception, UsageError)
    assert list(tmp_path.iterdir()) == []
    assert isinstance(CliRunner().invoke(demo, ["--directory", str(tmp_path / "mine")]).exception, UsageError)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_process_that_ends_is_noticed(tmp_path: Path) -> None:
    """The error has the end of the log of the part that failed, and the other parts are ended."""
    command = python("-c", "import sys; sys.exit('it broke')")
    with running("part", command, tmp_path / "log") as process:
        process._process.wait()
        with pytest.raises(SbusError, match=r"the part has ended with status 1(.|\n)*it broke"):
            process.check()


def test_a_process_runs_nothing_of_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plant imports no file of the current directory."""
    (tmp_path / "random.py").write_text("print('hijacked', flush=True)\n")
    monkeypatch.chdir(tmp_path)
    with running("part", python("-m", "sbus.spark.demo.plant"), tmp_path / "log") as process:
        process._process.wait()
    assert "hijacked" not in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_workers_of_spark_run_nothing_of_the_current_directory(tmp_path: Path) -> None:
    """Spark's Python workers import no file of the directory in which ``sbus spark`` was started."""
    here = tmp_path / "here"
    here.mkdir()
    for name in ("pyarrow", "random", "pickletools"):
        (here / f"{name}.py").write_text("open('hijacked', 'w')\n")
    with JournalWriter.open(tmp_path / "journal") as journal:
        journal.append([(b"a", b"x")], [1_700_000_000_000_000])
    command = [sys.executable, "-P", "-m", "sbus.cli", "spark", "traffic", f"--journal={tmp_path / 'journal'}"]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not (here / "hijacked").exists()


def test_a_process_is_ended(tmp_path: Path) -> None:
    """The process ends with the block."""
    with running("part", python("-c", "import time; time.sleep(60)"), tmp_path / "log") as process:
        assert isinstance(process, Process)
        process.check()
    with pytest.raises(SbusError):
        process.check()


def test_the_plant_lives_through_days() -> None:
    """A site is busier by day, one bearing grows hot, one sensor falls silent, and a seed repeats all messages."""
    seconds = 100.0
    sent: dict[str, list[tuple[float, bytes]]] = {}
    for name in SITES:
        site, same = Site(name, seconds), Site(name, seconds)
        for tick in range(1000):
            messages = list(site.messages(tick / 10, (tick + 1) / 10))
            assert messages == list(same.messages(tick / 10, (tick + 1) / 10))
            for key, payload in messages:
                sent.setdefault(str(key), []).append((tick / 10, payload))
    hottest = {key: max(float(p) for _, p in some) for key, some in sent.items() if key.endswith("temperature")}
    assert hottest.pop(HOT_KEY) > LIMIT + 5
    assert max(hottest.values()) < LIMIT
    assert 69 <= sent[SILENT_KEY][-1][0] <= 70
    night = sum(1 for some in sent.values() for at, _ in some if at < 10)
    noon = sum(1 for some in sent.values() for at, _ in some if 18 <= at < 28)
    assert noon > 1.3 * night
