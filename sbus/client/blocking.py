"""The client for programs that wait: plain sockets, no event loop.

::

    with sbus.connect() as bus:
        bus.subscribe("weather/")
        for message in bus:
            print(message.key, message.payload)

Not for several threads at once: give each a connection of its own.
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from typing import Any, Self, TypeVar

from sbus.client.calls import Calls, Inbox
from sbus.client.core import ClientCore, Message
from sbus.client.dialing import Backoff, dial, find_address
from sbus.errors import Closed, ConnectError, Disconnected, TimedOut
from sbus.keys import CURRENT, EARLY
from sbus.packets import DEFAULT_MAX_PACKET
from sbus.syscalls.batch import BATCH, PacketReader, send_packets
from sbus.syscalls.sockets import sendable

__all__ = ["Bus", "Subscription", "connect"]

T = TypeVar("T")


class _Waiter:
    """A waiter (see `sbus.client.core.Waiter`) that `Bus._run` reads the socket for."""

    __slots__ = ("_error", "_value")

    def __init__(self) -> None:
        self._value: bytes | None = None
        self._error: Exception | None = None

    def succeed(self, value: bytes) -> None:
        self._value = value

    def fail(self, error: Exception) -> None:
        self._error = error

    @property
    def is_done(self) -> bool:
        return self._value is not None or self._error is not None

    def __await__(self) -> Generator[_Waiter, None, bytes]:
        if not self.is_done:
            yield self
        if self._error is not None:
            raise self._error
        assert self._value is not None
        return self._value


class Subscription:
    """The messages of one pattern.

    They come to who iterates over the bus; or, from the moment that this is iterated over (or `get`
    is called), to this alone. A callback gets them while the bus is read for whatever reason.

    :ivar pattern: what it is subscribed to.
    """

    def __init__(self, bus: Bus, callback: Callable[[Message], Any] | None) -> None:
        self.pattern = b""
        self._bus = bus
        self._callback = callback
        self._own: deque[Message] | None = None
        self._closed = False

    def deliver(self, message: Message) -> None:
        """See `sbus.client.core.Sink`."""
        if self._callback is not None:
            self._callback(message)
        elif self._own is not None:
            self._own.append(message)
        else:
            self._bus._keep(message)

    def get(self, timeout: float | None = None) -> Message:
        """The next message.

        :raises sbus.errors.TimedOut: if none has come in so many seconds.
        :raises sbus.errors.Disconnected: if none will come.
        """
        own = self._claim()
        if not own:
            if self._closed:
                raise Closed("the subscription was closed here")
            self._bus._read_until(lambda: own, timeout)
        return own.popleft()

    def get_ready(self) -> list[Message]:
        """All messages that are here already, without waiting, in one list."""
        own = self._claim()
        if not self._closed:
            self._bus._read_ready()
        messages = list(own)
        own.clear()
        return messages

    def _claim(self) -> deque[Message]:
        if self._own is None:
            self._own = deque()
        return self._own

    def __iter__(self) -> Iterator[Message]:
        self._claim()
        while True:
            try:
                yield self.get()
            except Closed:
                return

    def close(self) -> None:
        """Unsubscribe."""
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
    timeout: float | None = 30.0,
    reconnect: bool | Backoff = False,
    on_gap: Callable[[Exception], Any] | None = None,
    on_control: Callable[[bytes, bytes], Any] | None = None,
) -> Bus:
    """Connect to a bus.

    :param address: where it is; without one, see `sbus.client.dialing.find_address`.
    :param dialect: ``current``, or ``early`` for servers of the first revision.
    :param max_packet: bytes in the longest packet, as at the server.
    :param timeout: seconds to try for while the server's backlog is full.
    :param reconnect: connect and subscribe again when the connection is lost.
    :param on_gap: called with the reason when that has happened: messages may have been missed.
    :param on_control: called with (key, payload) of control messages that this client does not know.
    :raises sbus.errors.ConnectError: with the reason and the remedy.
    """
    bus = Bus(address, dialect, max_packet, reconnect, on_gap, on_control)
    bus._open(timeout)
    return bus


class Bus(Calls[Subscription]):
    """A connection to a bus; made by `connect`, closed by `close` or at the end of ``with``."""

    def __init__(
        self,
        address: str | None,
        dialect: str,
        max_packet: int,
        reconnect: bool | Backoff,
        on_gap: Callable[[Exception], Any] | None,
        on_control: Callable[[bytes, bytes], Any] | None,
    ) -> None:
        super().__init__()
        self.address = find_address(address)
        self.core = ClientCore(EARLY if dialect == "early" else CURRENT, max_packet, on_control)
        self._max_packet = max_packet
        self._backoff = Backoff() if reconnect is True else (reconnect or None)
        self._on_gap = on_gap
        self._reader = PacketReader(max_packet)
        self._messages: deque[Message] = deque()
        self._kept: Message | None = None
        self._sock: socket.socket | None = None
        self._error: Disconnected | None = None

    # --- sending -----------------------------------------------------------------------------

    def publish(self, key: bytes | str, payload: bytes = b"", *, flags: int = 0, timeout: float | None = None) -> None:
        """Publish a message; returns when it is handed to the kernel.

        :param flags: for send(2): with ``MSG_DONTWAIT`` a full socket raises `BlockingIOError`.
        :param timeout: seconds to wait while the socket is full.
        :raises sbus.errors.InvalidKey: if nobody may publish with this key.
        :raises sbus.errors.PacketTooLong: if it does not fit a packet.
        :raises sbus.errors.TimedOut: if the socket stayed full; nothing was sent then.
        :raises sbus.errors.Disconnected: if it cannot be sent any more.
        """
        packet = self.core.publish(key, payload)
        if flags or timeout is not None:
            self._send_slowly(packet, flags, timeout)
        else:
            self._send_all([packet])

    def publish_many(self, messages: list[tuple[bytes | str, bytes]]) -> None:
        """Publish messages, (key, payload) each, in order; returns when all are handed to the kernel.

        :raises: as `publish`; if one of them cannot be published none is.
        """
        publish = self.core.publish
        self._send_all([publish(key, payload) for key, payload in messages])

    def send(self, packets: list[bytes]) -> None:
        """See `sbus.client.calls.Calls.send`."""
        self._send_all(packets)

    def _send_all(self, packets: list[bytes]) -> None:
        at = 0
        while at < len(packets):
            sock = self.socket
            try:
                sent = send_packets(sock, packets[at : at + BATCH] if at or len(packets) > BATCH else packets)
            except OSError as e:
                self._disconnected(f"the connection broke: {e.strerror}")
                continue
            at += sent
            if not sent:
                self._poll(select.POLLOUT, None)

    def _send_slowly(self, packet: bytes, flags: int, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                self.socket.send(packet, flags | socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                return
            except BlockingIOError:
                if flags & socket.MSG_DONTWAIT:
                    raise
                if not self._poll(select.POLLOUT, deadline):
                    raise TimedOut(f"the socket stayed full for {timeout} seconds; nothing was sent") from None
            except OSError as e:
                self._disconnected(f"the connection broke: {e.strerror}")

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
                self._read_until(lambda: messages, 0.0 if flags & socket.MSG_DONTWAIT else timeout)
            except TimedOut:
                if flags & socket.MSG_DONTWAIT:
                    raise BlockingIOError("no message is here") from None
                raise
        return messages[0] if flags & socket.MSG_PEEK else messages.popleft()

    def get_ready(self) -> list[Message]:
        """All messages that are here already, without waiting, in one list: for use after a poll."""
        self._read_ready()
        messages = list(self._messages)
        self._messages.clear()
        return messages

    def get_many(self, timeout: float | None = None) -> list[Message]:
        """Wait for a message, then give all that are here, in one list.

        :raises: as `receive`.
        """
        if not self._messages:
            self._read_until(lambda: self._messages, timeout)
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
        return len(self._messages)

    # --- what takes a round trip -------------------------------------------------------------

    def whoami(self, timeout: float | None = None) -> bytes:
        """Our name at the server, ``!/cred/<gid>/<uid>/<pid>``: what our private keys begin with."""
        return self._run(self._whoami(), timeout)

    def fence(self, timeout: float | None = None) -> None:
        """Wait until the server has dealt with everything that we have sent before."""
        self._run(self._fence(), timeout)

    def inbox(self, name: bytes | str) -> Inbox[Subscription]:
        """Subscribe to a private key of ours, which nobody else can read."""
        return self._run(self._inbox(name), None)

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
        """Whether somebody called `peer` (by ``whoami``) is there and can read what only he can."""
        return self._run(self._verify(peer), timeout)

    # --- the socket --------------------------------------------------------------------------

    def fileno(self) -> int:
        """The descriptor, for select, poll and epoll; when it is readable, call `get_ready`."""
        return self.socket.fileno()

    @property
    def socket(self) -> socket.socket:
        """The socket, for its options.

        :raises sbus.errors.Disconnected: if it is gone.
        """
        if self._error is not None:
            raise self._error
        assert self._sock is not None
        return self._sock

    def close(self) -> None:
        """Close; whoever iterates comes to the end."""
        if self._error is None:
            self._error = Closed("the connection to the bus was closed here")
        if self._sock is not None:
            self._sock.close()
            self._sock = None

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
        deadline = None if timeout is None else time.monotonic() + timeout
        error: Exception | None = None
        while True:
            try:
                waiter: _Waiter = call.throw(error) if error is not None else call.send(None)
            except StopIteration as result:
                value: T = result.value
                return value
            error = None
            while not waiter.is_done:
                try:
                    self._read(deadline)
                except (TimedOut, Disconnected) as e:
                    error = TimedOut(f"no answer within {timeout} seconds") if isinstance(e, TimedOut) else e
                    break

    def _keep(self, message: Message) -> None:
        """A message for who iterates over the bus: once, however many subscriptions want it."""
        if message is not self._kept:
            self._kept = message
            self._messages.append(message)

    def _unsubscribe(self, subscription: Subscription) -> None:
        if self._error is None:
            self.send(self.core.unsubscribe(subscription))

    def _open(self, timeout: float | None) -> None:
        self._sock = dial(self.address, self._max_packet, timeout)
        self.core.max_packet = min(self._max_packet, sendable(self._sock))

    def _poll(self, events: int, deadline: float | None) -> bool:
        """Wait for the socket; False if the deadline has passed first."""
        poll = select.poll()
        poll.register(self.socket, events)
        wait = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        return bool(poll.poll(wait))

    def _read(self, deadline: float | None) -> None:
        """Receive a batch, waiting for it.

        :raises sbus.errors.TimedOut: if the deadline has passed first.
        :raises sbus.errors.Disconnected: if the connection is lost, and not to be made again.
        """
        if not self._read_ready() and not self._poll(select.POLLIN, deadline):
            raise TimedOut("nothing has come in time")

    def _read_until(self, found: Callable[[], Any], timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not found():
            self._read(deadline)

    def _read_ready(self) -> bool:
        """Receive what is here; whether it was anything."""
        try:
            packets, ended = self._reader.read(self.socket)
        except OSError as e:
            packets, ended = [], True
            why = f"the connection broke: {e.strerror}"
        else:
            why = "the server closed the connection"
        self.core.receive(packets)
        if ended:
            self._disconnected(why)
        return bool(packets)

    def _disconnected(self, why: str) -> None:
        """The connection is lost: make it again if that is wanted, else it is the end.

        :raises sbus.errors.Disconnected: if it is.
        """
        error = Disconnected(f"{why} ({self.address})")
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        self._lost(error)
        if self._backoff is None:
            self._error = error
            raise error
        for delay in self._backoff.delays():
            time.sleep(delay)
            try:
                self._open(None)
                break
            except ConnectError:
                continue
        self._me = None
        if self._answers is not None:
            answers, self._answers = self._answers, None
            self.core.unsubscribe(answers)
        self._send_all(self.core.greeting())
        if self._on_gap is not None:
            self._on_gap(error)
