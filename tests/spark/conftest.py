"""One Spark session for all tests here, because it takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_QUICK = {
    # Most of the time goes into code that runs once. The second compiler and a collector with threads only delay it.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    # Nor need it verify what Spark's archives hold.
    " -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote",
    # It runs each stage of a query as a job of its own, to plan the next one by sizes: a third of the work on few rows.
    "spark.sql.adaptive.enabled": "false",
}
"""Settings that make queries on a few rows quicker, and leave the results as they are."""
_INTERPRETED = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
"""Settings with which Spark does not write and compile Java for each query; make test-all lets it."""


@pytest.fixture(scope="session")
def spark(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session on this machine with two cores; without Java the tests fail with an error that names the remedy."""
    from sbus.spark import get_session

    warehouse = str(tmp_path_factory.mktemp("warehouse"))
    thorough = pytestconfig.getoption("--hypothesis-profile") == "thorough"
    conf = _QUICK | ({} if thorough else _INTERPRETED) | {"spark.sql.warehouse.dir": warehouse}
    session = get_session("tests", master="local[2]", conf=conf)
    yield session
    session.stop()
