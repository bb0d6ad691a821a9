"""Make Spark report errors of this package in one line, without a traceback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from sbus.errors import SbusError

__all__ = ["HIDE", "in_one_line"]

HIDE = "SPARK_HIDE_TRACEBACK"
"""The environment variable that makes Spark's worker send only the text of an exception."""


@contextmanager
def in_one_line() -> Iterator[None]:
    """Let Spark report an error of this package, such as a misspelt option in SQL, without a traceback."""
    os.environ.pop(HIDE, None)
    try:
        yield
    except SbusError:
        os.environ[HIDE] = "1"
        raise
