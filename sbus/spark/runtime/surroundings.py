"""What Spark takes from its surroundings, put right: the user, the host's name, variables, places for programs.

Theory of operation
-------------------

Spark and Hadoop ask the system questions that it cannot always answer, and fail then with pages of Java. `put_right`
answers them for the time in which the JVM starts; the environment of this process is afterwards as it was.

* *The user* has no entry in the list of users (``docker run --user``, OpenShift). Java then has no home directory, and
  Hadoop no name for the user. Both can be given.
* *The host's name* does not resolve (containers, laptops). On one machine nobody needs it: Spark gets 127.0.0.1.
* *Variables of another installation* are left over from a profile: ``SPARK_HOME`` of a Spark of another version or of
  none, with its ``SPARK_CONF_DIR``; ``SPARK_REMOTE``; ``PYSPARK_DRIVER_PYTHON``. The Spark that belongs to pyspark is
  used. ``JAVA_HOME`` is looked at in `sbus.spark.runtime.java`, and ``PYSPARK_PYTHON`` is run once, because it is
  meant: the workers shall run it.
* *Nothing may be executed* in the directory for temporary files (``noexec``). Libraries of Spark unpack themselves
  there, and the stand-in for the interpreter is there. So another directory is looked for.
"""

from __future__ import annotations

import atexit
import contextlib
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache

import pyspark

from sbus.errors import SparkError
from sbus.spark.runtime.java import find_java
from sbus.spark.runtime.shipping import is_local
from sbus.syscalls.names import user_name

__all__ = ["java_options", "programs", "put_right", "settings"]

_FOREIGN = (
    "PYSPARK_DRIVER_PYTHON",
    "SPARK_API_MODE",
    "SPARK_CONNECT_MODE_ENABLED",
    "SPARK_LOCAL_REMOTE",
    "SPARK_REMOTE",
)
"""Variables that are for other programs than this one, or for Spark Connect."""
_VARIABLES = re.compile(r"SPARK_|PYSPARK_|HADOOP_|JAVA_|JDK_JAVA_|_JAVA_|CLASSPATH$|PYTHONPATH$")
_CHECK_TIMEOUT = 60.0
"""Seconds for an interpreter to import what a worker needs."""


@contextlib.contextmanager
def put_right(master: str) -> Iterator[list[str]]:
    """Within the block, give the JVM surroundings in which it can start.

    :param master: where Spark runs; not that of Spark Connect.
    :returns: yields the variables that may still be of another installation.
    :raises sbus.errors.UsageError: if there is no Java that can run Spark; with the remedy.
    :raises sbus.errors.SparkError: if ``PYSPARK_PYTHON`` cannot run workers; with the remedy.
    """
    before = dict(os.environ)
    try:
        for name in _FOREIGN:
            os.environ.pop(name, None)
        _choose_java(find_java())
        _choose_spark()
        if not user_name(os.geteuid()):
            for name in ("HADOOP_USER_NAME", "SPARK_USER"):
                os.environ.setdefault(name, str(os.geteuid()))
        if is_local(master):
            os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
            os.environ.pop("SPARK_LOCAL_HOSTNAME", None)
            if python := before.get("PYSPARK_PYTHON"):
                _check_python(python)
        left = before.keys() & os.environ.keys() - {"PYSPARK_PYTHON"}
        yield sorted(filter(_VARIABLES.match, left))
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def java_options() -> list[str]:
    """Return options for the JVM of the driver."""
    options = []
    if not user_name(os.geteuid()):
        home = os.environ.get("HOME", "")
        options.append(f"-Duser.home={home if os.path.isabs(home) else tempfile.gettempdir()}")
    if programs() is not None:
        options.append(f"-Djava.io.tmpdir={programs()}")
    return options


def settings() -> dict[str, str]:
    """Return settings of Spark that follow from its surroundings."""
    # Spark's own temporary files are large, and need not be executed.
    return {} if programs() is None else {"spark.local.dir": tempfile.gettempdir()}


@cache
def programs() -> str | None:
    """Return a directory for programs if none may be in that for temporary files, until this process ends.

    :returns: None if they may.
    :raises sbus.errors.SparkError: if no directory is known in which they may; with the remedy.
    """
    temporary = tempfile.gettempdir()
    if _may_execute(temporary):
        return None
    home = os.path.expanduser("~")
    cache_home = os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    for place in (os.environ.get("XDG_RUNTIME_DIR", ""), "/var/tmp", cache_home, home, "/dev/shm"):
        if _may_execute(place):
            directory = tempfile.mkdtemp(prefix="sbus-programs-", dir=place)
            atexit.register(shutil.rmtree, directory, ignore_errors=True)
            return directory
    raise SparkError(
        f"Spark has to execute programs that it unpacks, and {temporary} is mounted noexec: set TMPDIR to a directory "
        "where programs may be executed"
    )


def _may_execute(directory: str) -> bool:
    try:
        return os.access(directory, os.W_OK | os.X_OK) and not os.statvfs(directory).f_flag & os.ST_NOEXEC
    except OSError:
        return False


def _choose_java(java: str) -> None:
    """Make Spark's scripts run this Java: they prefer JAVA_HOME to PATH."""
    home = os.environ.get("JAVA_HOME")
    if home and os.path.join(home, "bin", "java") != java:
        os.environ["JAVA_HOME"] = os.path.dirname(os.path.dirname(os.path.realpath(java)))


def _choose_spark() -> None:
    """Make pyspark start the Spark of the same version."""
    own = os.path.dirname(os.path.abspath(pyspark.__file__))
    given = os.environ.get("SPARK_HOME")
    if not _is_spark(own) or (given and _is_spark(given)):
        return
    os.environ["SPARK_HOME"] = own
    settings_of = os.environ.get("SPARK_CONF_DIR")
    if given and settings_of and os.path.realpath(settings_of).startswith(os.path.join(os.path.realpath(given), "")):
        del os.environ["SPARK_CONF_DIR"]


def _is_spark(home: str) -> bool:
    """Return whether a Spark of the version of pyspark is there."""
    return bool(glob.glob(os.path.join(glob.escape(home), "jars", f"spark-core_*-{pyspark.__version__}.jar")))


def _check_python(python: str) -> None:
    """Check that workers can run in the interpreter that the environment names."""
    wanted = "{}.{}".format(*sys.version_info)
    program = "import sys, pyarrow; print('%d.%d' % sys.version_info[:2])"
    remedy = f"unset PYSPARK_PYTHON to use {sys.executable}, or name a Python {wanted} with pyarrow"
    try:
        # As pyspark runs it. PYTHONPATH and the like are for the interpreter of this process.
        done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=_CHECK_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as e:
        reason = e.strerror if isinstance(e, OSError) else "it does not answer"
        raise SparkError(f"PYSPARK_PYTHON is {python}, which cannot run: {reason}: {remedy}") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise SparkError(f"PYSPARK_PYTHON is {python}, which cannot run workers: {reason}: {remedy}")
    if done.stdout.strip() != wanted:
        raise SparkError(f"PYSPARK_PYTHON is {python}, which is Python {done.stdout.strip()}: {remedy}")
