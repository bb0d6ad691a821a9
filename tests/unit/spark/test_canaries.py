"""What this package takes from the inside of pyspark, checked one by one: a failure names what a release has changed.

The inside of the JVM is checked by ``tests/spark/test_canaries.py``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import socket
import struct
from typing import Any

import pyspark
import pytest
from pyspark import util, worker_util
from pyspark.sql import datasource
from pyspark.sql.worker import data_source_pushdown_filters, lookup_data_sources

from sbus.spark.datasource.one_line import HIDE
from sbus.spark.datasource.reader import ASKING, keeps_plans_apart

SPARK = f"pyspark {pyspark.__version__}"
EARLY = "change sbus/spark/runtime/early_worker.py"
READER = "change sbus/spark/datasource/reader.py"


@pytest.mark.parametrize(
    ("environ", "expected"), [({"PORT": "4711", "SECRET": "s3"}, (4711, "s3")), ({"SOCK_PATH": "/jvm"}, ("/jvm", None))]
)
def test_the_place_to_connect_to(
    environ: dict[str, str], expected: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker learns from three variables where the JVM listens."""
    asked: list[Any] = []

    def connect(*arguments: Any) -> Any:
        asked.append(arguments)
        raise ConnectionError

    monkeypatch.setattr(worker_util, "local_connect_and_auth", connect)
    for name in ("PORT", "SECRET", "SOCK_PATH"):
        monkeypatch.delenv(f"PYTHON_WORKER_FACTORY_{name}", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(f"PYTHON_WORKER_FACTORY_{name}", value)
    with contextlib.suppress(ConnectionError), worker_util.get_sock_file_to_executor():
        pass
    names = ", ".join(f"PYTHON_WORKER_FACTORY_{name}" for name in environ)
    assert asked == [expected], f"{SPARK}: workers do not find the JVM by {names}: {EARLY} (_connect)"


def test_the_proof_of_the_secret() -> None:
    """A worker sends the length of the secret and the secret, and reads an answer of the same form."""
    check = getattr(util, "_do_server_auth", None)
    assert check is not None, f"{SPARK}: pyspark.util._do_server_auth is gone: {EARLY} (_run replaces it)"
    assert [*inspect.signature(check).parameters] == ["conn", "auth_secret"], (
        f"{SPARK}: _do_server_auth has other parameters: {EARLY} (read_reply)"
    )

    class Connection(io.BytesIO):
        sent = b""

        def write(self, data: Any) -> int:
            self.sent += bytes(data)
            return len(data)

    connection = Connection(struct.pack("!i", 2) + b"ok")
    check(connection, "s3")
    assert connection.sent == struct.pack("!i", 2) + b"s3", f"{SPARK}: the secret is sent otherwise: {EARLY} (_connect)"
    assert not connection.read(), f"{SPARK}: the answer to the secret has another form: {EARLY} (read_reply)"


def test_how_a_worker_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes one ``socket.socket``, connects it, and only then proves the secret."""
    happened: list[str] = []

    class Recording(socket.socket):
        def connect(self, address: Any) -> None:
            happened.append("connect")

    monkeypatch.setattr(socket, "socket", Recording)
    monkeypatch.setattr(util, "_do_server_auth", lambda *_: happened.append("proof"))
    file, connection = util.local_connect_and_auth("4711", "s3")
    file.close()
    connection.close()
    assert happened == ["connect", "proof"], f"{SPARK}: a worker connects otherwise, by {happened}: {EARLY} (Connected)"


def test_modules_that_run_as_workers() -> None:
    """The programs that the JVM starts are modules, of which one asks for what a reader can use of a query."""
    for name in ("pyspark.daemon", "pyspark.sql.streaming.python_streaming_source_runner"):
        assert importlib.util.find_spec(name), f"{SPARK}: the program {name} has another name: check {EARLY}"
    assert importlib.util.find_spec(ASKING), f"{SPARK}: the program {ASKING} has another name: {READER} (ASKING)"
    assert data_source_pushdown_filters.__name__ == ASKING


def test_what_a_reader_overrides() -> None:
    """Readers have `pushFilters`, and from the release on that keeps plans apart also `pushLimit`."""
    base = datasource.DataSourceReader
    assert [*inspect.signature(base.pushFilters).parameters] == ["self", "filters"], f"{SPARK}: pushFilters: {READER}"
    if keeps_plans_apart(base):
        limit = inspect.signature(base.pushLimit)  # type: ignore[attr-defined]
        assert [*limit.parameters] == ["self", "limit"], f"{SPARK}: pushLimit has other parameters: {READER}"


def test_conditions_that_are_known() -> None:
    """Spark has no kinds of conditions that the data source has never heard of; it would read more than necessary."""
    known = {
        *("EqualNullSafe", "EqualTo", "GreaterThan", "GreaterThanOrEqual", "In", "IsNotNull", "IsNull", "LessThan"),
        *("LessThanOrEqual", "Not", "StringContains", "StringEndsWith", "StringStartsWith"),
    }
    found = {kind.__name__ for kind in datasource.Filter.__subclasses__() if kind.__module__ == datasource.__name__}
    assert found == known, f"{SPARK}: other conditions, {found ^ known}: change sbus/spark/datasource/conditions.py"


def test_the_search_for_sources() -> None:
    """Spark looks for `DefaultSource` in modules named ``pyspark_…``."""
    text = inspect.getsource(lookup_data_sources)
    for name in ('startswith("pyspark_")', "DefaultSource"):
        assert name in text, f"{SPARK}: the search for data sources has changed ({name}): change pyspark_sbus.py"


def test_errors_in_one_line() -> None:
    """A variable makes a worker send the text of an exception alone."""
    text = inspect.getsource(util)
    assert f'"{HIDE}"' in text, f"{SPARK}: workers do not read {HIDE}: change sbus/spark/datasource/one_line.py"
