"""The examples of the page on payloads and pipelines: SQL on a journal, repeats that are dropped, a pipeline."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import Row, SparkSession

from sbus.journal.writer import JournalWriter
from sbus.spark.datasource.options import WriteOptions
from sbus.spark.datasource.writer import publish
from sbus.testing import RunningBus
from tests.integration.docs.pages import EXAMPLES
from tests.spark.clusters import TIMEOUT
from tests.support.journals import NewJournal

PIPELINE = EXAMPLES / "pipeline"


@pytest.fixture
def plant(new_journal: NewJournal) -> JournalWriter:
    """A journal with a hot and a cold reading, and a payload that is none."""
    journal = new_journal()
    readings = [{"temperature": 90.5, "unit": "C"}, {"temperature": 20, "unit": "C"}]
    payloads = [*(json.dumps(reading).encode() for reading in readings), b"broken"]
    journal.append(list(zip([b"plant/a", b"plant/b", b"plant/c"], payloads, strict=True)))
    journal.sync()
    return journal


def run_sql(spark: SparkSession, name: str, journal: JournalWriter, bus: RunningBus) -> list[list[Row]]:
    """Run the statements of an example, and return the rows of each."""
    text = (PIPELINE / name).read_text()
    text = text.replace("/var/lib/sbus/journal", journal.directory).replace("/run/sbus.sock", bus.address)
    return [spark.sql(statement).collect() for statement in text.split(";") if statement.strip()]


@contextmanager
def receiving_once(bus: RunningBus) -> Iterator[subprocess.Popen[str]]:
    """Run the receiver of the page, which has subscribed."""
    command = [sys.executable, str(PIPELINE / "once.py"), bus.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
        try:
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == "ready\n"
            yield receiver
        finally:
            receiver.terminate()


def test_variant(spark: SparkSession, plant: JournalWriter, sbus_bus: RunningBus):
    """VARIANT gives fields of JSON, null for what is none, and the type that all payloads have in common."""
    try:
        *_, readings, shape = run_sql(spark, "variant.sql", plant, sbus_bus)
    finally:
        for view in ("parsed", "bus"):
            spark.catalog.dropTempView(view)
    assert [tuple(row) for row in readings] == [("plant/a", 90.5, "C"), ("plant/b", 20.0, "C"), ("plant/c", None, None)]
    assert [tuple(row) for row in shape] == [("OBJECT<temperature: DECIMAL(21,1), unit: STRING>", 1)]


@pytest.mark.slow
def test_alarms_in_sql(spark: SparkSession, plant: JournalWriter, sbus_bus: RunningBus):
    """Rows that match are published with an id that is the row of the journal."""
    with sbus_bus.connect() as bus:
        bus.subscribe("alarms/plant/a/")
        bus.fence(TIMEOUT)
        try:
            run_sql(spark, "alarms.sql", plant, sbus_bus)
        finally:
            spark.sql("DROP TABLE IF EXISTS alarms")
            spark.catalog.dropTempView("readings")
        key, payload = bus.receive(TIMEOUT)
    assert key == f"alarms/plant/a/{plant.id}-0".encode()
    assert json.loads(payload)["temperature"] == 90.5


def test_repeats_are_dropped(sbus_bus: RunningBus):
    """The receiver prints each alarm once when a task publishes its rows again."""
    import pyarrow as pa

    rows = pa.RecordBatch.from_pydict({"key": ["alarms/a"] * 3, "payload": ["hot"] * 3, "id": ["1", "2", "1"]})
    last = pa.RecordBatch.from_pydict({"key": ["alarms/a"], "payload": ["end"], "id": ["3"]})
    with receiving_once(sbus_bus) as receiver:
        for batches in ([rows], [rows, last]):
            publish(WriteOptions(sbus_bus.address, id="id"), iter(batches))
        assert receiver.stdout is not None
        printed = [receiver.stdout.readline() for _ in range(3)]
    assert printed == ["alarms/a/1 hot\n", "alarms/a/2 hot\n", "alarms/a/3 end\n"]


ROWS = 3000
RETRIED = f"""
import sys
from pyspark import TaskContext
from pyspark.sql import functions as F
from sbus.spark import get_session

spark = get_session(master="local[1,3]", conf={{"spark.sql.execution.arrow.maxRecordsPerBatch": "100"}})

@F.udf("string")
def fail_once(n):  # at the end of 3 MB, which is more than all buffers before the writer hold
    if n == {ROWS - 1} and TaskContext.get().attemptNumber() == 0:
        raise RuntimeError("once")
    return str(n) + "." * 1000

rows = spark.range(0, {ROWS}, 1, 1).select(F.lit("alarms/a").alias("key"), fail_once("id").alias("payload"), "id")
rows = rows.withColumn("id", F.col("id").cast("string"))
rows.write.format("sbus").options(socket=sys.argv[1], id="id").mode("append").save()
"""


@pytest.mark.slow
def test_a_task_that_spark_runs_again(sbus_bus: RunningBus, tmp_path: Path):
    """Spark runs a task again that has failed after a part of its rows: they come twice, and are printed once."""
    with sbus_bus.connect() as bus, receiving_once(sbus_bus) as receiver:
        bus.subscribe("alarms/")
        bus.fence(TIMEOUT)
        done = subprocess.run(
            [sys.executable, "-c", RETRIED, sbus_bus.address], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        bus.fence(TIMEOUT)
        keys = [message.key for message in bus.get_ready()]
        assert receiver.stdout is not None
        printed = [receiver.stdout.readline().rstrip(".\n") for _ in range(ROWS)]
    assert len(keys) > ROWS
    assert set(keys) == {b"alarms/a/%d" % n for n in range(ROWS)}
    assert printed == [f"alarms/a/{n} {n}" for n in range(ROWS)]


@pytest.mark.slow
def test_a_pipeline(plant: JournalWriter, sbus_bus: RunningBus, tmp_path: Path):
    """The pipeline of the page publishes an alarm."""
    pytest.importorskip("grpc", reason="the extra interop is not installed")
    project = tmp_path / "plant"
    shutil.copytree(PIPELINE / "plant", project)
    spec = project / "spark-pipeline.yml"
    text = spec.read_text().replace("/var/lib/plant", f"{tmp_path}/storage")
    spec.write_text(text.replace("/var/lib/sbus/journal", plant.directory).replace("/run/sbus.sock", sbus_bus.address))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK", "SPARK"))}
    env |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    env["SPARK_HOME"] = home = str(Path(pyspark.__file__).parent)
    command = [f"{home}/bin/spark-pipelines", "--conf", "spark.ui.enabled=false", "run", "--spec", str(spec)]
    with sbus_bus.connect() as bus:
        bus.subscribe("alarms/")
        bus.fence(TIMEOUT)
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        key, payload = bus.receive(TIMEOUT)
        bus.fence(TIMEOUT)
        assert bus.get_ready() == []
    assert key == f"alarms/plant/a/{plant.id}-0".encode()
    assert json.loads(payload)["temperature"] == 90.5
