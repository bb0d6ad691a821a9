"""One Spark session for all tests of the pipeline, as it takes seconds to start; and journals, quickly made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Messages = Sequence[tuple[bytes, bytes]]
WriteJournal = Callable[..., Path]


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session on this machine with two cores; without Java, the tests fail, and say what to install."""
    from sbus.spark import get_session

    session = get_session(
        "tests", master="local[2]", conf={"spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse"))}
    )
    yield session
    session.stop()
