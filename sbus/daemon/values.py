"""Parsers for values on a command line; their errors name the remedy.

They serve the services that ``twistd`` runs and the command ``sbus``, which does not import Twisted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import overload

from sbus.errors import UsageError

__all__ = ["LONGEST", "amount", "choice", "duration", "mode", "seconds", "size"]

_MOST = 10**15
"""No sensible amount is this large: as seconds or days, it is beyond what clocks count."""
LONGEST = float(_MOST)
"""The longest time that an option accepts, in seconds."""
_BYTES_PER_UNIT = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SECONDS_PER_UNIT = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def mode(text: str, option: str = "--mode") -> int:
    """Parse file permissions: the value of ``--mode``, in octal.

    :param option: what the text was given as, for the error.
    :raises UsageError: if it is not an octal number from 0 to 0777.
    """
    try:
        bits = int(text, 8)
    except ValueError:
        bits = -1
    if not 0 <= bits <= 0o777:
        raise UsageError(f"{option}={text}: give three octal digits (0 to 7), such as 770")
    return bits


def choice(option: str, *words: str) -> Callable[[str], str]:
    """Return a parser that accepts one of these words.

    :param option: the option's name, without dashes, for the text of the error.
    """

    def parse(text: str) -> str:
        if text not in words:
            raise UsageError(f"--{option}={text}: use {' or '.join(words)}")
        return text

    return parse


@overload
def amount(option: str, unit: str, *, least: int = 0) -> Callable[[str], int]: ...
@overload
def amount(option: str, unit: str, kind: type[float]) -> Callable[[str], float]: ...
def amount(option: str, unit: str, kind: type[float] = int, *, least: int = 0) -> Callable[[str], float]:
    """Return a parser that accepts a number above 0 and below 10^15.

    :param option: the option's name, without dashes, for the text of the error.
    :param unit: what is counted, in the plural.
    :param kind: ``int``, or ``float`` to accept fractions.
    :param least: the smallest number to accept.
    """

    limit = f", at least {least}" if least else " above 0"

    def parse(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = 0
        if not 0 < number < _MOST or number < least:
            most = " and below 10^15" if number >= _MOST else ""
            raise UsageError(f"--{option}={text}: give a number of {unit}{limit}{most}")
        return number

    return parse


def size(option: str, least: int = 1) -> Callable[[str], int]:
    """Return a parser that converts a size such as ``65536``, ``64M`` or ``64MiB`` to bytes; 1K is 1024 bytes.

    :param option: the option's name, without dashes, for the text of the error.
    :param least: the smallest size to accept, in bytes.
    """

    def parse(text: str) -> int:
        match = re.fullmatch(r"([0-9]{1,18})(?:([KMGT])(?:iB)?)?", text, re.ASCII | re.IGNORECASE)
        number = int(match[1]) * _BYTES_PER_UNIT[(match[2] or "").upper()] if match else 0
        if number < least:
            limit = " above 0" if least == 1 else f", at least {least}"
            raise UsageError(f"--{option}={text}: give a number of bytes{limit}, such as 64M or 2G")
        return number

    return parse


def seconds(text: str) -> float:
    """Return a time such as ``500ms`` or ``1h`` in seconds, or -1 if the text is not a time."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)(ms|s|m|h|d|)", text)
    return float(match[1]) * _SECONDS_PER_UNIT[match[2]] if match else -1.0


def duration(option: str, minimum: float = 0.0) -> Callable[[str], float]:
    """Return a parser that converts a time such as ``500ms`` or ``1h`` to seconds, up to `LONGEST`.

    :param option: the option's name, without dashes, for the text of the error.
    :param minimum: the shortest time to accept, in seconds.
    """

    def parse(text: str) -> float:
        time = seconds(text)
        if not minimum <= time <= LONGEST:
            limit = f" of {minimum:g} seconds or more" if minimum else ""
            if time > LONGEST:
                limit = f" from {minimum:g} to {LONGEST:g} seconds"
            raise UsageError(f"--{option}={text}: give a time{limit}, such as 500ms, 1s, 15m, 1h or 7d")
        return time

    return parse
