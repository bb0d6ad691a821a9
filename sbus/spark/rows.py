"""The message in a row of a journal, as expressions of Spark."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.types import DataType, StructType

from sbus.errors import UsageError
from sbus.journal.schema import MESSAGES, Kind
from sbus.spark.datasource.payloads import FORMATS, PROBLEM, VALUE, PayloadParser

__all__ = ["decode", "is_message", "payload_size"]


def decode(payload: Column | str, schema: str, *, format: str = "json") -> Column:
    """Return payloads as values, for rows of a lake or of any other table; a read of journals has ``payloadFormat``.

    :param payload: the column, or its name; of rows of the kind ``message``, because a digest is JSON, too.
    :param schema: the fields of the values, in Spark's DDL, such as ``temperature DOUBLE, unit STRING``.
    :param format: ``json`` or ``msgpack``.
    :returns: a STRUCT of ``value``, null for a payload that does not have this form, and ``problem``, which says why.
    :raises sbus.errors.UsageError: if the format or the type is not possible, or msgspec is not installed.
    """
    if format not in FORMATS or format == "text":
        raise UsageError(f"format={format!r}: use json or msgpack")
    type_: DataType = StructType.fromDDL(schema)
    PayloadParser(format, type_)  # raises if the type is not possible

    def decoded(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
        parser = PayloadParser(format, type_)
        for payloads in batches:
            yield pa.StructArray.from_arrays(parser.parse(payloads, payloads.is_valid()), [VALUE, PROBLEM])

    result = f"struct<{VALUE}: struct<{schema}>, {PROBLEM}: string>"
    values: Column = arrow_udf(decoded, result)(payload)  # type: ignore[call-overload]  # it reads the hints
    return values


def is_message() -> Column:
    """Whether a row is a message, with its payload or with a digest of it."""
    return F.col("kind").isin(*sorted(MESSAGES))


def payload_size() -> Column:
    """The bytes in the payload of a message, as the bus delivered it."""
    stated = F.get_json_object(F.col("payload").cast("string"), "$.length").try_cast("bigint")
    return F.when(F.col("kind") == Kind.DIGEST.value, stated).otherwise(F.length("payload").cast("bigint"))
