"""Calling the application from within a read of a blocking client."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVarTuple

__all__ = ["Callbacks"]

Args = TypeVarTuple("Args")


class Callbacks:
    """Calls the functions of the application, and knows what they raise from the client's own errors.

    :ivar errors: what they have raised and no call has raised yet.
    :ivar raised: the last one that a call has raised.
    """

    def __init__(self) -> None:
        self.errors: deque[Exception] = deque()
        self.raised: Exception | None = None

    def call(self, callback: Callable[[*Args], object], *args: *Args) -> None:
        """Call a function; if it raises, keep the error and go on."""
        try:
            callback(*args)
        except Exception as e:
            self.errors.append(e)

    def call_now(self, callback: Callable[[*Args], object], *args: *Args) -> None:
        """Call a function; if it raises, so does this."""
        try:
            callback(*args)
        except Exception as e:
            self.raised = e
            raise

    def raise_first(self) -> None:
        """Raise the first error that is kept."""
        if self.errors:
            self.raised = self.errors.popleft()
            raise self.raised
