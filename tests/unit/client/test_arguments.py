"""What the application may pass, and the errors for anything else."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

import pytest

from sbus.client.arguments import check_callback, check_count, check_function, check_seconds, check_text
from sbus.client.options import ConnectOptions
from sbus.client.queues import build_put
from sbus.errors import UsageError


@pytest.mark.parametrize("seconds", [1, 0.5, -1, math.inf, Decimal("1.5"), Fraction(1, 3), True])
def test_numbers_of_seconds(seconds: Any) -> None:
    """Any real number will do, and is a float from there on."""
    checked = check_seconds(seconds)
    assert (type(checked), checked) == (float, float(seconds))


def test_no_number_is_left_to_the_caller() -> None:
    """A timeout that is no number has ended."""
    assert math.isnan(check_seconds(math.nan))


@pytest.mark.parametrize("seconds", ["1", b"1", None, [1], 1j, 10**400, object(), Decimal("sNaN")])
def test_what_is_no_number_of_seconds(seconds: Any) -> None:
    """Text is none either, even if it could be parsed; the error shows the argument."""
    with pytest.raises(UsageError, match=r"^delay=.{1,80}: give a number of seconds$"):
        check_seconds(seconds, "delay")


@pytest.mark.parametrize("count", ["1", 1.0, None, True, 0, 11, math.nan])
def test_what_is_no_count(count: Any) -> None:
    """A count is an integer within its limits."""
    check_count(10, "n", "give 1 to 10", most=10)
    with pytest.raises(UsageError, match=r"^n=.*: give 1 to 10$"):
        check_count(count, "n", "give 1 to 10", most=10)


def test_whole_numbers_of_other_types() -> None:
    """Any whole number will do, such as numpy's, and is an int from there on."""

    class Whole:
        def __index__(self) -> int:
            return 7

    checked = check_count(Whole(), "n", "give 1 to 10", most=10)
    assert (type(checked), checked) == (int, 7)


def test_options_without_a_limit() -> None:
    """As many messages may wait for a bus as memory has room for."""
    assert ConnectOptions(reconnect_buffer=math.inf).reconnect_buffer == math.inf  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^reconnect_buffer=0: give a number of bytes above 0, or math\.inf$"):
        ConnectOptions(reconnect_buffer=0)


def test_a_job_without_a_delay() -> None:
    """None is no delay, as 0 is."""
    assert build_put(b"x", delay=None) == build_put(b"x")  # type: ignore[arg-type]


def test_functions_and_text() -> None:
    """The errors say what the argument is for, and its type."""
    check_function(print, "a callback")
    check_text("why", "the cause")
    with pytest.raises(UsageError, match=r"^a callback is a function, not int$"):
        check_function(5, "a callback")
    with pytest.raises(UsageError, match=r"^on_gap is a function, not int$"):
        check_callback(5, "on_gap")
    with pytest.raises(UsageError, match=r"^the cause is str, not bytes$"):
        check_text(b"why", "the cause")


def test_callbacks_are_ordinary_functions() -> None:
    """Nobody would await what a coroutine function makes, whether it is one or an object that is called like one."""

    async def function(message: object) -> None:
        """Never run."""

    class Handler:
        async def __call__(self, message: object) -> None:
            """Never run."""

    check_callback(print, "on_gap")
    check_callback(Handler, "on_gap")  # makes an object
    for callback in (function, partial(function, 1), Handler()):
        with pytest.raises(UsageError, match=r"^on_gap is an ordinary function: it may begin a task, but nobody"):
            check_callback(callback, "on_gap")
