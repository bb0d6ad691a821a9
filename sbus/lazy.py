"""Packages whose public names are imported when they are first used."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

__all__ = ["lazy_names"]


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package (:pep:`562`), so that importing the package imports nothing else.

    :param package: the package's ``__name__``.
    :param homes: the module of each public name, relative to the package: ``{"Limits": ".limits"}``.
    """

    def get(name: str) -> Any:
        if name in homes:
            import importlib

            return getattr(importlib.import_module(homes[name], package), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
