"""What the Twisted and the asyncio shell share: subscriptions as queues, and a connection that may come and go.

Everything here happens in one thread, in turns of an event loop, and nothing here waits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Self, TypeVar

from sbus.client.api import AwaitableWaiter, ClientApi
from sbus.client.connecting import find_address
from sbus.client.core import Message
from sbus.client.options import Settings
from sbus.client.outbox import Outbox
from sbus.errors import Closed, ConnectError, Disconnected
from sbus.protocol.bundles import MAX_BUNDLE
from sbus.routing.runs import total_size
from sbus.syscalls.batch import BATCH

__all__ = ["HIGH_WATER", "QueuedSubscription", "Session"]

HIGH_WATER = 4096
"""Messages that one subscription keeps unread before the socket is not read any more."""

Sub = TypeVar("Sub", bound="QueuedSubscription")


class QueuedSubscription:
    """The messages of one pattern: kept until they are read, or given to a callback.

    :ivar pattern: what it is subscribed to.
    :ivar callback: who gets the messages at once, if somebody does.
    """

    def __init__(self, session: Session[Any], callback: Callable[[Message], Any] | None) -> None:
        self.pattern = b""
        self.callback = callback
        self._session = session
        self._messages: deque[Message] = deque()
        self._waiting: list[AwaitableWaiter] = []
        self._error: Exception | None = None

    def deliver(self, messages: list[Message]) -> None:
        """See `sbus.client.core.Sink`."""
        if self._error is not None:
            return  # closed by another sink that has got the same messages
        if self.callback is not None:
            for message in messages:
                self._session._call_user(self.callback, message)
            return
        self._messages.extend(messages)
        if self._waiting:
            self._session._schedule_wake(self)
        if len(self._messages) >= HIGH_WATER:
            self._session.pause_for(self)

    def end(self, error: Exception) -> None:
        """No more messages will come; those that are here can still be read."""
        if self._error is None:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        """Something has changed: let those who wait look again."""
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter.set_result(b"")

    async def _get(self) -> Message:
        """Wait for the next message; several may wait."""
        while (message := self._next()) is None:
            await self._change()
        return message

    async def _get_many(self) -> list[Message]:
        """Wait for a message, then give all that are here."""
        while not self._messages:
            if self._error is not None:
                raise self._error
            await self._change()
        return self.get_ready()

    async def _change(self) -> None:
        """Wait until something may have come, or until it is over."""
        waiter = self._session.waiter()
        self._waiting.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def _next(self) -> Message | None:
        """The next message, or None if one may come.

        :raises sbus.errors.Disconnected: if none will come.
        """
        if not self._messages:
            if self._error is not None:
                raise self._error
            return None
        message = self._messages.popleft()
        if len(self._messages) == HIGH_WATER // 4:
            self._session.resume_for(self)
        return message

    def get_ready(self) -> list[Message]:
        """All messages that are here already, in one list; empty if there are none."""
        messages = list(self._messages)
        self._messages.clear()
        self._session.resume_for(self)
        return messages

    def close(self) -> None:
        """Unsubscribe; who iterates comes to the end."""
        self._session.unsubscribe(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Session(ClientApi[Sub]):
    """A client's connection to a bus, over an event loop.

    A shell gives it the methods that are abstract here and in `ClientApi`; it calls `_disconnected` when
    the connection is lost, and `_arrived` with what has come.
    """

    _failures: tuple[type[BaseException], ...] = (Exception,)  # of callbacks

    def __init__(self, address: str | None, settings: Settings) -> None:
        super().__init__()
        self.address = find_address(address)
        self.core = settings.core(settings.on_control and partial(self._call_user, settings.on_control))
        self.outbox = Outbox()
        self.outbox.extend(self.core.resync_packets())
        self._settings = settings
        self._backoff = settings.backoff
        self._at_once = BATCH  # writes that are still to be sent as they come, see `_write`
        self._writes = 0  # that wait for the end of this turn
        self._deferred_bytes = 0  # bytes in these
        self._crowded: set[QueuedSubscription] = set()
        self._roused: list[QueuedSubscription] = []  # whose readers are to be told of messages
        self._loss_reason: Disconnected | None = None  # why the connection was lost, until that has been told
        self._coming_back = False
        self._closing = False
        self._error: Exception | None = None

    # --- what a shell does -------------------------------------------------------------------

    @abstractmethod
    def callback_failed(self, error: BaseException) -> None:
        """A callback of the application's has raised an exception: log it."""

    @abstractmethod
    def _make_subscription(self, callback: Callable[[Message], Any] | None) -> Sub:
        """A subscription of the shell's kind."""

    @abstractmethod
    def _flush(self) -> None:
        """Send what the socket takes of the outbox, if there is a socket."""

    @abstractmethod
    def _send_now(self, packets: list[bytes]) -> int:
        """Send packets past the outbox, which is empty; how many the socket has taken.

        It may be none although a flush could send them, which also finds out what is the matter.
        """

    @abstractmethod
    def _soon(self, call: Callable[[], None]) -> None:
        """Call when this turn of the event loop is over, or what it has to do just now."""

    @abstractmethod
    def _set_reading(self, reading: bool) -> None:
        """Read from the socket, or do not, if there is a socket."""

    @abstractmethod
    async def _open(self) -> object:
        """Make a connection, and begin to send what waits.

        :raises ConnectError: if none can be made.
        """

    @abstractmethod
    def _is_connected(self) -> bool:
        """Whether there is a socket."""

    @abstractmethod
    def _detach(self) -> None:
        """Close the socket, if there is one."""

    @abstractmethod
    def _sleep(self, seconds: float) -> Awaitable[Any]:
        """Wait for so long."""

    @abstractmethod
    def _drained(self) -> Awaitable[None]:
        """Wait until everything that was added to the outbox has been handed to the kernel."""

    @abstractmethod
    def _reconnect(self) -> None:
        """Run `_reconnect_loop` in the background."""

    @abstractmethod
    def _ended(self, error: Exception) -> None:
        """It is over: tell who waits for that."""

    def _call_user(self, callback: Callable[..., Any], *args: Any) -> None:
        """Call the application; an exception of its must not harm the connection."""
        try:
            callback(*args)
        except self._failures as error:
            self.callback_failed(error)

    # --- what users do -----------------------------------------------------------------------

    def subscribe(self, pattern: bytes | str, callback: Callable[[Message], Any] | None = None) -> Sub:
        """Get what the pattern matches: by iterating over the result, or in a callback.

        :raises sbus.errors.InvalidKey: if nobody may use this pattern.
        """
        self._check_open()
        subscription = self._make_subscription(callback)
        self.send(self.core.subscribe(pattern, subscription))
        return subscription

    def unsubscribe(self, subscription: QueuedSubscription) -> None:
        """End a subscription."""
        if self._error is None:
            self.send(self.core.unsubscribe(subscription))
        subscription.end(Closed("the subscription was closed here"))
        self.resume_for(subscription)

    def send(self, packets: list[bytes]) -> None:
        """See `sbus.client.api.ClientApi.send`."""
        self._check_open()
        if packets:
            self._write(packets)

    # --- sending -----------------------------------------------------------------------------

    def _write(self, packets: list[bytes]) -> None:
        """Send packets, at once or when this turn is over, together with all else that is written in it.

        What is written alone goes at once. A few writes in a row may be each alone, as with somebody who
        waits for one message to be sent before the next: only when there have been many is one put off to
        see whether others come. As long as they do, only the first of a turn goes at once.
        """
        waiting = len(self.outbox)
        if self._at_once and not waiting and not self._writes:
            self._at_once -= 1
            sent = self._send_now(packets)
            if sent < len(packets):
                self.outbox.extend(packets[sent:])
                self._flush()
            return
        self.outbox.extend(packets)
        if self._writes:
            self._writes += 1
            self._deferred_bytes += total_size(packets)
            if self._deferred_bytes >= MAX_BUNDLE:  # as much as a bundle holds: nothing is won by waiting
                self._deferred_bytes = 0
                self._flush()
        elif not waiting:
            self._writes, self._deferred_bytes = 1, 0
            self._soon(self._turn_over)
        # Else the socket is full, or there is none: who sends what waits sends these too.

    def _turn_over(self) -> None:
        self._at_once = 1 if self._writes > 1 else BATCH
        self._writes = 0
        self._flush()

    # --- receiving ---------------------------------------------------------------------------

    def _arrived(self, packets: list[bytes]) -> None:
        """Packets have arrived; their readers are told when all are where they belong."""
        self.core.receive(packets)
        while self._roused:
            roused, self._roused = self._roused, []
            for subscription in roused:
                subscription._wake()

    def _schedule_wake(self, subscription: QueuedSubscription) -> None:
        """Messages have come for somebody who waits for them."""
        self._roused.append(subscription)

    # --- back-pressure -----------------------------------------------------------------------

    def pause_for(self, subscription: QueuedSubscription) -> None:
        """A subscription is not read: leave the rest to the server and the flood control chosen there."""
        if not self._crowded:
            self._set_reading(False)
        self._crowded.add(subscription)

    def resume_for(self, subscription: QueuedSubscription) -> None:
        """A subscription has room again."""
        if subscription in self._crowded:
            self._crowded.discard(subscription)
            if not self._crowded:
                self._set_reading(True)

    # --- coming and going --------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error

    def _disconnected(self, why: str) -> None:
        """The connection is lost: reconnect if that is wanted, else it is the end."""
        if self._error is not None:
            return
        error = Disconnected(f"{why} ({self.address})")
        if self._closing:
            self._end(Closed("the connection to the bus was closed here"))
        elif self._backoff is None:
            self._end(error)
        else:
            self._detach()
            waiting = self._lost()
            self.outbox.restart(self.core.resync_packets())
            self._loss_reason = self._loss_reason or error
            if not self._coming_back:
                self._coming_back = True
                self._reconnect()
            for waiter in waiting:
                waiter.set_exception(error)

    async def _reconnect_loop(self, *, tell: bool = True) -> None:
        """Connect until a connection lasts long enough to be where the old one was; then tell of the gap."""
        assert self._backoff is not None
        self._coming_back = True
        for delay in self._backoff.delays():
            await self._sleep(delay)
            try:
                if self._error is None:
                    await self._open()
                if self._is_connected():
                    await self._fence()
            except (ConnectError, Disconnected):
                pass
            if self._error is not None:
                self._detach()
                return
            if self._is_connected():
                break
        gap, self._loss_reason, self._coming_back = self._loss_reason, None, False
        if tell and self._settings.on_gap is not None and gap is not None:
            self._call_user(self._settings.on_gap, gap)

    async def _finish(self) -> None:
        """Send what waits, then end."""
        if self._error is None and self._is_connected() and len(self.outbox):
            self._closing = True
            try:
                await self._drained()
            except Disconnected:
                pass
            finally:
                self._closing = False
        self._close_now()

    def _close_now(self) -> None:
        """End, whatever waits to be sent."""
        self._end(Closed("the connection to the bus was closed here"))

    def _end(self, error: Exception) -> None:
        if self._error is not None:
            return
        self._error = error
        self._detach()
        for waiter in self._lost():
            waiter.set_exception(error)
        self.outbox.set_exception(error)
        for subscription in self.core.sinks():
            assert isinstance(subscription, QueuedSubscription)
            subscription.end(error)
        self._ended(error)
