"""Waiters on Deferreds."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Generic, TypeVar

from twisted.internet import defer

__all__ = ["DeferredWaiter", "DoneWaiter"]

T = TypeVar("T")


class _Waiter(Generic[T]):
    """A waiter (`sbus.client.core.Waiter`) on a Deferred, which may be cancelled.

    :param on_cancel: called when it is.
    """

    __slots__ = ("deferred",)

    def __init__(self, on_cancel: Callable[[], None] = lambda: None) -> None:
        self.deferred: defer.Deferred[T] = defer.Deferred(lambda _: on_cancel())

    def set_exception(self, error: Exception) -> None:
        if not self.deferred.called:
            self.deferred.errback(error)

    def __await__(self) -> Generator[object, None, T]:
        return self.deferred.__await__()


class DeferredWaiter(_Waiter[bytes]):
    """A waiter whose Deferred fires with the value."""

    __slots__ = ()

    def set_result(self, value: bytes) -> None:
        if not self.deferred.called:
            self.deferred.callback(value)


class DoneWaiter(_Waiter[None]):
    """A waiter whose Deferred fires with None."""

    __slots__ = ()

    def set_result(self, value: bytes) -> None:
        if not self.deferred.called:
            self.deferred.callback(None)
