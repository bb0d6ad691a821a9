"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["combined"]

F = TypeVar("F", bound=Callable[..., Any])


def combined(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Return a decorator that gives a command all of these options; its help lists them in this order."""

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
