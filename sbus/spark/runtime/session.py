"""A Spark session with defaults for one machine and the data source ``sbus``.

Theory of operation
-------------------

`get_session` makes an ordinary session, or returns the one that is there, with defaults below the settings of the
caller. It checks Java first, because Spark's own error for a missing or wrong Java names no remedy, and puts other
surroundings right (`sbus.spark.runtime.surroundings`). If Spark does not start all the same, the error has one line
(`sbus.spark.runtime.gateway`).

===================================  ===================================================================================
default                              why
===================================  ===================================================================================
this interpreter, for workers        Another one may lack PyArrow. On one machine, a program stands in for it that lets
                                     a stream survive a worker that takes long to start
                                     (`sbus.spark.runtime.early_worker`).
the time zone UTC                    Like the times in journals: hours and dates mean the same wherever a job runs.
partitions of a shuffle              On one machine, as many as there are cores, and at least two: Spark's default of
                                     200 costs more than the work.
the driver's address, 127.0.0.1      On one machine, no other takes part, and the host name need not resolve.
100 ms between looks of a stream     Each look for new rows lists directories; Spark's default is 10 ms.
two minutes for a Python worker      It has to answer in that time; Spark's default is 15 seconds.
a log of errors only                 And not of those that the caller gets as an exception (``log4j2.properties``).
===================================  ===================================================================================

With Spark Connect (a master such as ``sc://host:15002``) the session is on the server, which has its own settings.
Nothing of Java runs here, and the package goes to the server as an artifact of the session.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache

from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from sbus.errors import UsageError
from sbus.spark.datasource.source import SbusDataSource
from sbus.spark.runtime import surroundings
from sbus.spark.runtime.early_worker import launcher
from sbus.spark.runtime.gateway import starting
from sbus.spark.runtime.shipping import is_local, is_remote, ship, ship_to_server

__all__ = ["get_session", "parse_conf", "register"]

_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_LOG_OPTION = "-Dlog4j2.configurationFile="
_LOG_CONFIG = os.path.join(os.path.dirname(__file__), "log4j2.properties")

_LOGGERS = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
"""They print each mistake in a query with all frames of Java; the exception that PySpark raises has its text."""

_DEFAULTS = {
    "spark.python.authenticate.socketTimeout": "2min",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.pollingDelay": "100ms",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
_LOCAL_DEFAULTS = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}


def parse_conf(pairs: Iterable[str]) -> dict[str, str]:
    """Parse Spark settings from a command line, each ``name=value``.

    The last one for a name counts.

    :raises sbus.errors.UsageError: if a setting is not of this form.
    """
    conf = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--conf {pair!r}: use name=value, such as spark.driver.memory=4g")
        conf[name.strip()] = value
    return conf


def get_session(name: str = "sbus", *, master: str = "local[*]", conf: Mapping[str, str] | None = None) -> SparkSession:
    """Return the session, or make one, and `register` the data source with it.

    :param name: the name of the application.
    :param master: where Spark runs; ``local[*]`` is this machine with all its cores, and ``sc://HOST:PORT`` a server
        of Spark Connect.
    :param conf: settings of Spark, which take precedence over the defaults; for a session that is there, those that can
        still change.
    :raises sbus.errors.UsageError: if there is no Java that can run Spark; with the remedy.
    :raises sbus.errors.SparkError: if Spark does not start; with the remedy where one is known.
    """
    settings = dict(conf or {})
    builder = SparkSession.builder.appName(name)
    if master.startswith("sc://"):
        builder = builder.remote(master)
        for key, value in settings.items():
            builder = builder.config(key, value)
        return register(builder.getOrCreate())
    with surroundings.put_right(master) as variables:
        os.environ.setdefault("PYSPARK_PYTHON", _early_python() if is_local(master) else sys.executable)
        if SparkSession.getActiveSession() is None:
            builder = builder.master(master)
            settings = with_defaults(master, settings)
        for key, value in settings.items():
            builder = builder.config(key, value)
        with starting({**settings, "spark.master": master, "spark.app.name": name}, variables):
            session = builder.getOrCreate()
    return register(session)


@cache
def _early_python() -> str:
    """Return the program that stands in for this interpreter, until this process ends."""
    directory = tempfile.mkdtemp(prefix="sbus-python-", dir=surroundings.programs())
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return launcher(directory)


def with_defaults(master: str, conf: Mapping[str, str]) -> dict[str, str]:
    """Return settings of Spark, completed by the defaults for this master."""
    defaults = _DEFAULTS | surroundings.settings()
    if is_local(master):
        defaults |= _LOCAL_DEFAULTS
        defaults["spark.sql.shuffle.partitions"] = str(max(2, _cores(master)))
    given = conf.get(_JAVA_OPTIONS, "")
    options = surroundings.java_options()
    if _LOG_OPTION not in given:
        options.append(f"{_LOG_OPTION}file:{_LOG_CONFIG}")
    return {**defaults, **conf, _JAVA_OPTIONS: " ".join([*options, given]).strip()}


def _cores(master: str) -> int:
    """Return the number of tasks that a local master runs at a time."""
    number = re.fullmatch(r"local\[(\d+)(?:,.*)?\]", master)
    if number:
        return int(number[1])
    return 1 if master == "local" else len(os.sched_getaffinity(0))


def register(spark: SparkSession) -> SparkSession:
    """Register the data source ``sbus``, and send this package to the executors.

    :param spark: a session, also one of Spark Connect.
    :returns: the session.
    """
    if is_remote(spark):
        ship_to_server(spark)
    elif not is_local(str(spark.sparkContext.master)):
        ship(spark.sparkContext)
    spark.dataSource.register(SbusDataSource)
    for name in _LOGGERS:
        PySparkLogger.getLogger(name).disabled = True
    return spark
