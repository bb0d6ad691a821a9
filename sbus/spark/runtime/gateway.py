"""Start the JVM, and report a failure in one line, with the remedy where one is known.

The output of the JVM while it starts is kept back: if it starts, the text goes where it was meant to go, and so does
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
    re.compile(r" ERROR [\w.$]+: (.*)$", re.MULTILINE),
    re.compile(r"^(?:Error|Exception|Unrecognized|Invalid|Could not|Failed)\b.*$", re.MULTILINE),
)
_REMEDIES = (
    (r"UnknownHost", "the name of this host does not resolve: add it to /etc/hosts, or set SPARK_LOCAL_IP"),
    (r"Invalid UID|invalid null input|basedir must be absolute", "this user needs an entry in /etc/passwd: add one"),
    (r"UnsatisfiedLink|failed to map segment|noexec", "set TMPDIR to a directory where programs may be executed"),
    (r"local dir|No space left", "set SPARK_LOCAL_DIRS to a directory of this user with room"),
    (r"reserve enough space|insufficient memory|heap size", "choose another --conf spark.driver.memory"),
)
_END_TIMEOUT = 3.0
"""Seconds for a JVM that fails to end, and to let go of its output."""


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
    # The launcher's errors are on standard error, those of a JVM with wrong options on standard output.
    outputs = {"stdout": _Output(1), "stderr": _Output(2)}
    try:
        try:
            settings = SparkConf(loadDefaults=False).setAll(list(conf.items()))
            writers = {name: output.writer for name, output in outputs.items()}
            gateway = launch_gateway(settings, writers)  # type: ignore[no-untyped-call]
        finally:
            for output in outputs.values():
                os.close(output.writer)
        SparkContext._ensure_initialized(gateway=gateway)
        with translate_errors():
            yield
    except FileNotFoundError as e:
        raise SparkError(f"Spark does not start: {e.filename}: {e.strerror}{_unset(variables)}") from None
    except (PySparkException, OSError, SparkError) as e:
        texts = [output.end() for output in outputs.values()]
        if None not in texts:
            raise SparkError(explain("".join(filter(None, texts)), variables)) from None
        raise SparkError(f"{e}{_remedy(str(e))}") from e
    else:
        for output in outputs.values():
            output.forward()
    finally:
        for output in outputs.values():
            output.drop()


def explain(text: str, variables: Sequence[str]) -> str:
    """Return in one line why the JVM has ended.

    :param text: its output.
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
    """One output of the JVM: kept, then forwarded or dropped.

    :param target: the descriptor to forward it to.
    :ivar writer: the end of a pipe for the JVM; the caller closes it.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._reader, self.writer = os.pipe()
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
                        self._write(data)

    def end(self) -> str | None:
        """Return what the JVM has written, if it has ended or is about to end; None if it lives."""
        self._thread.join(_END_TIMEOUT)
        if self._thread.is_alive():
            return None
        return b"".join(self._kept or ()).decode(errors="replace")

    def forward(self) -> None:
        """Write the output so far, and from now on all of it."""
        with self._lock:
            self._write(_NOISE.sub(b"", b"".join(self._kept or ())))
            self._kept = None

    def drop(self) -> None:
        """Write nothing, now or later, unless it is forwarded."""
        with self._lock:
            if self._kept is not None:
                self._kept, self._is_dropped = None, True

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while data:
                data = data[os.write(self._target, data) :]
