"""Journals as tables on real Spark: every row and column, skipped segments, and errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from msgspec import msgpack
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from sbus.errors import UsageError
from sbus.journal.keytext import as_text
from sbus.journal.layout import list_segments
from sbus.journal.schema import Kind
from sbus.journal.senders import TYPES, Senders
from sbus.journal.writer import JournalWriter
from sbus.spark import decode
from sbus.spark.datasource.options import ReadOptions
from sbus.spark.datasource.reader import SbusReader
from sbus.spark.datasource.scan import schema
from tests.support.journals import Clock, NewJournal
from tests.support.journals import rows as rows_of

KEYS = [b"hosts/a/load", b"hosts/b/load", b"hosts/a/fan", b"", b"\xff\\/x", "größe".encode()]
HOUR = 3_600_000_000


def table(spark: SparkSession, *journals: Any, columns: str | None = None, **options: str) -> DataFrame:
    """The table of some journals."""
    paths = ",".join(getattr(journal, "directory", str(journal)) for journal in journals)
    reader = spark.read.format("sbus").option("journal", paths).options(**options)
    return (reader.schema(columns) if columns else reader).load()


def seqs(frame: DataFrame) -> list[int]:
    """The sequence numbers of the rows, sorted."""
    return sorted(row.seq for row in frame.select("seq").collect())


def stored(journal: JournalWriter) -> list[dict[str, Any]]:
    """The rows of a journal, read without Spark."""
    return rows_of(journal.directory)


def fill(journal: JournalWriter, clock: Clock) -> JournalWriter:
    """Five segments, one for each hour since 1970: a gap row, and messages, some with the hour in their key."""
    for hour in range(5):
        start = hour * HOUR
        keys = [*KEYS, b"hour/%d" % hour]
        journal.append_gap(Kind.START, {"hour": hour})
        for i in range(3):
            times = [start + i * 1000 + j for j in range(len(keys))]
            journal.append([(key, b"%d" % i) for key in keys], times)
        clock.time = times[-1]  # the next gap has the time of the last message
        journal.roll()
    return journal


def test_every_row_and_column(spark: SparkSession, new_journal: NewJournal):
    """Each row of a journal is there once with all columns; keys are text, or bytes with rawKeys."""
    journal = fill(new_journal(clock=(clock := Clock(0))), clock)
    journal.append([(b"not", b"synced")])
    expected = stored(journal)
    assert len(expected) == 5 * (1 + 3 * 7)
    for raw in (False, True):
        rows = table(spark, journal, rawKeys=str(raw), senders="true").toArrow().sort_by("seq").to_pylist()
        wanted = [{**row, "key": row["key"] if raw else as_text(row["key"])} for row in expected]
        assert rows == wanted


@pytest.mark.slow
def test_some_columns(spark: SparkSession, new_journal: NewJournal):
    """A schema with some columns, in any order, reads those; a pattern still works without the key column."""
    journal = new_journal()
    journal.append([(b"a", b"1"), (b"b", b"2")])
    journal.sync()
    frame = table(spark, journal, columns="payload BINARY, seq BIGINT", pattern="b")
    assert [tuple(row) for row in frame.collect()] == [(b"2", 1)]
    assert table(spark, journal, columns="kind STRING").distinct().collect() == [("message",)]
    for columns, words in (("Seq BIGINT", "no column Seq BIGINT"), ("key BINARY", "no column key BINARY")):
        with pytest.raises(PySparkException, match=f"UsageError: .*{words}: choose from journal STRING, seq BIGINT"):
            table(spark, journal, columns=columns).collect()


@pytest.mark.slow
def test_publishers(spark: SparkSession, new_journal: NewJournal):
    """The columns of publishers are there for a read that asks for them, by the option or by its schema."""
    journal = new_journal(clock=Clock(0))
    journal.append_gap(Kind.START, {})
    values = pa.array([b"1", b"2", b"3"], pa.binary())
    names = pa.array([b"17 !/cred/100/1000/42", b"9 !/cred/0/0/4711/!/cred/100/1001/43"], pa.binary())
    journal.append_columns(values, values, [0], [3], Senders(names, pa.array([2, 3], pa.int32())))
    journal.sync()
    assert table(spark, journal).columns == ["journal", "seq", "time", "kind", "key", "payload", "host"]
    frame = table(spark, journal, senders="true")
    assert frame.columns[6:] == [*TYPES, "host"]
    assert [tuple(row) for row in frame.orderBy("seq").select(*TYPES).collect()] == [
        (None,) * 5,
        *[(1000, 100, 42, 17, None)] * 2,
        (1001, 100, 43, 9, "!/cred/0/0/4711"),
    ]
    chosen = table(spark, journal, columns="sender_uid BIGINT, key STRING", gaps="false")
    assert chosen.groupBy("sender_uid").count().sort("sender_uid").collect() == [(1000, 2), (1001, 1)]


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> JournalWriter:
    """A journal of five segments, see `fill`."""
    clock = Clock(0)
    journal = fill(JournalWriter.open(tmp_path_factory.mktemp("five") / "journal", clock=clock), clock)
    journal.close()
    return journal


def spoil(source: str, target: Path, touched: set[int]) -> None:
    """Copy a journal, and overwrite the segments that a query must not touch."""
    shutil.copytree(source, target)
    for i, segment in enumerate(list_segments(str(target))):
        if i not in touched:
            Path(segment.path()).write_bytes(b"rubbish")


def at(hour: int, microsecond: int = 0) -> datetime:
    return datetime(1970, 1, 1, hour, 0, 0, microsecond, UTC)


SKIPPED: list[tuple[dict[str, str], set[int]]] = [
    ({}, {0, 1, 2, 3, 4}),
    ({"since": "1970-01-01T01:00", "until": "1970-01-01T02:00:00.000005"}, {1, 2}),
    ({"since": "1970-01-01T03:00:00.001006", "until": "1970-01-01T03:00:00.001007"}, {3}),
    ({"since": "1970-01-01T04:00:00.000001"}, {4}),
    # The gap row of the second segment has the time of the row before it.
    ({"until": "1970-01-01T00:00:01"}, {0, 1}),
    ({"pattern": "hour/2"}, {2}),
    ({"pattern": "hour/*"}, {0, 1, 2, 3, 4}),
    ({"pattern": "hour/1", "since": "1970-01-01T02:00"}, set()),
    ({"pattern": "hour/2", "gaps": "true"}, {0, 1, 2, 3, 4}),
    ({"pattern": "nothing"}, set()),
]


@pytest.mark.parametrize(("options", "touched"), SKIPPED, ids=[str(options) for options, _ in SKIPPED])
def test_segments_that_are_read(five: JournalWriter, options: dict[str, str], touched: set[int]):
    """A read plans only the segments that can have a row of its time and pattern."""
    reader = SbusReader(ReadOptions.parse({"journal": five.directory, **options}), schema(raw_keys=False))
    first_seqs = [segment.first_seq for segment in list_segments(five.directory)]
    planned = [part.segment.first_seq for partition in reader.partitions() for part in partition.slices]
    assert planned == [first_seqs[i] for i in sorted(touched)]


QUERIES: list[tuple[str, Callable[[dict[str, Any]], bool]]] = [
    (
        "time >= '1970-01-01 01:00' AND time < '1970-01-01 02:00:00.000005' AND kind = 'message' AND key LIKE 'ho%'",
        lambda row: row["kind"] == "message" and at(1) <= row["time"] < at(2, 5) and row["key"].startswith(b"ho"),
    ),
    (
        "key IN ('hour/1', 'hour/4', '\\\\xff\\\\x5c/x') AND seq < 88 AND seq > 25",
        lambda row: row["key"] in (b"hour/1", b"hour/4", b"\xff\\/x") and 25 < row["seq"] < 88,
    ),
    (
        "(kind <> 'message' OR payload = X'32') AND hour(time) % 2 = 0 AND NOT key = 'hour/2' AND seq >= 66",
        lambda row: (
            (row["kind"] != "message" or row["payload"] == b"2")
            and row["seq"] >= 66
            and row["time"].hour % 2 == 0
            and row["key"] != b"hour/2"
        ),
    ),
]


def test_conditions_of_a_query(spark: SparkSession, five: JournalWriter):
    """The conditions of a query, which Spark applies, find exactly the rows for which they hold."""
    for query, is_wanted in QUERIES:
        expected = [row["seq"] for row in stored(five) if is_wanted(row)]
        assert expected
        assert seqs(table(spark, five).where(query)) == expected


@pytest.mark.slow
def test_filters_of_queries_on_one_table(spark: SparkSession, five: JournalWriter):
    """Two queries on one DataFrame, or two parts of one query, do not affect each other, whatever Spark hands over."""
    names = ("spark.sql.python.filterPushdown.enabled", "spark.sql.python.limitPushdown.enabled")
    before = {name: str(spark.conf.get(name, "false")) for name in names}
    everything = [row["seq"] for row in stored(five)]
    try:
        for is_asked in ("false", "true"):
            for name in names:
                spark.conf.set(name, is_asked)
            frame = table(spark, five)
            few = frame.where("seq < 10")
            assert seqs(few) == everything[:10]
            assert frame.limit(5).count() == 5
            assert seqs(frame) == everything
            assert seqs(few.union(frame.where("seq >= 20"))) == everything[:10] + everything[20:]
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)


def test_a_span_of_time(spark: SparkSession, five: JournalWriter, tmp_path: Path):
    """The options since and until leave out exactly the rows beyond them, and do not open segments beyond them."""
    rows = stored(five)
    since, until = (rows[at]["time"].replace(tzinfo=UTC) for at in (30, 50))
    options = {"since": since.isoformat(), "until": until.isoformat()}
    expected = [row["seq"] for row in rows if since <= row["time"].replace(tzinfo=UTC) < until]
    assert seqs(table(spark, five, **options)) == expected
    assert 0 < len(expected) < len(rows)
    spoil(five.directory, tmp_path / "spoiled", {1, 2})
    assert seqs(table(spark, tmp_path / "spoiled", **options)) == expected


def test_damage_is_told(spark: SparkSession, five: JournalWriter, tmp_path: Path):
    """A damaged segment fails a query that needs it, with its name and the remedy."""
    spoil(five.directory, tmp_path / "spoiled", {0})
    with pytest.raises(
        PySparkException, match=r"sbus\.errors\.JournalError: .*0000000000000022-.*restore it from a copy"
    ):
        table(spark, tmp_path / "spoiled").where("seq < 23").collect()


@pytest.mark.slow
def test_patterns(spark: SparkSession, five: JournalWriter, tmp_path: Path):
    """A pattern selects what the bus would deliver, and skips segments."""
    keys = table(spark, five, pattern="hosts/*/load").groupBy("key").count().orderBy("key").collect()
    assert [tuple(row) for row in keys] == [("hosts/a/load", 15), ("hosts/b/load", 15)]
    assert table(spark, five, pattern=r"\xff\x5c/", gaps="true").count() == 20
    spoil(five.directory, tmp_path / "spoiled", {1})
    assert table(spark, tmp_path / "spoiled", pattern="hour/1").count() == 3


def test_several_journals(spark: SparkSession, new_journal: NewJournal, tmp_path: Path):
    """Paths and globs can be mixed; a journal that both name is read once."""
    for name in ("a/x", "b/x", "c/y"):
        journal = new_journal(name)
        journal.append([(name.encode(), b"")])
        journal.sync()
    frame = table(spark, f"{tmp_path}/*/x", f"{tmp_path}/c/y\n{tmp_path}/a/x")
    assert sorted(row.key for row in frame.collect()) == ["a/x", "b/x", "c/y"]
    assert frame.select("journal").distinct().count() == 3


@pytest.mark.slow
def test_the_size_of_tasks(spark: SparkSession, new_journal: NewJournal):
    """One task reads several small segments, several tasks divide a large one, and each row is read once."""
    journal = new_journal()
    for _ in range(20):
        journal.append([(b"k", b"p" * 1000)] * 100)
    journal.roll()
    for _ in range(20):
        journal.append([(b"k", b"p")])
        journal.roll()
    assert table(spark, journal).rdd.getNumPartitions() == 1
    frame = table(spark, journal, partitionBytes="500000")
    assert 4 <= frame.rdd.getNumPartitions() <= 6
    assert seqs(frame) == list(range(2020))


def test_nothing_recorded(spark: SparkSession, new_journal: NewJournal):
    """A journal without rows is a table without rows."""
    assert table(spark, new_journal()).collect() == []


def test_sql(spark: SparkSession, five: JournalWriter):
    """In SQL, a journal is a view with all columns or those that are named."""
    spark.sql(f"CREATE TEMPORARY VIEW some (key STRING) USING sbus OPTIONS (journal '{five.directory}')")
    try:
        rows = spark.sql(
            "SELECT key, count(*) AS n FROM some WHERE key LIKE 'hour/%' GROUP BY key ORDER BY key"
        ).collect()
        assert [tuple(row) for row in rows] == [(f"hour/{i}", 3) for i in range(5)]
    finally:
        spark.catalog.dropTempView("some")


@pytest.mark.slow
def test_tables_of_the_catalog(spark: SparkSession, five: JournalWriter):
    """A table keeps its options, by OPTIONS or by LOCATION; dropping it leaves the journal alone."""
    whole = seqs(spark.read.format("sbus").load(five.directory))
    assert len(whole) == 110
    try:
        spark.sql(f"CREATE TABLE located USING sbus LOCATION '{five.directory}'")
        spark.sql(f"CREATE TABLE opted USING sbus OPTIONS (journal '{five.directory}', pattern 'hour/*')")
        assert seqs(spark.table("located")) == whole
        found = spark.sql("SELECT key, count(*) FROM opted GROUP BY key ORDER BY key").collect()
        assert [tuple(row) for row in found] == [(f"hour/{i}", 3) for i in range(5)]
        narrow = "SELECT count(*) FROM opted WITH (since = '1970-01-01T01:00', until = '1970-01-01T03:00')"
        assert spark.sql(narrow).collect()[0][0] == 6
        assert spark.read.option("pattern", "hour/1").table("opted").count() == 3
    finally:
        for name in ("located", "opted"):
            spark.sql(f"DROP TABLE IF EXISTS {name}")
    assert len(list_segments(five.directory)) == 5


def test_positions(spark: SparkSession, five: JournalWriter):
    """A read begins and ends at a row or a time of each journal; a row that is not there is an error."""
    positions = {"startingOffsets": json.dumps({five.id: 20}), "endingOffsets": "1970-01-01T02:00:00Z"}
    assert seqs(table(spark, five, **positions)) == list(range(20, 45))
    with pytest.raises(
        PySparkException, match=r"JournalError: the row 111 .* is not there yet: it has the rows 0 to 109"
    ):
        table(spark, five, startingOffsets=json.dumps({five.id: 111})).collect()
    with pytest.raises(PySparkException, match=r"UsageError: .*there is no journal 'other'; those that are read are"):
        table(spark, five, endingOffsets='{"other": 1}')


@pytest.mark.slow
def test_typed_payloads(spark: SparkSession, new_journal: NewJournal):
    """Payloads come as values of a schema; a bad one is kept as it is, with the reason."""
    journal = new_journal()
    journal.append_gap(Kind.START, {})
    journal.append([(b"a", b'{"t": 1.5, "tags": ["x"]}'), (b"a", b"broken"), (b"a", b'{"t": 2}')])
    journal.close()
    typed = {"payloadFormat": "json", "payloadSchema": "t DOUBLE, tags ARRAY<STRING>"}
    frame = table(spark, journal, **typed).orderBy("seq")
    assert [tuple(row) for row in frame.select("value.t", "value.tags", "payload", "problem").collect()] == [
        (None, None, b"{}", None),
        (1.5, ["x"], b'{"t": 1.5, "tags": ["x"]}', None),
        (None, None, b"broken", "not JSON: JSON is malformed: invalid character (byte 0)"),
        (2.0, None, b'{"t": 2}', None),
    ]
    columns = "value STRUCT<t: DOUBLE>, key STRING"
    assert table(spark, journal, columns=columns, payloadFormat="json", pattern="a").count() == 3
    text = table(spark, journal, payloadFormat="text", gaps="false").select("value").orderBy("seq")
    assert text.collect()[1].value == "broken"
    with pytest.raises(PySparkException, match=r"UsageError: .*give the fields of the payloads with payloadSchema"):
        table(spark, journal, payloadFormat="json")


@pytest.mark.slow
def test_payloads_of_messagepack(spark: SparkSession, new_journal: NewJournal):
    """MessagePack comes as values of a schema, with binary data and times of its own; a payload that is none, or of
    another type, is kept as it is, with the reason.
    """
    journal = new_journal()
    journal.append_gap(Kind.START, {})
    at = datetime(2026, 1, 31, 12, tzinfo=UTC)
    good = msgpack.encode({"t": 1.5, "raw": b"\0\xff", "at": at, "tags": ["x", None]})
    wrong = msgpack.encode({"t": "warm"})
    journal.append([(b"a", payload) for payload in (good, good[:-1], wrong, b"\xc1", msgpack.encode({"t": 2}))])
    journal.close()
    typed = {"payloadFormat": "msgpack", "payloadSchema": "t DOUBLE, raw BINARY, at TIMESTAMP, tags ARRAY<STRING>"}
    frame = table(spark, journal, gaps="false", **typed).orderBy("seq")
    found = frame.selectExpr("value.*", "payload", "problem").collect()
    assert [row.payload for row in found[:4]] == [good, good[:-1], wrong, b"\xc1"]
    first, *bad, last = found
    assert (first.t, first.raw, first.at.astimezone(UTC), first.tags) == (1.5, b"\0\xff", at, ["x", None])
    assert (last.t, last.raw, last.problem, first.problem) == (2.0, None, None, None)
    assert all((row.t, row.raw, row.at, row.tags) == (None, None, None, None) for row in bad)
    problems = [row.problem for row in bad]
    assert [problem.startswith("not MessagePack: ") for problem in problems] == [True, False, True]
    assert problems[1] == "Expected `float | null`, got `str` - at `$.t`"


def test_payloads_of_any_table(spark: SparkSession):
    """`decode` does the same for a column of any table; null stays null."""
    rows = [(1, msgpack.encode({"the t": 1.5})), (2, msgpack.encode({"the t": "warm"})), (3, None)]
    frame = spark.createDataFrame(rows, "n INT, payload BINARY")
    found = frame.select("n", decode("payload", "`the t` DOUBLE", format="msgpack").alias("found")).orderBy("n")
    assert [tuple(row) for row in found.select("found.value.the t", "found.problem").collect()] == [
        (1.5, None),
        (None, "Expected `float | null`, got `str` - at `$.the t`"),
        (None, None),
    ]
    with pytest.raises(UsageError, match="format='text': use json or msgpack"):
        decode("payload", "t DOUBLE", format="text")


@pytest.mark.slow
def test_wrong_options(spark: SparkSession, five: JournalWriter):
    """A wrong option or a missing journal fails at load(), for tables and streams."""
    with pytest.raises(PySparkException, match=r"sbus\.errors\.UsageError: .*no option 'patern'.*did you mean pattern"):
        spark.read.format("sbus").options(journal=five.directory, patern="a").load()
    with pytest.raises(PySparkException, match=r"sbus\.errors\.JournalMissing: /none: this is no journal"):
        spark.readStream.format("sbus").options(journal="/none").load()


@pytest.mark.slow
def test_a_segment_of_another_journal(spark: SparkSession, new_journal: NewJournal):
    """A segment that belongs to another journal fails the query, with its name."""
    one, other = new_journal("one"), new_journal("other")
    for journal in (one, other):
        journal.append([(b"k", b"")], 0)
        journal.close()
    segment = list_segments(one.directory)[0]
    for suffix in (".arrows", ".idx", ".json"):
        shutil.copy(list_segments(other.directory)[0].path(suffix), segment.path(suffix))
    with pytest.raises(
        PySparkException, match=rf"JournalError: {segment.path()}: a segment of another schema or journal"
    ):
        table(spark, one).collect()
