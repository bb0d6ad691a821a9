"""Publishing Arrow batches to a real bus, without a session of Spark: order, text and bytes, and errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, DataType, LongType, StringType, StructType

from sbus.errors import ConnectError, InvalidKey, PacketTooLong, UsageError
from sbus.spark.datasource.options import WriteOptions
from sbus.spark.datasource.source import SbusDataSource
from sbus.spark.datasource.writer import SbusStreamWriter, SbusWriter, publish, table_columns
from sbus.testing import RunningBus, running_bus


@pytest.fixture(scope="module")
def running() -> Iterator[RunningBus]:
    with running_bus() as bus:
        yield bus


def columns(**types: DataType) -> StructType:
    schema = StructType()
    for name, kind in types.items():
        schema = schema.add(name, kind)
    return schema


def batch(keys: list[Any], payloads: list[Any], kind: pa.DataType | None = None) -> pa.RecordBatch:
    kind = kind or pa.binary()
    return pa.RecordBatch.from_arrays([pa.array(keys, kind), pa.array(payloads, kind)], names=["key", "payload"])


def test_order_and_count(running: RunningBus):
    """All rows of all batches arrive in order before the task ends, and are counted."""
    sent = [(b"k/%d" % (i % 7), b"%d" % i) for i in range(3000)]
    thirds = [sent[at : at + 1000] for at in range(0, 3000, 1000)]
    batches = [batch([key for key, _ in third], [payload for _, payload in third]) for third in thirds]
    with running.connect() as bus:
        bus.subscribe(b"k/")
        bus.fence(5)
        assert publish(WriteOptions(running.address), iter(batches)).messages == 3000
        assert [tuple(bus.receive(5)) for _ in sent] == sent


def test_text(running: RunningBus):
    r"""Text is UTF-8; in keys, and in keys alone, \xNN stands for any other byte, as it does when they are read."""
    keys, payloads = ["ä/b", r"\xff\x5c", r"\xff\x5c", ""], ["ü", r"\xff", "", "\0"]
    with running.connect() as bus:
        bus.subscribe(b"")
        bus.fence(5)
        publish(WriteOptions(running.address), iter([batch(keys, payloads, pa.utf8())]))
        expected = [("ä/b".encode(), "ü".encode()), (b"\xff\\", rb"\xff"), (b"\xff\\", b""), (b"", b"\0")]
        assert [tuple(bus.receive(5)) for _ in keys] == expected


def test_ids(sbus_bus: RunningBus):
    """An id is the last segment of the key; a task that is run again sends the same keys again."""
    rows = pa.RecordBatch.from_pydict({"n": ["1", "2"], "payload": ["x", "y"], "key": ["a/b", "c"]})
    sent = [(b"a/b/1", b"x"), (b"c/2", b"y")]
    with sbus_bus.connect() as bus:
        bus.subscribe(b"")
        bus.fence(5)
        for _ in range(2):
            publish(WriteOptions(sbus_bus.address, id="n"), iter([rows]))
        assert [tuple(bus.receive(5)) for _ in range(4)] == sent * 2


@pytest.mark.parametrize(
    ("id_", "dialect", "words"),
    [
        (None, "current", "the column n is NULL in 1 of 1 rows.*give each row an id that is the same when"),
        ("", "current", "the column n has '', which is not one segment"),
        ("a/b", "current", r"the column n has 'a/b'.*use ids without '/', such as replace\(n, '/', '-'\)"),
        ("a.b", "early", r"use ids without '\.'"),
    ],
)
def test_wrong_ids(sbus_bus: RunningBus, id_: str | None, dialect: str, words: str):
    """An id that is not one segment of a key is refused with the remedy."""
    rows = pa.RecordBatch.from_pydict({"key": ["a"], "payload": ["x"], "n": pa.array([id_], pa.utf8())})
    with pytest.raises(UsageError, match=words):
        publish(WriteOptions(sbus_bus.address, id="n", dialect=dialect), iter([rows]))


def test_nothing_to_publish():
    """A partition without rows needs no bus."""
    assert publish(WriteOptions("/nowhere"), iter([])).messages == 0


REFUSED = [
    (batch([b"a", None], [b"", b""]), UsageError, "key is NULL in 1 of 2 rows.*where key IS NOT NULL"),
    (batch([b"a", b"b"], [None, None]), UsageError, r"payload is NULL in 2 of 2 rows.*coalesce\(payload"),
    (batch(["a\\b"], ["x"], pa.utf8()), UsageError, "a backslash in a key"),
    (batch([b"a\0b"], [b""]), InvalidKey, "contains a NUL"),
    (batch([b"!/x"], [b""]), InvalidKey, "'!' is reserved"),
    (batch([b"a"], [b"p" * 500_000]), PacketTooLong, "500006 bytes"),
]


@pytest.mark.parametrize(("refused", "error", "words"), REFUSED, ids=[words[:20] for _, _, words in REFUSED])
def test_what_cannot_be_published(running: RunningBus, refused: pa.RecordBatch, error: type[Exception], words: str):
    """A row that cannot be sent fails the task with the reason, and nothing of its batch is sent."""
    with running.connect() as bus:
        bus.subscribe(b"")
        bus.fence(5)
        with pytest.raises(error, match=words):
            publish(WriteOptions(running.address), iter([batch([b"first"], [b"1"]), refused]))
        bus.publish(b"ours")  # in no order with what others publish
        assert {bus.receive(5).key for _ in range(2)} == {b"first", b"ours"}
        bus.fence(5)
        assert bus.get_ready() == []


def test_no_bus():
    """Without a bus the task fails, with the remedy."""
    with pytest.raises(ConnectError, match=r"no bus at /nowhere: .*start one"):
        publish(WriteOptions("/nowhere"), iter([batch([b"a"], [b""])]))


KEY_AND_PAYLOAD = columns(key=StringType(), payload=StringType())
WRONG = [
    (columns(key=StringType()), "there is no column payload"),
    (columns(payload=StringType(), key=BinaryType(), kind=StringType()), r"kind cannot be.*select\('key', 'payload'\)"),
    (columns(key=LongType(), payload=StringType()), r"the column key is bigint.*CAST\(key AS STRING\)"),
]


@pytest.mark.parametrize("writer", [SbusWriter, SbusStreamWriter])
@pytest.mark.parametrize(("schema", "words"), WRONG, ids=[words[:20] for _, words in WRONG])
def test_wrong_columns(writer: Callable[..., Any], schema: StructType, words: str):
    """Columns that cannot be published are refused with the remedy, before anything is sent."""
    with pytest.raises(UsageError, match=words):
        writer(WriteOptions("/nowhere"), schema, False)


def test_the_column_of_ids():
    """The column that the option id names has to be there, and is a column of a table that publishes."""
    options = WriteOptions("/nowhere", id="n")
    with pytest.raises(UsageError, match="there is no column n: publish the columns key and payload and n alone"):
        SbusWriter(options, KEY_AND_PAYLOAD, False)
    with pytest.raises(UsageError, match=r"n cannot be sent.*the option id names a column of ids"):
        SbusWriter(WriteOptions("/nowhere"), columns(key=StringType(), payload=StringType(), n=StringType()), False)
    assert table_columns(options).fieldNames() == ["key", "payload", "n"]


def test_columns_of_other_tables():
    """What a column still has of the table that it was read from is no option of a write; what a table to publish to
    has is, below what the write says itself.
    """
    journal, bus = ({"comment": f"sbus {json.dumps(options)}"} for options in ({"journal": "/j"}, {"socket": "/table"}))
    schema = StructType().add("payload", StringType())
    read, table = (StructType(schema.fields[:]).add("key", StringType(), True, each) for each in (journal, bus))
    assert SbusDataSource({"socket": "/s"}).writer(read, False).options == WriteOptions("/s")
    assert SbusDataSource({"Socket": "/s"}).writer(table, False).options == WriteOptions("/s")
    assert SbusDataSource({}).writer(table, False).options == WriteOptions("/table")
    with pytest.raises(UsageError, match="the option socket"):
        SbusDataSource({}).writer(read, False)


def test_modes():
    """Only modes that append are accepted, because published messages cannot be overwritten."""
    schema = columns(payload=StringType(), key=BinaryType())
    with pytest.raises(UsageError, match=r"mode\('append'\)"):
        SbusWriter(WriteOptions("/nowhere"), schema, True)
    with pytest.raises(UsageError, match=r"outputMode\('append'\)"):
        SbusStreamWriter(WriteOptions("/nowhere"), schema, True)
