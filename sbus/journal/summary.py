"""The summary of a closed segment, its ``.json``.

From it a reader knows whether it can skip the segment, without opening the rows.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from sbus.errors import JournalError, UsageError
from sbus.journal.keytext import as_text, from_text
from sbus.journal.layout import LATEST, SUMMARY, Segment, read_object

__all__ = ["MAX_KEYS", "Summary", "key_range", "may_list", "read_summary"]

MAX_KEYS = 1000
"""The most distinct keys that a summary lists; of a segment with more it has only the least and the greatest."""
_MOST_KEY_BYTES = 1 << 20
"""The most bytes of these keys together: a key can have 400 kB, and as text four times as many."""


class Summary(NamedTuple):
    """The summary of a closed segment.

    :ivar first_seq: the number of the first row.
    :ivar rows: the number of rows.
    :ivar min_time: the time of the first row, in µs since the epoch.
    :ivar max_time: the time of the last row.
    :ivar size: the size of the ``.arrows`` file in bytes.
    :ivar kinds: the number of rows of each kind that occurs.
    :ivar keys: the distinct keys of the messages, sorted; None if they are unknown, more than `MAX_KEYS`, or too long.
    :ivar min_key: the least key by bytes; None without messages, or if the keys are unknown.
    :ivar max_key: the greatest key, likewise.
    """

    first_seq: int
    rows: int
    min_time: int
    max_time: int
    size: int
    kinds: dict[str, int]
    keys: list[bytes] | None
    min_key: bytes | None
    max_key: bytes | None

    @property
    def last_seq(self) -> int:
        """The number of the last row."""
        return self.first_seq + self.rows - 1

    def pack(self) -> bytes:
        """Return the content of the file."""
        fields = {
            "first_seq": self.first_seq,
            "last_seq": self.last_seq,
            "rows": self.rows,
            "min_time": self.min_time,
            "max_time": self.max_time,
            "bytes": self.size,
            "kinds": self.kinds,
            "keys": None if self.keys is None else [as_text(key) for key in self.keys],
            "min_key": None if self.min_key is None else as_text(self.min_key),
            "max_key": None if self.max_key is None else as_text(self.max_key),
        }
        return json.dumps(fields, indent=1).encode() + b"\n"


def may_list(keys: Collection[bytes], most_bytes: float = _MOST_KEY_BYTES) -> bool:
    """Return whether a summary lists these keys.

    :param most_bytes: of all keys; earlier releases had no such limit.
    """
    return len(keys) <= MAX_KEYS and sum(map(len, keys)) <= most_bytes


def key_range(arrays: Iterable[pa.Array | None]) -> tuple[list[bytes] | None, bytes | None, bytes | None]:
    """Return the `keys`, `min_key` and `max_key` of a `Summary` for arrays of keys.

    :param arrays: the keys, batch by batch; None for a batch that cannot be read, which makes all three unknown.
    """
    distinct: set[bytes] | None = set()
    ends: set[bytes] = set()
    for keys in arrays:
        if keys is None:
            return None, None, None
        ends.update(pc.min_max(keys).as_py().values())
        if distinct is not None:
            distinct.update(keys.unique().to_pylist())
            if not may_list(distinct):
                distinct = None
    return None if distinct is None else sorted(distinct), min(ends, default=None), max(ends, default=None)


def read_summary(segment: Segment) -> Summary:
    """Read the summary of a closed segment.

    :raises FileNotFoundError: if the segment is not closed, or gone.
    :raises JournalError: if the file is damaged.
    """
    path = segment.path(SUMMARY)
    fields = read_object(path)
    try:
        keys, least, greatest = fields["keys"], fields["min_key"], fields["max_key"]
        if max(abs(int(fields["min_time"])), abs(int(fields["max_time"]))) > LATEST:
            raise ValueError("no such time")
        if int(fields["last_seq"]) != int(fields["first_seq"]) + int(fields["rows"]) - 1:
            raise ValueError("its numbers of rows contradict each other")
        return Summary(
            first_seq=int(fields["first_seq"]),
            rows=int(fields["rows"]),
            min_time=int(fields["min_time"]),
            max_time=int(fields["max_time"]),
            size=int(fields["bytes"]),
            kinds=dict(fields["kinds"]),
            keys=None if keys is None else [from_text(key) for key in keys],
            min_key=None if least is None else from_text(least),
            max_key=None if greatest is None else from_text(greatest),
        )
    except (KeyError, TypeError, ValueError, OverflowError, UsageError) as e:
        raise JournalError(f"{path}: it is damaged ({type(e).__name__}: {e}): restore it from a copy") from None
