"""The blocking client: plain sockets, no event loop, no threads.

::

    with sbus.connect() as bus:
        bus.subscribe("weather/")
        for message in bus:
            print(message.key, message.payload)

Use a connection from one thread at a time. With ``reconnect``, the next call that needs a lost connection makes it
again, within that call's own timeout. Callbacks run while the bus is read, and may use it.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Self, Unpack

from sbus.client.api import Inbox
from sbus.client.blocking.connection import BlockingConnection
from sbus.client.blocking.subscription import Subscription
from sbus.client.blocking.waiting import deadline_in
from sbus.client.core import Message
from sbus.client.options import ConnectOptions, Keywords
from sbus.errors import Closed, Disconnected, TimedOut

__all__ = ["Bus", "Subscription", "connect"]

Socket = socket.socket  # inside `Bus`, the property `socket` hides the module


def connect(address: str | os.PathLike[str] | None = None, **options: Unpack[Keywords]) -> Bus:
    """Connect to a bus.

    :param address: path or abstract address of the bus; by default the result of
        `sbus.client.connecting.find_address`.
    :param options: the fields of `sbus.client.options.ConnectOptions`: dialect, max_packet, bundles, timeout,
        reconnect, on_gap, on_control.
    :raises sbus.errors.ConnectError: with the reason and the remedy.
    """
    bus = Bus(address, ConnectOptions(**options))
    bus._open()
    return bus


class Bus(BlockingConnection[Subscription]):
    """A connection to a bus, made by `connect`.

    `close`, or the end of ``with``, closes it.
    """

    def __init__(self, address: str | os.PathLike[str] | None, options: ConnectOptions) -> None:
        super().__init__(address, options)
        self._messages: deque[Message] = deque()
        self._last_delivered: list[Message] | None = None

    # --- sending -----------------------------------------------------------------------------

    def publish(self, key: bytes | str, payload: bytes = b"", *, flags: int = 0, timeout: float | None = None) -> None:
        """Publish a message; return when it has been handed to the kernel.

        :param flags: flags of send(2); with ``MSG_DONTWAIT``, a full socket raises `BlockingIOError`.
        :param timeout: seconds to wait while the socket is full; None for no limit.
        :raises sbus.errors.InvalidKey: if the protocol does not allow the key.
        :raises sbus.errors.PacketTooLong: if the message does not fit a packet.
        :raises sbus.errors.TimedOut: if the socket stayed full; the message is then not sent.
        :raises sbus.errors.Disconnected: if the connection is lost and not made again.
        """
        packet = self.core.publish(key, payload)
        if flags or timeout is not None:
            self._send_one(packet, flags, timeout)
        else:
            self._send_all([packet])

    def publish_many(self, messages: Iterable[tuple[bytes | str, bytes]]) -> None:
        self._send_all(self.core.publish_many(messages))

    # --- receiving ---------------------------------------------------------------------------

    def subscribe(self, pattern: bytes | str, callback: Callable[[Message], object] | None = None) -> Subscription:
        """Subscribe to a pattern.

        Read the messages from the bus or from the result, or pass a callback.

        :raises sbus.errors.InvalidKey: if the protocol does not allow the pattern.
        """
        subscription = Subscription(self, callback)
        self.send(self.core.subscribe(pattern, subscription))
        return subscription

    def receive(self, timeout: float | None = None, *, flags: int = 0) -> Message:
        """Wait for the next message and return it.

        :param timeout: seconds to wait; None for no limit.
        :param flags: flags of recv(2): ``MSG_DONTWAIT`` raises `BlockingIOError` if no message is waiting, ``MSG_PEEK``
            leaves the message in place. Others have no effect on this kind of socket.
        :raises sbus.errors.TimedOut: if none has come within `timeout` seconds.
        :raises sbus.errors.Disconnected: if no more messages will come.
        """
        messages = self._messages
        if not messages:
            try:
                self._read_until(lambda: messages, deadline_in(0.0 if flags & socket.MSG_DONTWAIT else timeout))
            except TimedOut:
                if flags & socket.MSG_DONTWAIT:
                    raise BlockingIOError(errno.EAGAIN, "no message is waiting") from None
                raise
        return messages[0] if flags & socket.MSG_PEEK else messages.popleft()

    def get_ready(self) -> list[Message]:
        """Return all messages that are here, without waiting; call it after a poll.

        :raises sbus.errors.Disconnected: if there are none and no more will come.
        """
        self._read_now(self._messages)
        return self._take_messages()

    def get_many(self, timeout: float | None = None) -> list[Message]:
        """Wait for a message, then return all that are here.

        :raises: as `receive`.
        """
        if not self._messages:
            self._read_until(lambda: self._messages, deadline_in(timeout))
        return self._take_messages()

    def _take_messages(self) -> list[Message]:
        messages = list(self._messages)
        self._messages.clear()
        return messages

    def __iter__(self) -> Iterator[Message]:
        messages = self._messages
        while True:
            while messages:
                yield messages.popleft()
            try:
                self._read_until(lambda: messages, None)
            except Closed:
                return

    @property
    def pending(self) -> int:
        """Messages that are in memory already, which a poll of the socket does not show.

        Subscriptions that are read themselves (inboxes always are) have a `pending` of their own.
        """
        return len(self._messages) + len(self._batch)

    # --- round trips (documented in `ClientApi`) ---------------------------------------------

    def whoami(self, timeout: float | None = None) -> bytes:
        return self._run(self._whoami(), timeout)

    def fence(self, timeout: float | None = None) -> None:
        self._run(self._fence(), timeout)

    def inbox(self, name: bytes | str) -> Inbox[Subscription]:
        inbox = self._run(self._inbox(name), None)
        inbox.subscription._claim()  # otherwise its messages would go to the readers of the bus
        return inbox

    def request(self, key: bytes | str, payload: bytes = b"", timeout: float | None = 10.0) -> bytes:
        return self._run(self._request(key, payload), timeout)

    def answer_proofs(self) -> Subscription:
        return self._run(self._answer_proofs(), None)

    def verify(self, peer: bytes | str, timeout: float | None = 10.0) -> bool:
        try:
            return self._run(self._verify(peer), timeout)
        except TimedOut:
            return False

    # --- the socket --------------------------------------------------------------------------

    def fileno(self) -> int:
        """Return the descriptor, for select, poll and epoll.

        When it is readable, call `get_ready`.

        With ``reconnect``, ask for it before each poll: a new connection has another one.
        """
        return self.socket.fileno()

    @property
    def socket(self) -> Socket:
        """The socket, for its options.

        :raises sbus.errors.Disconnected: if the connection has ended.
        """
        sock = self._connected(None)
        if sock is None:
            raise Disconnected("not connected at present")
        return sock

    def close(self) -> None:
        """Close; iteration over the bus and its subscriptions ends."""
        if self._error is None:
            self._error = Closed("the connection to the bus was closed here")
        self._detach()
        self._batch.take()  # callbacks get no more

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what `Subscription` calls -----------------------------------------------------------

    def _take_shared(self, subscription: Subscription) -> list[Message]:
        """Return the unread messages of a subscription that gets a queue of its own.

        They leave the queue of the bus, except those that other subscriptions share there.
        """
        own: list[Message] = []
        others: deque[Message] = deque()
        for message in self._messages:
            sinks = self.core.sinks_for(message.key)
            if subscription in sinks:
                own.append(message)
            shared = any(isinstance(s, Subscription) and s is not subscription and s._is_shared() for s in sinks)
            if shared or subscription not in sinks:
                others.append(message)
        self._messages.clear()
        self._messages.extend(others)
        return own

    def _deliver_shared(self, messages: list[Message]) -> None:
        """Keep messages for the readers of the bus.

        Several subscriptions may deliver the same list, which is kept once.
        """
        if messages is not self._last_delivered:
            self._last_delivered = messages
            self._messages.extend(messages)

    def _unsubscribe(self, subscription: Subscription, deadline: float | None) -> None:
        if self._error is None:
            self._outbox.extend(self.core.unsubscribe(subscription))
            if self._loss_reason is None:
                try:
                    self._drain(deadline)
                except (Disconnected, TimedOut):
                    pass  # the subscription has ended here all the same
