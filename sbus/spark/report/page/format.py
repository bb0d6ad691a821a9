"""Figures as people read them: numbers, rates, sizes, spans of time and moments."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

__all__ = ["amount", "change", "duration", "moment", "moment_near", "number", "rate", "ticks", "time_ticks"]

_SECOND = 1_000_000
_DAY = 86_400 * _SECOND
_TIME_STEPS = [
    *(int(s * _SECOND) for s in (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30)),
    *(m * 60 * _SECOND for m in (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440)),
    *(d * _DAY for d in (2, 7, 14, 28, 56, 182, 364)),
]
_SPACE = "\N{NARROW NO-BREAK SPACE}"


def number(value: float) -> str:
    """Exact and grouped below a million, in three digits above: 12 345, 1.23 M."""
    if value < 1_000_000:
        return f"{round(value):,}".replace(",", _SPACE)
    return _scaled(value, (("", 1), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12)))


def amount(size: float) -> str:
    """Bytes."""
    return _scaled(size, (("B", 1), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12)))


def _scaled(value: float, units: tuple[tuple[str, float], ...]) -> str:
    for unit, factor in reversed(units):
        if value >= factor * 0.9995:
            value /= factor
            digits = 0 if factor == 1 and value == round(value) else 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{value:.{digits}f}{_SPACE}{unit}".rstrip(_SPACE)
    return f"{value:.2g}{_SPACE}{units[0][0]}".rstrip(_SPACE) if value else f"0{_SPACE}{units[0][0]}".rstrip(_SPACE)


def rate(per_second: float) -> str:
    """Messages per second, minute, hour or day: whichever gives a number that one can imagine."""
    for unit, seconds in (("s", 1), ("min", 60), ("h", 3600)):
        if per_second * seconds >= 1 or not per_second:
            return f"{_scaled(per_second * seconds, (('', 1), ('k', 1e3), ('M', 1e6)))}/{unit}"
    return f"{_scaled(per_second * 86400, (('', 1),))}/d"


def change(now: float, before: float) -> str:
    """How much more or less, as a percentage or, if it is a lot, a factor."""
    if not before:
        return "new" if now else "none"
    factor = now / before
    if factor >= 2.995:
        return f"×{_SPACE}{factor:.{1 if factor < 10 else 0}f}"
    percent = (factor - 1) * 100
    if abs(percent) < 0.05:
        return f"±0{_SPACE}%"
    digits = 1 if abs(percent) < 9.95 else 0
    return f"{percent:+.{digits}f}{_SPACE}%".replace("-", "−")


def duration(micros: float) -> str:
    """A span of time in its two largest units."""
    if micros < 1000:
        return f"{micros:.3g}{_SPACE}µs"
    if micros < _SECOND:
        return f"{micros / 1000:.3g}{_SPACE}ms"
    if micros < 10 * _SECOND:
        return f"{micros / _SECOND:.1f}".removesuffix(".0") + f"{_SPACE}s"
    if micros == _DAY:
        return f"24{_SPACE}h"
    left = round(micros / _SECOND)
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    parts = []
    for unit, seconds in units:
        count, left = divmod(left, seconds)
        if count:
            parts.append(f"{count}{_SPACE}{unit}")
        if parts and (len(parts) == 2 or not count):
            break
    return " ".join(parts)


def _at(micros: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)


def moment(micros: int) -> str:
    """Date and time, UTC."""
    at = _at(micros)
    return f"{at:%a} {at.day} {at:%b %Y}, {_clock(at, micros)}"


def moment_near(micros: int, near: int) -> str:
    """The time, UTC; with the day if it is another one than `near` is on."""
    at, other = _at(micros), _at(near)
    day = "" if at.date() == other.date() else f"{at.day} {at:%b} "
    return day + _clock(at, micros)


def _clock(at: datetime, micros: int) -> str:
    return f"{at:%H:%M}" if micros % (60 * _SECOND) == 0 else f"{at:%H:%M:%S}"


def ticks(largest: float, most: int = 4) -> list[float]:
    """Round values from 0 upwards for an axis; the last one is not below the largest value."""
    if largest <= 0:
        return [0, 1]
    step = 10.0**-12
    while True:
        for factor in (1, 2, 5):
            if step * factor * most >= largest:
                count = math.ceil(float(f"{largest / (step * factor):.9g}"))
                return [float(f"{step * factor * i:.9g}") for i in range(max(1, count) + 1)]
        step *= 10


def time_ticks(start: int, end: int, most: int = 9) -> list[tuple[int, str, bool]]:
    """Round times within a span: when (µs), what to write there, and whether it begins a day."""
    step = next((s for s in _TIME_STEPS if (end - start) / s <= most), _TIME_STEPS[-1])
    found = []
    for at in range(-(-start // step) * step, end, step):
        time = _at(at)
        is_day = at % _DAY == 0
        if is_day:
            label = f"{time:%a} {time.day} {time:%b}" if step < 364 * _DAY else f"{time.day} {time:%b %Y}"
        elif step % (60 * _SECOND) == 0:
            label = f"{time:%H:%M}"
        else:
            label = f"{time:%H:%M:%S}" + (f".{time.microsecond // 100_000}" if step < _SECOND else "")
        found.append((at, label, is_day))
    return found
