"""Surroundings in which Spark would not start: what is put right, and the one line for what is not."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pyspark
import pytest

from sbus.errors import SparkError, UsageError
from sbus.spark.runtime import surroundings
from sbus.spark.runtime.gateway import explain
from sbus.spark.runtime.surroundings import java_options, programs, put_right, settings

OWN = os.path.dirname(pyspark.__file__)


@pytest.fixture(autouse=True)
def java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Java that is found, and an environment without variables that matter."""
    for name in list(os.environ):
        if surroundings._VARIABLES.match(name):
            monkeypatch.delenv(name)
    home = tmp_path / "java"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").touch(0o755)
    monkeypatch.setenv("PATH", f"{home}/bin:{os.environ['PATH']}")
    programs.cache_clear()
    yield home
    programs.cache_clear()


def test_the_environment_is_afterwards_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables are put right for the JVM alone."""
    monkeypatch.setenv("SPARK_HOME", "/nowhere")
    monkeypatch.setenv("SPARK_REMOTE", "sc://nowhere:15002")
    before = dict(os.environ)
    with put_right("local[*]"):
        assert "SPARK_REMOTE" not in os.environ
        os.environ["MORE"] = "x"
    assert dict(os.environ) == before


@pytest.mark.parametrize("given", ["/nowhere", "another", None])
def test_the_spark_of_pyspark_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    """SPARK_HOME without a Spark, or with one of another version, is passed over, with its settings."""
    if given == "another":
        (tmp_path / "spark" / "jars").mkdir(parents=True)
        (tmp_path / "spark" / "jars" / "spark-core_2.13-3.5.1.jar").touch()
        given = str(tmp_path / "spark")
    if given is not None:
        monkeypatch.setenv("SPARK_HOME", given)
        monkeypatch.setenv("SPARK_CONF_DIR", f"{given}/conf")
    with put_right("local[*]"):
        assert os.environ["SPARK_HOME"] == OWN
        assert "SPARK_CONF_DIR" not in os.environ


def test_a_spark_of_the_same_version_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SPARK_HOME with the version of pyspark is meant, and so are settings elsewhere."""
    (tmp_path / "spark" / "jars").mkdir(parents=True)
    (tmp_path / "spark" / "jars" / f"spark-core_2.13-{pyspark.__version__}.jar").touch()
    monkeypatch.setenv("SPARK_HOME", str(tmp_path / "spark"))
    monkeypatch.setenv("SPARK_CONF_DIR", "/etc/spark")
    with put_right("local[*]") as variables:
        assert os.environ["SPARK_HOME"] == str(tmp_path / "spark")
        assert os.environ["SPARK_CONF_DIR"] == "/etc/spark"
    assert variables == ["SPARK_CONF_DIR", "SPARK_HOME"]


def test_on_one_machine_the_host_name_need_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    """A local master needs no address but 127.0.0.1; with another master the operator's address stays."""
    monkeypatch.setenv("SPARK_LOCAL_IP", "10.9.8.7")
    monkeypatch.setenv("SPARK_LOCAL_HOSTNAME", "elsewhere")
    with put_right("local[2]"):
        assert os.environ["SPARK_LOCAL_IP"] == "127.0.0.1"
        assert "SPARK_LOCAL_HOSTNAME" not in os.environ
    with put_right("spark://host:7077"):
        assert os.environ["SPARK_LOCAL_IP"] == "10.9.8.7"


def test_a_java_home_of_another_program(java: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's scripts get the JAVA_HOME of the Java that was found in PATH."""
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    with put_right("local[*]"):
        assert os.environ["JAVA_HOME"] == str(java)


def test_no_java_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a Java the error is as before, and the environment too."""
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="needs Java 17"), put_right("local[*]"):
        pass


def test_a_user_without_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whom the system does not know gets a name from the number, and a home directory."""
    assert not [option for option in java_options() if "user.home" in option]

    monkeypatch.setattr("sbus.spark.runtime.surroundings.user_name", lambda uid: "")
    monkeypatch.setenv("HOME", "/home/me")
    assert "-Duser.home=/home/me" in java_options()
    monkeypatch.delenv("HOME")
    assert f"-Duser.home={tempfile.gettempdir()}" in java_options()
    with put_right("local[*]"):
        assert os.environ["HADOOP_USER_NAME"] == os.environ["SPARK_USER"] == str(os.geteuid())


def test_a_python_that_cannot_run_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PYSPARK_PYTHON is run once: a missing one, one of another version, and one without pyarrow are errors."""
    for number, (text, reason) in enumerate({
        None: "cannot run: No such file",
        "echo 3.8": "which is Python 3.8",
        "echo 'ModuleNotFoundError: no pyarrow' >&2; exit 1": "cannot run workers: ModuleNotFoundError",
    }.items()):  # fmt: skip
        python = tmp_path / f"python{number}"
        if text is not None:
            python.write_text(f"#!/bin/sh\n{text}\n")
            python.chmod(0o755)
        monkeypatch.setenv("PYSPARK_PYTHON", str(python))
        with (
            pytest.raises(SparkError, match=rf"PYSPARK_PYTHON is .*{reason}.*: unset PYSPARK_PYTHON"),
            put_right("local"),
        ):
            pass
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    with put_right("local"):
        assert os.environ["PYSPARK_PYTHON"] == sys.executable


def test_a_directory_where_programs_may_be_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing may be executed where temporary files are, programs go elsewhere, and Spark's other files stay."""
    assert (programs(), settings()) == (None, {})
    assert not [option for option in java_options() if "tmpdir" in option]
    programs.cache_clear()
    closed = {tempfile.gettempdir(), "/var/tmp", "/dev/shm"}
    real = os.statvfs

    def statvfs(path: str) -> SimpleNamespace:
        return SimpleNamespace(f_flag=os.ST_NOEXEC) if path in closed else SimpleNamespace(f_flag=real(path).f_flag)

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = programs()
    assert found is not None
    assert Path(found).parent == tmp_path
    assert Path(found).stat().st_mode & 0o777 == 0o700
    assert f"-Djava.io.tmpdir={found}" in java_options()
    assert settings() == {"spark.local.dir": tempfile.gettempdir()}
    programs.cache_clear()
    closed |= {str(tmp_path), os.path.expanduser("~")}
    with pytest.raises(SparkError, match="is mounted noexec: set TMPDIR to a directory"):
        programs()


@pytest.mark.parametrize(
    ("text", "variables", "expected"),
    [
        (
            'Exception in thread "main" java.lang.ExceptionInInitializerError\n\tat a.b(C.scala)\n'
            "Caused by: java.net.UnknownHostException: me: Name or service not known\n\t... 9 more\n",
            ["SPARK_CONF_DIR"],
            "UnknownHostException: me: Name or service not known: the name of this host does not resolve: add it to "
            "/etc/hosts, or set SPARK_LOCAL_IP",
        ),
        ("Error: Unrecognized option: --foo\nUsage: x\n", [], "Error: Unrecognized option: --foo"),
        (
            "Error occurred during initialization of VM\nToo small maximum heap\n",
            ["JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS"],
            "Too small maximum heap: unset what is of another installation: JAVA_TOOL_OPTIONS, _JAVA_OPTIONS",
        ),
        ("line\nlast line\n\n", [], "last line"),
        ("", [], "its JVM has ended"),
    ],
)
def test_a_failure_has_one_line(text: str, variables: list[str], expected: str) -> None:
    """Of pages of Java, the error has the cause, and the remedy if one is known."""
    assert explain(text, variables) == f"Spark does not start: {expected}"
