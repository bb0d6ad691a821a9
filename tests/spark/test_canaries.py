"""What this package takes from the inside of Spark's JVM: a failure names what a release has changed.

The inside of pyspark is checked by ``tests/unit/spark/test_canaries.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pyspark
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader

from sbus.spark.datasource.catalog import _PROPERTIES
from sbus.spark.datasource.reader import keeps_plans_apart

SPARK = f"Spark {pyspark.__version__}"
CATALOG = "change sbus/spark/datasource/catalog.py"


def new_source() -> type[DataSource]:
    """A data source that reports what Spark tells it, in the text of an error; a class that workers need not import."""

    class Told(DataSource):
        @classmethod
        def name(cls) -> str:
            return "told"

        def schema(self) -> Any:
            if "report" in self.options:
                raise ValueError("TOLD" + json.dumps(dict(self.options)) + "TOLD")
            return "a INT COMMENT 'kept', b INT"

        def reader(self, schema: Any) -> Any:
            comments = [column.metadata.get("comment") for column in schema]
            raise ValueError("TOLD" + json.dumps({"options": dict(self.options), "comments": comments}) + "TOLD")

    return Told


@pytest.fixture
def told(spark: SparkSession) -> Iterator[SparkSession]:
    """A session with a table of that source."""
    spark.dataSource.register(new_source())
    yield spark
    spark.sql("DROP TABLE IF EXISTS told")


def report(spark: SparkSession, statement: str) -> dict[str, Any]:
    """Run a statement that fails with a report."""
    with pytest.raises(PySparkException) as caught:
        spark.sql(statement).collect()
    found = re.search("ValueError: TOLD(.*?)TOLD", str(caught.value), re.DOTALL)
    assert found, str(caught.value)
    return dict(json.loads(found[1]))


def test_tables_of_the_catalog(told: SparkSession) -> None:
    """Spark gives a table's options, twice, and known properties when it is created; later only its columns."""
    said = report(told, "CREATE TABLE told USING told OPTIONS (report 'x', Other 'y')")
    said = {name.lower(): value for name, value in said.items()}
    assert "provider" in said, f"{SPARK} does not name the provider of a new table: {CATALOG} (table_options)"
    options = {name: said.get(name) for name in ("report", "other")}
    assert options == {"report": "x", "other": "y"}, f"{SPARK} does not hand over options: {CATALOG} (table_options)"
    repeated = {f"option.{name}" for name in options}
    unknown = said.keys() - _PROPERTIES - options.keys() - repeated - {"path"}
    assert not unknown, f"{SPARK} adds {sorted(unknown)} to the options of a new table: {CATALOG} (_PROPERTIES)"

    told.sql("CREATE TABLE told USING told OPTIONS (other 'y')")
    read = report(told, "SELECT a FROM told WITH (more = 'z')")
    assert read["comments"] == ["kept", None], f"{SPARK} does not keep the comments of columns: {CATALOG} (remember)"
    assert read["options"].get("more") == "z", f"{SPARK} drops the options of WITH (…): change 4-datasource.rst"
    assert "other" not in read["options"], f"{SPARK} keeps the options of a table: {CATALOG} (remember is not needed)"


def leaky_source() -> type[DataSource]:
    """A data source of ten rows that accepts the first condition ``a < number``."""
    from pyspark.sql.datasource import InputPartition, LessThan

    class Leaky(DataSource):
        @classmethod
        def name(cls) -> str:
            return "leaky"

        def schema(self) -> Any:
            return "a INT"

        def reader(self, schema: Any) -> Any:
            return LeakyReader()

    class LeakyReader(DataSourceReader):
        rows = 10

        def pushFilters(self, filters: list[Any]) -> Any:
            self.rows = min([10, *(one.value for one in filters if isinstance(one, LessThan))])
            return filters

        def read(self, partition: InputPartition) -> Any:
            return iter([(number,) for number in range(self.rows)])

    return Leaky


@pytest.mark.slow
def test_plans_of_queries_on_one_table(spark: SparkSession) -> None:
    """Spark keeps the plan that follows from conditions with the query, if and only if its readers have `pushLimit`."""
    spark.dataSource.register(leaky_source())
    name = "spark.sql.python.filterPushdown.enabled"
    before = str(spark.conf.get(name))
    spark.conf.set(name, "true")
    try:
        frame = spark.read.format("leaky").load()
        assert frame.where("a < 3").count() == 3
        is_apart = frame.count() == 10
    finally:
        spark.conf.set(name, before)
    assert is_apart == keeps_plans_apart(DataSourceReader), (
        f"{SPARK} {'keeps' if is_apart else 'does not keep'} plans apart: change sbus/spark/datasource/reader.py"
    )
