"""What the commands of ``twistd`` share: options with values that are checked, and errors that fit one line."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from twisted.python import usage

from sbus.errors import UsageError
from sbus.version import __version__

__all__ = ["CommandLine", "amount", "choice", "duration", "mode"]

_UNITS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def mode(text: str) -> int:
    """Permissions, from the three octal digits after ``--mode=``.

    :raises UsageError: if they are something else.
    """
    try:
        bits = int(text, 8)
    except ValueError:
        bits = -1
    if not 0 <= bits <= 0o777:
        raise UsageError(f"--mode={text}: give three octal digits, as 0770")
    return bits


def choice(option: str, *words: str) -> Callable[[str], str]:
    """What takes one of these words as the option's value."""

    def coerce(text: str) -> str:
        if text not in words:
            raise UsageError(f"--{option}={text}: say {' or '.join(words)}")
        return text

    return coerce


def amount(option: str, unit: str, kind: Callable[[str], Any] = int) -> Callable[[str], Any]:
    """What takes a number above 0 as the option's value."""

    def coerce(text: str) -> Any:
        try:
            number = kind(text)
        except ValueError:
            number = 0
        if not 0 < number < float("inf"):
            raise UsageError(f"--{option}={text}: give a number of {unit} above 0")
        return number

    return coerce


def duration(option: str, least: float = 0.0) -> Callable[[str], float]:
    """What takes a time as the option's value, in seconds or with its unit, and makes seconds of it."""

    def coerce(text: str) -> float:
        match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h|d|)", text)
        seconds = float(match[1]) * _UNITS[match[2]] if match else -1.0
        if seconds < least:
            more = f" of {least:g} seconds or more" if least else ""
            raise UsageError(f"--{option}={text}: give a time{more}, as 500ms, 1s, 15m, 1h or 7d")
        return seconds

    return coerce


class CommandLine(usage.Options):
    """The command line of a service.

    :cvar command: its name, behind that of ``twistd``.
    """

    command: str

    def opt_version(self) -> None:
        """Print the version of sbus and exit."""
        print(f"sbus {__version__}")
        sys.exit(0)

    def parseOptions(self, options: Any = None) -> None:
        """Parse and check the command line.

        :raises SystemExit: with one line; Twisted's own way would print all of the help around it.
        """
        try:
            super().parseOptions(options)  # type: ignore[no-untyped-call]
        except (usage.UsageError, UsageError) as e:
            raise SystemExit(f"{self.command}: {e} (see twistd {self.command} --help)") from None
