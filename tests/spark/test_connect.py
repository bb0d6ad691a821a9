"""The data source over Spark Connect: real servers, whose Python has this package or does not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

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
PLAIN_CLIENT = """
import json, sys
from pyspark.sql import SparkSession

address, journal = sys.argv[1:]
spark = SparkSession.builder.remote(address).getOrCreate()
spark.sql(f"CREATE TABLE plain USING sbus OPTIONS (journal '{journal}', pattern 'a/')")
print(json.dumps({
    "by SQL": [row.n for row in spark.sql("SELECT count(*) n FROM plain").collect()],
    "imported": "sbus" in sys.modules,
}))
"""


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Start a server of Spark Connect on loopback, with this interpreter for its Python; return its address."""
    pytest.importorskip("grpc", reason="the extra interop is not installed")
    with ExitStack() as servers:
        yield lambda python: servers.enter_context(serving(tmp_path, python))


@contextmanager
def serving(tmp_path: Path, python: str) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    home = str(Path(pyspark.__file__).parent)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYSPARK", "SPARK"))}
    env |= {"SPARK_HOME": home, "SPARK_LOCAL_IP": "127.0.0.1"}
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


def run_client(program: str, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Run a program in a process of its own, and return the object that it prints."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK", "SPARK"))}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, *arguments],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + (tmp_path / "log").read_text()[-3000:]
    return dict(json.loads(done.stdout))


@pytest.mark.slow
def test_a_journal_over_spark_connect(start_server, new_journal, tmp_path):
    """A client of Spark Connect sends the package to a server without it, and reads a journal there."""
    journal = new_journal()
    journal.append([(b"a/1", b"one"), (b"a/2", b"two"), (b"b", b"three")])
    journal.sync()
    server = start_server(str(bare_python(tmp_path / "python")))
    found = run_client(CLIENT, tmp_path, server, journal.directory)
    assert found["session"].startswith("pyspark.sql.connect.")
    messages = [row for row in found["rows"] if row[1] == "message"]
    assert [row[2:] for row in messages] == [["a/1", "one"], ["a/2", "two"], ["b", "three"]]
    assert (found["by SQL"], found["pattern"]) == ([2], 1)


@pytest.mark.slow
def test_a_server_that_has_the_package(start_server, new_journal, tmp_path):
    """Such a server finds the data source by itself, so a client needs SQL alone; one that registers it works, too."""
    journal = new_journal()
    journal.append([(b"a/1", b"one"), (b"a/2", b"two"), (b"b", b"three")])
    journal.sync()
    server = start_server(sys.executable)
    assert run_client(PLAIN_CLIENT, tmp_path, server, journal.directory) == {"by SQL": [2], "imported": False}
    assert run_client(CLIENT, tmp_path, server, journal.directory)["by SQL"] == [2]
