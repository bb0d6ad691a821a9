"""The callbacks of the application, which a read calls, and which may read themselves.

If a callback reads, the next callbacks are called inside of it. At `DEEPEST` they wait until one of these returns. So a
callback that asks another service answers any number of requests that arrive together: without a limit, each would be
called inside the one before, and Python permits about 60 of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVarTuple

__all__ = ["DEEPEST", "Calls"]

Args = TypeVarTuple("Args")

DEEPEST = 8
"""Callbacks inside one another. One that asks a service of the same connection needs two."""


class Calls:
    """The callbacks of one connection, called in order.

    :ivar errors: the exceptions that callbacks have raised, and that no read has raised yet.
    :ivar was_interrupted: whether an exception other than an `Exception`, such as `KeyboardInterrupt`, left a callback.
    """

    __slots__ = ("_depth", "_waiting", "errors", "was_interrupted")

    def __init__(self) -> None:
        self.errors: deque[Exception] = deque()
        self.was_interrupted = False
        self._depth = 0
        self._waiting: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether no callback waits, and no exception either."""
        return not self.errors and not self._waiting

    def add(self, callback: Callable[[*Args], object], *args: *Args) -> None:
        """Call a callback after those that wait: now, unless too many are called inside one another."""
        self._waiting.append((callback, args))
        self.run()

    def run(self) -> None:
        """Call the callbacks that wait, as far as the depth permits."""
        while self._waiting and self._depth < DEEPEST:
            callback, args = self._waiting.popleft()
            self._depth += 1
            try:
                callback(*args)
            except Exception as e:
                self.errors.append(e)
            except BaseException:
                self.was_interrupted = True
                raise
            finally:
                self._depth -= 1
