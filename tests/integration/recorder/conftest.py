"""Recorders as processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import Process

QUICK = ("--batch-time=10ms", "--sync=0")


class Recorder(Process):
    """A real ``twistd sbus-recorder``.

    :param options: further options, besides ``--socket`` and ``--journal``.
    """

    def __init__(self, folder: Path, address: str | Path, journal: Path, *options: str, **kwargs: Any) -> None:
        arguments = ["-n", "--pidfile=", "sbus-recorder", f"--socket={address}", f"--journal={journal}", *options]
        super().__init__(folder, arguments, **kwargs)

    def wait_recording(self, count: int = 1) -> Recorder:
        self.wait_log(r"recording '.*' of ", count)
        return self


@pytest.fixture
def journal(directory: Path) -> Path:
    return directory / "journal"


@pytest.fixture
def recorder(spawn: Callable[..., Any], directory: Path, journal: Path) -> Callable[..., Recorder]:
    """Start a recorder of the bus in the directory, and wait until it records."""

    def start(*options: str, **kwargs: Any) -> Recorder:
        started: Recorder = spawn(Recorder, directory, directory / "bus", journal, *QUICK, *options, **kwargs)
        return started.wait_recording()

    return start
