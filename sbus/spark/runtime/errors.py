"""Translate a failure of Spark into one of this package's errors.

One line of text replaces pages of frames.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException

from sbus import errors
from sbus.errors import SbusError, SparkError

__all__ = ["translate", "translate_errors"]

# An exception of this package in a Python worker: Spark puts its traceback into the text, or its one line.
_OWN_ERROR = re.compile(r"^(?:\[\w+\] [^:\n]*: )?(?:\w+(?:\.\w+)*: )*sbus\.errors\.(\w+): (.*)$", re.MULTILINE)
# These wrappers only say that the other language failed; the cause comes further down.
_NO_WRAPPER = r"(?![\w.]*(?:Py4JJavaError|PythonException): )"
_TRACEBACK_END = re.compile(
    rf"^{_NO_WRAPPER}((?:\w+\.)+[A-Z]\w*|\w*(?:Error|Exception|Exit|Interrupt)): (.*)$", re.MULTILINE
)
# If a stream ends because of an exception in Java, the text names the stream before it.
_STREAM_END = re.compile(
    r"^\[STREAM_FAILED\] Query \[.*?\] terminated with exception: (?:[\w$]+\.)*([\w$]+: .*?)(?: SQLSTATE: \w+)?$", re.M
)
_CAUSE = re.compile(rf"^(?:Caused by)?: {_NO_WRAPPER}(?:[\w$]+\.)*([\w$]+: .*)$", re.MULTILINE)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Translate the errors of Spark that the block raises.

    :raises sbus.errors.SbusError: with the class and the text of an error of this package, wherever in Spark it was
        raised; for any other failure a `SparkError` with one line.
    """
    try:
        yield
    except (PySparkException, Py4JError) as e:
        raise translate(e) from e


def translate(failure: BaseException) -> SbusError:
    """Return the error to raise in place of a failure of Spark.

    :param failure: an exception of pyspark or py4j.
    """
    text = _text(failure)
    for name, message in reversed(_OWN_ERROR.findall(text)):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, SbusError) and kind is not errors.Violation:
            return kind(message.strip())
    for pattern in (_TRACEBACK_END, _CAUSE, _STREAM_END):
        if found := pattern.findall(text):
            last = found[-1]
            return SparkError(f"Spark: {last if isinstance(last, str) else ': '.join(last)}")
    first = next((line for line in text.splitlines() if line.strip()), type(failure).__name__)
    return SparkError(f"Spark: {first.strip()}")


def _text(failure: BaseException) -> str:
    if isinstance(failure, Py4JJavaError):
        return str(failure.java_exception.toString())
    if isinstance(failure, Py4JError):
        return "the JVM is gone: it was killed, or ran out of memory: try --conf spark.driver.memory=4g"
    return str(failure)
