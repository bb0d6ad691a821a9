"""The cost of a call, measured so that other load on the machine does not matter."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType

__all__ = ["called", "calls"]


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


def called(folder: str, function: Callable[..., object], *args: object) -> list[str]:
    """Return the names of the Python functions of a folder that run in one call of `function`, in order."""
    names: list[str] = []

    def profile(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and folder in frame.f_code.co_filename:
            names.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function(*args)
    finally:
        sys.setprofile(before)
    return names
