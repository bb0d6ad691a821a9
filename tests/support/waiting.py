"""Waiting for something that no event announces."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["wait_until"]

T = TypeVar("T")


def wait_until(
    look: Callable[[], T], is_right: Callable[[T], object] = bool, *, timeout: float = 20.0, pause: float = 0.01
) -> T:
    """Look again and again until what is found is right, and return it.

    :param timeout: seconds after which the test fails, with what was found last.
    :param pause: seconds between two looks.
    """
    deadline = time.monotonic() + timeout
    while not is_right(found := look()):
        assert time.monotonic() < deadline, found
        time.sleep(pause)
    return found
