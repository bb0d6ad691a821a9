"""Find a Java that can run Spark.

If there is none, raise an error with the remedy, which Spark's own error lacks.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Mapping

from sbus.errors import UsageError

__all__ = ["find_java"]

_MIN_JAVA = 17
_REMEDY = (
    "install one (Debian, Ubuntu: apt install openjdk-17-jre-headless) and set JAVA_HOME to it if it is not in PATH"
)
_REQUIRED_MODULE = "jdk.incubator.vector"
"""A module that Spark's launcher adds to the JVM; without it the JVM does not start."""


def find_java(environ: Mapping[str, str] = os.environ) -> str:
    """Return the path of the ``java`` that Spark will run.

    It is ``$JAVA_HOME/bin/java`` if that can run Spark, or else the one in ``PATH``.

    :raises sbus.errors.UsageError: if there is no Java, or it cannot run Spark; with the remedy.
    """
    in_path = shutil.which("java", path=environ.get("PATH", ""))
    if home := environ.get("JAVA_HOME"):
        java = os.path.join(home, "bin", "java")
        try:
            if not os.access(java, os.X_OK):
                raise UsageError(f"JAVA_HOME is {home}, but there is no {java}: correct it, or unset it to use PATH")
            _check(java)
        except UsageError:
            # JAVA_HOME may be of another program; the error about it is the one to report.
            with contextlib.suppress(UsageError):
                if in_path is not None:
                    _check(in_path)
                    return in_path
            raise
        return java
    if in_path is None:
        raise UsageError(f"Spark needs Java {_MIN_JAVA} or 21, and neither JAVA_HOME nor PATH has one: {_REMEDY}")
    _check(in_path)
    return in_path


def _check(java: str) -> None:
    """Check the installation's file ``release``; an installation may lack it."""
    home = os.path.dirname(os.path.dirname(os.path.realpath(java)))
    try:
        with open(os.path.join(home, "release"), encoding="utf-8", errors="replace") as file:
            release = dict(re.findall(r'^(\w+)="(.*)"$', file.read(), re.MULTILINE))
    except OSError:
        return
    version = re.match(r"(?:1\.)?(\d+)", release.get("JAVA_VERSION", ""))
    if version and int(version[1]) < _MIN_JAVA:
        raise UsageError(f"{java} is Java {version[1]}, and Spark needs Java {_MIN_JAVA} or 21: {_REMEDY}")
    if "MODULES" in release and _REQUIRED_MODULE not in release["MODULES"].split():
        raise UsageError(f"{java} lacks the module {_REQUIRED_MODULE}, which Spark needs: {_REMEDY}")
