"""The processes that tests fork from one that has twistd's imports."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.nursery import Forked


def test_a_signal_may_come_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process can be reaped between the check that it runs and the signal."""
    process = Forked([str(Path(sys.executable).with_name("twistd")), "--version"], tmp_path, os.environ)
    assert process.wait(20.0) == 0
    with process.stdout:
        assert "twistd" in process.stdout.read()
    monkeypatch.setattr(process, "poll", lambda: None)
    process.kill()
