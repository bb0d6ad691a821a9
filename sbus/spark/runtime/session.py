"""A Spark session with defaults for one machine, to which the data source ``sbus`` is known."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping

from pyspark.sql import SparkSession

from sbus.errors import UsageError
from sbus.spark.datasource.source import SbusDataSource
from sbus.spark.runtime.java import find_java
from sbus.spark.runtime.shipping import is_local, ship

__all__ = ["get_session", "parse_conf", "register"]

_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_LOG_OPTION = "-Dlog4j2.configurationFile="
_LOGGING = os.path.join(os.path.dirname(__file__), "log4j2.properties")

_EVERYWHERE = {
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Journals are in UTC; hours and dates mean the same wherever a job runs.
    "spark.sql.session.timeZone": "UTC",
    # A stream with nothing to do looks for news this often; each look lists directories.
    "spark.sql.streaming.pollingDelay": "100ms",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
_LOCALLY = {
    # Nobody else is to talk to this session, and the machine's name need not resolve.
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}


def parse_conf(pairs: Iterable[str]) -> dict[str, str]:
    """Settings of Spark as given on a command line, ``name=value`` each; of two for one name, the last.

    :raises sbus.errors.UsageError: for what is none.
    """
    conf = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--conf {pair!r}: say name=value, such as spark.driver.memory=4g")
        conf[name.strip()] = value
    return conf


def get_session(name: str = "sbus", *, master: str = "local[*]", conf: Mapping[str, str] | None = None) -> SparkSession:
    """Make a session, or get the one that is there, and `register` the data source with it.

    :param name: what Spark calls the application.
    :param master: where the work is done: ``local[*]`` is this machine with all cores; for another than a
        local one this package is sent along.
    :param conf: settings of Spark, over our defaults; of a session that is there, as far as they can change.
    :raises sbus.errors.UsageError: if there is no Java that runs Spark; with the remedy.
    """
    find_java()
    # Workers under another interpreter than this one would lack pyarrow.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = dict(conf or {})
    builder = SparkSession.builder.appName(name)
    if SparkSession.getActiveSession() is None:
        builder = builder.master(master)
        settings = with_defaults(master, settings)
    for key, value in settings.items():
        builder = builder.config(key, value)
    return register(builder.getOrCreate())


def with_defaults(master: str, conf: Mapping[str, str]) -> dict[str, str]:
    """Settings of Spark, and ours for this master where they say nothing."""
    ours = dict(_EVERYWHERE)
    if is_local(master):
        ours |= _LOCALLY
        ours["spark.sql.shuffle.partitions"] = str(max(2, _cores(master)))
    options = conf.get(_JAVA_OPTIONS, "")
    if _LOG_OPTION not in options:
        options = f"{_LOG_OPTION}file:{_LOGGING} {options}".strip()
    return {**ours, **conf, _JAVA_OPTIONS: options}


def _cores(master: str) -> int:
    """How many tasks a local master runs at a time."""
    number = re.fullmatch(r"local\[(\d+)(?:,.*)?\]", master)
    if number:
        return int(number[1])
    return 1 if master == "local" else len(os.sched_getaffinity(0))


def register(spark: SparkSession) -> SparkSession:
    """Make the data source ``sbus`` known to a session, and this package to its executors.

    :returns: the session.
    """
    if not is_local(str(spark.sparkContext.master)):
        ship(spark.sparkContext)
    spark.dataSource.register(SbusDataSource)
    return spark
