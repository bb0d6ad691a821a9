"""Let Spark report a mistake in a query in one line, without the traceback of its Python worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from sbus.errors import SbusError

__all__ = ["in_one_line"]

_HIDE = "SPARK_HIDE_TRACEBACK"
"""The variable that makes Spark's worker send the text of an exception alone."""


@contextmanager
def in_one_line() -> Iterator[None]:
    """Report an error of this package in one line; of any other exception, the traceback is of use.

    This is for calls that plan a query. Spark has processes for them in which no code of the user runs.
    """
    os.environ.pop(_HIDE, None)
    try:
        yield
    except SbusError:
        os.environ[_HIDE] = "1"
        raise
