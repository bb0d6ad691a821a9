"""Subscriptions with a queue, and watches, for the Twisted and the asyncio client.

A subscription to requests whose handlers are coroutines is a reader of its own queue: it begins the next handler while
fewer than `sbus.client.responding.MOST_HANDLERS` are under way. So a flood of requests stops the reading of the socket
as unread messages do, and handlers begin in the order of their requests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol, Self

from sbus.client.dispatch import AwaitableWaiter, Message
from sbus.client.losses import LossMark, Lost, MessageQueue
from sbus.client.responding import Responder
from sbus.client.watches import Watch
from sbus.errors import Closed, NotAllowed

__all__ = ["HIGH_WATER", "LOW_WATER", "QueuedSubscription", "Readers", "WatchQueue"]

HIGH_WATER = 4096
"""Unread messages of one subscription at which the client stops reading its socket."""
LOW_WATER = HIGH_WATER // 4
"""Unread messages at which it reads again."""


class Owner(Protocol):
    """The methods of a connection that a subscription or a watch uses."""

    def waiter(self) -> AwaitableWaiter:
        """Return a new waiter."""

    def call_user(self, callback: Callable[[Message], object], message: Message, /) -> None:
        """Call the application and log an exception that it raises."""

    def report_lost(self, lost: Lost) -> None:
        """Call ``on_lost``."""

    def schedule_wake(self, readers: Readers) -> None:
        """Call `Readers.wake` once the packets at hand are processed."""

    def pause_for(self, subscription: QueuedSubscription) -> None:
        """Stop reading the socket until `resume_for`."""

    def resume_for(self, subscription: QueuedSubscription) -> None:
        """Read the socket again, as far as this subscription is concerned."""

    def unsubscribe(self, subscription: QueuedSubscription) -> None:
        """End a subscription."""

    def unwatch(self, watch: WatchQueue) -> None:
        """End a watch."""


class Readers:
    """The coroutines that wait for one subscription, watch or worker."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._waiters: list[AwaitableWaiter] = []

    def wake(self) -> None:
        """Let them look again."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.set_result(b"")

    def wake_soon(self) -> None:
        """Let them look again once the packets at hand are processed."""
        if self._waiters:
            self._owner.schedule_wake(self)

    async def wait(self) -> None:
        """Wait to be woken up."""
        waiter = self._owner.waiter()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)


class QueuedSubscription:
    """The messages of one pattern: kept until they are read, or passed to a callback.

    :ivar pattern: the pattern subscribed to.
    :ivar callback: the function called with each message, or None.
    """

    def __init__(self, owner: Owner, callback: Callable[[Message], object] | None) -> None:
        self.pattern = b""
        self.callback = callback
        self._owner = owner
        self._messages = MessageQueue()
        self._readers = Readers(owner)
        self._error: Exception | None = None
        self._responder = callback if isinstance(callback, Responder) else None
        if self._responder is not None:
            self._responder.on_room = self._serve

    def deliver(self, messages: list[Message]) -> None:
        """See `sbus.client.core.Sink`."""
        if self._error is not None:
            return  # closed by another sink's callback for the same messages
        if self.callback is not None and self._responder is None:
            for message in messages:
                self._owner.call_user(self.callback, message)
            return
        self._messages.extend(messages)
        self._serve()
        self._readers.wake_soon()
        if len(self._messages) >= HIGH_WATER:
            self._owner.pause_for(self)

    def _serve(self) -> None:
        """Call the responder with the requests that are here, as far as it has room."""
        responder, messages = self._responder, self._messages
        while responder is not None and messages and responder.has_room:
            if messages.marks:
                self._settle()
            if messages:
                message = messages.popleft()
                if len(messages) == LOW_WATER:
                    self._owner.resume_for(self)
                self._owner.call_user(responder, message)

    def begin(self) -> None:
        """See `sbus.client.core.Sink`: no message of others is in its queue."""

    def has_unread(self) -> bool:
        """See `sbus.client.losses.LossKeeper`."""
        return bool(self._messages)

    def keep(self, mark: LossMark) -> None:
        """See `sbus.client.losses.LossKeeper`."""
        self._messages.keep(mark)
        if len(self._messages) >= HIGH_WATER:
            self._owner.pause_for(self)

    def forked(self, error: Exception) -> None:
        """Forget the messages, which are the parent's to read."""
        self._error = error
        self._messages.refill(())

    def end(self, error: Exception) -> None:
        """Take no more messages; reading the rest ends with `error`, and requests get no handler."""
        if self._error is None:
            self._error = error
        if self._responder is not None:
            self._messages.refill(())
        self._readers.wake()

    def refuse(self, error: NotAllowed) -> None:
        """Take no more messages, as in `end`: the server has refused the subscription."""
        if self._error is None:
            self._error = error
        self._readers.wake_soon()

    async def _get(self) -> Message:
        """Wait for the next message; several readers may wait, and are served in order."""
        while (message := self._next()) is None:
            await self._readers.wait()
        return message

    async def _get_many(self) -> list[Message]:
        """Wait for a message, then return all that are here, up to the next loss."""
        while not (messages := self.get_ready()):
            if self._error is not None:
                raise self._error
            await self._readers.wait()
        return messages

    def _next(self) -> Message | None:
        """Remove and return the next message, or None if there is none yet.

        :raises Exception: the error that has ended the subscription, if no more messages will come.
        """
        if self._messages.marks:
            self._settle()
        if not self._messages:
            if self._error is not None:
                raise self._error
            return None
        message = self._messages.popleft()
        if len(self._messages) == LOW_WATER:
            self._owner.resume_for(self)
        return message

    def _settle(self) -> None:
        """Report the losses that were reached."""
        self._messages.settle(self._owner.report_lost)
        if len(self._messages) <= LOW_WATER:
            self._owner.resume_for(self)

    def get_ready(self) -> list[Message]:
        """Return all messages that are here, without waiting; perhaps none.

        With ``on_lost``, a list ends where messages are missing: call it again for the rest.

        :raises sbus.errors.NotAllowed: if there are none, and the server has refused the subscription.
        """
        if self._messages.marks:
            self._settle()
        messages = self._messages.take()
        if len(self._messages) <= LOW_WATER:
            self._owner.resume_for(self)
        if not messages and isinstance(self._error, NotAllowed):
            raise self._error
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


class WatchQueue(Watch):
    """Whether anybody subscribes to a key: the state at first, and then each change."""

    def __init__(self, owner: Owner, key: bytes) -> None:
        super().__init__(key)
        self._owner = owner
        self._readers = Readers(owner)

    def update(self, has_subscribers: bool) -> None:
        """See `sbus.client.watches.Watch`."""
        super().update(has_subscribers)
        self._readers.wake_soon()

    def end(self, error: Exception) -> None:
        """See `sbus.client.watches.Watch`."""
        super().end(error)
        self._readers.wake()

    async def _get(self) -> bool:
        while (state := self._next()) is None:
            await self._readers.wait()
        return state

    def close(self) -> None:
        """End the watch; iteration over it ends."""
        self._owner.unwatch(self)

    def __aiter__(self) -> AsyncIterator[bool]:
        return self

    async def __anext__(self) -> bool:
        try:
            return await self._get()
        except Closed:
            raise StopAsyncIteration from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
