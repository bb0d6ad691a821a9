"""A subscription of the blocking client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol, Self, TypeVarTuple

from sbus.client.blocking.callbacks import Callbacks
from sbus.client.blocking.waiting import deadline_in
from sbus.client.core import Batch, Message
from sbus.client.losses import LossMark, Lost, MessageQueue
from sbus.client.snapshots import LastValue
from sbus.errors import Closed, NotAllowed

__all__ = ["Subscription"]

Args = TypeVarTuple("Args")


class Owner(Protocol):
    """The methods of `sbus.client.blocking.Bus` that a subscription uses."""

    _batch: Batch
    _callbacks: Callbacks
    _kept: int

    def _read_until(self, condition: Callable[[], object], deadline: float | None) -> None:
        """Receive until a condition holds."""

    def _read_now(self, wanted: MessageQueue) -> None:
        """Receive the packets that are here."""

    def report_lost(self, lost: Lost) -> None:
        """Call ``on_lost``."""

    def _has_shared(self) -> bool:
        """Return whether messages wait for the readers of the bus."""

    def _keep_shared(self, mark: LossMark) -> None:
        """Put a mark after these messages."""

    def _deliver_shared(self, messages: list[Message]) -> None:
        """Keep messages for the readers of the bus."""

    def _take_shared(self, subscription: Subscription) -> list[Message]:
        """Hand over the messages kept for this subscription."""

    def _unsubscribe(self, subscription: Subscription) -> None:
        """End a subscription."""

    def _is_own(self, error: Exception) -> bool:
        """Return whether an error comes from the bus, and not from a callback."""

    def limit(self, timeout: float | None) -> AbstractContextManager[None]:
        """Bound a block of calls."""


class Subscription:
    """The messages of one pattern.

    They go to the readers of the bus. Once the subscription itself is read (by iteration, `get`, `get_many` or
    `get_ready`), it has its own queue, which takes over those that were not read yet. A callback instead gets each
    message whenever the bus is read; if it raises, that read raises the error after it has dispatched all messages that
    came together.

    :ivar pattern: the pattern subscribed to.
    :ivar callback: the function called with each message, or None.
    """

    def __init__(
        self, bus: Owner, callback: Callable[[Message], object] | None, *, requires_sender: bool = False
    ) -> None:
        self.pattern = b""
        self.callback = callback
        self._deepest = bus._callbacks.deepest_of(callback)
        self._bus = bus
        self._since = bus._kept  # those kept before, and newer ones that have left the queue from its middle
        self._own: MessageQueue | None = None
        self._closed = False
        self._requires_sender = requires_sender
        self._refusal: NotAllowed | None = None

    def deliver(self, messages: list[Message]) -> None:
        """See `sbus.client.core.Sink`."""
        if self._closed:
            return  # closed by another sink's callback for the same messages
        if self.callback is not None:
            call = self._bus._callbacks.call
            for message in messages:
                call(self.callback, message, deepest=self._deepest, later=self._call_later)
        elif self._own is not None:
            self._own.extend(messages)
        else:
            self._bus._deliver_shared(messages)

    def _call_later(self, message: Message) -> None:
        if self.callback is not None and (not self._closed or self._refusal is not None):
            self.callback(message)

    def begin(self) -> None:
        """See `sbus.client.core.Sink`."""
        self._since = self._bus._kept

    def takes(self, message: Message) -> bool:
        """Return whether a message with a matching key is for this subscription.

        A last value is for those that asked for it, unless it may be no last value.
        """
        if isinstance(message, LastValue) and message.pattern not in (None, self.pattern):
            return False
        return message.sender is not None or not self._requires_sender

    def refuse(self, error: NotAllowed) -> None:
        """Take no more messages, and raise the error once the others are read: the server refuses the subscription."""
        self._closed, self._refusal = True, error

    def has_unread(self) -> bool:
        """See `sbus.client.losses.LossKeeper`."""
        if self.callback is not None:
            return False
        return self._bus._has_shared() if self._own is None else bool(self._own)

    def keep(self, mark: LossMark) -> None:
        """See `sbus.client.losses.LossKeeper`."""
        if self._own is None:
            self._bus._keep_shared(mark)
        else:
            self._own.keep(mark)

    def get(self, timeout: float | None = None) -> Message:
        """Wait for the next message and return it.

        :raises sbus.errors.TimedOut: if none has come within `timeout` seconds.
        :raises sbus.errors.Disconnected: if no more messages will come.
        :raises sbus.errors.NotAllowed: if no more messages will come, because the server refuses the subscription.
        """
        return self._wait(timeout).popleft()

    def get_many(self, timeout: float | None = None) -> list[Message]:
        """Wait for a message, then return all that are here; with ``on_lost``, up to where messages are missing.

        :raises: as `get`.
        """
        return self._wait(timeout).take()

    def _wait(self, timeout: float | None) -> MessageQueue:
        """Return the subscription's own queue once it has a message."""
        own, deadline = self._claim(), deadline_in(timeout)
        own.settle(self._bus.report_lost)
        while not own:
            self._bus._read_until(lambda: own or self._closed, deadline)
            if not own:
                raise self._refusal or Closed("the subscription was closed here: subscribe again to read more")
            own.settle(self._bus.report_lost)
        return own

    def get_ready(self) -> list[Message]:
        """Return all messages that are here already, without waiting.

        With ``on_lost``, a list ends where messages are missing: call it again until `pending` is 0.

        :raises sbus.errors.Disconnected: if there are none and no more will come.
        :raises sbus.errors.NotAllowed: if there are none, and the server has refused the subscription.
        """
        own = self._claim()
        own.settle(self._bus.report_lost)
        if not self._closed:
            self._bus._read_now(own)
        if self._refusal is not None and not own:
            raise self._refusal
        return own.take()

    def _claim(self) -> MessageQueue:
        """Return the subscription's own queue, and create it first if necessary."""
        if self._own is None:
            self._own = MessageQueue(self._bus._take_shared(self))
        return self._own

    def forked(self) -> None:
        """Forget the messages, in a forked child."""
        if self._own is not None:
            self._own.refill(())

    def _is_shared(self) -> bool:
        """Return whether the messages go to the readers of the bus."""
        return self._own is None and self.callback is None

    def __iter__(self) -> Iterator[Message]:
        self._claim()
        while True:
            try:
                yield self.get()
            except Closed as e:
                if self._bus._is_own(e):
                    return
                raise

    @property
    def pending(self) -> int:
        """Messages in memory, queued or not dispatched yet, which no poll shows."""
        own = 0 if self._own is None else len(self._own) - self._own.marks
        return own + len(self._bus._batch)

    def close(self) -> None:
        """Unsubscribe; iteration over the subscription ends."""
        self._closed = True
        self._bus._unsubscribe(self)  # also if an exception of a signal handler has interrupted an earlier call here

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an exception, do not wait for a full socket: the rest goes out with the next packet.
        with self._bus.limit(None if kind is None else 0.0):
            self.close()
