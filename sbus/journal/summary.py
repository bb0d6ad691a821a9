"""What is told of a closed segment in its ``.json``, so that nobody need open it to know that it can be skipped."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from sbus.errors import JournalError, UsageError
from sbus.journal.keytext import as_text, from_text
from sbus.journal.layout import CLOSED, Segment, read_object

__all__ = ["MAX_KEYS", "Summary", "key_range", "read_summary"]

MAX_KEYS = 1000
"""With more distinct keys in a segment, its summary has the least and the greatest only."""


class Summary(NamedTuple):
    """What is told of a closed segment.

    :ivar first_seq: of its first row.
    :ivar rows: how many it has; the last one's seq is `last_seq`.
    :ivar min_time: µs since 1970; of the first row.
    :ivar max_time: of the last row.
    :ivar size: bytes of the ``.arrows`` file.
    :ivar kinds: how many rows of each kind that occurs.
    :ivar keys: the distinct keys of its messages, sorted; None if there are more than `MAX_KEYS`, or it is not known.
    :ivar min_key: the least of them by bytes; None without messages, or if it is not known.
    :ivar max_key: the greatest.
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
        return self.first_seq + self.rows - 1

    def pack(self) -> bytes:
        """The content of the file."""
        told = {
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
        return json.dumps(told, indent=1).encode() + b"\n"


def key_range(arrays: Iterable[pa.Array | None]) -> tuple[list[bytes] | None, bytes | None, bytes | None]:
    """Which keys there are in arrays of keys: `keys`, `min_key` and `max_key` of a summary.

    :param arrays: with None for one that cannot be read; then nothing is ruled out.
    """
    distinct: set[bytes] | None = set()
    ends: set[bytes] = set()
    for keys in arrays:
        if keys is None:
            return None, None, None
        ends.update(pc.min_max(keys).as_py().values())
        if distinct is not None:
            distinct.update(keys.unique().to_pylist())
            if len(distinct) > MAX_KEYS:
                distinct = None
    return None if distinct is None else sorted(distinct), min(ends, default=None), max(ends, default=None)


def read_summary(segment: Segment) -> Summary:
    """What is told of a closed segment.

    :raises FileNotFoundError: if it is not closed, or gone.
    :raises JournalError: if the file is damaged.
    """
    path = segment.path(CLOSED)
    told = read_object(path)
    try:
        keys, least, greatest = told["keys"], told["min_key"], told["max_key"]
        return Summary(
            first_seq=int(told["first_seq"]),
            rows=int(told["rows"]),
            min_time=int(told["min_time"]),
            max_time=int(told["max_time"]),
            size=int(told["bytes"]),
            kinds=dict(told["kinds"]),
            keys=None if keys is None else [from_text(key) for key in keys],
            min_key=None if least is None else from_text(least),
            max_key=None if greatest is None else from_text(greatest),
        )
    except (KeyError, TypeError, ValueError, UsageError) as e:
        raise JournalError(f"{path}: it is damaged ({type(e).__name__}: {e}): restore it from a copy") from None
