"""The options of the data source: their meaning, and the errors for wrong ones."""

from __future__ import annotations

import pytest
from pyspark.sql.types import LongType, StringType, StructType

from sbus.errors import UsageError
from sbus.journal.clock import HOUR, now
from sbus.journal.senders import TYPES
from sbus.protocol.keys import EARLY
from sbus.spark.datasource.catalog import recall, remember, table_options
from sbus.spark.datasource.options import ReadOptions, StreamOptions, WriteOptions
from sbus.spark.datasource.positions import EARLIEST, LATEST, Positions
from sbus.spark.datasource.scan import described, schema


def read(**options: str) -> ReadOptions:
    return ReadOptions.parse({"journal": "/j", **options})


def stream(**options: str) -> StreamOptions:
    return StreamOptions.parse({"journal": "/j", **options})


def test_defaults():
    """With only a journal, all rows are read, keys are text, and a stream starts at the first row."""
    assert read() == ReadOptions(journals=("/j",))
    assert stream() == StreamOptions(read=read())


def test_names_in_any_case():
    """Option names are not case-sensitive, because Spark hands them over in lower case."""
    assert read(RAWKEYS="TRUE").raw_keys
    assert read(rawkeys="true").raw_keys
    assert not read(rawKeys="False").raw_keys


def test_publishers_are_read_only_if_asked_for():
    """The columns exist with the option, or if the schema names them."""
    assert described(read()) == schema(raw_keys=False, senders=False)
    assert described(read(senders="true")) == schema(raw_keys=False)
    assert len(schema(raw_keys=False)) == len(schema(raw_keys=False, senders=False)) + len(TYPES)


def test_several_journals():
    """Commas or line breaks separate paths and globs; spaces around them are ignored."""
    assert read(journal="/a, /b/*,\n/c d\n").journals == ("/a", "/b/*", "/c d")


def test_a_pattern_leaves_gaps_out_unless_told():
    """By default, a read with a pattern leaves gaps out and one without it has them; the option gaps overrides that."""
    assert (read().gaps, read(pattern="a/").gaps) == (True, False)
    assert (read(gaps="false").gaps, read(pattern="a/", gaps="true").gaps) == (False, True)


def test_a_pattern_as_text():
    r"""A pattern is written as keys are read: UTF-8, and any other byte as \xNN."""
    assert read(pattern="größe/*").pattern == "größe/*".encode()
    assert read(pattern=r"a\xff\x5c/").pattern == b"a\xff\\/"
    assert read(pattern="").pattern == b""


def test_a_dialect():
    """The dialect decides which patterns are valid."""
    assert read(dialect="early", pattern="a.!.*").dialect is EARLY


@pytest.mark.parametrize(
    ("text", "microseconds"),
    [
        ("1970-01-01", 0),
        ("1970-01-02T00:00:01.5", 86_401_500_000),
        ("1970-01-01 01:00:00+01:00", 0),
        ("1969-12-31T23:59:59.999999Z", -1),
    ],
)
def test_a_starting_time(text: str, microseconds: int):
    """A stream can start at a time in ISO 8601, in UTC unless it has a zone."""
    assert stream(startingOffsets=text).read.start == Positions(microseconds)


def test_times_before_now():
    """A span of time, and where a stream starts, may be told by how long ago that was, as on the command line."""
    options = read(since="-1h", until="-30m")
    assert options.since is not None
    assert options.until is not None
    assert 0 <= now() - options.since - HOUR < HOUR // 60
    assert 0 <= now() - options.until - HOUR // 2 < HOUR // 60
    start = stream(startingOffsets="-1h").read.start.default
    assert isinstance(start, int)
    assert 0 <= start - options.since < HOUR // 60


def test_positions_of_journals():
    """As with Kafka, JSON gives a row for each journal, -2 for its first and -1 for its end; and here also a time."""
    options = read(
        startingOffsets='{"a": 5, "b": -2, "c": "1970-01-01T00:00:01Z"}',
        endingOffsets='{"a": 9, "b": -1, "c": "latest"}',
    )
    assert options.start == Positions(EARLIEST, {"b": EARLIEST, "c": 1_000_000}, {"a": 5})
    assert options.end == Positions(LATEST, {"b": LATEST, "c": LATEST}, {"a": 9})


def test_paths():
    """The argument of load, several of them, and the location of a table stand for the option journal."""
    assert ReadOptions.parse({"path": "/j"}).journals == ("/j",)
    assert ReadOptions.parse({"paths": '["/j", "/k"]'}).journals == ("/j", "/k")
    assert ReadOptions.parse({"path": "file:/j"}).journals == ("/j",)


def test_tables_of_the_catalog():
    """The options of a table are told from its properties; a location is the journal, unless there is that option."""
    said = {"provider": "sbus", "owner": "root", "option.pattern": "a", "pattern": "a"}
    assert table_options({**said, "location": "file:/j"}) == {"path": "file:/j", "pattern": "a"}
    managed = {**said, "location": "file:/warehouse/t", "path": "file:/warehouse/t", "journal": "/j"}
    assert table_options(managed) == {"journal": "/j", "pattern": "a"}
    assert table_options({"path": "/j"}) is None


def test_options_are_kept_with_the_columns():
    """Columns, also as DDL, carry the options of their table; other columns have none."""
    options = {"journal": "/it's\\here", "pattern": "a"}
    columns = StructType().add("seq", LongType()).add("key", StringType())
    kept = remember(columns, options)
    assert isinstance(kept, StructType)
    assert recall(kept) == options
    assert [(column.name, column.dataType) for column in kept] == [("seq", LongType()), ("key", StringType())]
    assert recall(columns) == {}
    ddl = remember("seq bigint, key string", {"journal": "/it's"})
    assert ddl == """seq bigint COMMENT 'sbus {"journal": "/it\\'s"}', key string"""


def test_limits_of_a_stream():
    """The limits and the other options of a stream are parsed."""
    options = stream(startingOffsets="Latest", maxRowsPerTrigger="5", maxBytesPerTrigger="7", failOnDataLoss="false")
    assert options == StreamOptions(read(startingOffsets="latest"), 5, 7, False)


def test_where_to_publish():
    """A write names its bus; Spark's own options, for the checkpoint and the name of a query, are accepted."""
    assert WriteOptions.parse({"socket": "/s", "maxpacket": "1000"}) == WriteOptions("/s", max_packet=1000)
    options = {"socket": "/s", "checkpointlocation": "/c", "queryname": "q", "dialect": "early", "id": "n"}
    assert WriteOptions.parse(options) == WriteOptions("/s", "n", "early")


WRONG = [
    (ReadOptions, {}, "option journal: name the directory"),
    (ReadOptions, {"journal": " , "}, "option journal=' , ': name the directory"),
    (ReadOptions, {"path": "/j", "journal": "/k"}, r"option journal='/k': give it or load\(path\), not both"),
    (
        ReadOptions,
        {"journal": "/j", "patern": "x"},
        "no option 'patern'.*; did you mean pattern\\?; the options are",
    ),
    # What Spark 4.3 does with accepted conditions can give a query the rows of another.
    (
        ReadOptions,
        {"journal": "/j", "pushfilters": "true"},
        "no option 'pushfilters' to read with; the options are: journal, pattern, .*since, until",
    ),
    (ReadOptions, {"journal": "/j", "socket": "/s"}, "no option 'socket' to read with"),
    (ReadOptions, {"journal": "/j", "rawkeys": "yes"}, "option rawKeys='yes': use true or false"),
    (ReadOptions, {"journal": "/j", "dialect": "late"}, "option dialect='late': use 'current' or 'early'"),
    (
        ReadOptions,
        {"journal": "/j", "pattern": "a/!/b"},
        "option pattern='a/!/b': the pattern a/!/b is not allowed: '!' is reserved",
    ),
    (ReadOptions, {"journal": "/j", "pattern": "!/cred////a"}, "secret messages are never recorded"),
    (ReadOptions, {"journal": "/j", "pattern": "a\\b"}, r"write a backslash in a key as \\x5c"),
    (ReadOptions, {"journal": "/j", "partitionbytes": "0"}, "option partitionBytes='0': use a whole number"),
    (ReadOptions, {"journal": "/j", "endingoffsets": '{"a": -3}'}, "use earliest, latest or a time .* JSON object"),
    (ReadOptions, {"journal": "/j", "startingoffsets": '{"a": 1'}, "use earliest, latest or a time .* JSON object"),
    (ReadOptions, {"journal": "/j", "startingoffsets": "-1"}, "startingOffsets='-1': use earliest, latest or a time"),
    (ReadOptions, {"journal": "/j", "since": "1h"}, "since='1h': use a time .* or one before now such as -15m"),
    (ReadOptions, {"journal": "/j", "until": "-9999999d"}, "until='-9999999d': use a time"),
    (ReadOptions, {"journal": "/j", "payloadformat": "xml"}, "payloadFormat='xml': use json, msgpack, text"),
    (ReadOptions, {"journal": "/j", "payloadschema": "a INT"}, "payloadSchema='a INT': this is for payloadFormat json"),
    (ReadOptions, {"journal": "/j", "failondataloss": "false"}, "failOnDataLoss='false': this is for streams"),
    (StreamOptions, {"journal": "/j", "endingoffsets": "latest"}, "no option 'endingoffsets' to stream with"),
    (StreamOptions, {"journal": "/j", "startingoffsets": "soon"}, "startingOffsets='soon': use earliest, latest or a"),
    (StreamOptions, {"journal": "/j", "maxrowspertrigger": "1e6"}, "maxRowsPerTrigger='1e6': use a whole number"),
    (StreamOptions, {"journal": "/j", "maxbytespertrigger": "-1"}, "maxBytesPerTrigger='-1': use a whole number"),
    (WriteOptions, {}, "the option socket: name the bus, such as .*leave out the columns in CREATE TABLE"),
    (WriteOptions, {"socket": "/s", "id": "key"}, "id='key': name a third column"),
    (WriteOptions, {"sockt": "/s"}, "no option 'sockt' to write with; did you mean socket\\?"),
    (WriteOptions, {"path": "/s"}, "no option 'path' to write with; the options are: socket"),
]


@pytest.mark.parametrize(("kind", "options", "words"), WRONG, ids=[words[:30] for _, _, words in WRONG])
def test_wrong_options(kind: type, options: dict[str, str], words: str):
    """The error for a wrong or unknown option names it and the remedy."""
    with pytest.raises(UsageError, match=words):
        kind.parse(options)  # type: ignore[attr-defined]
