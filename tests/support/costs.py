"""The cost of a call, measured so that other load on the machine does not matter."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

__all__ = ["calls"]


def calls(function: Callable[..., object], *args: object) -> int:
    """Return the number of Python and C functions that run in one call of `function`."""
    count = 0

    def profile(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()
    sys.setprofile(profile)
    try:
        function(*args)
    finally:
        sys.setprofile(before)
        gc.enable()
    return count
