"""Payloads as typed values: what is taken, what is a problem, and which types there are."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
    VariantType,
)

from sbus.errors import UsageError
from sbus.spark.datasource.payloads import PayloadParser

READING = StructType().add("t", DoubleType()).add("unit", StringType()).add("n", IntegerType())


def parsed(format_: str, type_: DataType, *payloads: bytes) -> list[tuple[Any, str | None]]:
    parser = PayloadParser(format_, type_)
    values, problems = parser.parse(pa.array(payloads, pa.binary()), pa.array([True] * len(payloads)))
    return list(zip(values.to_pylist(), problems.to_pylist(), strict=True))


def test_json():
    """Fields by name: missing ones are null, others are ignored; a whole number may be a fraction."""
    assert parsed("json", READING, b'{"t": 1.5, "unit": "C", "n": 2, "more": []}', b'{"t": 3}', b"null") == [
        ({"t": 1.5, "unit": "C", "n": 2}, None),
        ({"t": 3.0, "unit": None, "n": None}, None),
        (None, None),
    ]


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        (b"", "not JSON: Expecting value"),
        (b'{"t": 1', "not JSON: Expecting"),
        (b"\xff", "not UTF-8: byte 0 is 0xff"),
        (b'{"t": NaN}', "not JSON: NaN"),
        (b'{"t": "1"}', "t: '1' is not a number"),
        (b'{"t": true}', "t: True is not a number"),
        (b'{"unit": 5}', "unit: 5 is not a text"),
        (b'{"n": 1.5}', "n: 1.5 is not a whole number"),
        (b'{"n": 4294967296}', "n: 4294967296 is out of range"),
        (b"[1]", "[1] is not an object"),
        (b'{"unit": "\\ud800"}', "unit: 'utf-8' codec can't encode"),
        (b"[" * 100_000, "recursion"),
        (b"9" * 5_000, "Exceeds the limit"),
        (b'{"t": ' + b"1" * 400 + b"}", "t: int too large to convert to float"),
    ],
)
def test_problems(payload: bytes, problem: str):
    """A payload of another form has no value, and a reason of one short line; its neighbours are not affected."""
    good = b'{"n": 1}'
    first, bad, last = parsed("json", READING, good, payload, good)
    assert first == last == ({"t": None, "unit": None, "n": 1}, None)
    assert bad[0] is None
    assert bad[1] is not None
    assert problem in bad[1]
    assert len(bad[1]) <= 200


TYPES: list[tuple[DataType, str, Any]] = [
    (LongType(), "9223372036854775807", 2**63 - 1),
    (ByteType(), "-128.0", -128),
    (BooleanType(), "true", True),
    (StringType(), '"ü"', "ü"),
    (BinaryType(), '"AP8="', b"\0\xff"),
    (DateType(), '"2026-01-31"', date(2026, 1, 31)),
    (TimestampType(), '"2026-01-31T12:00:00+01:00"', datetime(2026, 1, 31, 11, tzinfo=UTC)),
    (TimestampType(), '"2026-01-31 12:00"', datetime(2026, 1, 31, 12, tzinfo=UTC)),
    (DecimalType(5, 2), "123.456", Decimal("123.46")),
    (DecimalType(5, 2), '"999.99"', Decimal("999.99")),
    (ArrayType(IntegerType()), "[1, null, 3]", [1, None, 3]),
    (MapType(StringType(), DoubleType()), '{"a": 1, "b": null}', [("a", 1.0), ("b", None)]),
    (StructType().add("a", StructType().add("b", ArrayType(StringType()))), '{"a": {"b": ["c"]}}', {"a": {"b": ["c"]}}),
]


@pytest.mark.parametrize(("type_", "text", "value"), TYPES, ids=[each.simpleString() for each, _, _ in TYPES])
def test_types(type_: DataType, text: str, value: Any):
    """Each type of Spark that JSON can express."""
    assert parsed("json", type_, text.encode()) == [(value, None)]


@pytest.mark.parametrize(
    ("type_", "text"),
    [
        (DecimalType(5, 2), "1000"),
        (DecimalType(5, 2), '"NaN"'),
        (DecimalType(5, 2), '"x"'),
        (BinaryType(), '"%"'),
        (DateType(), '"31.1.2026"'),
        (TimestampType(), "5"),
        (ArrayType(IntegerType()), "{}"),
        (MapType(StringType(), DoubleType()), '{"a": "b"}'),
    ],
)
def test_wrong_values(type_: DataType, text: str):
    """A value that the type does not have is a problem."""
    [(value, problem)] = parsed("json", type_, text.encode())
    assert value is None
    assert problem


def test_text():
    """Text is UTF-8."""
    assert parsed("text", StringType(), "größe".encode(), b"", b"a\xffb") == [
        ("größe", None),
        ("", None),
        (None, "not UTF-8: byte 1 is 0xff"),
    ]


def test_msgpack():
    """MessagePack has binary data and times of its own; what follows a value is a problem."""
    msgpack = pytest.importorskip("msgpack")
    time = datetime(2026, 1, 31, 12, tzinfo=UTC)
    kind = StructType().add("raw", BinaryType()).add("at", TimestampType()).add("n", LongType())
    good = msgpack.packb({"raw": b"\0\xff", "at": time, "n": 7}, datetime=True)
    found = parsed("msgpack", kind, good, good + b"\0", good[:-1], b"", b"\xc1")
    assert found[0] == ({"raw": b"\0\xff", "at": time, "n": 7}, None)
    assert all(value is None and problem and problem.startswith("not MessagePack: ") for value, problem in found[1:])


def test_rows_that_are_no_messages():
    """A gap has neither a value nor a problem."""
    parser = PayloadParser("json", READING)
    values, problems = parser.parse(pa.array([b"not json", b"{}"]), pa.array([False, True]))
    assert values.to_pylist() == [None, {"t": None, "unit": None, "n": None}]
    assert problems.to_pylist() == [None, None]


@pytest.mark.parametrize("type_", [VariantType(), MapType(IntegerType(), StringType())])
def test_impossible_types(type_: DataType):
    """A type that no payload can have is refused before anything is read."""
    with pytest.raises(UsageError, match="a payload cannot be of the type"):
        PayloadParser("json", StructType().add("a", type_))
    with pytest.raises(UsageError, match="the column value is STRING"):
        PayloadParser("text", LongType())


@given(
    st.one_of(
        st.binary(max_size=30),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["t", "unit", "n"]), inner, max_size=3)
            ),
            max_leaves=5,
        ).map(lambda value: json.dumps(value).encode()),
    )
)
def test_every_payload_has_a_value_or_a_problem(payload: bytes):
    """For any bytes, nothing is raised, and only JSON's null has neither a value nor a problem."""
    for format_, type_ in (("json", READING), ("msgpack", READING), ("text", StringType())):
        if format_ == "msgpack":
            pytest.importorskip("msgpack")
        [(value, problem)] = parsed(format_, type_, payload)
        assert value is None or problem is None
        assert value is not None or problem or payload.strip() in (b"null", b"\xc0")
