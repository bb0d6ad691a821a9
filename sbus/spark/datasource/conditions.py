"""The conditions of a query, as far as they help to read less.

Spark hands over those parts of a ``WHERE`` that compare one column with literals, and all of them hold for a row of the
result. Any other condition is ignored: Spark checks each row once more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

from sbus.errors import UsageError
from sbus.journal.clock import from_datetime
from sbus.journal.keytext import as_text, from_text

__all__ = ["Conditions"]

_KNOWN = (
    *(EqualNullSafe, EqualTo, GreaterThan, GreaterThanOrEqual, In, IsNotNull, IsNull, LessThan, LessThanOrEqual),
    *(StringContains, StringEndsWith, StringStartsWith),
)
_NO_LEAST, _NO_GREATEST = -sys.maxsize - 1, sys.maxsize
"""Ends of the numbers of rows, and of times."""


class Conditions:
    """Conditions that hold for each row of a result.

    :param filters: as Spark hands them over.
    :param raw_keys: whether keys come as bytes instead of text.
    """

    def __init__(self, filters: Iterable[Filter] = (), *, raw_keys: bool = False) -> None:
        self._raw_keys = raw_keys
        self._of: dict[str, list[Filter]] = {}
        for condition in filters:
            column = _column(condition)
            if column is not None:
                self._of.setdefault(column, []).append(condition)

    def restrict(self, column: str) -> bool:
        """Return whether a column has conditions."""
        return column in self._of

    def allow(self, column: str, value: Any) -> bool:
        """Return whether a column may have a value; other than that of times."""
        return all(_holds(condition, value) for condition in self._of.get(column, ()))

    def allow_key(self, key: bytes) -> bool:
        """Return whether a row may have a key."""
        return self.allow("key", key if self._raw_keys else as_text(key))

    def may_allow_between(self, least: bytes, greatest: bytes) -> bool:
        """Return whether keys between these two can be allowed."""
        return all(self._reaches(condition, least, greatest) for condition in self._of.get("key", ()))

    def _reaches(self, condition: Filter, least: bytes, greatest: bytes) -> bool:
        match condition:
            case EqualTo(_, value):
                return least <= self._key(value, least) <= greatest
            case In(_, values):
                return any(least <= self._key(value, least) <= greatest for value in values)
            case StringStartsWith(_, text) if "\\" not in text:  # it could end within \xNN
                start = text.encode()
                return least[: len(start)] <= start <= greatest
        return True

    def _key(self, value: Any, unknown: bytes) -> bytes:
        """Return the key for a value in a condition; `unknown` for a value that is none."""
        try:
            return value if isinstance(value, bytes) else from_text(value)
        except UsageError:
            return unknown

    def span(self, column: str) -> tuple[int | None, int | None]:
        """Return the least and the greatest number that a column may have; None: no limit.

        Times are in µs since the epoch.
        """
        ends = [_span(condition) for condition in self._of.get(column, ())]
        least = max((least for least, _ in ends), default=_NO_LEAST)
        greatest = min((greatest for _, greatest in ends), default=_NO_GREATEST)
        return None if least == _NO_LEAST else least, None if greatest == _NO_GREATEST else greatest


def _column(condition: Filter) -> str | None:
    """Return the column of a condition; None if it is not understood."""
    if isinstance(condition, Not):
        return _column(condition.child)
    if isinstance(condition, _KNOWN) and len(condition.attribute) == 1:
        return str(condition.attribute[0])
    return None


def _holds(condition: Filter, value: Any) -> bool | None:
    """Evaluate a condition as SQL does; None stands for NULL."""
    match condition:
        case Not(child):
            holds = _holds(child, value)
            return None if holds is None else not holds
        case IsNull():
            return value is None
        case IsNotNull():
            return value is not None
        case EqualNullSafe(_, other):
            return bool(value == other)
    if value is None:
        return None
    match condition:
        case EqualTo(_, other):
            return bool(value == other)
        case In(_, others):
            return value in others
        case GreaterThan(_, other):
            return bool(value > other)
        case GreaterThanOrEqual(_, other):
            return bool(value >= other)
        case LessThan(_, other):
            return bool(value < other)
        case LessThanOrEqual(_, other):
            return bool(value <= other)
        case StringStartsWith(_, text):
            return bool(value.startswith(text))
        case StringEndsWith(_, text):
            return bool(value.endswith(text))
        case StringContains(_, text):
            return text in value
    return True


def _span(condition: Filter) -> tuple[int, int]:
    """Return the least and the greatest number for which a condition can hold."""
    match condition:
        case EqualTo(_, value) if (number := _number(value)) is not None:
            return number, number
        case In(_, values):
            spans = [_span(EqualTo((), value)) for value in values]
            return min((least for least, _ in spans), default=0), max((most for _, most in spans), default=-1)
        case GreaterThan(_, value) if (number := _number(value)) is not None:
            return number + 1, _NO_GREATEST
        case GreaterThanOrEqual(_, value) if (number := _number(value)) is not None:
            return number, _NO_GREATEST
        case LessThan(_, value) if (number := _number(value)) is not None:
            return _NO_LEAST, number - 1
        case LessThanOrEqual(_, value) if (number := _number(value)) is not None:
            return _NO_LEAST, number
    return _NO_LEAST, _NO_GREATEST


def _number(value: Any) -> int | None:
    """Return a literal as a number; None if it is neither one nor a time with a zone."""
    if isinstance(value, int):
        return value
    if isinstance(value, datetime) and value.tzinfo is not None:
        return from_datetime(value)
    return None
