"""The client for programs that wait: plain sockets, no event loop.

::

    with sbus.connect() as bus:
        bus.subscribe("weather/")
        for message in bus:
            print(message.key, message.payload)

Not for several threads at once: give each a connection of its own.

A lost connection that is to be made again is made again by the next call that needs it, within the
time that this call has. Callbacks run while the bus is read, and may use it.
"""

from __future__ import annotations

import errno
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

from sbus.client.api import Inbox
from sbus.client.blocking.connection import WaitingConnection, deadline_in
from sbus.client.connecting import Backoff
from sbus.client.core import Message
from sbus.client.options import Settings
from sbus.errors import Closed, Disconnected, TimedOut
from sbus.protocol.packets import DEFAULT_MAX_PACKET

__all__ = ["Bus", "Subscription", "connect"]

Socket = socket.socket  # as `Bus.socket` hides the module


class Subscription:
    """The messages of one pattern.

    They come to who iterates over the bus; or, once this is iterated over (or `get` or `get_many` is called),
    to this alone, with those that have come before and were not read. A callback gets them while the bus is read
    for whatever reason; its exceptions are raised there, when all that came together is dealt with.

    :ivar pattern: what it is subscribed to.
    :ivar callback: who gets the messages at once, if somebody does.
    """

    def __init__(self, bus: Bus, callback: Callable[[Message], Any] | None) -> None:
        self.pattern = b""
        self._bus = bus
        self.callback = callback
        self._own: deque[Message] | None = None
        self._closed = False

    def deliver(self, messages: list[Message]) -> None:
        """See `sbus.client.core.Sink`."""
        if self._closed:
            return  # closed by another sink that has got the same messages
        if self.callback is not None:
            for message in messages:
                self._bus._call_user(self.callback, message)
        elif self._own is not None:
            self._own.extend(messages)
        else:
            self._bus._keep(messages)

    def get(self, timeout: float | None = None) -> Message:
        """The next message.

        :raises sbus.errors.TimedOut: if none has come in so many seconds.
        :raises sbus.errors.Disconnected: if none will come.
        """
        return self._wait(timeout).popleft()

    def get_many(self, timeout: float | None = None) -> list[Message]:
        """Wait for a message, then give all that are here, in one list.

        :raises: as `get`.
        """
        own = self._wait(timeout)
        messages = list(own)
        own.clear()
        return messages

    def _wait(self, timeout: float | None) -> deque[Message]:
        """Our own messages, when there is one."""
        own = self._claim()
        if not own:
            self._bus._read_until(lambda: own or self._closed, deadline_in(timeout))
            if not own:
                raise Closed("the subscription was closed here")
        return own

    def get_ready(self) -> list[Message]:
        """All messages that are here already, without waiting, in one list.

        :raises sbus.errors.Disconnected: if there are none, and none will come.
        """
        own = self._claim()
        if not self._closed:
            self._bus._read_now(own)
        messages = list(own)
        own.clear()
        return messages

    def _claim(self) -> deque[Message]:
        if self._own is None:
            self._own = deque(self._bus._hand_over(self))
        return self._own

    def _shares(self) -> bool:
        """Whether its messages go to who iterates over the bus."""
        return self._own is None and self.callback is None

    def __iter__(self) -> Iterator[Message]:
        self._claim()
        while True:
            try:
                yield self.get()
            except Closed:
                return

    @property
    def pending(self) -> int:
        """Messages in memory, its own and unsorted ones, which a poll of the socket does not tell of."""
        return len(self._own or ()) + len(self._bus._batch)

    def close(self) -> None:
        """Unsubscribe; who iterates comes to the end."""
        self._leave(None)

    def _leave(self, deadline: float | None) -> None:
        if not self._closed:
            self._closed = True
            self._bus._unsubscribe(self, deadline)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Who is interrupted, or in trouble, is not to wait for the socket: the rest goes with what is sent next.
        self._leave(None if kind is None else deadline_in(0.0))


def connect(
    address: str | None = None,
    *,
    dialect: str = "current",
    max_packet: int = DEFAULT_MAX_PACKET,
    bundles: bool = True,
    timeout: float | None = 30.0,
    reconnect: bool | Backoff = False,
    on_gap: Callable[[Exception], Any] | None = None,
    on_control: Callable[[bytes, bytes], Any] | None = None,
) -> Bus:
    """Connect to a bus.

    :param address: where it is; without one, see `sbus.client.connecting.find_address`.
    :param dialect: ``current``, or ``early`` for servers of the first revision.
    :param max_packet: bytes in the longest packet, as at the server.
    :param bundles: ask the server for :doc:`bundles </bundles>`, and use them if it has any.
    :param timeout: seconds to try for while the server's backlog is full.
    :param reconnect: connect and subscribe again when the connection is lost.
    :param on_gap: called with the reason when that has happened: messages may have been missed.
    :param on_control: called with (key, payload) of control messages that this client does not know.
    :raises sbus.errors.ConnectError: with the reason and the remedy.
    """
    settings = Settings(
        dialect=dialect,
        max_packet=max_packet,
        bundles=bundles,
        reconnect=reconnect,
        on_gap=on_gap,
        on_control=on_control,
    )
    bus = Bus(address, settings)
    bus._open(timeout)
    return bus


class Bus(WaitingConnection[Subscription]):
    """A connection to a bus; made by `connect`, closed by `close` or at the end of ``with``."""

    def __init__(self, address: str | None, settings: Settings) -> None:
        super().__init__(address, settings)
        self._messages: deque[Message] = deque()
        self._kept: list[Message] | None = None

    # --- sending -----------------------------------------------------------------------------

    def publish(self, key: bytes | str, payload: bytes = b"", *, flags: int = 0, timeout: float | None = None) -> None:
        """Publish a message; returns when it is handed to the kernel.

        :param flags: for send(2): with ``MSG_DONTWAIT`` a full socket raises `BlockingIOError`.
        :param timeout: seconds to wait while the socket is full.
        :raises sbus.errors.InvalidKey: if nobody may publish with this key.
        :raises sbus.errors.PacketTooLong: if it does not fit a packet.
        :raises sbus.errors.TimedOut: if the socket stayed full; it is not sent then.
        :raises sbus.errors.Disconnected: if it cannot be sent any more.
        """
        packet = self.core.publish(key, payload)
        if flags or timeout is not None:
            self._send_in_time(packet, flags, timeout)
        else:
            self._send_all([packet])

    def publish_many(self, messages: Iterable[tuple[bytes | str, bytes]]) -> None:
        """Publish messages, (key, payload) each, in order; returns when all are handed to the kernel.

        :raises: as `publish`; if one of them cannot be published none is.
        """
        self._send_all(self.core.publish_many(messages))

    # --- receiving ---------------------------------------------------------------------------

    def subscribe(self, pattern: bytes | str, callback: Callable[[Message], Any] | None = None) -> Subscription:
        """Get what the pattern matches.

        :raises sbus.errors.InvalidKey: if nobody may use this pattern.
        """
        subscription = Subscription(self, callback)
        self.send(self.core.subscribe(pattern, subscription))
        return subscription

    def receive(self, timeout: float | None = None, *, flags: int = 0) -> Message:
        """The next message.

        :param timeout: seconds to wait for it.
        :param flags: for recv(2): with ``MSG_DONTWAIT`` it raises `BlockingIOError` if there is none;
            with ``MSG_PEEK`` the message stays. Others mean nothing on this kind of socket.
        :raises sbus.errors.TimedOut: if none has come.
        :raises sbus.errors.Disconnected: if none will come.
        """
        messages = self._messages
        if not messages:
            try:
                self._read_until(lambda: messages, deadline_in(0.0 if flags & socket.MSG_DONTWAIT else timeout))
            except TimedOut:
                if flags & socket.MSG_DONTWAIT:
                    raise BlockingIOError(errno.EAGAIN, "no message is here") from None
                raise
        return messages[0] if flags & socket.MSG_PEEK else messages.popleft()

    def get_ready(self) -> list[Message]:
        """All messages that are here already, without waiting, in one list: for use after a poll.

        :raises sbus.errors.Disconnected: if there are none, and none will come.
        """
        self._read_now(self._messages)
        messages = list(self._messages)
        self._messages.clear()
        return messages

    def get_many(self, timeout: float | None = None) -> list[Message]:
        """Wait for a message, then give all that are here, in one list.

        :raises: as `receive`.
        """
        if not self._messages:
            self._read_until(lambda: self._messages, deadline_in(timeout))
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
        """Messages that are in memory already, which a poll of the socket does not tell of.

        Not those of subscriptions that are read themselves (inboxes always are), which have a `pending` of their own.
        """
        return len(self._messages) + len(self._batch)

    # --- what takes a round trip -------------------------------------------------------------

    def whoami(self, timeout: float | None = None) -> bytes:
        """Our name at the server, ``!/cred/<gid>/<uid>/<pid>``: what our private keys begin with."""
        return self._run(self._whoami(), timeout)

    def fence(self, timeout: float | None = None) -> None:
        """Wait until the server has dealt with everything that we have sent before."""
        self._run(self._fence(), timeout)

    def inbox(self, name: bytes | str) -> Inbox[Subscription]:
        """Subscribe to a private key of ours, which nobody else can read; the subscription keeps what comes."""
        inbox = self._run(self._inbox(name), None)
        inbox.subscription._claim()  # else what comes while anything else is waited for would go to the bus
        return inbox

    def request(self, key: bytes | str, payload: bytes = b"", timeout: float | None = 10.0) -> bytes:
        """Ask somebody, and wait for the answer.

        :raises sbus.errors.TimedOut: if none came in so many seconds.
        :raises sbus.errors.RequestFailed: if the answer is an error.
        """
        return self._run(self._request(key, payload), timeout)

    def answer_proofs(self) -> Subscription:
        """Let others `verify` that we are who we say (while this bus is read)."""
        return self._run(self._answer_proofs(), None)

    def verify(self, peer: bytes | str, timeout: float | None = 10.0) -> bool:
        """Whether somebody called `peer` (by ``whoami``) is there and can read what only he can.

        False if that is not proved in so many seconds.
        """
        try:
            return self._run(self._verify(peer), timeout)
        except TimedOut:
            return False

    # --- the socket --------------------------------------------------------------------------

    def fileno(self) -> int:
        """The descriptor, for select, poll and epoll; when it is readable, call `get_ready`.

        Ask for it anew before each poll if the connection is to be made again when it is lost.
        """
        return self.socket.fileno()

    @property
    def socket(self) -> Socket:
        """The socket, for its options.

        :raises sbus.errors.Disconnected: if it is gone.
        """
        sock = self._connected(None)
        if sock is None:
            raise Disconnected("not connected just now")
        return sock

    def close(self) -> None:
        """Close; whoever iterates comes to the end."""
        if self._error is None:
            self._error = Closed("the connection to the bus was closed here")
        self._detach()
        self._batch.take()  # callbacks get no more

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- where messages go -------------------------------------------------------------------

    def _hand_over(self, subscription: Subscription) -> list[Message]:
        """Messages that have come for a subscription before it was read itself.

        They go from the bus's queue to its own, but for those that others want from the bus.
        """
        mine: list[Message] = []
        others: deque[Message] = deque()
        for message in self._messages:
            sinks = self.core.sinks_for(message.key)
            if subscription in sinks:
                mine.append(message)
            shared = any(isinstance(s, Subscription) and s is not subscription and s._shares() for s in sinks)
            if shared or subscription not in sinks:
                others.append(message)
        self._messages.clear()
        self._messages.extend(others)
        return mine

    def _keep(self, messages: list[Message]) -> None:
        """Messages for who iterates over the bus: once, however many subscriptions want them."""
        if messages is not self._kept:
            self._kept = messages
            self._messages.extend(messages)

    def _unsubscribe(self, subscription: Subscription, deadline: float | None) -> None:
        if self._error is None:
            self._outbox.extend(self.core.unsubscribe(subscription))
            if self._loss_reason is None:
                try:
                    self._drain(deadline)
                except (Disconnected, TimedOut):
                    pass  # it is over all the same
