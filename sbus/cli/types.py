"""Parameter types: what arguments and options of ``sbus`` accept."""

from __future__ import annotations

import math
import os
import sys
from datetime import datetime
from typing import Any

import click

from sbus.daemon.moments import moment
from sbus.daemon.values import LONGEST, mode, seconds, size
from sbus.errors import UsageError
from sbus.ownership import check_file_mode

__all__ = ["BYTES", "COUNT", "RATE", "SECONDS", "Duration", "Mode", "Number", "Size", "SocketPath", "Speed", "Time"]

BYTES = os.fsencode
"""A key, a pattern or a payload: the argument byte for byte, whatever its encoding."""


class Number(click.FloatRange):
    """A number in a range, which NaN is not."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


RATE = Number(min=0, min_open=True)


class _Count(click.IntRange):
    """A number above 0; there is never more to count than a signed integer of 64 bits has room for."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return min(super().convert(value, param, ctx), sys.maxsize)


COUNT = _Count(min=1)


class SocketPath(click.ParamType[str]):
    """The path of a socket; a word that looks like an option means that the path was forgotten."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value.startswith("-"):
            self.fail(f"{value!r} is an option: give a path before it; a file with that name is ./{value}", param, ctx)
        return str(value)


class Duration(click.ParamType[float]):
    """A time such as ``500ms``, ``10s`` or ``1h``, as seconds.

    :param minimum: the shortest time to accept, in seconds.
    :param maximum: the longest one.
    """

    name = "time"

    def __init__(self, minimum: float = 0.0, maximum: float = LONGEST) -> None:
        self.minimum = minimum
        self.maximum = maximum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        time = seconds(value)
        if not self.minimum <= time <= self.maximum:
            limits = f" of {self.minimum:g} seconds or more" if self.minimum else ""
            if time > self.maximum or self.maximum < LONGEST:
                limits = f" from {self.minimum:g} to {self.maximum:g} seconds"
            self.fail(f"{value!r}: give a time{limits}, such as 500ms, 1s, 15m, 1h or 7d", param, ctx)
        return time


class _TimeLimit(Duration):
    """A time above 0; plain numbers are seconds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        time = value if isinstance(value, float) else seconds(value)
        if not 0 < time <= LONGEST:
            most = f" and up to {LONGEST:g} seconds" if time > LONGEST else ""
            self.fail(f"{value!r} is not a time above 0{most}: write it as 90, 90s, 1.5m or 500ms", param, ctx)
        return time


SECONDS = _TimeLimit()


class Size(click.ParamType[int]):
    """A size such as ``65536``, ``512K`` or ``1MiB``, as bytes.

    :param minimum: the smallest size to accept, in bytes.
    :param maximum: the largest one; None if there is none.
    """

    name = "size"

    def __init__(self, minimum: int, maximum: int | None = None) -> None:
        self.minimum = minimum
        self.maximum = maximum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            number = size(self.name)(value)
        except UsageError:
            number = 0 if value == "0" else -1
        if number < self.minimum:
            self.fail(
                f"{value!r} is not a size of {self.minimum} bytes or more: write it as 65536, 512K or 1M", param, ctx
            )
        if self.maximum is not None and number > self.maximum:
            self.fail(f"{value!r} is more than {self.maximum} bytes", param, ctx)
        return number


class Mode(click.ParamType[int]):
    """Permissions of files, in octal; their owner must be able to read and write."""

    name = "mode"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        return check_file_mode(mode(value))


class Time(click.ParamType[datetime]):
    """A date and time in ISO 8601, in UTC unless it names another zone, or a time before now such as ``-15m``."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        try:
            return moment(value)
        except ValueError:
            self.fail(f"{value!r} is not a time: write it as 2026-01-31, 2026-01-31T12:00:00 or -15m", param, ctx)
        except OverflowError:
            self.fail(f"{value!r} is not a time: in UTC it is outside the years 1 to 9999", param, ctx)


class Speed(click.ParamType[float]):
    """A factor above 0, or 0 for ``max``."""

    name = "speed"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if value == "max":
            return 0.0
        try:
            speed = float(value)
        except ValueError:
            speed = 0.0
        if not 0 < speed <= 1e6:
            self.fail(f"{value!r} is not a speed: 1 keeps the original timing, 2 is twice as fast, max has no limit")
        return speed
