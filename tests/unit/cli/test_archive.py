"""``sbus spark archive`` when Spark or the storage fails: what it says, when it tries again, and when it gives up."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sbus.cli import archiving as command
from sbus.cli.main import cli
from sbus.cli.spark.job import Job
from sbus.cli.stopping import StopRequest
from sbus.errors import SparkError, StorageError
from sbus.journal.writer import JournalWriter


class FakeArchive:
    """An archive that fails, or ends, as a test says.

    :param outcome: the error that it fails with; None: it ends well.
    :param batches: the batches that it has done by then.
    """

    rows = lost = 0
    damaged = ()
    upkeep = None
    lag = 0
    done_at = 0.0
    is_busy = False

    def __init__(self, outcome: Exception | None, batches: int = 0) -> None:
        self._outcome = outcome
        self.batches = batches

    def wait(self, seconds: float) -> bool:
        if self._outcome is not None:
            raise self._outcome
        return True

    def __enter__(self) -> FakeArchive:
        return self

    def __exit__(self, *_: object) -> None:
        pass


Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command with archives that fail or end one after the other; the pauses between them take no time."""
    JournalWriter.open(tmp_path / "journal").close()
    waited: list[float] = []

    def go(
        *archives: FakeArchive, options: tuple[str, ...] = (), alive: bool = True, stop_at: int | None = None
    ) -> Any:
        coming = iter(archives)

        @contextmanager
        def session(*_: object) -> Iterator[object]:
            context = SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=lambda: not alive)))
            yield SimpleNamespace(sparkContext=context)

        def wait(seconds: float, stop: StopRequest) -> None:
            waited.append(seconds)
            if len(waited) == stop_at:
                signal.raise_signal(signal.SIGTERM)

        monkeypatch.setattr(Job, "session", session)
        monkeypatch.setattr(command, "_wait", wait)
        monkeypatch.setattr("sbus.spark.jobs.archive.Archive", lambda *_, **how: next(coming))
        paths = [f"--journal={tmp_path}/journal", f"--lake={tmp_path}/lake"]
        done: Any = CliRunner().invoke(cli, ["spark", "archive", *paths, *options])
        done.waited = waited
        return done

    return go


def full(batches: int = 0) -> FakeArchive:
    return FakeArchive(OSError(28, "No space left on device"), batches)


def test_pauses_double_and_each_is_announced(run: Run) -> None:
    """The first pause is 1 s, each is twice the one before, at most 5 minutes; the line says what failed, why and when
    the next try is. A batch that is done makes the next pause short again.
    """
    done: Any = run(*[full() for _ in range(11)], full(batches=3), FakeArchive(StorageError("503")), FakeArchive(None))
    assert done.exit_code == 0
    assert done.waited == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 1, 2]
    lines = [line for line in done.stderr.splitlines() if "trying again" in line]
    assert re.fullmatch(r"sbus: .*No space left on device: make room .*; trying again in 1 s", lines[0])
    assert lines[9].endswith("; trying again in 300 s")
    assert lines[-1] == "sbus: 503; trying again in 2 s"
    assert len(lines) == len(done.waited)


@pytest.mark.parametrize("options", [("--no-retry",), ("--once",)])
def test_it_gives_up_if_it_may_not_try_again(run: Run, options: tuple[str, ...]) -> None:
    """With --no-retry or --once the first failure is the last: one line, and status 1."""
    done: Any = run(FakeArchive(SparkError("Spark: it broke")), options=options)
    assert (done.exit_code, done.waited, done.stderr) == (1, [], "sbus: Spark: it broke\n")
    done = run(full(), options=options)
    assert (done.exit_code, done.waited) == (1, [])
    assert re.fullmatch(r"sbus: No space left on device: make room for .*\n", done.stderr)


def test_it_gives_up_without_its_jvm(run: Run) -> None:
    """A JVM that is gone does not come back in this process: status 1, and the service manager starts it again."""
    done: Any = run(FakeArchive(SparkError("Spark: the JVM is gone")), alive=False)
    assert (done.exit_code, done.waited, done.stderr) == (1, [], "sbus: Spark: the JVM is gone\n")


def test_a_signal_ends_a_pause(run: Run) -> None:
    """SIGTERM between two tries ends the command with status 0."""
    done: Any = run(full(), full(), full(), stop_at=2)
    assert (done.exit_code, done.waited) == (0, [1, 2])


def test_a_pause_looks_for_signals() -> None:
    """A pause is over with the signal, not with its time."""
    stop = StopRequest()
    stop.is_made = True
    command._wait(3600.0, stop)
