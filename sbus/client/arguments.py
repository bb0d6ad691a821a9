"""Checks of what the application passes.

A wrong argument raises `UsageError` in the call that has it, with the remedy, and not a `TypeError` from somewhere
below, when half of the work may be done.
"""

from __future__ import annotations

import math
import operator
from inspect import iscoroutinefunction

from sbus.errors import InvalidKey, UsageError

__all__ = [
    "as_bytes",
    "check_callback",
    "check_count",
    "check_function",
    "check_payload",
    "check_seconds",
    "check_text",
]


def as_bytes(text: bytes | str, what: str = "key") -> bytes:
    """Return bytes unchanged and text as UTF-8.

    :param what: what the text is, for the error.
    :raises InvalidKey: if it is neither, or text that UTF-8 cannot encode.
    """
    try:
        return text.encode() if isinstance(text, str) else bytes(memoryview(text))
    except TypeError:
        raise InvalidKey(f"a {what} is str or bytes, not {type(text).__name__}") from None
    except UnicodeEncodeError:
        raise InvalidKey(
            f"the {what} {text!r:.80} is text that UTF-8 cannot encode: give bytes (os.fsencode)"
        ) from None


def check_payload(payload: object, what: str = "a payload") -> None:
    """Check that a payload is bytes, or has the buffer interface.

    :param what: what it is, with its article, for the error.
    :raises UsageError: if it does not.
    """
    if not isinstance(payload, (bytes, bytearray, memoryview)):
        try:
            memoryview(payload)  # type: ignore[arg-type]
        except TypeError:
            raise UsageError(
                f"{what} is bytes, not {type(payload).__name__}: encode it, for example text.encode() or as JSON"
            ) from None


def check_text(text: object, what: str) -> None:
    """Check that an argument is text.

    :param what: what the text is, with its article, for the error.
    :raises UsageError: if it is anything else.
    """
    if not isinstance(text, str):
        raise UsageError(f"{what} is str, not {type(text).__name__}")


def check_function(function: object, what: str) -> None:
    """Check that an argument can be called.

    :param what: what the function is, with its article, for the error.
    :raises UsageError: if it cannot.
    """
    if not callable(function):
        raise UsageError(f"{what} is a function, not {type(function).__name__}")


def check_callback(function: object, what: str) -> None:
    """Check that an argument can be called, and makes no coroutine.

    :param what: what the function is, for the error.
    :raises UsageError: if it is something else.
    """
    check_function(function, what)
    call = getattr(type(function), "__call__", None)  # noqa: B004  # of which kind it is
    if iscoroutinefunction(function) or iscoroutinefunction(call):
        raise UsageError(f"{what} is an ordinary function: it may begin a task, but nobody awaits its coroutine")


def check_seconds(seconds: object, name: str = "timeout") -> float:
    """Return a number of seconds, which may be negative, infinite or no number (NaN).

    :param name: the name of the argument, for the error.
    :raises UsageError: if it is no number at all, or an integer that is too large.
    """
    try:
        math.isnan(seconds)  # type: ignore[arg-type]  # float() would parse text
        return float(seconds)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{name}={seconds!r:.80}: give a number of seconds") from None


def check_count(count: object, name: str, remedy: str, least: int = 1, most: float = math.inf) -> int:
    """Return an argument that is a whole number, of any type, within its limits.

    :param name: the name of the argument, for the error.
    :param remedy: what to give.
    :raises UsageError: if it is not.
    """
    try:
        if not isinstance(count, bool) and least <= (whole := operator.index(count)) <= most:  # type: ignore[arg-type]
            return whole
    except TypeError:
        pass
    raise UsageError(f"{name}={count!r:.80}: {remedy}")
