"""Spark looks for top-level modules named ``pyspark_…`` to find data sources by itself; this one has ``sbus``.

So SQL, Spark Connect, Thrift servers and declarative pipelines can read and publish without `sbus.spark.register`.
"""

from __future__ import annotations

import contextlib

# One module that cannot be imported hides every other data source from Spark. This one is in each installation of sbus,
# also where Spark's Python lacks PyArrow or is older.
with contextlib.suppress(ImportError):
    from sbus.spark.datasource.source import SbusDataSource as DefaultSource  # noqa: F401
