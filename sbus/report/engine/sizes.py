"""Payload sizes out of the messages and bytes of each size: there are at most some thousand sizes."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from sbus.report.figures import Sizes

__all__ = ["sizes_of"]

Sized = tuple[str | None, int, int, int]
"""Label, size, messages, bytes."""


def sizes_of(found: Sequence[Sized], labels: Sequence[str]) -> tuple[list[Sizes], list[tuple[int, int, int]]]:
    """Return the payload sizes of all messages and of each label, and a histogram."""
    sizes = []
    for label in (None, *labels):
        mine = [each for each in found if label is None or each[0] == label]
        total = sum(n for _, _, n, _ in mine)
        if total:
            mean = sum(size for *_, size in mine) / total
            p50, p95, p99 = (round(p) for p in percentiles(((size, n) for _, size, n, _ in mine), (0.5, 0.95, 0.99)))
            sizes.append(Sizes(label, total, mean, p50, p95, p99, max(size for _, size, _, _ in mine)))
    bins: Counter[int] = Counter()
    for _, size, n, _ in found:
        # Half octaves: 1, 2, 3, 4-5, 6-7, 8-11, ...; -1 for empty payloads.
        bins[math.floor(2 * math.log2(size) + 1e-9) if size > 0 else -1] += n
    return sizes, [(*_bounds(number), n) for number, n in sorted(bins.items())]


def percentiles(found: Iterable[tuple[int, int]], wanted: Iterable[float]) -> list[float]:
    """Return percentiles of values that occur several times each; between two values, they are interpolated.

    :param found: (value, how often); not empty.
    """
    counts: Counter[int] = Counter()
    for value, n in found:
        counts[value] += n
    values = sorted(counts)
    ends = list(itertools.accumulate(counts[value] for value in values))
    result = []
    for share in wanted:
        place = (ends[-1] - 1) * share
        low, high = (values[bisect.bisect_right(ends, at)] for at in (math.floor(place), math.ceil(place)))
        part = place - math.floor(place)
        result.append(low + (high - low) * part)
    return result


def _bounds(number: int) -> tuple[int, int]:
    """Return the smallest and the largest size in a bin of the histogram."""
    if number < 0:
        return 0, 0
    edges = [-int(-(2 ** (n / 2)) // 1) if n % 2 else 2 ** (n // 2) for n in (number, number + 1)]
    return edges[0], edges[1] - 1
