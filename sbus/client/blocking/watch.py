"""A watch of the blocking client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol, Self

from sbus.client import watches
from sbus.client.blocking.waiting import deadline_in
from sbus.errors import Closed

__all__ = ["Watch"]


class Owner(Protocol):
    """The methods of `sbus.client.blocking.Bus` that a watch uses."""

    def _read_until(self, condition: Callable[[], object], deadline: float | None) -> None:
        """Receive until a condition holds."""

    def _end_watch(self, watch: Watch) -> None:
        """End a watch."""

    def _is_own(self, error: Exception) -> bool:
        """Return whether an error comes from the bus, and not from a callback."""

    def limit(self, timeout: float | None) -> AbstractContextManager[None]:
        """Bound a block of calls."""


class Watch(watches.Watch):
    """Whether anybody subscribes to a key; read it with `get` or a loop.

    :ivar key: the key.
    :ivar has_subscribers: the newest state, as of the last time that the bus was read; None until the server has
        reported one.
    """

    def __init__(self, bus: Owner, key: bytes) -> None:
        super().__init__(key)
        self._bus = bus

    def get(self, timeout: float | None = None) -> bool:
        """Wait for the state at first, and then for each change; return the newest state.

        :raises sbus.errors.TimedOut: if there was no change within `timeout` seconds.
        :raises sbus.errors.Disconnected: if no more changes will come.
        :raises sbus.errors.UsageError: if the server does not report this.
        """
        deadline = deadline_in(timeout)
        while (state := self._next()) is None:
            self._bus._read_until(self._has_news, deadline)
        return state

    def __iter__(self) -> Iterator[bool]:
        while True:
            try:
                yield self.get()
            except Closed as e:
                if self._bus._is_own(e):
                    return
                raise

    def close(self) -> None:
        """End the watch; iteration over it ends."""
        self._bus._end_watch(self)
        self.end(Closed("the watch was closed here: begin another one with watch_subscribers"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._bus.limit(None if kind is None else 0.0):  # as for a subscription
            self.close()
