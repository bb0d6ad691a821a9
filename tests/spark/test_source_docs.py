"""The examples and tables of the page on the data source, run on a journal and a bus."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sbus.journal.schema import Kind
from sbus.journal.writer import JournalWriter
from sbus.spark.datasource.options import ReadOptions, StreamOptions, WriteOptions
from sbus.spark.datasource.scan import schema
from sbus.testing import RunningBus
from tests.integration.docs.pages import EXAMPLES, literals, page, rows
from tests.support.journals import NewJournal

TIMEOUT = 10
SIX = 1_777_615_200_000_000
"""2026-05-01 06:00 UTC in µs."""

PAGE = page("pipeline/4-datasource.rst")


@pytest.fixture
def journal(new_journal: NewJournal) -> JournalWriter:
    """A journal with the loads of two hosts and a gap."""
    journal = new_journal(clock=lambda: SIX - 1)
    journal.append_gap(Kind.START, {"how": "new"})
    for minute in range(10):
        messages = [(f"hosts/{host}/load", f"{minute if host == 'a' else 0.5}") for host in "ab"]
        messages += [("hosts/a/fan", "on")] if minute == 5 else []
        journal.append([(key.encode(), payload.encode()) for key, payload in messages], SIX + minute * 60_000_000)
    journal.sync()
    return journal


def tables(printed: str) -> list[list[list[str]]]:
    """The cells of all tables that Spark has printed, with their headings."""
    found: list[list[list[str]]] = []
    for block in re.findall(r"\+-[+-]+\n((?:.*\|\n|\+-[+-]+\n)+)", printed):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        found.append([[cell.strip() for cell in line.strip("|").split("|")] for line in lines])
    return found


@pytest.mark.slow
def test_python(
    spark: SparkSession,
    journal: JournalWriter,
    sbus_bus: RunningBus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    """The examples in Python print and publish what the page says."""
    arguments = ["datasource.py", journal.directory, sbus_bus.address, str(tmp_path)]
    monkeypatch.setattr("sys.argv", arguments)
    with sbus_bus.connect() as bus:
        for pattern in ("highest/", "alerts/"):
            bus.subscribe(pattern)
        bus.fence(TIMEOUT)
        runpy.run_path(str(EXAMPLES / "pipeline" / "datasource.py"))
        published = {message.key: message.payload for message in (bus.receive(TIMEOUT) for _ in range(3))}
    assert published.pop(b"alerts/hosts/a/load") == b"9"
    assert {key: json.loads(payload) for key, payload in published.items()} == {
        b"highest/a": {"host": "a", "load": 9.0},
        b"highest/b": {"host": "b", "load": 0.5},
    }
    counts, highest, lengths, an_hour, gaps = tables(capfd.readouterr().out)
    assert counts == [["key", "count"], ["hosts/a/fan", "1"], ["hosts/a/load", "10"], ["hosts/b/load", "10"]]
    assert highest == [["host", "highest"], ["a", "9.0"], ["b", "0.5"]]
    assert ["2026-05-01 06:00:00", "42"] in lengths
    assert len(an_hour) == 1 + 20  # as many as are shown
    assert [row[1:] for row in gaps] == [["kind", "what"], ["start", '{"how": "new"}']]
    assert spark.read.parquet(f"{tmp_path}/messages").count() == 21


@pytest.mark.slow
def test_sql(spark: SparkSession, journal: JournalWriter):
    """The examples in SQL return the expected rows."""
    try:
        results = results_of(spark, "datasource.sql", journal)
    finally:
        for view in ("bus", "loads"):
            spark.catalog.dropTempView(view)
    assert results == [[], [("hosts/a", 11, 12), ("hosts/b", 10, 30)], [], [("a", 9.0), ("b", 0.5)]]


def test_tables(spark: SparkSession, journal: JournalWriter):
    """The examples of tables return the expected rows: those of a span, and of the last hour none."""
    try:
        results = results_of(spark, "tables.sql", journal)
    finally:
        for table in ("rows", "recent"):
            spark.sql(f"DROP TABLE IF EXISTS {table}")
    assert results == [[], [], [("hosts/a/fan", 1), ("hosts/a/load", 3)], [(0,)]]


def results_of(spark: SparkSession, name: str, journal: JournalWriter) -> list[list[tuple[Any, ...]]]:
    """Run the statements of an example on a journal."""
    text = (EXAMPLES / "pipeline" / name).read_text()
    assert "/var/lib/sbus/journal" in text
    statements = text.replace("/var/lib/sbus/journal", journal.directory).split(";")
    return [[tuple(row) for row in spark.sql(one).collect()] for one in statements if one.strip()]


def test_columns():
    """The table of columns lists each column with its type."""
    described = {literals(row[0])[0]: literals(row[1])[0] for row in rows(PAGE, "list-table:: Columns")[1:]}
    assert described == {field.name: field.dataType.simpleString().upper() for field in schema(raw_keys=False)}


@pytest.mark.parametrize(
    ("headings", "kind", "extra"),
    [
        (["Options for reading\n", "Further options of tables"], ReadOptions, {"journal": "/j"}),
        (["Options for reading\n", "Further options of streams"], StreamOptions, {"journal": "/j"}),
        (["list-table:: Options for writing"], WriteOptions, {"socket": "/s"}),
    ],
    ids=["read", "stream", "write"],
)
def test_options(headings: list[str], kind: type, extra: dict[str, str]):
    """The tables list exactly the options that exist, with their defaults."""
    table = [row for heading in headings for row in rows(PAGE, heading)[1:]]
    described = {literals(row[0])[0]: literals(row[1]) for row in table}
    with pytest.raises(Exception, match="the options are: ") as error:
        kind.parse({**extra, "nonsense": ""})  # type: ignore[attr-defined]
    known = str(error.value).rpartition("the options are: ")[2].split(", ")
    assert list(described) == known
    given = {name: default[0] for name, default in described.items() if default and "$" not in default[0]}
    assert kind.parse({**extra, **given}) == kind.parse(extra)  # type: ignore[attr-defined]
