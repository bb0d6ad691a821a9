"""One Spark session for all tests of the pipeline, as it takes seconds to start; and journals, quickly made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sbus.journal.writing import Journal

NewJournal = Callable[..., "Journal"]


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session on this machine with two cores; without Java, the tests fail, and say what to install."""
    from sbus.spark import get_session

    session = get_session(
        "tests", master="local[2]", conf={"spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse"))}
    )
    yield session
    session.stop()


@pytest.fixture
def new_journal(tmp_path: Path) -> Iterator[NewJournal]:
    """Open a journal for writing: ``new_journal("name", segment_bytes=1000)``; at the end of the test it is closed.

    What is appended is seen by readers after `sync`, `roll` or `close`.
    """
    from sbus.journal.writing import Journal

    mine: list[Journal] = []

    def open_journal(name: str = "journal", **options: Any) -> Journal:
        mine.append(Journal.open(tmp_path / name, **options))
        return mine[-1]

    yield open_journal
    for journal in mine:
        journal.close()
