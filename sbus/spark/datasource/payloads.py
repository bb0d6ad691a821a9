"""Payloads as typed values: ``payloadFormat`` is ``json``, ``msgpack`` or ``text``.

The columns ``value`` and ``problem`` follow those of a journal. If a payload has the format and the type of ``value``,
its value is there, and ``problem`` is null. Otherwise ``value`` is null, and ``problem`` says why; the column
``payload`` always has it as it was published. So a bad message neither fails a query nor gets lost. Rows that are not
messages have neither a value nor a problem.

Types are strict, because a guess would hide errors: text is not a number, and a number is not text. A whole number may
stand for a fraction, and 2.0 for 2; dates, times and decimals may be text; binary data in JSON is Base64, as `to_json`
writes it. A missing field is null. A field that the type does not have is ignored, so publishers can add fields.

msgspec decodes a payload and checks its type in one step, into an object with a slot for each field. The objects of a
batch become one Arrow array per field, which is several times as fast as an array of dictionaries.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Context, Decimal, InvalidOperation
from itertools import accumulate, chain
from operator import attrgetter
from typing import Annotated, Any, NoReturn

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
from sbus.journal.clock import as_utc, parse

__all__ = ["FORMATS", "PROBLEM", "VALUE", "PayloadParser"]

FORMATS = {"json": "JSON", "msgpack": "MessagePack", "text": "UTF-8"}
"""The formats, and their names in the text of a problem."""
VALUE = "value"
PROBLEM = "problem"

_MAX_REASON = 200
"""Maximum length of a reason, in characters."""
_BITS: dict[type[DataType], int] = {ByteType: 8, ShortType: 16, IntegerType: 32, LongType: 64}
_SIMPLE: dict[type[DataType], type] = {
    StringType: str,
    BooleanType: bool,
    FloatType: float,
    DoubleType: float,
    BinaryType: bytes,
    DateType: date,
}


class PayloadParser:
    """Turns payloads into values of one type.

    :param format_: one of `FORMATS`.
    :param type_: the type of the values.
    :raises sbus.errors.UsageError: if the type is not supported, or msgspec is not installed.
    """

    def __init__(self, format_: str, type_: DataType) -> None:
        if format_ == "text" and not isinstance(type_, StringType):
            raise UsageError(
                f"format('sbus'): payloadFormat='text': the column value is STRING, not {type_.simpleString().upper()}"
            )
        self._format = FORMATS[format_]
        self._decode = bytes.decode if format_ == "text" else _decoder(format_, type_)
        self._type = to_arrow_type(type_, timezone="UTC")

    def parse(self, payloads: pa.Array, is_message: pa.Array) -> tuple[pa.Array, pa.Array]:
        """Return the values and the problems of payloads.

        :param is_message: whether each payload is that of a message.
        """
        decode = self._decode
        values: list[Any] = []
        problems: list[str | None] = [None] * len(payloads)
        for row, (payload, wanted) in enumerate(zip(payloads.to_pylist(), is_message.to_pylist(), strict=True)):
            try:
                values.append(decode(payload) if wanted else None)
            except (ValueError, OverflowError, RecursionError) as error:  # an error of msgspec is a ValueError
                values.append(None)
                problems[row] = self._reason(error)
        return _array(values, self._type), pa.array(problems, pa.string())

    def _reason(self, error: Exception) -> str:
        """Return the problem in one short line: the form of the payload, or the type of its value."""
        is_malformed = type(error).__name__ != "ValidationError"  # a name, because msgspec need not be there for text
        return (f"not {self._format}: {error}" if is_malformed else str(error))[:_MAX_REASON]


def _decoder(format_: str, type_: DataType) -> Callable[[bytes], Any]:
    """Return the function that decodes a payload and checks its type."""
    try:
        import msgspec
    except ImportError:
        raise UsageError(
            f"format('sbus'): payloadFormat={format_!r} needs the package msgspec here and on the executors: "
            "pip install msgspec"
        ) from None

    def optional(type_: DataType) -> Any:
        return required(type_) | None

    def required(type_: DataType) -> Any:
        if isinstance(type_, StructType) and type_.fields:
            fields = [
                (f"f{number}", optional(field.dataType), msgspec.field(default=None, name=field.name))
                for number, field in enumerate(type_)
            ]
            return msgspec.defstruct("Fields", fields, gc=False)
        if isinstance(type_, ArrayType):
            return list[optional(type_.elementType)]  # type: ignore[misc]
        if isinstance(type_, MapType) and isinstance(type_.keyType, StringType):
            return dict[str, optional(type_.valueType)]  # type: ignore[misc]
        if isinstance(type_, TimestampType):
            return _Converted("time", (), {"convert": staticmethod(_timestamp)})
        if isinstance(type_, DecimalType):
            return _Converted("decimal", (), {"convert": staticmethod(_decimal(type_))})
        for kind, bits in _BITS.items():
            if isinstance(type_, kind):
                limit = 1 << bits - 1
                whole = msgspec.Meta(ge=-float(limit), lt=float(limit), multiple_of=1.0)
                return Annotated[int, msgspec.Meta(ge=-limit, le=limit - 1)] | Annotated[float, whole]
        for kind, simple in _SIMPLE.items():
            if isinstance(type_, kind):
                return simple
        raise UsageError(f"format('sbus'): a payload cannot be of the type {type_.simpleString().upper()}")

    library = msgspec.json if format_ == "json" else msgspec.msgpack
    try:
        decoder = library.Decoder(optional(type_), dec_hook=lambda kind, value: kind.convert(value))
    except ValueError as error:  # of fields with the same name
        raise UsageError(f"format('sbus'): {type_.simpleString()}: {error}") from None
    decode: Callable[[bytes], Any] = decoder.decode
    return decode


class _Converted(type):
    """A type for msgspec whose `convert` gets values as they are in the payload."""

    convert: Callable[[object], object]

    def __instancecheck__(cls, value: object) -> bool:
        """Accept whatever `convert` returns."""
        return True


def _timestamp(value: object) -> datetime:
    if isinstance(value, str):
        value = parse(value)
    if not isinstance(value, datetime):
        _refuse(value, "a time, such as 2026-01-31T12:00:00Z")
    try:
        return value if value.tzinfo is UTC else as_utc(value)
    except OverflowError:
        _refuse(value, "a time in the years 1 to 9999 of UTC")


def _decimal(type_: DecimalType) -> Callable[[object], Decimal]:
    unit = Decimal(1).scaleb(-type_.scale)
    context = Context(prec=type_.precision + 1)  # rounding up can add a digit

    def convert(value: object) -> Decimal:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            _refuse(value, "a number")
        try:
            number = Decimal(str(value)).quantize(unit, context=context)
        except InvalidOperation:
            _refuse(value, "a number of this size")
        if not number.is_finite() or number.adjusted() >= type_.precision - type_.scale:
            _refuse(value, "a number of this size")
        return number

    return convert


def _refuse(value: object, wanted: str) -> NoReturn:
    text = repr(value)
    raise ValueError(f"{text if len(text) <= 40 else text[:39] + '…'} is not {wanted}")


def _array(values: list[Any], type_: pa.DataType) -> pa.Array:
    """Return decoded values as an array; a struct is made of one array per field."""
    if pa.types.is_struct(type_):
        names = [f"f{number}" for number in range(type_.num_fields)]
        missing = type("Missing", (), dict.fromkeys(names))
        is_null = [value is None for value in values]
        if any(is_null):
            values = [missing if value is None else value for value in values]
        columns = [
            _array([*map(attrgetter(name), values)], field.type) for name, field in zip(names, type_, strict=True)
        ]
        return pa.StructArray.from_arrays(columns, fields=[*type_], mask=pa.array(is_null, pa.bool_()))
    if pa.types.is_list(type_):
        return pa.ListArray.from_arrays(_offsets(values), _array(_flat(values), type_.value_type), type=type_)
    if pa.types.is_map(type_):
        keys = pa.array(_flat(values), pa.string())
        items = _array(_flat([value and value.values() for value in values]), type_.item_type)
        return pa.MapArray.from_arrays(_offsets(values), keys, items, type=type_)
    return pa.array(values, type_)


def _offsets(values: list[Any]) -> pa.Array:
    """Return the offset of each list's first element, null for a null list, and the end of the last list."""
    ends = accumulate((len(value or ()) for value in values), initial=0)
    starts = [None if value is None else end for value, end in zip([*values, ()], ends, strict=True)]
    return pa.array(starts, pa.int32())


def _flat(values: list[Any]) -> list[Any]:
    return [*chain.from_iterable(value for value in values if value is not None)]
