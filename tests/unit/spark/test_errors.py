"""A failure in Spark becomes one line, with the class of the error that caused it."""

from __future__ import annotations

import pytest
from py4j.protocol import Py4JNetworkError
from pyspark.errors import PySparkException

from sbus.errors import JournalError, SparkError
from sbus.spark.runtime.errors import translate, translate_errors

OURS = """[STREAM_FAILED] Query [id = 1] terminated with exception: Job aborted due to stage failure: Task 0 failed
org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "sbus/spark/datasource/scan.py", line 151, in read
    raise JournalError(f"{path}: it is damaged")
sbus.errors.JournalError: /j/0-0.arrows: it is damaged: restore it from a copy

\tat org.apache.spark.api.python.BasePythonRunner.run(PythonRunner.scala:1)
Caused by: java.lang.RuntimeException: something else
"""


def test_an_error_of_ours_stays_what_it_is():
    """The class and the text of an error survive the way through Python workers and Java."""
    error = translate(PySparkException(OURS))
    assert (type(error), str(error)) == (JournalError, "/j/0-0.arrows: it is damaged: restore it from a copy")
    error = translate(PySparkException("[A_B] Failed to plan: sbus.errors.JournalError: it is gone\n SQLSTATE: 38000"))
    assert (type(error), str(error)) == (JournalError, "it is gone")


CALLED = "py4j.protocol.Py4JJavaError: An error occurred while calling o156.parquet."
WORKER = "org.apache.spark.api.python.PythonException: Traceback (most recent call last):"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[NOT_FOUND] There is no /x.\n\nJVM stacktrace:\nat a.b", "Spark: [NOT_FOUND] There is no /x."),
        ("failed\nTraceback (most recent call last):\nValueError: no\n", "Spark: ValueError: no"),
        ("failed\nCaused by: java.io.IOException: No space left\n\tat a", "Spark: IOException: No space left"),
        (
            f"failed\n{CALLED}\n: org.a.SparkException: Job aborted.\n\tat a\nCaused by: java.io.IOException: full\n",
            "Spark: IOException: full",
        ),
        (
            f"failed\n{CALLED}\n: java.lang.IllegalStateException: stopped\n\tat a",
            "Spark: IllegalStateException: stopped",
        ),
        (
            "[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: java.io.IOException: No space left "
            "SQLSTATE: XXKST",
            "Spark: IOException: No space left",
        ),
        (
            f"failed\n{WORKER}\n  File x\npyarrow.lib.ArrowInvalid: no\n\n\tat a\nCaused by: {WORKER}\n  File x\n",
            "Spark: pyarrow.lib.ArrowInvalid: no",
        ),
    ],
)
def test_any_other_failure_becomes_the_line_that_says_most(text, line):
    """The line is the last cause, of either language, and not the wrapper of the other; or else the first line."""
    with pytest.raises(SparkError) as caught, translate_errors():
        raise PySparkException(text)
    assert str(caught.value) == line


def test_a_jvm_that_is_gone_is_called_that():
    """If the JVM has died, the error says so, and not what py4j reports."""
    assert "the JVM is gone" in str(translate(Py4JNetworkError("Answer from Java side is empty")))
