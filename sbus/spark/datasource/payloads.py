"""Payloads as typed values: ``payloadFormat`` is ``json``, ``msgpack`` or ``text``.

The columns ``value`` and ``problem`` join those of a journal. A payload that has the format and the type of ``value``
is there as a value, and ``problem`` is null. Of any other, ``value`` is null and ``problem`` says why; the column
``payload`` has every payload as it was published. So one bad message spoils neither a query nor itself. Rows of
other kinds than messages have neither a value nor a problem.

Types are checked strictly, because a guess would hide what is wrong: text is not a number, nor a number text. A whole
number may stand for a fraction; dates, times and decimals may be text; binary data in JSON is Base64, as `to_json`
writes it. A field that is missing is null, and one that the type does not have is ignored, so that publishers can add
fields.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import NoReturn, cast

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from sbus.errors import UsageError

__all__ = ["FORMATS", "PROBLEM", "VALUE", "PayloadParser"]

FORMATS = ("json", "msgpack", "text")
VALUE = "value"
PROBLEM = "problem"

_MAX_REASON = 200
"""Characters of a reason at most."""
_BITS: dict[type[DataType], int] = {ByteType: 8, ShortType: 16, IntegerType: 32, LongType: 64}

Converter = Callable[[object], object]


class PayloadParser:
    """Turns payloads into values of one type.

    :param format_: one of `FORMATS`.
    :param type_: the type of the values.
    :raises sbus.errors.UsageError: if the type is not possible, or MessagePack is not installed.
    """

    def __init__(self, format_: str, type_: DataType) -> None:
        if format_ == "text" and not isinstance(type_, StringType):
            raise UsageError(
                f"format('sbus'): payloadFormat='text': the column value is STRING, not {type_.simpleString().upper()}"
            )
        self._decode = _DECODERS[format_]()
        self._convert = _converter(type_)
        self._type = to_arrow_type(type_, timezone="UTC")
        self._is_text = format_ == "text"

    def parse(self, payloads: pa.Array, is_message: pa.Array) -> tuple[pa.Array, pa.Array]:
        """Return the values and the problems of payloads.

        :param is_message: of which rows the payload is one of a message.
        """
        values: list[object] = []
        problems: list[str | None] = []
        for payload, wanted in zip(payloads.to_pylist(), is_message.to_pylist(), strict=True):
            value, problem = self._parse_one(payload) if wanted else (None, None)
            values.append(value)
            problems.append(problem)
        return pa.array(values, self._type), pa.array(problems, pa.string())

    def _parse_one(self, payload: bytes) -> tuple[object, str | None]:
        try:
            return self._convert(self._decode(payload)), None
        except (ValueError, OverflowError, RecursionError, InvalidOperation) as error:
            return None, (str(error) or type(error).__name__)[:_MAX_REASON]


# --- formats --------------------------------------------------------------------------------------


def _text() -> Callable[[bytes], object]:
    return _decode_text


def _decode_text(payload: bytes) -> str:
    try:
        return payload.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {error.start} is {payload[error.start]:#04x}") from None


def _json() -> Callable[[bytes], object]:
    def constant(name: str) -> NoReturn:
        raise ValueError(f"not JSON: {name}")

    def decode(payload: bytes) -> object:
        try:
            return cast("object", json.loads(_decode_text(payload), parse_constant=constant))
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error}") from None

    return decode


def _msgpack() -> Callable[[bytes], object]:
    try:
        import msgpack
    except ImportError:
        raise UsageError(
            "format('sbus'): payloadFormat='msgpack' needs the package msgpack here and on the executors: "
            "pip install msgpack"
        ) from None

    def decode(payload: bytes) -> object:
        try:
            return cast("object", msgpack.unpackb(payload, timestamp=3))
        except (ValueError, msgpack.UnpackException) as error:
            raise ValueError(f"not MessagePack: {error or type(error).__name__}") from None

    return decode


_DECODERS: dict[str, Callable[[], Callable[[bytes], object]]] = {"json": _json, "msgpack": _msgpack, "text": _text}


# --- types ----------------------------------------------------------------------------------------


def _converter(type_: DataType) -> Converter:
    """Return the function that checks a decoded value, and returns what Arrow takes; null stays null."""
    convert = _required(type_)
    return lambda value: None if value is None else convert(value)


def _required(type_: DataType) -> Converter:
    if isinstance(type_, StructType):
        return _struct(type_)
    if isinstance(type_, ArrayType):
        return _array(type_)
    if isinstance(type_, MapType) and isinstance(type_.keyType, StringType):
        return _map(type_)
    if isinstance(type_, DecimalType):
        return _decimal(type_)
    for whole, bits in _BITS.items():
        if isinstance(type_, whole):
            return _integer(bits)
    for simple, convert in _SIMPLE.items():
        if isinstance(type_, simple):
            return convert
    raise UsageError(f"format('sbus'): a payload cannot be of the type {type_.simpleString().upper()}")


def _struct(type_: StructType) -> Converter:
    fields = [(field.name, _converter(field.dataType)) for field in type_]

    def convert(value: object) -> object:
        if not isinstance(value, dict):
            _refuse(value, "an object")
        found = {}
        for name, convert_field in fields:
            try:
                found[name] = convert_field(value.get(name))
            except (ValueError, OverflowError, InvalidOperation) as error:
                raise ValueError(f"{name}: {error}") from None
        return found

    return convert


def _array(type_: ArrayType) -> Converter:
    element = _converter(type_.elementType)

    def convert(value: object) -> object:
        if not isinstance(value, list):
            _refuse(value, "a list")
        return [element(each) for each in value]

    return convert


def _map(type_: MapType) -> Converter:
    element = _converter(type_.valueType)

    def convert(value: object) -> object:
        if not isinstance(value, dict):
            _refuse(value, "an object")
        return [(_string(key), element(each)) for key, each in value.items()]

    return convert


def _decimal(type_: DecimalType) -> Converter:
    unit = Decimal(1).scaleb(-type_.scale)

    def convert(value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            _refuse(value, "a number")
        number = Decimal(str(value))
        if not number.is_finite() or number.quantize(unit).adjusted() >= type_.precision - type_.scale:
            raise ValueError(f"{_shown(value)} is out of range")
        return number.quantize(unit)

    return convert


def _integer(bits: int) -> Converter:
    limit = 1 << bits - 1

    def convert(value: object) -> object:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            _refuse(value, "a whole number")
        if not -limit <= value < limit:
            raise ValueError(f"{_shown(value)} is out of range")
        return value

    return convert


def _float(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse(value, "a number")
    return float(value)


def _boolean(value: object) -> object:
    return value if isinstance(value, bool) else _refuse(value, "true or false")


def _string(value: object) -> object:
    if not isinstance(value, str):
        _refuse(value, "a text")
    value.encode()  # JSON can have half of a surrogate pair, which no text of Spark can
    return value


def _binary(value: object) -> object:
    if isinstance(value, str):
        return base64.b64decode(value, validate=True)
    return value if isinstance(value, bytes) else _refuse(value, "binary data")


def _timestamp(value: object) -> object:
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    if not isinstance(value, datetime):
        _refuse(value, "a time, such as 2026-01-31T12:00:00Z")
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def _date(value: object) -> object:
    return date.fromisoformat(value) if isinstance(value, str) else _refuse(value, "a date, such as 2026-01-31")


_SIMPLE: dict[type[DataType], Converter] = {
    StringType: _string,
    BooleanType: _boolean,
    FloatType: _float,
    DoubleType: _float,
    BinaryType: _binary,
    TimestampType: _timestamp,
    DateType: _date,
}


def _refuse(value: object, wanted: str) -> NoReturn:
    raise ValueError(f"{_shown(value)} is not {wanted}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"
