"""The defaults of a session, and the package that is sent to a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from sbus.errors import UsageError
from sbus.spark.runtime.session import get_session, parse_conf, with_defaults
from sbus.spark.runtime.shipping import is_local, pack
from tests.support.journals import NewJournal


def test_conf():
    """Settings are name=value; a value can have equals signs, and the last setting of a name counts."""
    assert parse_conf(["a=1", "b=x=y", "a = 2"]) == {"a": " 2", "b": "x=y"}


@pytest.mark.parametrize("pair", ["a", "=1", ""])
def test_wrong_conf(pair: str):
    """A setting in another form is an error with the remedy."""
    with pytest.raises(UsageError, match=r"--conf .*: use name=value"):
        parse_conf([pair])


def test_which_masters_are_local():
    """Only masters that run in this process count as local."""
    assert [m for m in ("local", "local[*]", "local[2,3]", "local-cluster[2,1,512]", "spark://h:1") if is_local(m)] == [
        "local",
        "local[*]",
        "local[2,3]",
    ]


def test_shuffle_partitions():
    """On one machine, a shuffle has as many partitions as there are cores; a cluster keeps Spark's default."""
    name = "spark.sql.shuffle.partitions"
    masters = ["local", "local[1]", "local[4]", "local[8,2]"]
    assert [with_defaults(master, {})[name] for master in masters] == ["2", "2", "4", "8"]
    assert with_defaults("local[*]", {})[name] == str(max(2, len(os.sched_getaffinity(0))))
    assert name not in with_defaults("spark://host:7077", {})


def test_settings_go_before_defaults():
    """Settings of the caller take precedence; Java options are added to ours unless they configure logging."""
    java = "spark.driver.extraJavaOptions"
    conf = with_defaults("local[2]", {"spark.ui.enabled": "true", java: "-Xss2m"})
    assert conf["spark.ui.enabled"] == "true"
    ours, theirs = conf[java].split()
    assert theirs == "-Xss2m"
    assert Path(ours.removeprefix("-Dlog4j2.configurationFile=file:")).is_file()
    mine = "-Dlog4j2.configurationFile=file:/mine"
    assert with_defaults("local[2]", {java: mine})[java] == mine


@pytest.mark.slow
def test_the_package_works_from_a_zip(tmp_path: Path):
    """The data source works from the zip file for executors, without compiled parts."""
    path = pack(str(tmp_path))
    with zipfile.ZipFile(path) as file:
        assert all(name.startswith("sbus/") and name.endswith(".py") for name in file.namelist())
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import sbus.spark.datasource.source, sbus.journal.reader\n"
        "from sbus.syscalls import batch\n"
        "print(sbus.__file__); print(sbus.spark.datasource.source.__file__); print(batch.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, cwd="/")
    assert done.stdout.splitlines() == [
        f"{path}/sbus/__init__.py",
        f"{path}/sbus/spark/datasource/source.py",
        "sbus.syscalls.batch",
    ], done.stderr


def test_a_session(spark: SparkSession):
    """A session is in UTC and has no web page; workers run this interpreter."""
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.sql.execution.arrow.pyspark.enabled") == "true"
    assert spark.conf.get("spark.sql.shuffle.partitions") == "2"
    assert spark.sparkContext.uiWebUrl is None
    assert spark.sparkContext.parallelize([0]).map(lambda _: sys.executable).collect() == [sys.executable]


def test_the_session_that_is_there(spark: SparkSession):
    """A second call returns the same session, with the settings that can still change."""
    name = "spark.sql.files.maxRecordsPerFile"
    assert get_session("another", master="local[7]", conf={name: "17"}).sparkContext is spark.sparkContext
    assert spark.conf.get(name) == "17"
    spark.conf.unset(name)
    assert spark.sparkContext.master == "local[2]"


def test_a_session_that_registers_nothing(spark: SparkSession, new_journal: NewJournal):
    """Spark finds the data source by itself, so SQL reaches a journal in a session that knows nothing of it."""
    session = spark.newSession()
    session.sql(f"CREATE TEMPORARY VIEW mine USING sbus OPTIONS (journal '{new_journal().directory}')")
    assert "payload" in session.table("mine").columns
