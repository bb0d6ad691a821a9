"""The callbacks of the application, which a read of a blocking client calls, and which may read themselves.

If a callback reads, the next callbacks are called inside of it. At `DEEPEST` they wait until one of these returns. So a
callback that asks another service answers any number of requests that arrive together: without a limit, each would be
called inside the one before, and Python permits about 60 of them.

Callbacks that others may wait for do not wait themselves: replies, and as far as twice that depth, requests, as a
service may be of the same connection.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TypeVarTuple

from sbus.client.dispatch import OwnCallback
from sbus.client.responding import Responder

__all__ = ["DEEPEST", "Callbacks"]

Args = TypeVarTuple("Args")

DEEPEST = 16
"""Callbacks inside one another. Each takes about twelve of the 1,000 calls that Python permits."""
_DEEPEST_OF: dict[type, float] = {OwnCallback: math.inf, Responder: 2 * DEEPEST}


class Callbacks:
    """Calls the functions of the application in order, and distinguishes their errors from the client's own.

    :ivar errors: their exceptions that no call has raised yet.
    :ivar raised: the last one that a call has raised.
    :ivar was_interrupted: whether an exception other than an `Exception`, such as `KeyboardInterrupt`, left a callback.
    """

    __slots__ = ("_depth", "_waiting", "errors", "raised", "was_interrupted")

    def __init__(self) -> None:
        self.errors: deque[Exception] = deque()
        self.raised: Exception | None = None
        self.was_interrupted = False
        self._depth = 0
        self._waiting: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether no callback waits, and no exception either."""
        return not self.errors and not self._waiting

    def call(self, callback: Callable[[*Args], object], *args: *Args) -> None:
        """Call a function after those that wait: now, unless too many are called inside one another.

        If it raises, keep the error and continue.
        """
        depth = self._depth
        if (self._waiting or depth >= DEEPEST) and depth >= _DEEPEST_OF.get(type(callback), 0):
            self._waiting.append((callback, args))
        else:
            self._call(callback, args)
        if self._waiting:
            self._run()

    def _run(self) -> None:
        while self._waiting and self._depth < DEEPEST:
            self._call(*self._waiting.popleft())

    def _call(self, callback: Callable[..., object], args: tuple[object, ...]) -> None:
        depth = self._depth
        self._depth = depth + 1
        try:
            callback(*args)
        except Exception as e:
            self.errors.append(e)
        except BaseException:
            self.was_interrupted = True
            raise
        finally:
            self._depth = depth

    def call_now(self, callback: Callable[[*Args], object], *args: *Args) -> None:
        """Call a function; if it raises, so does this."""
        try:
            callback(*args)
        except Exception as e:
            self.raised = e
            raise

    def settle(self) -> None:
        """Call the functions that wait, as far as the depth permits, and raise the first error that is kept."""
        if self._waiting:
            self._run()
        if self.errors:
            self.raised = self.errors.popleft()
            raise self.raised
