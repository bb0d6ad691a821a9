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
import time
from bisect import bisect_left
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from typing import Self, TypeVar, Unpack

from sbus.client.api import CLOSED_HERE, Inbox
from sbus.client.arguments import as_bytes
from sbus.client.batches import BlockingPayloadBatch, PayloadBatch
from sbus.client.blocking.connection import BlockingConnection
from sbus.client.blocking.subscription import Subscription
from sbus.client.blocking.waiting import PolledWaiter
from sbus.client.blocking.watch import Watch
from sbus.client.blocking.work import Work
from sbus.client.connecting import SERVER_CLOSED
from sbus.client.core import Message
from sbus.client.forks import leave_to_parent
from sbus.client.losses import LossMark, MessageQueue
from sbus.client.options import ConnectOptions, Keywords
from sbus.client.payloads import Buffer
from sbus.errors import Closed, Disconnected, Forked, NotAllowed, PacketTooLong, TimedOut
from sbus.syscalls.batch import send_split
from sbus.syscalls.polling import has_hung_up
from sbus.syscalls.sockets import DONTWAIT, PEEK, SEND_NOW

__all__ = ["Bus", "Subscription", "Watch", "connect"]

T = TypeVar("T")

_IN_PLACE = 1 << 15
"""Bytes of a payload from which on it is sent from where it is: the copy of 64 KiB into a packet takes 2 µs."""
_NO_KEY = object()
Socket = socket.socket  # inside `Bus`, the property `socket` hides the module


def connect(address: str | os.PathLike[str] | None = None, **options: Unpack[Keywords]) -> Bus:
    """Connect to a bus.

    :param address: path or abstract address of the bus; by default the result of
        `sbus.client.connecting.find_address`.
    :param options: the fields of `sbus.client.options.ConnectOptions`: dialect, max_packet, bundles, timeout,
        reconnect, reconnect_buffer, on_gap, on_lost, on_denied, sender, payloads, on_control.
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
        self._messages = MessageQueue()
        self._kept = 0  # messages that have been put there
        self._last_in_place: tuple[object, bytes] = _NO_KEY, b""  # the last key, and how its packets begin
        leave_to_parent(self)

    # --- sending -----------------------------------------------------------------------------

    def publish(self, key: bytes | str, payload: Buffer = b"", *, flags: int = 0, timeout: float | None = None) -> None:
        """Publish a message; return when it has been handed to the kernel.

        A message of more than 64 KiB waits until the bus has announced its limits.

        :param flags: flags of send(2); with ``MSG_DONTWAIT``, a full socket raises `BlockingIOError`, and so does a
            large message before the bus has announced its limits.
        :param timeout: seconds to wait for these limits, and while the socket is full; None for no limit.
        :raises sbus.errors.InvalidKey: if the protocol does not allow the key.
        :raises sbus.errors.PacketTooLong: if the message does not fit a packet.
        :raises sbus.errors.TimedOut: if the time is over; the message is then not sent.
        :raises sbus.errors.Disconnected: if the connection is lost and not made again.
        """
        if (
            type(payload) is bytes
            and len(payload) >= _IN_PLACE
            and not flags
            and timeout is None
            and self._send_in_place(key, payload)
        ):
            return
        try:
            packet = self.core.publish(key, payload)
        except PacketTooLong:
            try:
                self._learn_limit(0.0 if flags & DONTWAIT else timeout)
            except TimedOut as e:
                if flags & DONTWAIT and self._is_own(e):
                    raise BlockingIOError(errno.EAGAIN, "the bus has not said yet what it takes") from None
                raise
            packet = self.core.publish(key, payload)
        if flags or timeout is not None:
            self._send_one(packet, flags, timeout)
        else:
            self._send_all([packet])

    def _send_in_place(self, key: bytes | str, payload: bytes) -> bool:
        """Send a message from where its payload is; return False to leave it to the ordinary way."""
        last_key, head = self._last_in_place
        if key is not last_key:
            head = self.core.publish(key, b"")
            self._last_in_place = key if isinstance(key, (bytes, str)) else _NO_KEY, head  # a bytearray may change
        while True:
            if self.outbox.packets:
                self._drain(self._limit)
            sock = self._usable or self._connected(self._limit)
            if sock is None or (self._reconnecting and self._is_unsettled()):
                return False
            if len(head) + len(payload) > self.core.longest_plain:
                return False
            try:
                if send_split(sock, head, payload):
                    return True
            except OSError as e:
                self._not_sent(sock, e, len(head) + len(payload))
            if sock is self._sock:
                self._wait_writable(sock, self._limit)

    def publish_many(self, messages: Iterable[tuple[bytes | str, Buffer]]) -> None:
        messages = list(messages)
        try:
            packets = self.core.publish_many(messages)
        except PacketTooLong:
            self._learn_limit(None)
            packets = self.core.publish_many(messages)
        self._send_all(packets)

    def _learn_limit(self, timeout: float | None) -> None:
        """Find out what the server takes, as a message is too long for all that is known; it may be another one now."""
        sock = self._usable
        if sock is not None and has_hung_up(sock):
            self._connection_lost(SERVER_CLOSED, self._reader.read_rest(sock))
        self._connected(self._until(timeout))
        if self.core.may_learn_limit:
            self._run(self._fence(), timeout)

    def payloads(self) -> BlockingPayloadBatch:
        """Begin a batch of large messages (:doc:`/payloads`); the end of ``with``, or its ``send``, sends it."""
        self._check_open()
        return BlockingPayloadBatch(self.core, self._send_batch)

    def _send_batch(self, batch: PayloadBatch[None]) -> None:
        if self.core.is_open:
            self._run(self._fence(), None)
        self._send_all(batch.packets())

    # --- receiving ---------------------------------------------------------------------------

    def subscribe(
        self,
        pattern: bytes | str,
        callback: Callable[[Message], object] | None = None,
        *,
        last: bool = False,
        sender: bool = False,
    ) -> Subscription:
        """Subscribe to a pattern.

        Read the messages from the bus or from the result, or pass a callback.

        :param last: get the last values of matching keys first, as far as the server keeps them.
        :param sender: get only messages whose sender is known; the client asks for it from now on (see `ClientApi`).
        :raises sbus.errors.InvalidKey: if the protocol does not allow the pattern.
        """
        self._hint(pattern)
        self._check_whole()
        subscription = Subscription(self, callback, requires_sender=sender)
        self._begin(lambda: self.core.subscribe(pattern, subscription, last=last, sender=sender), subscription)
        return subscription

    def _begin(self, begin: Callable[[], list[bytes]], begun: Subscription | Watch) -> None:
        """Begin a subscription or a watch, and send its packets; if that fails, end it: the caller never gets it."""
        try:
            self.send(begin())
        except BaseException:
            with self.limit(0.0):
                begun.close()
            raise

    def receive(self, timeout: float | None = None, *, flags: int = 0) -> Message:
        """Wait for the next message and return it.

        :param timeout: seconds to wait; None for no limit.
        :param flags: flags of recv(2): ``MSG_DONTWAIT`` raises `BlockingIOError` if no message is waiting, ``MSG_PEEK``
            leaves the message in place. Others have no effect on this kind of socket.
        :raises sbus.errors.TimedOut: if none has come within `timeout` seconds.
        :raises sbus.errors.Disconnected: if no more messages will come.
        :raises sbus.errors.NotAllowed: once for each subscription that the server has refused.
        """
        messages = self._messages
        try:
            self._wait_for_messages(messages, 0.0 if flags & DONTWAIT else timeout)
        except TimedOut as e:
            if flags & DONTWAIT and self._is_own(e):
                raise BlockingIOError(errno.EAGAIN, "no message is waiting") from None
            raise
        return messages[0] if flags & PEEK else messages.popleft()

    def get_ready(self) -> list[Message]:
        """Return all messages that are here, without waiting; call it after a poll.

        With ``on_lost``, a list ends where messages are missing: call it again until `pending` is 0.

        :raises sbus.errors.Disconnected: if there are none and no more will come.
        :raises sbus.errors.NotAllowed: if there are none, and the server has refused a subscription.
        """
        self._messages.settle(self.report_lost)
        self._read_now(self._messages)
        if not self._messages:
            self._raise_refused()
        return self._messages.take()

    def get_many(self, timeout: float | None = None) -> list[Message]:
        """Wait for a message, then return all that are here; with ``on_lost``, up to where messages are missing.

        :raises: as `receive`.
        """
        self._wait_for_messages(self._messages, timeout)
        return self._messages.take()

    def __iter__(self) -> Iterator[Message]:
        messages = self._messages
        while True:
            try:
                self._wait_for_messages(messages, None)
            except Closed as e:
                if self._is_own(e):
                    return
                raise
            yield messages.popleft()
            while messages and not messages.marks:
                yield messages.popleft()

    @property
    def pending(self) -> int:
        """Messages that are in memory already, which a poll of the socket does not show.

        Subscriptions that are read themselves (inboxes always are) have a `pending` of their own.
        """
        return len(self._messages) - self._messages.marks + len(self._batch)

    # --- round trips (documented in `ClientApi`) ---------------------------------------------

    def whoami(self, timeout: float | None = None) -> bytes:
        return self._run(self._whoami(), timeout)

    def fence(self, timeout: float | None = None) -> None:
        self._run(self._fence(), timeout)

    def has_subscribers(self, key: bytes | str, timeout: float | None = 10.0) -> bool:
        return self._run(self._has_subscribers(key), timeout)

    def watch_subscribers(self, key: bytes | str) -> Watch:
        watch = Watch(self, as_bytes(key))
        self._check_whole()
        self._begin(lambda: self.core.watch(watch), watch)
        return watch

    def inbox(self, name: bytes | str) -> Inbox[Subscription]:
        inbox = self._run(self._inbox(name), None)
        inbox.subscription._claim()  # otherwise its messages would go to the readers of the bus
        return inbox

    def request(self, key: bytes | str, payload: bytes = b"", timeout: float | None = 10.0) -> bytes:
        return self._run_long(lambda: self._request(key, payload), timeout)

    def _run_long(self, call: Callable[[], Coroutine[PolledWaiter, None, T]], timeout: float | None) -> T:
        """Run a call that sends the application's payload; see `_learn_limit`."""
        try:
            return self._run(call(), timeout)
        except PacketTooLong as e:
            if not self._is_own(e):
                raise
        self._learn_limit(timeout)
        return self._run(call(), timeout)

    def _check_time(self) -> None:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise TimedOut("not sent: the time was over before, as of a callback that read on")

    def enqueue(
        self,
        queue: str,
        key: bytes | str,
        payload: bytes = b"",
        *,
        id: bytes | str | None = None,
        delay: float = 0.0,
        timeout: float | None = 10.0,
    ) -> int:
        return self._run_long(lambda: self._enqueue(queue, key, payload, id, delay), timeout)

    def work(self, queue: str, credit: int = 1) -> Work:
        return Work(self, queue, credit)

    def answer_proofs(self) -> Subscription:
        return self._run(self._answer_proofs(), None)

    def verify(self, peer: bytes | str, timeout: float | None = 10.0) -> bool:
        try:
            return self._run(self._verify(peer), timeout)
        except TimedOut as e:
            if self._is_own(e):
                return False
            raise

    # --- the socket --------------------------------------------------------------------------

    def fileno(self) -> int:
        """Return the descriptor, for select, poll and epoll.

        When it is readable, call `get_ready`.

        With ``reconnect``, ask for it before each poll: a new connection has another one. If `state` was
        ``"reconnecting"``, call `get_ready` before the poll: messages may have come with the new connection.
        """
        return self.socket.fileno()

    @property
    def socket(self) -> Socket:
        """The socket, for its options.

        :raises sbus.errors.Disconnected: if the connection has ended.
        """
        sock = self._connected(self._limit)
        if sock is None:
            raise Disconnected("not connected at present")
        return sock

    def close(self) -> None:
        """Close; iteration over the bus and its subscriptions ends.

        Another thread may call it, and a signal handler: a call that waits raises `sbus.errors.Closed` then.
        """
        error = Closed(CLOSED_HERE)
        # Past the outbox, which the call that is interrupted may be sending; a full socket must not delay the end.
        sock = self._sock
        for packet in [work.part(error) for work in tuple(self.works)]:
            with suppress(OSError):
                if packet is not None and sock is not None:
                    sock.send(packet, SEND_NOW)
        if self._error is None:
            self._error = error
        self._wake_and_detach()
        self._batch.take()  # callbacks get no more
        self._callbacks.clear()

    def forked(self, error: Forked) -> None:
        """Give the connection up in a forked child; the parent reads what was received."""
        self._error = error
        self._detach()
        self._batch.take()
        self._callbacks.clear()
        self._messages.refill(())
        for sink in self.core.sinks():
            if isinstance(sink, Subscription):
                sink.forked()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what `Subscription` calls -----------------------------------------------------------

    def _take_shared(self, subscription: Subscription) -> list[Message]:
        """Return the unread messages of a subscription that gets its own queue.

        They leave the queue of the bus, except those that other subscriptions share there.
        """
        self._unread_errors.pop(subscription, None)  # its own reader gets it
        own: list[Message] = []
        others: list[Message] = []
        gone: list[int] = []
        age = 0  # how many messages have been kept after this one
        for message in reversed(self._messages):
            if isinstance(message, LossMark):
                own.append(message)
                others.append(message)
                continue
            sinks = [s for s in self.core.sinks_for(message.key) if isinstance(s, Subscription)]
            sharing = [s for s in sinks if s._is_shared() and age < self._kept - s._since and s.takes(message)]
            if subscription in sharing:
                own.append(message)
            if sharing == [subscription]:
                gone.append(age)
            else:
                others.append(message)
            age += 1
        self._messages.refill(reversed(others))
        for sink in self.core.sinks():
            if isinstance(sink, Subscription):
                sink._since += bisect_left(gone, self._kept - sink._since)
        return own[::-1]

    def _deliver_shared(self, messages: list[Message]) -> None:
        """Keep messages for the readers of the bus.

        Several subscriptions may deliver the same list, which is kept once.
        """
        kept = self._messages
        if not kept or kept[-1] is not messages[-1]:
            kept.extend(messages)
            self._kept += len(messages)

    def _end_watch(self, watch: Watch) -> None:
        self._check_whole()
        if self._error is None:
            self._send_last(self.core.extensions.unwatch(watch))

    def _refuse(self, subscription: Subscription, error: NotAllowed) -> bool:
        self._hand_over(self.core.unsubscribe(subscription))
        subscription.refuse(error)
        if subscription._is_shared():
            self._unread_errors[subscription] = error
        return subscription.callback is None

    def _has_shared(self) -> bool:
        return bool(self._messages)

    def _keep_shared(self, mark: LossMark) -> None:
        self._messages.keep(mark)

    def _unsubscribe(self, subscription: Subscription) -> None:
        self._check_whole()
        if self._error is None:
            self._send_last(self.core.unsubscribe(subscription))

    def _send_last(self, packets: list[bytes]) -> None:
        """Send the packets that end a subscription or a watch, which has ended here whether they go out or not."""
        with suppress(Disconnected, TimedOut):
            self.send(packets)
