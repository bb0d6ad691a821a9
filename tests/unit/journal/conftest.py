"""A journal of forty rows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sbus.journal.writer import JournalWriter
from tests.support.journals import Clock
from tests.unit.journal.damages import ROWS


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undamaged journal."""
    directory = tmp_path_factory.mktemp("whole") / "journal"
    with JournalWriter.open(directory, clock=Clock()) as journal:
        for start in range(0, ROWS, 5):
            if start == ROWS // 2:
                journal.roll()
            journal.append([(b"k/%d" % n, b"payload %d" % n * 20) for n in range(start, start + 5)])
    return directory


@pytest.fixture
def journal(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "journal"))
