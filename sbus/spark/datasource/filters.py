"""Select the rows that a read asks for, and skip segments that have none.

A read selects by the options ``pattern``, ``gaps``, ``since`` and ``until``. Rows are filtered in Arrow, before they
reach Spark. The conditions of a query are not applied here: Spark 4.3 keeps conditions that a source has accepted with
the result of ``load()``, so two queries on one DataFrame could get each other's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from sbus.journal.digests import is_message
from sbus.journal.schema import MESSAGES
from sbus.journal.summary import Summary
from sbus.protocol.keys import Dialect, matches_open

__all__ = ["RowFilter"]

_CACHED_KEYS = 100_000
"""Keys for which the filter remembers whether the pattern matches; above that it starts afresh."""


@dataclass(slots=True)
class RowFilter:
    """What a read selects.

    :ivar pattern: select only messages whose keys it matches; None: all messages.
    :ivar gaps: whether to select the rows that are not messages, too.
    :ivar dialect: the rules by which the pattern matches.
    :ivar since: select no rows before this time (µs since the epoch); None: no such limit.
    :ivar until: select no rows at or after this time (µs since the epoch); None: no such limit.
    """

    pattern: bytes | None
    gaps: bool
    dialect: Dialect
    since: int | None = None
    until: int | None = None
    _matched: dict[bytes, bool] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        """The columns of a journal that `filter` needs."""
        names = []
        if self.since is not None or self.until is not None:
            names.append("time")
        if self.pattern is not None or not self.gaps:
            names.append("kind")
        if self.pattern is not None:
            names.append("key")
        return names

    # --- segments ----------------------------------------------------------------------------

    @property
    def max_time(self) -> int | None:
        """The last time that is selected, in µs since the epoch; None: no limit."""
        return None if self.until is None else self.until - 1

    @property
    def kinds(self) -> frozenset[str] | None:
        """The kinds of rows that can be selected; None: all."""
        return None if self.gaps else MESSAGES

    @property
    def can_skip_segments(self) -> bool:
        """Whether the summaries of closed segments can rule some of them out."""
        return self.pattern is not None or not self.gaps

    def may_select(self, summary: Summary) -> bool:
        """Return whether a closed segment can have selected rows, by its kinds and keys."""
        kinds = summary.kinds.keys() if self.gaps else summary.kinds.keys() & MESSAGES
        if not kinds or kinds - MESSAGES:
            return bool(kinds)
        if summary.keys is not None:
            return self.matches_any(summary.keys)
        if summary.min_key is None or summary.max_key is None:
            return True
        return self.may_match_between(summary.min_key, summary.max_key)

    def matches_any(self, keys: Sequence[bytes]) -> bool:
        """Return whether the pattern matches one of these keys."""
        return bool(pc.any(self._pattern_mask(keys)).as_py()) if keys else False

    def may_match_between(self, min_key: bytes, max_key: bytes) -> bool:
        """Return whether the pattern can match a key from `min_key` to `max_key`.

        The beginning of the pattern decides.
        """
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
        masks = []
        if self.since is not None or self.until is not None:
            masks.append(self._time_mask(batch.column("time")))
        if self.pattern is not None or not self.gaps:
            masks.append(self._message_mask(batch))
        for mask in masks:
            if not mask.true_count:
                return batch.slice(0, 0)
        masks = [mask for mask in masks if mask.true_count < len(mask)]
        if not masks:
            return batch
        return batch.filter(masks[0] if len(masks) == 1 else pc.and_(*masks))

    def _time_mask(self, times: pa.Array) -> pa.Array:
        mask = pa.repeat(pa.scalar(True), len(times))
        if self.since is not None:
            mask = pc.and_(mask, pc.greater_equal(times, pa.scalar(self.since, times.type)))
        if self.until is not None:
            mask = pc.and_(mask, pc.less(times, pa.scalar(self.until, times.type)))
        return mask

    def _message_mask(self, batch: pa.RecordBatch) -> pa.Array:
        """Select the messages that match the pattern, and the gaps if requested."""
        kinds = _encoded(batch.column("kind"))
        messages = is_message(kinds.dictionary).take(kinds.indices)
        if self.pattern is None:
            return messages
        keys = _encoded(batch.column("key"))
        matched = pc.and_(messages, self._pattern_mask(keys.dictionary.to_pylist()).take(keys.indices))
        return pc.or_(matched, pc.invert(messages)) if self.gaps else matched

    def _pattern_mask(self, keys: Sequence[bytes]) -> pa.Array:
        """Match each key by the rules of the bus.

        No pattern for open keys matches a secret one.
        """
        pattern = self.pattern
        if pattern is None:
            return pa.repeat(pa.scalar(True), len(keys))
        dialect, matched = self.dialect, self._matched
        if len(matched) > _CACHED_KEYS:
            matched.clear()
        for key in keys:
            if key not in matched:
                matched[key] = not dialect.is_secret(key) and matches_open(pattern, key, dialect.separator)
        return pa.array([matched[key] for key in keys], pa.bool_())


def _encoded(values: pa.Array) -> pa.DictionaryArray:
    return values if isinstance(values, pa.DictionaryArray) else values.dictionary_encode()
