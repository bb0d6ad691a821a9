"""Send the installed package to a cluster's executors, which need not install it.

Executors need Python of the same version with pyarrow. Plain Python files of this package are enough, because every
compiled part has a plain twin.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import zipfile
from weakref import WeakSet

from pyspark import SparkContext
from pyspark.sql import SparkSession

import sbus

__all__ = ["is_local", "is_remote", "ship", "ship_to_server"]

_shipped: WeakSet[SparkContext | SparkSession] = WeakSet()


def is_local(master: str) -> bool:
    """Return whether all work runs in this process and its children.

    These can import this package.
    """
    return master == "local" or master.startswith("local[")


def is_remote(spark: SparkSession) -> bool:
    """Return whether a session is one of Spark Connect."""
    return type(spark).__module__.startswith("pyspark.sql.connect.")


def ship(context: SparkContext) -> None:
    """Send this package to the executors of a context, once."""
    if context not in _shipped:
        # Executors that join later fetch the file, so it is kept until this process ends.
        directory = tempfile.mkdtemp(prefix="sbus-package-")
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        package = pack(directory)
        context.addPyFile(package)
        # Spark does not bring files to the process here that plans a stream, which may run the executors' Python.
        paths = [context.environment.get("PYTHONPATH"), package]
        context.environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        _shipped.add(context)


def ship_to_server(spark: SparkSession) -> None:
    """Send this package to the server of a session of Spark Connect, once."""
    if spark not in _shipped:
        with tempfile.TemporaryDirectory(prefix="sbus-package-") as directory:
            spark.addArtifacts(pack(directory), pyfile=True)
        _shipped.add(spark)


def pack(directory: str) -> str:
    """Write the Python modules of this package to a zip file.

    :param directory: the directory for the file.
    :returns: the path of the file.
    """
    [root] = sbus.__path__
    path = os.path.join(directory, f"sbus-{sbus.__version__}.zip")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            for name in sorted(names):
                if name.endswith(".py"):
                    full = os.path.join(folder, name)
                    file.write(full, os.path.join("sbus", os.path.relpath(full, root)))
    return path
