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
    """

    __slots__ = ("_depth", "_raised", "_waiting", "errors")

    def __init__(self) -> None:
        self.errors: deque[Exception] = deque()
        self._raised: BaseException | None = None
        self._depth = 0
        self._waiting: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether no callback can be called now, and no exception waits to be raised."""
        return not self.errors and (not self._waiting or self._depth >= DEEPEST)

    def deepest_of(self, callback: object) -> float:
        """Return the depth below which a callback is called at once, whatever waits."""
        return _DEEPEST_OF.get(type(callback), 0)

    def call(
        self,
        callback: Callable[[*Args], object],
        *args: *Args,
        deepest: float = 0,
        later: Callable[[*Args], object] | None = None,
    ) -> None:
        """Call a function after those that wait: now, unless too many are called inside one another.

        If it raises, keep the error and continue.

        :param deepest: see `deepest_of`.
        :param later: the function to call instead, if it has to wait.
        """
        depth = self._depth
        if (self._waiting or depth >= DEEPEST) and depth >= deepest:
            self._waiting.append((later or callback, args))
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
        except BaseException as e:
            self._raised = e
            raise
        finally:
            self._depth = depth

    def call_now(self, callback: Callable[[*Args], object], *args: *Args) -> None:
        """Call a function; if it raises, so does this."""
        try:
            callback(*args)
        except BaseException as e:
            self._raised = e
            raise

    def settle(self) -> None:
        """Call the functions that wait, as far as the depth permits, and raise the first error that is kept."""
        self._raised = None  # which keeps all that its traceback has
        if self._waiting:
            self._run()
        if self.errors:
            self._raised = self.errors.popleft()
            raise self._raised

    def has_raised(self, error: BaseException) -> bool:
        """Return whether an exception that a call has raised comes from a callback."""
        return error is self._raised

    def clear(self) -> None:
        """Call none of those that wait."""
        self._waiting.clear()
