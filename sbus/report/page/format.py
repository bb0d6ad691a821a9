"""Write figures for people: numbers, rates, sizes, durations, moments and keys."""

from __future__ import annotations

import math
from datetime import datetime

from sbus.journal.clock import DAY, MINUTE, SECOND, to_datetime
from sbus.journal.keytext import printable

__all__ = [
    "amount",
    "axis_values",
    "change",
    "duration",
    "exact_share",
    "millis",
    "moment",
    "moment_near",
    "number",
    "printable_key",
    "rate",
    "rates",
    "share",
    "time_ticks",
]

_TIME_STEPS = [
    *(int(s * SECOND) for s in (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30)),
    *(m * MINUTE for m in (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440)),
    *(d * DAY for d in (2, 7, 14, 28, 56, 182, 364)),
]
"""Distances of labels on an axis of time, in µs."""
_RATE_UNITS = (("s", 1), ("min", 60), ("h", 3600), ("d", 86400))
"""Units of rates, with their seconds."""
_SPACE = "\N{NARROW NO-BREAK SPACE}"


def number(value: float) -> str:
    """Write a number: exact and grouped below a million, else with three digits.

    For example 12 345 and 1.23 M.
    """
    if value < 1_000_000:
        return f"{round(value):,}".replace(",", _SPACE)
    return _scaled(value, (("", 1), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12)))


def amount(size: float) -> str:
    """Write a number of bytes."""
    return _scaled(size, (("B", 1), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12)))


def _scaled(value: float, units: tuple[tuple[str, float], ...]) -> str:
    for unit, factor in reversed(units):
        if value >= factor * 0.9995:
            value /= factor
            digits = 0 if factor == 1 and value == round(value) else 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{value:.{digits}f}{_SPACE}{unit}".rstrip(_SPACE)
    return f"{value:.2g}{_SPACE}{units[0][0]}".rstrip(_SPACE) if value else f"0{_SPACE}{units[0][0]}".rstrip(_SPACE)


def rate(per_second: float) -> str:
    """Write a rate in the first unit that gives at least 1.

    The units are per second, minute, hour and day.
    """
    return rates(per_second)[0]


def rates(*per_second: float) -> list[str]:
    """Write rates that are compared in one unit: the first one that gives the least of them at least 1."""
    least = min((value for value in per_second if value), default=0)
    unit, seconds = next((u for u in _RATE_UNITS[:-1] if least * u[1] >= 1 or not least), _RATE_UNITS[-1])
    return [f"{_scaled(value * seconds, (('', 1), ('k', 1e3), ('M', 1e6)))}/{unit}" for value in per_second]


def change(now: float, before: float) -> str:
    """Write a change as a percentage, or as a factor from three on."""
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
    """Write a duration, given in µs, with its two largest units."""
    if micros < 1000:
        return f"{micros:.3g}{_SPACE}µs"
    if micros < SECOND:
        return f"{micros / 1000:.3g}{_SPACE}ms"
    if micros < 10 * SECOND:
        return f"{micros / SECOND:.1f}".removesuffix(".0") + f"{_SPACE}s"
    if micros == DAY:
        return f"24{_SPACE}h"
    left = round(micros / SECOND)
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    parts = []
    for unit, seconds in units:
        count, left = divmod(left, seconds)
        if count:
            parts.append(f"{count}{_SPACE}{unit}")
        if parts and (len(parts) == 2 or not count):
            break
    return " ".join(parts)


def printable_key(key: str, limit: int = 160) -> str:
    r"""Return a key as text, with each unprintable character as ``\xNN``.

    :param key: in text form.
    :param limit: characters; the middle of a longer key is left out.
    """
    if len(key) > limit:
        key = f"{key[: limit // 2]}…{key[-(limit // 2) :]}"
    return printable(key)


def moment(micros: int) -> str:
    """Write a moment, given in µs since the epoch, as date and time in UTC."""
    at = to_datetime(micros)
    return f"{at:%a} {at.day} {at:%b %Y}, {_clock(at, micros)}"


def moment_near(micros: int, near: int) -> str:
    """Write the time of a moment in UTC, with the day unless it is the day of `near`."""
    at, other = to_datetime(micros), to_datetime(near)
    day = "" if at.date() == other.date() else f"{at.day} {at:%b} "
    return day + _clock(at, micros)


def _clock(at: datetime, micros: int) -> str:
    return f"{at:%H:%M}" if micros % (MINUTE) == 0 else f"{at:%H:%M:%S}"


def axis_values(largest: float) -> list[float]:
    """Return round values for an axis, at most five: from 0 to at least the largest value."""
    if largest <= 0:
        return [0, 1]
    step = 10.0**-12
    while True:
        for factor in (1, 2, 5):
            if 4 * step * factor >= largest:
                count = math.ceil(float(f"{largest / (step * factor):.9g}"))
                return [float(f"{step * factor * i:.9g}") for i in range(max(1, count) + 1)]
        step *= 10


def time_ticks(start: int, end: int, most: int = 9) -> list[tuple[int, str, bool]]:
    """Return round times within a span: (time in µs, label, whether a day begins)."""
    step = next((s for s in _TIME_STEPS if (end - start) / s <= most), _TIME_STEPS[-1])
    found = []
    for at in range(-(-start // step) * step, end, step):
        time = to_datetime(at)
        is_day = at % DAY == 0
        if is_day:
            label = f"{time:%a} {time.day} {time:%b}" if step < 364 * DAY else f"{time.day} {time:%b %Y}"
        elif step % (MINUTE) == 0:
            label = f"{time:%H:%M}"
        else:
            label = f"{time:%H:%M:%S}" + (f".{time.microsecond // 100_000}" if step < SECOND else "")
        found.append((at, label, is_day))
    return found


def share(part: int, whole: int) -> str:
    """Return a part of a whole in percent."""
    percentage = 100 * part / whole if whole else 0
    return f"{percentage:.{1 if percentage < 9.95 else 0}f}{_SPACE}%"


def exact_share(part: float) -> str:
    """Write a part of 1 in percent, with the digits that tell it from nothing and from all."""
    percentage = 100 * part
    if percentage > 99.995 or not percentage:
        return f"{percentage:.0f}{_SPACE}%"
    digits = 1 if 0.1 <= percentage < 99.9 else 2
    return f"{min(max(percentage, 0.01), 99.99):.{digits}f}".removesuffix(".0") + f"{_SPACE}%"


def millis(micros: int) -> int:
    """Return a time as the page's script takes it, in ms since the epoch."""
    return micros // 1000
