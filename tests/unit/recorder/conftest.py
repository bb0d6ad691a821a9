"""Fixtures: a recorder without a bus, and the batches that it sends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sbus.recorder import pipeline as recording
from sbus.recorder.buffer import Batch
from tests.unit.recorder.parts import FakeConnection, Recorder

# --- batches --------------------------------------------------------------------------------------


@pytest.fixture
def sent() -> list[Batch]:
    return []


# --- a recording ----------------------------------------------------------------------------------


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recorder]:
    monkeypatch.setattr(recording, "Connection", FakeConnection)
    return lambda **settings: Recorder(tmp_path / "journal", **settings)
