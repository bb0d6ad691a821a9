"""Tables of Spark that publish to a bus: INSERT in all its forms, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from sbus.testing import RunningBus
from tests.support.journals import NewJournal

TIMEOUT = 60


@pytest.fixture
def alarms(spark: SparkSession, sbus_bus: RunningBus) -> Iterator[str]:
    """The name of a table that publishes to the bus."""
    spark.sql(f"CREATE TABLE alarms USING sbus OPTIONS (socket '{sbus_bus.address}', id 'n')")
    yield "alarms"
    spark.sql("DROP TABLE alarms")


def test_a_table_to_publish_to(spark: SparkSession, alarms: str, sbus_bus: RunningBus):
    """What is inserted into a table is published to its bus, also if the columns of the query are those of the table:
    text and numbers as text, binary data as it is.
    """
    with sbus_bus.connect() as bus:
        bus.subscribe(b"")
        bus.fence(TIMEOUT)
        spark.sql(f"INSERT INTO {alarms} SELECT 'a' AS key, 'x' AS payload, '7' AS n")
        spark.sql(f"INSERT INTO {alarms} VALUES ('b', X'ff00', 8)")
        assert [tuple(bus.receive(TIMEOUT)) for _ in range(2)] == [(b"a/7", b"x"), (b"b/8", b"\xff\x00")]


@pytest.mark.slow
def test_ways_to_insert(spark: SparkSession, alarms: str, sbus_bus: RunningBus):
    """The options of a table reach each kind of insertion, and those of a view, too; WITH takes precedence."""
    row = spark.sql("SELECT '1' AS n, 'p' AS payload, 'k' AS key")
    with sbus_bus.connect() as bus:
        bus.subscribe(b"")
        bus.fence(TIMEOUT)
        spark.sql(f"INSERT INTO {alarms} BY NAME SELECT '1' AS n, 'p' AS payload, 'k' AS key")
        spark.sql(f"INSERT INTO {alarms} (n, payload, key) VALUES (1, 'p', 'k')")
        row.writeTo(alarms).append()
        row.select("key", "payload", "n").write.insertInto(alarms)
        row.write.format("sbus").mode("append").saveAsTable(alarms)
        spark.sql(f"CREATE TEMPORARY VIEW bus USING sbus OPTIONS (socket '{sbus_bus.address}', id 'n')")
        spark.sql("INSERT INTO bus SELECT 'k' AS key, 'p' AS payload, '1' AS n")
        assert [tuple(bus.receive(TIMEOUT)) for _ in range(6)] == [(b"k/1", b"p")] * 6
        with pytest.raises(PySparkException, match=r"ConnectError: no bus at /nowhere"):
            spark.sql(f"INSERT INTO {alarms} WITH (socket = '/nowhere') VALUES ('k', 'p', '1')")
    spark.catalog.dropTempView("bus")


@pytest.mark.slow
def test_wrong_uses_of_tables(spark: SparkSession, alarms: str, new_journal: NewJournal, tmp_path: Path):
    """A bus cannot be read nor a journal written to; where Spark loses the options of a table, nothing is published."""
    journal = new_journal()
    stream = spark.readStream.format("sbus").option("journal", journal.directory).schema("key STRING, payload BINARY")
    spark.sql(f"CREATE TABLE recorded USING sbus OPTIONS (journal '{journal.directory}')")
    spark.sql("CREATE TABLE named (key STRING, payload STRING) USING sbus OPTIONS (socket '/nowhere')")
    try:
        for statement, words in (
            (f"SELECT * FROM {alarms}", r"this is the bus at .*, to publish to: .* name the journal"),
            (f"INSERT OVERWRITE {alarms} VALUES ('k', 'p', 1)", r"use mode\('append'\)"),
            ("INSERT INTO recorded SELECT * FROM recorded", "the option socket: name the bus"),
            ("INSERT INTO named VALUES ('k', 'p')", "the option socket: .*leave out the columns"),
            ("CREATE TABLE wrong USING sbus OPTIONS (socket '/s', idd 'n')", "no option 'idd'.*did you mean id"),
            ("CREATE TABLE wrong USING sbus OPTIONS (socket '/s', journal '/j')", "no option 'socket' to read with"),
        ):
            with pytest.raises(PySparkException, match=words):
                spark.sql(statement).collect()
        query = stream.load().writeStream.option("checkpointLocation", str(tmp_path)).toTable(alarms)
        with pytest.raises(PySparkException, match=r"the option socket: .*not with toTable"):
            query.awaitTermination(TIMEOUT)
    finally:
        for name in ("recorded", "named"):
            spark.sql(f"DROP TABLE {name}")
