"""What fails in Spark as one of our own errors with one line of text, instead of pages of Java and Python frames."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException

from sbus import errors
from sbus.errors import SbusError, SparkError

__all__ = ["translate", "translate_errors"]

# Where an exception of ours was raised in a Python process of Spark's, its traceback is part of the text.
_OURS = re.compile(r"^(?:\w+(?:\.\w+)*: )*sbus\.errors\.(\w+): (.*)$", re.MULTILINE)
# These only say that something has failed in the other language; what it was comes further down.
_NO_WRAPPER = r"(?![\w.]*(?:Py4JJavaError|PythonException): )"
_TRACEBACK_END = re.compile(
    rf"^{_NO_WRAPPER}((?:\w+\.)+[A-Z]\w*|\w*(?:Error|Exception|Exit|Interrupt)): (.*)$", re.MULTILINE
)
_CAUSE = re.compile(rf"^(?:Caused by)?: {_NO_WRAPPER}(?:[\w$]+\.)*([\w$]+: .*)$", re.MULTILINE)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Around what uses Spark.

    :raises SbusError: of the class and with the text that one of ours had wherever in Spark it was raised; else a
        `SparkError` that says in a line what Spark says.
    """
    try:
        yield
    except (PySparkException, Py4JError) as e:
        raise translate(e) from e


def translate(failure: BaseException) -> SbusError:
    """
    :param failure: what pyspark or py4j has raised.
    :returns: what to raise instead.
    """
    text = _text(failure)
    for name, message in reversed(_OURS.findall(text)):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, SbusError) and kind is not errors.Violation:
            return kind(message.strip())
    for pattern in (_TRACEBACK_END, _CAUSE):
        if found := pattern.findall(text):
            last = found[-1]
            return SparkError(f"Spark: {last if isinstance(last, str) else ': '.join(last)}")
    first = next((line for line in text.splitlines() if line.strip()), type(failure).__name__)
    return SparkError(f"Spark: {first.strip()}")


def _text(failure: BaseException) -> str:
    if isinstance(failure, Py4JJavaError):
        return str(failure.java_exception.toString())
    if isinstance(failure, Py4JError):
        return "the JVM is gone: it was killed, or ran out of memory (see --conf spark.driver.memory=4g)"
    return str(failure)
