"""Apache Spark beside the bus: a data source for journals, and jobs.

Journals are tables and streams; DataFrames can be published to a bus.

::

    from sbus.spark import get_session

    spark = get_session()
    spark.read.format("sbus").option("journal", "/var/lib/sbus/journal").load()

A program with a session of its own calls `register` with it instead. Spark is an extra, so nothing of it is imported
before it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sbus.spark.runtime.session import get_session, register

__all__ = ["get_session", "register"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from sbus.spark.runtime import session

        return getattr(session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
