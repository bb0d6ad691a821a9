"""A subscription with a queue, for the Twisted and the asyncio client."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Protocol, Self

from sbus.client.api import AwaitableWaiter
from sbus.client.core import Message
from sbus.errors import Closed

__all__ = ["HIGH_WATER", "LOW_WATER", "QueuedSubscription"]

HIGH_WATER = 4096
"""Unread messages of one subscription at which the client stops reading its socket."""
LOW_WATER = HIGH_WATER // 4
"""Unread messages at which it reads again."""


class Owner(Protocol):
    """What a subscription needs of its connection."""

    def waiter(self) -> AwaitableWaiter:
        """Return a new waiter."""

    def call_user(self, callback: Callable[[Message], object], message: Message, /) -> None:
        """Call the application and log what it raises."""

    def schedule_wake(self, subscription: QueuedSubscription) -> None:
        """Call `QueuedSubscription.wake` once the packets at hand are processed."""

    def pause_for(self, subscription: QueuedSubscription) -> None:
        """Stop reading the socket until `resume_for`."""

    def resume_for(self, subscription: QueuedSubscription) -> None:
        """Read the socket again, as far as this subscription is concerned."""

    def unsubscribe(self, subscription: QueuedSubscription) -> None:
        """End a subscription."""


class QueuedSubscription:
    """The messages of one pattern: kept until they are read, or passed to a callback.

    :ivar pattern: the pattern subscribed to.
    :ivar callback: the function called with each message, or None.
    """

    def __init__(self, owner: Owner, callback: Callable[[Message], object] | None) -> None:
        self.pattern = b""
        self.callback = callback
        self._owner = owner
        self._messages: deque[Message] = deque()
        self._waiters: list[AwaitableWaiter] = []
        self._error: Exception | None = None

    def deliver(self, messages: list[Message]) -> None:
        """See `sbus.client.core.Sink`."""
        if self._error is not None:
            return  # closed by another sink's callback for the same messages
        if self.callback is not None:
            for message in messages:
                self._owner.call_user(self.callback, message)
            return
        self._messages.extend(messages)
        if self._waiters:
            self._owner.schedule_wake(self)
        if len(self._messages) >= HIGH_WATER:
            self._owner.pause_for(self)

    def end(self, error: Exception) -> None:
        """Take no more messages; reading the rest ends with `error`."""
        if self._error is None:
            self._error = error
        self.wake()

    def wake(self) -> None:
        """Let the readers that wait look again."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.set_result(b"")

    async def _get(self) -> Message:
        """Wait for the next message; several readers may wait, and are served in order."""
        while (message := self._next()) is None:
            await self._change()
        return message

    async def _get_many(self) -> list[Message]:
        """Wait for a message, then return all that are here."""
        while not self._messages:
            if self._error is not None:
                raise self._error
            await self._change()
        return self.get_ready()

    async def _change(self) -> None:
        """Wait until messages have come or the subscription has ended."""
        waiter = self._owner.waiter()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def _next(self) -> Message | None:
        """Remove and return the next message, or None if there is none yet.

        :raises sbus.errors.Disconnected: if no more messages will come.
        """
        if not self._messages:
            if self._error is not None:
                raise self._error
            return None
        message = self._messages.popleft()
        if len(self._messages) == LOW_WATER:
            self._owner.resume_for(self)
        return message

    def get_ready(self) -> list[Message]:
        """Return all messages that are here, without waiting; perhaps none."""
        messages = list(self._messages)
        self._messages.clear()
        self._owner.resume_for(self)
        return messages

    def close(self) -> None:
        """Unsubscribe; iteration over the subscription ends."""
        self._owner.unsubscribe(self)

    def __aiter__(self) -> AsyncIterator[Message]:
        return self

    async def __anext__(self) -> Message:
        try:
            return self._next() or await self._get()
        except Closed:
            raise StopAsyncIteration from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
