"""Spans of time, in µs since 1970: what a period of a recording has lost, and what is left of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Span", "length", "merged", "nice_width", "overlap", "without"]

_SECOND = 1_000_000
_WIDTHS = [
    *(int(_SECOND * s) for s in (0.5, 1, 2, 5, 10, 15, 30)),
    *(60 * _SECOND * m for m in (1, 2, 5, 10, 15, 30)),
    *(3600 * _SECOND * h for h in (1, 2, 3, 6, 12, 24, 48, 24 * 7, 24 * 14, 24 * 28)),
]


class Span(NamedTuple):
    """From `start` to just before `end`."""

    start: int
    end: int


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans in order that neither touch nor overlap; empty ones are left out."""
    found: list[Span] = []
    for span in sorted(s for s in spans if s.end > s.start):
        if found and span.start <= found[-1].end:
            found[-1] = Span(found[-1].start, max(found[-1].end, span.end))
        else:
            found.append(span)
    return found


def without(whole: Span, lost: Iterable[Span]) -> list[Span]:
    """What is left of a span when others are taken out of it."""
    left = []
    at = whole.start
    for span in merged(lost):
        if span.start > at:
            left.append(Span(at, min(span.start, whole.end)))
        at = max(at, span.end)
    left.append(Span(at, whole.end))
    return [span for span in left if span.end > span.start]


def overlap(whole: Span, spans: Iterable[Span]) -> int:
    """How many µs of a span the others cover, together."""
    return sum(max(0, min(whole.end, s.end) - max(whole.start, s.start)) for s in merged(spans))


def length(spans: Iterable[Span]) -> int:
    """How many µs the spans cover, together."""
    return sum(s.end - s.start for s in merged(spans))


def nice_width(span: int, most: int = 300) -> int:
    """The shortest width of a window that clocks have a name for, so that at most so many windows cover the span."""
    # One more may be needed, as windows begin at round times.
    return next((w for w in _WIDTHS if span <= w * (most - 1)), -(-span // (most - 1)))
