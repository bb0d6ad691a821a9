"""Start the JVM, and report a failure in one line, with the remedy where one is known.

What the JVM writes to standard error while it starts is kept back: if it starts, the text goes to standard error, and
all that it writes later; if it does not, the line that names the cause becomes the error.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence

from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.java_gateway import launch_gateway

from sbus.errors import SparkError
from sbus.spark.runtime.errors import translate_errors

__all__ = ["explain", "starting"]

_NOISE = re.compile(rb"WARNING: Using incubator modules: .*\n")
_CAUSES = (
    re.compile(r"^Error occurred during initialization of VM\n(.*)$", re.MULTILINE),
    re.compile(r"^Caused by: (?:[\w$]+\.)*([\w$]+(?:: .*)?)$", re.MULTILINE),
    re.compile(r"^Exception in thread \S+ (?:[\w$]+\.)*([\w$]+(?:: .*)?)$", re.MULTILINE),
    re.compile(r"^(?:Error|Exception|Unrecognized|Invalid|Could not|Failed)\b.*$", re.MULTILINE),
)
_REMEDIES = (
    (r"UnknownHost", "the name of this host does not resolve: add it to /etc/hosts, or set SPARK_LOCAL_IP"),
    (r"Invalid UID|invalid null input|basedir must be absolute", "this user needs an entry in /etc/passwd: add one"),
    (r"UnsatisfiedLink|failed to map segment|noexec", "set TMPDIR to a directory where programs may be executed"),
    (r"local dir|No space left", "set SPARK_LOCAL_DIRS to a directory of this user with room"),
    (r"reserve enough space|insufficient memory|heap size", "choose another --conf spark.driver.memory"),
)
_END_TIMEOUT = 10.0
"""Seconds for a JVM that has ended to let go of its output; a child of it may keep it."""


@contextlib.contextmanager
def starting(conf: Mapping[str, str], variables: Sequence[str]) -> Iterator[None]:
    """Start the JVM, unless it runs; within the block, a session is made.

    :param conf: the settings of the session.
    :param variables: the variables of the environment that may be of another installation.
    :raises sbus.errors.SparkError: if the JVM does not start, or the block raises an error of Spark; in one line.
    """
    if SparkContext._gateway is not None:
        with translate_errors():
            yield
        return
    reader, writer = os.pipe()
    output = _Output(reader)
    try:
        try:
            settings = SparkConf(loadDefaults=False).setAll(list(conf.items()))
            gateway = launch_gateway(settings, {"stderr": writer})  # type: ignore[no-untyped-call]
        finally:
            os.close(writer)
        SparkContext._ensure_initialized(gateway=gateway)
        with translate_errors():
            yield
    except PySparkException:
        raise SparkError(explain(output.end(), variables)) from None
    except OSError as e:
        output.end()
        raise SparkError(f"Spark does not start: {e.filename}: {e.strerror}{_unset(variables)}") from None
    except SparkError as e:
        output.drop()
        raise SparkError(f"{e}{_remedy(str(e))}") from e
    else:
        output.forward()


def explain(text: str, variables: Sequence[str]) -> str:
    """Return in one line why the JVM has ended.

    :param text: what it has written.
    :param variables: the variables of its environment that may be of another installation.
    """
    for pattern in _CAUSES:
        if found := pattern.findall(text):
            cause = found[-1]
            break
    else:
        cause = next((line for line in reversed(text.splitlines()) if line.strip()), "its JVM has ended")
    cause = cause.strip().rstrip(".")
    return f"Spark does not start: {cause}{_remedy(text) or _unset(variables)}"


def _remedy(text: str) -> str:
    return next((f": {remedy}" for pattern, remedy in _REMEDIES if re.search(pattern, text)), "")


def _unset(variables: Sequence[str]) -> str:
    return f": unset what is of another installation: {', '.join(variables)}" if variables else ""


class _Output:
    """What the JVM writes to standard error: kept, then forwarded or dropped."""

    def __init__(self, reader: int) -> None:
        self._reader = reader
        self._lock = threading.Lock()
        self._kept: list[bytes] | None = []
        self._is_dropped = False
        self._thread = threading.Thread(target=self._read, name="spark-output", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with open(self._reader, "rb", buffering=0) as stream:
            while data := stream.read(1 << 16):
                with self._lock:
                    if self._kept is not None:
                        self._kept.append(data)
                    elif not self._is_dropped:
                        _write(data)

    def end(self) -> str:
        """Wait for the end of the JVM, and return what it has written."""
        self._thread.join(_END_TIMEOUT)
        with self._lock:
            return b"".join(self._kept or ()).decode(errors="replace")

    def forward(self) -> None:
        """Write what there is, and from now on what comes."""
        with self._lock:
            _write(_NOISE.sub(b"", b"".join(self._kept or ())))
            self._kept = None

    def drop(self) -> None:
        """Write nothing, now or later."""
        with self._lock:
            self._kept, self._is_dropped = None, True


def _write(data: bytes) -> None:
    with contextlib.suppress(OSError):  # standard error is closed
        while data:
            data = data[os.write(2, data) :]
