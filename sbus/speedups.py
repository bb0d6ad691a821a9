"""The choice between a compiled module and its plain Python twin.

Hot loops exist twice behind one name: in Cython (``_name.pyx``) and in plain Python. sbus uses the compiled twin where
it was built, unless the environment variable ``SBUS_PURE`` is set to something other than ``0``.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

__all__ = ["choose", "is_wanted"]


def is_wanted() -> bool:
    """Return whether compiled twins may be used."""
    return os.environ.get("SBUS_PURE", "0") in ("", "0")


def choose(module: str, **plain: Any) -> tuple[Any, ...]:
    """Return the compiled twin of each function.

    Where the module was not built, return the plain functions.

    :param module: the name of the compiled module.
    :param plain: the plain functions, by the names that they have in that module.
    :returns: the functions in the order of `plain`.
    """
    if is_wanted():
        try:
            compiled = importlib.import_module(module)
        except ImportError:
            pass
        else:
            return tuple(getattr(compiled, name) for name in plain)
    return tuple(plain.values())
