"""Arithmetic on spans of time, in µs since the epoch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sbus.journal.clock import HOUR, MINUTE, SECOND

__all__ = ["Span", "length", "merged", "nice_width", "overlap", "without"]

_WIDTHS = [
    *(int(SECOND * s) for s in (0.5, 1, 2, 5, 10, 15, 30)),
    *(MINUTE * m for m in (1, 2, 5, 10, 15, 30)),
    *(HOUR * h for h in (1, 2, 3, 6, 12, 24, 48, 24 * 7, 24 * 14, 24 * 28)),
]


class Span(NamedTuple):
    """From `start` to just before `end`."""

    start: int
    end: int


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the same time as ordered, separate spans.

    They do not touch or overlap, and empty ones are left out.
    """
    found: list[Span] = []
    for span in sorted(s for s in spans if s.end > s.start):
        if found and span.start <= found[-1].end:
            found[-1] = Span(found[-1].start, max(found[-1].end, span.end))
        else:
            found.append(span)
    return found


def without(whole: Span, lost: Iterable[Span]) -> list[Span]:
    """Return a span without the time that others cover."""
    left = []
    at = whole.start
    for span in merged(lost):
        if span.start > at:
            left.append(Span(at, min(span.start, whole.end)))
        at = max(at, span.end)
    left.append(Span(at, whole.end))
    return [span for span in left if span.end > span.start]


def overlap(whole: Span, spans: Iterable[Span]) -> int:
    """Return the µs of a span that others cover together."""
    return sum(max(0, min(whole.end, s.end) - max(whole.start, s.start)) for s in merged(spans))


def length(spans: Iterable[Span]) -> int:
    """Return the µs that spans cover together."""
    return sum(s.end - s.start for s in merged(spans))


def nice_width(span: int, max_windows: int = 300) -> int:
    """Return the shortest round window width, in µs, that covers a span.

    At most `max_windows` windows cover it.
    """
    # Windows begin at round times, so there can be one more than the span has widths.
    return next((w for w in _WIDTHS if span <= w * (max_windows - 1)), -(-span // (max_windows - 1)))
