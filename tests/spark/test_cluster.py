"""The jobs on a real cluster: a master and two workers on loopback, whose Python does not have this package."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pyspark
import pytest

from tests.spark.clusters import TIMEOUT, bare_python, wait_for_log
from tests.support.archived import archived, files, recorded


class Cluster(NamedTuple):
    """The address of a cluster, and the Python of its executors."""

    master: str
    python: Path


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with Spark and Arrow, and without this package."""
    return bare_python(tmp_path_factory.mktemp("python"))


@pytest.fixture(scope="module")
def cluster(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A standalone master with two workers of one core each, in directories of their own."""
    home = tmp_path_factory.mktemp("cluster")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYSPARK", "SPARK"))}
    env |= {"SPARK_HOME": str(Path(pyspark.__file__).parent), "SPARK_LOCAL_IP": "127.0.0.1"}
    env |= {"SPARK_DAEMON_MEMORY": "256m", "SPARK_NO_DAEMONIZE": "1"}

    def start(kind: str, *arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
        where = home / f"{kind}{len(list(home.iterdir()))}"
        where.mkdir()
        log = where / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [f"{env['SPARK_HOME']}/bin/spark-class", f"org.apache.spark.deploy.{kind.lower()}.{kind}",
                 "--host", "127.0.0.1", "--port", "0", "--webui-port", "0", *arguments],
                env=env, cwd=where, stdout=file, stderr=file,
            )  # fmt: skip
        return process, log

    with ExitStack() as ends:

        def end(process: subprocess.Popen[bytes]) -> None:
            process.terminate()
            process.wait(TIMEOUT)

        master, log = start("Master")
        ends.callback(end, master)
        url = wait_for_log(master, log, r"Starting Spark master at (spark://\S+)")
        for _ in range(2):
            worker, log = start("Worker", "--cores", "1", "--memory", "600m", "--work-dir", str(home / "work"), url)
            ends.callback(end, worker)
            wait_for_log(worker, log, r"Successfully registered with (master)")
        yield Cluster(url, python)


JOBS = """
import sys
from sbus.spark.jobs.archive import Archive
from sbus.spark.jobs.lake import Lake
from sbus.spark.jobs.tables import load_rows
from sbus.spark.runtime.session import get_session
from sbus.spark.jobs.traffic import traffic

master, journals, lake = sys.argv[1:]
local = {f"spark.driver.{name}": "127.0.0.1" for name in ("host", "bindAddress")}
spark = get_session(master=master, conf={"spark.executor.memory": "512m", "spark.driver.memory": "512m", **local})
with Archive(spark, [journals], Lake(lake)) as job:
    assert job.wait()
print(job.rows, job.batches)
for row in traffic(load_rows(spark, lake=lake), window=86400, depth=2).collect():
    print(row["prefix"], row["messages"])
"""


@pytest.mark.slow
def test_jobs_bring_the_package_to_the_executors(cluster, new_journal, tmp_path):
    """Executors without the package archive two journals, and share an hour of them; they measure the lake.

    Nor does the Python that plans the stream here have the package: it is the executors', and finds none beside it.
    """
    journals = [new_journal(name, segment_bytes=20_000) for name in ("one", "two")]
    for journal in journals:
        for number in range(10):
            journal.append([(b"a/%d" % (row % 3), bytes(20_000 + row % 100)) for row in range(100 + number)])
        journal.sync()
    lake = tmp_path / "lake"
    done = subprocess.run(
        [sys.executable, "-c", JOBS, cluster.master, f"{tmp_path}/*", str(lake)],
        env=os.environ | {"PYSPARK_PYTHON": str(cluster.python), "PYTHONSAFEPATH": "1"},
        capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    archive, *measured = done.stdout.splitlines()
    assert archive == "2090 1"
    assert archived(lake) == recorded(*(journal.directory for journal in journals))
    assert 2 <= len(files(lake)) <= 4  # the test may run at the end of an hour
    messages = dict(line.split() for line in measured)
    assert messages.keys() == {"a/0", "a/1", "a/2"}
    assert sum(map(int, messages.values())) == 2090
