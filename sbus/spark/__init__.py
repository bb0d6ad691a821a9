"""Apache Spark on the bus: journals as tables and streams, tables and streams published, and the jobs over them.

::

    from sbus.spark import get_session

    spark = get_session()
    spark.read.format("sbus").option("journal", "/var/lib/sbus/journal").load()

A program that has a session of its own calls `register` with it instead. Nothing is imported before it is
used, as Spark is an extra.
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
