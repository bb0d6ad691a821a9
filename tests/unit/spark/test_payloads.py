"""Payloads as typed values: what is taken, what is a problem, and which types there are."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import msgspec
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
        (b"", "not JSON: Input data was truncated"),
        (b'{"t": 1', "not JSON: Input data was truncated"),
        (b"{} x", "not JSON: JSON is malformed: trailing characters"),
        (b'{"t": NaN}', "not JSON: JSON is malformed"),
        (b'{"unit": "\xff"}', "not JSON: "),  # the rest is msgspec's
        (b'{"unit": "\\ud800"}', "not JSON: "),
        (b'{"more": ' + b"[" * 100_000, "not JSON: maximum recursion depth"),
        (b'{"t": "1"}', "Expected `float | null`, got `str` - at `$.t`"),
        (b'{"t": true}', "Expected `float | null`, got `bool` - at `$.t`"),
        (b'{"unit": 5}', "Expected `str | null`, got `int` - at `$.unit`"),
        (b'{"n": 1.5}', "Expected `float` that's a multiple of 1.0 - at `$.n`"),
        (b'{"n": 4294967296}', "Expected `int` <= 2147483647 - at `$.n`"),
        (b"[1]", "Expected `object | null`, got `array`"),
        (b"9" * 5_000, "Number out of range"),
        (b'{"t": ' + b"1" * 400 + b"}", "Number out of range - at `$.t`"),
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
    (DecimalType(38, 0), f'"{"9" * 38}"', Decimal("9" * 38)),
    (DecimalType(38, 10), f'"-{"9" * 28}.{"9" * 10}"', Decimal(f"-{'9' * 28}.{'9' * 10}")),
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
        (DecimalType(38, 10), f'"{"9" * 28}.{"9" * 11}"'),
        (DecimalType(38, 0), '"1e38"'),
        (DecimalType(5, 2), '"NaN"'),
        (DecimalType(5, 2), '"x"'),
        (BinaryType(), '"%"'),
        (DateType(), '"31.1.2026"'),
        (TimestampType(), "5"),
        (TimestampType(), '"0001-01-01T00:00:00+12:00"'),
        (TimestampType(), '"9999-12-31T23:59:59-12:00"'),
        (ArrayType(IntegerType()), "{}"),
        (MapType(StringType(), DoubleType()), '{"a": "b"}'),
    ],
)
def test_wrong_values(type_: DataType, text: str):
    """A value that the type does not have is a problem."""
    [(value, problem)] = parsed("json", type_, text.encode())
    assert value is None
    assert problem
    assert not problem.startswith("not JSON")


def test_text():
    """Text is UTF-8."""
    assert parsed("text", StringType(), "größe".encode(), b"", b"a\xffb") == [
        ("größe", None),
        ("", None),
        (None, "not UTF-8: 'utf-8' codec can't decode byte 0xff in position 1: invalid start byte"),
    ]


def test_msgpack():
    """MessagePack has binary data and times of its own; what follows a value is a problem."""
    time = datetime(2026, 1, 31, 12, tzinfo=UTC)
    kind = StructType().add("raw", BinaryType()).add("at", TimestampType()).add("n", LongType())
    good = msgspec.msgpack.encode({"raw": b"\0\xff", "at": time, "n": 7})
    found = parsed("msgpack", kind, good, good + b"\0", good[:-1], b"", b"\xc1")
    assert found[0] == ({"raw": b"\0\xff", "at": time, "n": 7}, None)
    assert all(value is None and problem and problem.startswith("not MessagePack: ") for value, problem in found[1:])


def test_rows_that_are_no_messages():
    """A gap has neither a value nor a problem."""
    parser = PayloadParser("json", READING)
    values, problems = parser.parse(pa.array([b"not json", b"{}"]), pa.array([False, True]))
    assert values.to_pylist() == [None, {"t": None, "unit": None, "n": None}]
    assert problems.to_pylist() == [None, None]


NESTED = (
    StructType()
    .add("rows", ArrayType(READING))
    .add("by name", MapType(StringType(), StructType().add("f0", ArrayType(ArrayType(LongType())))))
)
"""Each kind of type in another, and names that are none in Python."""


def or_none(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


def fields(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return or_none(st.fixed_dictionaries({name: or_none(value) for name, value in values.items()}))


NESTED_VALUES = fields(
    rows=st.lists(fields(t=st.floats(allow_nan=False, allow_infinity=False), unit=st.text(), n=st.integers(-5, 5))),
    **{
        "by name": st.dictionaries(
            st.text(max_size=2), fields(f0=st.lists(or_none(st.lists(or_none(st.integers(-5, 5)))))), max_size=3
        )
    },
)


@given(st.lists(NESTED_VALUES, max_size=5))
def test_nested_values(values: list[Any]):
    """Values of any depth come as they were sent, in JSON and in MessagePack, whatever of them is null."""
    expected = [
        value and {**value, "by name": None if value["by name"] is None else [*value["by name"].items()]}
        for value in values
    ]
    for format_, library in (("json", msgspec.json), ("msgpack", msgspec.msgpack)):
        found = parsed(format_, NESTED, *map(library.encode, values))
        assert found == [(value, None) for value in expected]


@pytest.mark.parametrize("type_", [VariantType(), MapType(IntegerType(), StringType()), StructType()])
def test_impossible_types(type_: DataType):
    """A type that no payload can have is refused before anything is read."""
    with pytest.raises(UsageError, match="a payload cannot be of the type"):
        PayloadParser("json", StructType().add("a", type_))
    with pytest.raises(UsageError, match="same name"):
        PayloadParser("json", StructType().add("a", LongType()).add("a", LongType()))
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
        [(value, problem)] = parsed(format_, type_, payload)
        assert value is None or problem is None
        assert value is not None or problem or payload.strip() in (b"null", b"\xc0")
