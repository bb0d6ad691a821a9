"""What a query wants of a journal: which segments and batches can hold any of it, and which rows of a batch it is.

Spark hands over the conditions of a query that concern one column each. Those that are understood here are applied
here, exactly, and need not be checked by Spark again; so rows that are not wanted never leave Arrow. The others go
back to Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
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
from sbus.journal.keytext import as_text_array, from_text
from sbus.journal.schema import KINDS, Kind
from sbus.journal.summary import Summary
from sbus.protocol.keys import Dialect, matches_open

__all__ = ["Range", "RowFilter"]

_DISTINCT = ("journal", "kind", "key")
"""Columns whose conditions are checked once for each value that occurs."""
_TYPES: dict[str, tuple[type, ...]] = {
    "journal": (str,),
    "seq": (int,),
    "time": (datetime,),
    "kind": (str,),
    "key": (str, bytes),
    "payload": (bytes,),
}
_KNOWN_KEYS = 100_000
"""Keys of which it is remembered whether the pattern matches them."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_COMPARE: dict[type[Filter], Callable[[pa.Array, Any], pa.Array]] = {
    EqualTo: pc.equal,
    EqualNullSafe: pc.equal,
    GreaterThan: pc.greater,
    GreaterThanOrEqual: pc.greater_equal,
    LessThan: pc.less,
    LessThanOrEqual: pc.less_equal,
    StringStartsWith: lambda array, value: pc.starts_with(array, value.as_py()),
    StringEndsWith: lambda array, value: pc.ends_with(array, value.as_py()),
    StringContains: lambda array, value: pc.match_substring(array, value.as_py()),
}


@dataclass(frozen=True, slots=True)
class Range:
    """Whole numbers from `first` to `last`, both included; None: without bound."""

    first: int | None = None
    last: int | None = None

    def intersect(self, first: int | None, last: int | None) -> Range:
        """The part of it that is in another range, too."""
        bounds = [bound for bound in (self.first, first) if bound is not None]
        ends = [end for end in (self.last, last) if end is not None]
        return Range(max(bounds, default=None), min(ends, default=None))


@dataclass(slots=True)
class RowFilter:
    """What is wanted of the rows.

    :ivar pattern: messages whose keys it does not match are not wanted.
    :ivar gaps: whether rows that are not messages are wanted.
    :ivar raw_keys: whether conditions on keys speak of bytes instead of text.
    :ivar times: µs since 1970 of the rows that can be wanted.
    :ivar seqs: the same for their numbers.
    """

    pattern: bytes | None
    gaps: bool
    raw_keys: bool
    dialect: Dialect
    times: Range = Range()
    seqs: Range = Range()
    conditions: dict[str, list[Filter]] = field(default_factory=dict)
    _matched: dict[bytes, bool] = field(default_factory=dict)

    # --- what a query says -------------------------------------------------------------------

    def push(self, filters: Iterable[Filter]) -> list[Filter]:
        """Take over the conditions of a query.

        :returns: those that are not understood here, and that Spark must check.
        """
        rest = []
        for one in filters:
            column = _column(one)
            if column is None:
                rest.append(one)
                continue
            self.conditions.setdefault(column, []).append(one)
            if column == "time":
                self.times = self.times.intersect(*_bounds(one, _microseconds))
            elif column == "seq":
                self.seqs = self.seqs.intersect(*_bounds(one, int))
        return rest

    @property
    def columns(self) -> list[str]:
        """The columns that must be read to know which rows are wanted."""
        names = list(self.conditions)
        if self.pattern is not None and "key" not in names:
            names.append("key")
        if (self.pattern is not None or not self.gaps) and "kind" not in names:
            names.append("kind")
        return names

    # --- what can be skipped -----------------------------------------------------------------

    def wants_journal(self, journal_id: str) -> bool:
        """Whether any row of this journal can be wanted."""
        return self._holds("journal", pa.array([journal_id]))

    def wants_kind(self, kind: str) -> bool:
        """Whether any row of this kind can be wanted."""
        if kind != Kind.MESSAGE and not (self.gaps and self._keys_hold([b""])):
            return False
        return self._holds("kind", pa.array([str(kind)]))

    def kinds(self) -> frozenset[str] | None:
        """The kinds of rows that can be wanted; None: all."""
        kinds = frozenset(str(kind) for kind in KINDS if self.wants_kind(kind))
        return None if len(kinds) == len(KINDS) else kinds

    @property
    def can_skip_segments(self) -> bool:
        """Whether it pays to look at what is told of closed segments."""
        return self.pattern is not None or not self.gaps or not {"key", "kind"}.isdisjoint(self.conditions)

    def wants_segment(self, told: Summary) -> bool:
        """Whether any row of a closed segment can be wanted."""
        kinds = [kind for kind in told.kinds if self.wants_kind(kind)]
        if kinds != [Kind.MESSAGE]:
            return bool(kinds)
        if told.keys is not None:
            return self.wants_keys(told.keys)
        if told.min_key is None or told.max_key is None:
            return True
        return self.wants_keys_between(told.min_key, told.max_key)

    def wants_keys(self, keys: Sequence[bytes]) -> bool:
        """Whether a message with one of these keys can be wanted."""
        return bool(pc.any(self._match(keys)).as_py()) if keys else False

    def wants_keys_between(self, least: bytes, greatest: bytes) -> bool:
        """Whether a message whose key is not less than one and not greater than the other can be wanted."""
        conditions = [_beginnings(one, self.raw_keys) for one in self.conditions.get("key", ())]
        if self.pattern is not None:
            literal, star, _ = self.pattern.partition(b"*")
            below = star or not literal or literal.endswith(self.dialect.separator)
            conditions.append([(literal, not below)])
        return all(
            alternatives is None
            or any(
                least <= key <= greatest if exact else least[: len(key)] <= key <= greatest
                for key, exact in alternatives
            )
            for alternatives in conditions
        )

    def _match(self, keys: Sequence[bytes]) -> pa.Array:
        return pc.and_(self._key_mask(pa.array(keys, pa.binary())), self._pattern_mask(keys))

    def _keys_hold(self, keys: Sequence[bytes]) -> bool:
        return bool(pc.any(self._key_mask(pa.array(keys, pa.binary()))).as_py())

    def _holds(self, column: str, values: pa.Array) -> bool:
        return bool(pc.any(_mask(self.conditions.get(column, ()), values)).as_py())

    # --- which rows --------------------------------------------------------------------------

    def filter(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of a batch that are wanted.

        :param batch: with at least the `columns`, as they are in a journal, or keys as a dictionary of bytes.
        """
        masks = [self._column_mask(name, batch.column(name)) for name in self.conditions if name != "key"]
        if "key" in self.conditions:
            keys = _encoded(batch.column("key"))
            masks.append(self._key_mask(keys.dictionary).take(keys.indices))
        if self.pattern is not None or not self.gaps:
            masks.append(self._rows(batch))
        for mask in masks:
            if not mask.true_count:
                return batch.slice(0, 0)
        masks = [mask for mask in masks if mask.true_count < len(mask)]
        if not masks:
            return batch
        whole = masks[0]
        for mask in masks[1:]:
            whole = pc.and_(whole, mask)
        return batch.filter(whole)

    def _rows(self, batch: pa.RecordBatch) -> pa.Array:
        """The messages that the pattern matches, and the gaps, if they are wanted."""
        kinds = _encoded(batch.column("kind"))
        messages = pc.equal(kinds.dictionary, str(Kind.MESSAGE)).take(kinds.indices)
        if self.pattern is None:
            return messages
        keys = _encoded(batch.column("key"))
        matched = pc.and_(messages, self._pattern_mask(keys.dictionary.to_pylist()).take(keys.indices))
        return pc.or_(matched, pc.invert(messages)) if self.gaps else matched

    def _column_mask(self, name: str, values: pa.Array) -> pa.Array:
        if name not in _DISTINCT:
            return _mask(self.conditions[name], values)
        encoded = _encoded(values)
        return _mask(self.conditions[name], encoded.dictionary).take(encoded.indices)

    def _key_mask(self, keys: pa.Array) -> pa.Array:
        conditions = self.conditions.get("key", ())
        return _mask(conditions, keys if self.raw_keys or not conditions else as_text_array(keys))

    def _pattern_mask(self, keys: Sequence[bytes]) -> pa.Array:
        """For each key: does the pattern match it, by the rules of the bus?"""
        pattern = self.pattern
        if pattern is None:
            return pa.repeat(pa.scalar(True), len(keys))
        dialect, known = self.dialect, self._matched
        if len(known) > _KNOWN_KEYS:
            known.clear()
        for key in keys:
            if key not in known:
                known[key] = not dialect.is_secret(key) and matches_open(pattern, key, dialect.separator)
        return pa.array([known[key] for key in keys], pa.bool_())


def _encoded(values: pa.Array) -> pa.DictionaryArray:
    return values if isinstance(values, pa.DictionaryArray) else values.dictionary_encode()


def _column(one: Filter) -> str | None:
    """The column of a condition that is understood here, or None."""
    if isinstance(one, Not):
        return _column(one.child)
    path: Sequence[str] = getattr(one, "attribute", ())
    if len(path) != 1 or path[0] not in _TYPES:
        return None
    if isinstance(one, IsNull | IsNotNull):
        return path[0]
    values = one.value if isinstance(one, In) else (getattr(one, "value", None),)
    if type(one) not in _COMPARE and not isinstance(one, In):
        return None
    if isinstance(one, StringStartsWith | StringEndsWith | StringContains) and path[0] in ("seq", "time"):
        return None
    # A condition on NULL is never true, in ways that Spark knows best.
    if not all(isinstance(value, _TYPES[path[0]]) and not isinstance(value, bool) for value in values):
        return None
    return path[0]


def _mask(conditions: Iterable[Filter], values: pa.Array) -> pa.Array:
    """Where all of the conditions hold."""
    mask = pa.repeat(pa.scalar(True), len(values))
    for one in conditions:
        mask = pc.and_(mask, _evaluate(one, values))
    return mask


def _evaluate(one: Filter, values: pa.Array) -> pa.Array:
    if isinstance(one, Not):
        return pc.invert(_evaluate(one.child, values))
    if isinstance(one, IsNull | IsNotNull):  # nothing in a journal is
        return pa.repeat(pa.scalar(isinstance(one, IsNotNull)), len(values))
    if isinstance(one, In):
        return pc.is_in(values, value_set=pa.array(list(one.value), values.type))
    return _COMPARE[type(one)](values, pa.scalar(one.value, values.type))  # type: ignore[attr-defined]


def _bounds(one: Filter, number: Callable[[Any], int]) -> tuple[int | None, int | None]:
    """Between which numbers all values lie for which the condition can hold."""
    if isinstance(one, EqualTo | EqualNullSafe):
        return number(one.value), number(one.value)
    if isinstance(one, GreaterThan):
        return number(one.value) + 1, None
    if isinstance(one, GreaterThanOrEqual):
        return number(one.value), None
    if isinstance(one, LessThan):
        return None, number(one.value) - 1
    if isinstance(one, LessThanOrEqual):
        return None, number(one.value)
    if isinstance(one, In) and one.value:
        numbers = [number(value) for value in one.value]
        return min(numbers), max(numbers)
    return None, None


def _beginnings(one: Filter, raw_keys: bool) -> list[tuple[bytes, bool]] | None:
    """What keys begin with for which the condition can hold, and whether that is the whole key; None: anything."""
    if isinstance(one, EqualTo | EqualNullSafe | StringStartsWith):
        values: list[Any] = [one.value]
    elif isinstance(one, In):
        values = list(one.value)
    else:
        return None
    try:
        keys = [value if raw_keys else from_text(value) for value in values]
    except UsageError:  # the text of no key, but perhaps the beginning of one
        return None
    return [(key, not isinstance(one, StringStartsWith)) for key in keys]


def _microseconds(time: datetime) -> int:
    return (time - _EPOCH) // timedelta(microseconds=1)
