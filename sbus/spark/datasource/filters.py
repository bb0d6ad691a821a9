"""Select the rows that a read asks for, and skip segments that have none.

A read selects by the options ``pattern``, ``gaps``, ``since`` and ``until``, and by the conditions of a query if Spark
hands them over (`sbus.spark.datasource.reader`). Rows are filtered in Arrow, before they reach Spark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc

from sbus.journal.digests import is_message
from sbus.journal.schema import KINDS, MESSAGES
from sbus.journal.summary import Summary
from sbus.protocol.keys import Dialect, matches_open
from sbus.spark.datasource.conditions import Conditions

__all__ = ["RowFilter"]

_CACHED_KEYS = 100_000
"""Keys for which the filter remembers whether the pattern matches; above that it starts afresh."""


@dataclass(slots=True)
class RowFilter:
    """The rows that a read selects.

    :ivar pattern: select only messages whose keys it matches; None: all messages.
    :ivar gaps: whether to select the rows that are not messages, too.
    :ivar dialect: the rules by which the pattern matches.
    :ivar since: select no rows before this time (µs since the epoch); None: no such limit.
    :ivar until: select no rows at or after this time (µs since the epoch); None: no such limit.
    :ivar conditions: those of the query, beside the above.
    """

    pattern: bytes | None
    gaps: bool
    dialect: Dialect
    since: int | None = None
    until: int | None = None
    conditions: Conditions = field(default_factory=Conditions)
    _matched: dict[bytes, bool] = field(default_factory=dict)

    def narrowed(self, conditions: Conditions) -> RowFilter:
        """Return a filter that also leaves out rows for which the conditions of a query do not hold."""
        least, greatest = conditions.span("time")
        since = [time for time in (self.since, least) if time is not None]
        until = [time for time in (self.until, None if greatest is None else greatest + 1) if time is not None]
        return replace(
            self,
            since=max(since, default=None),
            until=min(until, default=None),
            conditions=conditions,
            _matched={},
        )

    @property
    def columns(self) -> list[str]:
        """The columns of a journal that `filter` needs."""
        names = []
        if self.since is not None or self.until is not None:
            names.append("time")
        if self.pattern is not None or self.kinds is not None:
            names.append("kind")
        if self._selects_keys:
            names.append("key")
        return names

    @property
    def _selects_keys(self) -> bool:
        return self.pattern is not None or self.conditions.restrict("key")

    # --- segments ----------------------------------------------------------------------------

    @property
    def max_time(self) -> int | None:
        """The last time that is selected, in µs since the epoch; None: no limit."""
        return None if self.until is None else self.until - 1

    @property
    def kinds(self) -> frozenset[str] | None:
        """The kinds of rows that can be selected; None: all."""
        kinds = None if self.gaps else MESSAGES
        if not self.conditions.restrict("kind"):
            return kinds
        return frozenset(str(kind) for kind in KINDS if self.gaps or kind in MESSAGES if self._allows_kind(kind))

    def _allows_kind(self, kind: str) -> bool:
        return self.conditions.allow("kind", str(kind))

    @property
    def can_skip_segments(self) -> bool:
        """Whether the summaries of closed segments can rule some of them out."""
        return self._selects_keys or self.kinds is not None

    def may_select(self, summary: Summary) -> bool:
        """Return whether a closed segment can have selected rows, by its kinds and keys."""
        kinds = summary.kinds.keys() if self.kinds is None else summary.kinds.keys() & self.kinds
        if kinds - MESSAGES and self.conditions.allow_key(b""):  # the key of all rows that are not messages
            return True
        if not kinds & MESSAGES:
            return False
        if summary.keys is not None:
            return self.matches_any(summary.keys)
        if summary.min_key is None or summary.max_key is None:
            return True
        return self.may_match_between(summary.min_key, summary.max_key)

    def matches_any(self, keys: Sequence[bytes]) -> bool:
        """Return whether messages with one of these keys can be selected."""
        return any(self._matches(key) and self.conditions.allow_key(key) for key in keys)

    def may_match_between(self, min_key: bytes, max_key: bytes) -> bool:
        """Return whether messages with a key from `min_key` to `max_key` can be selected.

        The beginning of the pattern decides.
        """
        if not self.conditions.may_allow_between(min_key, max_key):
            return False
        if self.pattern is None:
            return True
        literal, star, _ = self.pattern.partition(b"*")
        is_exact = bool(literal) and not star and not literal.endswith(self.dialect.separator)
        return min_key <= literal <= max_key if is_exact else min_key[: len(literal)] <= literal <= max_key

    # --- rows --------------------------------------------------------------------------------

    def filter(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of a batch that are selected.

        :param batch: with at least the `columns`, in the types of a journal.
        """
        selected: pa.Array | None = None
        for mask in self._masks(batch):
            if not mask.true_count:
                return batch.slice(0, 0)
            if mask.true_count < len(mask):
                selected = mask if selected is None else pc.and_(selected, mask)
        return batch if selected is None else batch.filter(selected)

    def _masks(self, batch: pa.RecordBatch) -> Iterator[pa.Array]:
        if self.since is not None or self.until is not None:
            yield self._time_mask(batch.column("time"))
        if self.kinds is not None:
            kinds = _encoded(batch.column("kind"))
            yield pc.is_in(kinds.dictionary, pa.array(sorted(self.kinds), pa.utf8())).take(kinds.indices)
        if self._selects_keys:
            yield self._key_mask(batch)

    def _time_mask(self, times: pa.Array) -> pa.Array:
        mask = pa.repeat(pa.scalar(True), len(times))
        if self.since is not None:
            mask = pc.and_(mask, pc.greater_equal(times, pa.scalar(self.since, times.type)))
        if self.until is not None:
            mask = pc.and_(mask, pc.less(times, pa.scalar(self.until, times.type)))
        return mask

    def _key_mask(self, batch: pa.RecordBatch) -> pa.Array:
        """Select the messages that match the pattern, and all other rows; of these, the ones with an allowed key."""
        keys = _encoded(batch.column("key"))
        names = keys.dictionary.to_pylist()
        mask = pa.repeat(pa.scalar(True), len(batch))
        if self.pattern is not None:
            kinds = _encoded(batch.column("kind"))
            messages = is_message(kinds.dictionary).take(kinds.indices)
            matched = pa.array([self._matches(key) for key in names], pa.bool_())
            mask = pc.or_(matched.take(keys.indices), pc.invert(messages))
        if self.conditions.restrict("key"):
            allowed = pa.array([self.conditions.allow_key(key) for key in names], pa.bool_())
            mask = pc.and_(mask, allowed.take(keys.indices))
        return mask

    def _matches(self, key: bytes) -> bool:
        """Return whether the pattern matches a key by the rules of the bus.

        No pattern for open keys matches a secret one.
        """
        if self.pattern is None:
            return True
        matches = self._matched.get(key)
        if matches is None:
            if len(self._matched) >= _CACHED_KEYS:
                self._matched.clear()
            separator = self.dialect.separator
            matches = not self.dialect.is_secret(key) and matches_open(self.pattern, key, separator)
            self._matched[key] = matches
        return matches


def _encoded(values: pa.Array) -> pa.DictionaryArray:
    return values if isinstance(values, pa.DictionaryArray) else values.dictionary_encode()
