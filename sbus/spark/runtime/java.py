"""Find a Java that runs Spark, or say what to do: Spark's own complaint names no remedy."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping

from sbus.errors import UsageError

__all__ = ["find_java"]

_OLDEST = 17
_REMEDY = (
    "install one (Debian, Ubuntu: apt install openjdk-17-jre-headless) and set JAVA_HOME to it if it is not in PATH"
)
_NEEDED = "jdk.incubator.vector"
"""A module that Spark's launcher asks the JVM for; without it, the JVM does not start."""


def find_java(environ: Mapping[str, str] = os.environ) -> str:
    """The ``java`` that Spark will run: ``$JAVA_HOME/bin/java``, else that of ``PATH``.

    :returns: its path.
    :raises sbus.errors.UsageError: if there is none, or one that does not run Spark; with the remedy.
    """
    if home := environ.get("JAVA_HOME"):
        java = os.path.join(home, "bin", "java")
        if not os.access(java, os.X_OK):
            raise UsageError(f"JAVA_HOME is {home}, but there is no {java}: set it right, or unset it to use PATH")
    else:
        found = shutil.which("java", path=environ.get("PATH"))
        if found is None:
            raise UsageError(f"Spark needs Java {_OLDEST} or 21, and there is none (JAVA_HOME, PATH): {_REMEDY}")
        java = found
    _check(java)
    return java


def _check(java: str) -> None:
    """Look into the file ``release`` that Java installations have; one without it is taken at its word."""
    home = os.path.dirname(os.path.dirname(os.path.realpath(java)))
    try:
        with open(os.path.join(home, "release"), encoding="utf-8", errors="replace") as file:
            release = dict(re.findall(r'^(\w+)="(.*)"$', file.read(), re.MULTILINE))
    except OSError:
        return
    version = re.match(r"(?:1\.)?(\d+)", release.get("JAVA_VERSION", ""))
    if version and int(version[1]) < _OLDEST:
        raise UsageError(f"{java} is Java {version[1]}, and Spark needs Java {_OLDEST} or 21: {_REMEDY}")
    if "MODULES" in release and _NEEDED not in release["MODULES"].split():
        raise UsageError(f"{java} lacks the module {_NEEDED}, which Spark needs: {_REMEDY}")
