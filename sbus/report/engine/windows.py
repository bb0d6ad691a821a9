"""The windows of a period, the prefixes of its keys, and how sums by window are arranged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sbus.report.figures import KeyTraffic, Traffic
from sbus.report.spans import Span, nice_width

__all__ = ["MAX_DEPTH", "MAX_LABELS", "Windows", "choose_depth", "traffic_of", "windows_of", "with_shape"]

MAX_LABELS = 7
"""Prefixes with a colour of their own; all other keys share one."""
MAX_DEPTH = 4
"""Segments of the longest prefix."""
_MAX_SHAPE_COUNTS = 60
"""Counts in the small picture of a key."""
_MAX_WINDOWS = 300
"""Windows of a period."""


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of a period.

    The period before has the same ones, shifted by its length.

    :ivar width: the length of a window, in µs.
    """

    period: Span
    width: int

    @property
    def origin(self) -> int:
        """The beginning of the first window.

        It is a multiple of the width, at or before the start of the period.
        """
        return self.period.start // self.width * self.width

    @property
    def count(self) -> int:
        """The number of windows."""
        return -(-(self.period.end - self.origin) // self.width)

    @property
    def both(self) -> Span:
        """The period and the one before it."""
        return Span(2 * self.period.start - self.period.end, self.period.end)


def windows_of(period: Span) -> Windows:
    """Return the windows of a period."""
    return Windows(period, nice_width(period.end - period.start, _MAX_WINDOWS))


def choose_depth(found: Sequence[tuple[int, int, float]]) -> int:
    """Choose the number of segments of a prefix: the fewest that tell keys apart well.

    That is at least three prefixes, none of them with more than 60 % of the messages.

    :param found: for each depth the number of prefixes, and the share of the busiest: (depth, prefixes, share).
    """
    for depth, prefixes, share in sorted(found):
        if prefixes >= 3 and share <= 0.6:
            return depth
    return min(sorted(found), key=lambda each: each[2])[0] if found else 1


def traffic_of(
    rows: Sequence[tuple[bool, int, str | None, int, int]], windows: Windows, labels: Sequence[str], *, has_before: bool
) -> Traffic:
    """Arrange sums of messages and bytes: (whether it is this period, window, label, messages, bytes)."""
    names: list[str | None] = list(labels)
    if any(now and label is None for now, _, label, _, _ in rows):
        names.append(None)
    at = {name: i for i, name in enumerate(names)}
    messages, sizes = ([[0] * windows.count for _ in names] for _ in range(2))
    before, bytes_before = [0] * windows.count, [0] * windows.count
    for now, number, label, n, size in rows:
        window = min(number, windows.count - 1)
        if now:
            messages[at[label]][window] += n
            sizes[at[label]][window] += size
        else:
            before[window] += n
            bytes_before[window] += size
    return Traffic(
        windows.width,
        windows.origin,
        names,
        messages,
        sizes,
        before if has_before else None,
        bytes_before if has_before else None,
    )


def with_shape(found: tuple[str, int, int, float], counts: list[int]) -> KeyTraffic:
    """Complete the traffic of a key (its messages, bytes and rate) with its shape, given its messages per window."""
    bundle = max(1, -(-len(counts) // _MAX_SHAPE_COUNTS))
    shape = [sum(counts[at : at + bundle]) for at in range(0, len(counts), bundle)]
    if shorter := len(counts) % bundle:
        shape[-1] = round(shape[-1] * bundle / shorter)
    return KeyTraffic(*found, shape)
