"""Apache Spark beside the bus: a data source for journals, and jobs.

Journals are tables and streams; DataFrames can be published to a bus.

::

    from sbus.spark import get_session

    spark = get_session()
    spark.read.format("sbus").load("/var/lib/sbus/journal")

A program with its own session calls `register` with it instead. Spark is an extra, so nothing of it is imported before
it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbus.lazy import lazy_names

if TYPE_CHECKING:
    from sbus.spark.rows import decode
    from sbus.spark.runtime.progress import lag
    from sbus.spark.runtime.session import get_session, register

__all__ = ["decode", "get_session", "lag", "register"]

__getattr__ = lazy_names(
    __name__,
    {
        "decode": ".rows",
        "get_session": ".runtime.session",
        "lag": ".runtime.progress",
        "register": ".runtime.session",
    },
)
