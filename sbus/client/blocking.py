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
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from functools import partial
from typing import Any, Self, TypeVar

from sbus.client.calls import Calls, Inbox
from sbus.client.core import Batch, Message
from sbus.client.dialing import CLOSED, Backoff, describe_loss, dial, find_address, try_to_dial
from sbus.client.outbox import Outbox
from sbus.client.sending import read_at_once, send_some, share
from sbus.client.settings import Settings
from sbus.errors import Closed, ConnectError, Disconnected, PacketTooLong, TimedOut
from sbus.packets import DEFAULT_MAX_PACKET
from sbus.syscalls.batch import PacketReader
from sbus.syscalls.sockets import sendable

__all__ = ["Bus", "Subscription", "connect"]

T = TypeVar("T")
Socket = socket.socket  # as `Bus.socket` hides the module

_ANSWER = b"CMSG bundle/on\0"
_LATE = 16
"""Batches that are still read when the time is up, for what had come by then: no socket holds more."""
_RETRY = 0.05
"""Seconds until a socket is tried again for which the kernel had no memory."""


class _Waiter:
    """A waiter (see `sbus.client.core.Waiter`) that `Bus._run` reads the socket for."""

    __slots__ = ("_error", "_value")

    def __init__(self) -> None:
        self._value: bytes | None = None
        self._error: Exception | None = None

    def succeed(self, value: bytes) -> None:
        if self._error is None and self._value is None:
            self._value = value

    def fail(self, error: Exception) -> None:
        if self._value is None:
            self._error = error

    @property
    def has_succeeded(self) -> bool:
        return self._value is not None

    def is_done(self) -> bool:
        return self._value is not None or self._error is not None

    def __await__(self) -> Generator[_Waiter, None, bytes]:
        if not self.is_done():
            yield self
        if self._error is not None:
            raise self._error
        assert self._value is not None
        return self._value


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
                self._bus._tell(self.callback, message)
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
            self._bus._read_until(lambda: own or self._closed, _deadline(timeout))
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

    def close(self) -> None:
        """Unsubscribe; who iterates comes to the end."""
        if not self._closed:
            self._closed = True
            self._bus._unsubscribe(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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

    :param address: where it is; without one, see `sbus.client.dialing.find_address`.
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


class Bus(Calls[Subscription]):
    """A connection to a bus; made by `connect`, closed by `close` or at the end of ``with``."""

    def __init__(self, address: str | None, settings: Settings) -> None:
        super().__init__()
        self.address = find_address(address)
        self.core = settings.core(settings.on_control and partial(self._tell, settings.on_control))
        self._settings = settings
        self._reader = PacketReader(settings.longest)
        self._batch = Batch([])  # what was received; a callback that reads goes on where it stands
        self._failures: deque[Exception] = deque()  # of callbacks
        self._messages: deque[Message] = deque()
        self._kept: list[Message] | None = None
        self._outbox = Outbox()  # what has to be sent before anything else
        self._outbox.extend(self.core.greeting())
        self._deadline: float | None = None  # of the call of the vocabulary that is under way
        self._sock: Socket | None = None
        self._asking = False  # the server may yet answer that it takes bundles
        self._error: Disconnected | None = None  # why it is over
        self._backoff = settings.backoff
        self._gap: Disconnected | None = None  # why the connection was lost, until that has been told
        self._delays: Iterator[float] = iter(())
        self._next_attempt = 0.0
        self._proof = _Waiter()  # that the new connection is where the old one was
        self._coming_back = False

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

    def send(self, packets: list[bytes]) -> None:
        """See `sbus.client.calls.Calls.send`."""
        if self._error is not None:
            raise self._error
        self._outbox.extend(packets)
        self._drain(self._deadline)

    def _send_all(self, packets: list[bytes]) -> None:
        """Send messages, however long it takes."""
        at = 0
        while at < len(packets):
            if self._outbox:
                self._drain(None)
            sock = self._connected(None)
            if sock is None:
                self._outbox.extend(packets[at:])
                return
            if self._asking and len(packets) > 1:
                self._hear_answer(sock)
            size = share(self.core.bundle_limit)
            sent = self._send(sock, packets[at : at + size] if at or len(packets) > size else packets)
            at += sent
            if not sent and sock is self._sock:
                self._wait_for_room(sock, None)

    def _send_in_time(self, packet: bytes, flags: int, timeout: float | None) -> None:
        """Send a message, or nothing."""
        deadline = _deadline(0.0 if flags & socket.MSG_DONTWAIT else timeout)
        try:
            while True:
                self._drain(deadline)
                sock = self._connected(deadline)
                if sock is None:
                    raise Disconnected("not connected just now")
                if self._send(sock, [packet], flags):
                    return
                if sock is self._sock:
                    self._wait_for_room(sock, deadline)
        except TimedOut:
            if flags & socket.MSG_DONTWAIT:
                raise BlockingIOError(errno.EAGAIN, "the socket is full, or not connected just now") from None
            raise TimedOut(f"not sent: the socket was full, or not connected, for {timeout} seconds") from None

    def _drain(self, deadline: float | None) -> None:
        """Send what has to be sent before anything else, or find out that the connection is lost."""
        while self._outbox:
            sock = self._connected(deadline)
            if sock is None:
                return
            taken = self._outbox.take(share(self.core.bundle_limit))
            try:
                sent = self._send(sock, taken)
            except PacketTooLong:
                self._outbox.done(taken, 1)
                raise
            if sock is not self._sock:
                return  # it is lost; what is left is for the next one
            self._outbox.done(taken, sent)
            if not sent:
                self._wait_for_room(sock, deadline)

    def _send(self, sock: Socket, packets: list[bytes], flags: int = 0) -> int:
        """Send what the socket takes of a batch; if the connection turns out to be lost, nothing.

        :raises sbus.errors.PacketTooLong: if the first packet does not fit the socket's buffer.
        """
        try:
            if not flags:
                return send_some(sock, packets, self.core.bundle_limit) if packets else 0
            sock.send(packets[0], flags | socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            return 1
        except BlockingIOError:
            return 0
        except OSError as e:
            if e.errno in (errno.EPIPE, errno.ECONNRESET):
                self._lose(describe_loss(e), self._read_rest(sock))
            elif e.errno in (errno.ENOBUFS, errno.ENOMEM):
                time.sleep(_RETRY)
            elif e.errno == errno.EMSGSIZE:
                raise PacketTooLong(f"{len(packets[0])} bytes do not fit the socket's send buffer (SO_SNDBUF)") from e
            else:
                raise
            return 0

    def _hear_answer(self, sock: Socket) -> None:
        """Take the server's word on bundles, if it is here: who only publishes never reads.

        We asked before anything else, so the answer is the first packet to come, if there is one.
        """
        try:
            first = sock.recv(len(_ANSWER), socket.MSG_DONTWAIT | socket.MSG_PEEK)
            self._asking = False
            if first == _ANSWER:
                self.core.receive(self._reader.read(sock, 1)[0])
        except OSError:
            pass  # nothing yet; or the connection is lost, which is dealt with when it is used

    def _wait_for_room(self, sock: Socket, deadline: float | None) -> None:
        if (deadline is not None and time.monotonic() >= deadline) or not _poll(sock, select.POLLOUT, deadline):
            raise TimedOut("the socket stayed full")

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
                self._read_until(lambda: messages, _deadline(0.0 if flags & socket.MSG_DONTWAIT else timeout))
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
            self._read_until(lambda: self._messages, _deadline(timeout))
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
        """Messages that are in memory already, which a poll of the socket does not tell of."""
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

    # --- what the vocabulary needs (`Calls`) -------------------------------------------------

    def waiter(self) -> _Waiter:
        """See `sbus.client.calls.Calls.waiter`."""
        return _Waiter()

    def _run(self, call: Coroutine[Any, None, T], timeout: float | None) -> T:
        """Run a coroutine of the vocabulary: read the socket while it waits."""
        outer, deadline = self._deadline, _deadline(timeout)
        self._deadline = deadline
        error: Exception | None = None
        try:
            while True:
                try:
                    waiter: _Waiter = call.throw(error) if error is not None else call.send(None)
                except StopIteration as result:
                    value: T = result.value
                    return value
                error = None
                try:
                    self._read_until(waiter.is_done, deadline)
                except TimedOut:
                    error = TimedOut(f"no answer within {timeout} seconds")
                except Disconnected as e:
                    error = e
        finally:
            self._deadline = outer
            call.close()

    def _hand_over(self, subscription: Subscription) -> list[Message]:
        """Messages that have come for a subscription before it was read itself.

        They go from the bus's queue to its own, but for those that others want from the bus.
        """
        mine: list[Message] = []
        others: deque[Message] = deque()
        for message in self._messages:
            sinks = self.core.wanting(message.key)
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

    def _unsubscribe(self, subscription: Subscription) -> None:
        if self._error is None:
            self._outbox.extend(self.core.unsubscribe(subscription))
            if self._gap is None:
                try:
                    self._drain(None)
                except Disconnected:
                    pass  # then it is over all the same

    def _read_until(self, found: Callable[[], Any], deadline: float | None) -> None:
        """Receive until something is here.

        :raises sbus.errors.TimedOut: if the deadline has passed first.
        :raises sbus.errors.Disconnected: if the connection is lost, and not to be made again.
        """
        late = 0
        while not found():
            self._read(deadline)
            if deadline is not None and time.monotonic() >= deadline:
                late += 1
                if late > _LATE and not found():
                    raise TimedOut("nothing has come in time")

    def _read(self, deadline: float | None) -> None:
        """Receive a batch, waiting for it; none if the connection is lost, but to be made again."""
        if not self._read_ready(deadline):
            sock = self._sock
            if sock is not None and not _poll(sock, select.POLLIN, deadline):
                raise TimedOut("nothing has come in time")

    def _read_now(self, wanted: deque[Message]) -> None:
        """Receive what is here."""
        try:
            for _ in range(_LATE):
                if not self._read_ready(0.0):
                    return
        except TimedOut:
            pass  # not connected just now
        except Disconnected:
            if not wanted:
                raise

    def _read_ready(self, deadline: float | None) -> int:
        """Receive a batch that is here; how many packets it was.

        :param deadline: until when to wait for a connection.
        """
        if self._failures:
            raise self._failures.popleft()
        if count := len(self._batch):
            self._receive()
            return count
        sock = self._connected(deadline)
        if sock is None:
            raise Disconnected("not connected just now")
        try:
            packets, ended = self._reader.read(sock, read_at_once(self.core.bundle_limit))
        except OSError as e:
            self._lose(describe_loss(e))
        else:
            if packets:  # if the end is behind them it will be told again
                self._asking = False
                self._batch = Batch(packets)
                self._receive()
                return len(packets)
            if ended:
                self._lose(CLOSED)
        if self._error is not None:
            raise self._error
        return 0

    def _receive(self) -> None:
        self.core.go_on(self._batch)
        if self._failures:
            raise self._failures.popleft()

    def _tell(self, callback: Callable[..., Any], *args: Any) -> None:
        """Call the application; an exception of its must not keep others from what is theirs."""
        try:
            callback(*args)
        except Exception as e:
            self._failures.append(e)

    def _read_rest(self, sock: Socket) -> list[bytes]:
        """The server takes no more; what it sent before is still here to be read."""
        rest: list[bytes] = []
        while True:
            try:
                packets, ended = self._reader.read(sock)
            except OSError:
                return rest
            rest += packets
            if ended or not packets:
                return rest

    # --- coming and going --------------------------------------------------------------------

    def _open(self, timeout: float | None) -> None:
        self._attach(dial(self.address, self._settings.longest, timeout))
        self._drain(_deadline(timeout))

    def _attach(self, sock: Socket) -> None:
        self._sock = sock
        self._asking = self._settings.bundles
        self.core.connected(sendable(sock))

    def _detach(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _connected(self, deadline: float | None) -> Socket | None:
        """The socket, made again if need be; None if a callback asks while that is being done.

        :raises sbus.errors.TimedOut: if the deadline has passed first.
        :raises sbus.errors.Disconnected: if it is over.
        """
        if self._gap is not None and not self._coming_back:
            self._come_back(deadline)
        if self._error is not None:
            raise self._error
        return self._sock

    def _lose(self, why: str, rest: list[bytes] | None = None) -> None:
        """The connection is lost; `rest` is what it has brought and nobody has got yet."""
        error = Disconnected(f"{why} ({self.address})")
        if self._backoff is None:
            self._error = error
        elif self._gap is None:
            self._delays = self._backoff.delays()
            self._next_attempt = time.monotonic() + next(self._delays)
            self._gap = error
        self._detach()
        # Messages are still good, whenever they are read; the replies were for those who are told now.
        rest = self._batch.take() + Batch(rest or []).packets
        self._batch = Batch([packet for packet in rest if packet.startswith(b"MSG ")])
        waiting = self._lost()
        self._outbox.restart(self.core.greeting())
        for waiter in waiting:
            waiter.fail(error)

    def _come_back(self, deadline: float | None) -> None:
        """Connect until a connection lasts long enough to be where the old one was; then tell of the gap."""
        self._coming_back = True
        try:
            while self._error is None and not (self._sock is not None and self._proof.has_succeeded):
                if self._sock is None:
                    self._try_to_open(deadline)
                else:
                    self._drain(deadline)
                    if self._sock is not None and not self._proof.is_done():
                        self._read(deadline)
        finally:
            self._coming_back = False
        gap, self._gap = self._gap, None
        on_gap = self._settings.on_gap
        if on_gap is not None and gap is not None and self._error is None:
            on_gap(gap)

    def _try_to_open(self, deadline: float | None) -> None:
        """Try to connect, when it is time to."""
        until = self._next_attempt if deadline is None else min(self._next_attempt, deadline)
        time.sleep(max(0.0, until - time.monotonic()))
        if time.monotonic() < self._next_attempt:
            raise TimedOut("there is no connection yet")
        self._next_attempt = time.monotonic() + next(self._delays)
        try:
            sock = try_to_dial(self.address, self._settings.longest)
        except ConnectError:
            return
        if sock is not None:
            self._attach(sock)
            self._proof = _Waiter()
            self._outbox.extend(self.core.fence(self._proof))


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _poll(sock: Socket, events: int, deadline: float | None) -> bool:
    """Wait for a socket; False if the deadline has passed first."""
    poll = select.poll()
    poll.register(sock, events)
    wait = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
    return bool(poll.poll(wait))
