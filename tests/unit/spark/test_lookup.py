"""Spark's own search for data sources finds ``sbus``."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

from pyspark.serializers import CloudPickleSerializer, read_int
from pyspark.sql.worker import lookup_data_sources

from sbus.spark.datasource.source import SbusDataSource


def test_spark_finds_the_source() -> None:
    """The program with which Spark looks for data sources returns the class, under the name ``sbus``."""
    found = io.BytesIO()
    lookup_data_sources._main(io.BytesIO(), found)
    found.seek(0)
    read = CloudPickleSerializer()
    sources = {}
    for _ in range(read_int(found)):
        name = found.read(read_int(found)).decode()
        sources[name] = read._read_with_length(found)
    assert sources["sbus"] is SbusDataSource


def test_other_sources_are_found_without_the_libraries(tmp_path: Path) -> None:
    """Where PyArrow is missing, the module can be imported, and has no source."""
    (tmp_path / "pyarrow.py").write_text("raise ImportError('not here')\n")
    program = "import pyspark_sbus; print(hasattr(pyspark_sbus, 'DefaultSource'))"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("False\n", "")
