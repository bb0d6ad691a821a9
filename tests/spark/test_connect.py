"""The data source over Spark Connect: a real server, whose Python does not have this package."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

from tests.spark.clusters import TIMEOUT, bare_python, wait_for_log

CLIENT = """
import json, sys
from sbus.spark import get_session

address, journal = sys.argv[1:]
spark = get_session(master=address)
rows = spark.read.format("sbus").load(journal)
spark.sql(f"CREATE TABLE recording USING sbus OPTIONS (journal '{journal}')")
print(json.dumps({
    "session": type(spark).__module__,
    "rows": [(row.seq, row.kind, row.key, bytes(row.payload).decode()) for row in rows.orderBy("seq").collect()],
    "by SQL": [row.n for row in spark.sql("SELECT count(*) n FROM recording WHERE key LIKE 'a/%'").collect()],
    "pattern": rows.where("key = 'b'").count(),
}))
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a server of Spark Connect on loopback."""
    pytest.importorskip("grpc", reason="the extra interop is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    home = str(Path(pyspark.__file__).parent)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYSPARK", "SPARK"))}
    env |= {"SPARK_HOME": home, "SPARK_LOCAL_IP": "127.0.0.1"}
    python = str(bare_python(tmp_path / "python"))
    env |= {"PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": python}
    log = tmp_path / "log"
    command = [f"{home}/bin/spark-submit", "--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    command += ["--master", "local[2]", "--conf", f"spark.connect.grpc.binding.port={port}"]
    command += ["--conf", "spark.ui.enabled=false", "--conf", f"spark.sql.warehouse.dir={tmp_path}/warehouse"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "spark-internal"], env=env, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    try:
        wait_for_log(process, log, r"(Spark Connect server started)")
        yield f"sc://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(TIMEOUT)


@pytest.mark.slow
def test_a_journal_over_spark_connect(server, new_journal, tmp_path):
    """A client of Spark Connect sends the package to the server, and reads a journal there."""
    journal = new_journal()
    journal.append([(b"a/1", b"one"), (b"a/2", b"two"), (b"b", b"three")])
    journal.sync()
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK", "SPARK"))}
    done = subprocess.run(
        [sys.executable, "-P", "-c", CLIENT, server, journal.directory],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + (tmp_path / "log").read_text()[-3000:]
    found = json.loads(done.stdout)
    assert found["session"].startswith("pyspark.sql.connect.")
    messages = [row for row in found["rows"] if row[1] == "message"]
    assert [row[2:] for row in messages] == [["a/1", "one"], ["a/2", "two"], ["b", "three"]]
    assert (found["by SQL"], found["pattern"]) == ([2], 1)
