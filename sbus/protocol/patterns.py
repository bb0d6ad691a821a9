"""Patterns compared: their intersection, whether one covers the other, and the cost of one.

Matching goes segment by segment and never backtracks (`sbus.protocol.keys`). So the keys that two patterns both match
are the keys that one other pattern matches, or there are none, and both questions are decided without looking at keys.

The *shape* of a pattern is its one canonical form: two patterns match the same keys if and only if their shapes are
equal. Only open patterns have a shape; secret ones are never compared.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Shape", "covers", "intersect", "pattern_cost", "shape"]

_FREE_SEGMENTS = 16
_SEGMENT_COST = 256


class Shape(NamedTuple):
    """A pattern in canonical form.

    :ivar parts: the segments that the pattern names: each is a literal, or a literal with one ``*`` after it.
    :ivar is_below: whether the pattern matches only keys with more segments than `parts`, whatever these are.
    """

    parts: tuple[bytes, ...]
    is_below: bool

    def pattern(self, separator: bytes = b"/") -> bytes:
        """Return the shortest pattern with this shape."""
        text = separator.join(self.parts)
        return text + separator if self.is_below and self.parts else text


def shape(pattern: bytes, separator: bytes = b"/") -> Shape | None:
    """Return the shape of an open pattern, or None if it matches no key."""
    if not pattern:
        return Shape((), True)
    parts = []
    for segment in pattern.split(separator):
        literal, star, rest = segment.partition(b"*")
        if rest.strip(b"*"):
            return None
        parts.append(literal + star)
    if parts[-1]:
        return Shape(tuple(parts), False)
    return Shape(tuple(parts[:-1]), True)


def intersect(one: Shape, other: Shape) -> Shape | None:
    """Return the shape of the pattern that matches the keys that both match, or None if there are none."""
    short, long = sorted((one, other), key=lambda each: len(each.parts))
    if len(short.parts) == len(long.parts):
        if short.is_below is not long.is_below:
            return None
    elif not short.is_below:
        return None
    parts = []
    for mine, its in zip(short.parts, long.parts, strict=False):
        if mine == its or _takes(its, mine):
            parts.append(mine)
        elif _takes(mine, its):
            parts.append(its)
        else:
            return None
    return Shape((*parts, *long.parts[len(parts) :]), long.is_below)


def covers(one: Shape, other: Shape) -> bool:
    """Return whether the first pattern matches every key that the second one matches."""
    return intersect(one, other) == other


def _takes(wide: bytes, narrow: bytes) -> bool:
    """Return whether the first segment ends with ``*`` and matches all that the second one matches."""
    return wide.endswith(b"*") and narrow.startswith(wide[:-1])


def pattern_cost(pattern: bytes, separator: bytes) -> int:
    """Return the cost of a pattern, in bytes, toward ``--max-pattern-bytes``.

    It is the pattern's length, and 256 bytes more for each segment after the sixteenth: that is the memory that such
    a segment takes. Without this, one megabyte of separators would cost the server a hundred.
    """
    return len(pattern) + max(0, pattern.count(separator) + 1 - _FREE_SEGMENTS) * _SEGMENT_COST
