"""Whether the compiled parts are to be used: where they were built, and ``SBUS_PURE=1`` does not forbid it."""

from __future__ import annotations

import os

__all__ = ["is_wanted"]


def is_wanted() -> bool:
    """Whether a compiled twin is to be used if there is one."""
    return os.environ.get("SBUS_PURE", "0") in ("", "0")
