"""The asyncio client, without Twisted.

::

    async with await connect() as bus:
        async for message in bus.subscribe("weather/"):
            print(message.key, message.payload)
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from sbus.client.api import Inbox
from sbus.client.arguments import as_bytes, check_seconds
from sbus.client.connecting import (
    BACKLOG_RETRY,
    SERVER_CLOSED,
    Backoff,
    backlog_full,
    connect_once,
    describe_loss,
    is_absent,
)
from sbus.client.core import Message
from sbus.client.inlet import Inlet, PayloadInlet
from sbus.client.options import ConnectOptions, Keywords
from sbus.client.outbox import NO_ROOM, send_limit, send_some
from sbus.client.payload_sender import PayloadSender
from sbus.client.payloads import Buffer
from sbus.client.session import Session
from sbus.client.subscription import QueuedSubscription, WatchQueue
from sbus.errors import Closed, ConnectError, Disconnected, Forked, PacketTooLong, TimedOut, UsageError
from sbus.syscalls.sockets import grow_send_buffer, max_sendable

__all__ = ["Bus", "Subscription", "Watch", "connect"]

T = TypeVar("T")
Socket = socket.socket  # inside `Bus`, the property `socket` hides the module

_MEMORY_RETRY = 0.05
"""Seconds until the next attempt to send after the kernel ran out of memory."""


class _Waiter:
    """A waiter (`sbus.client.core.Waiter`) on a future."""

    __slots__ = ("_future",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._future: asyncio.Future[bytes] = loop.create_future()

    def set_result(self, value: bytes) -> None:
        if not self._future.done():
            self._future.set_result(value)

    def set_exception(self, error: Exception) -> None:
        if not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # mark as retrieved: its task may have been cancelled

    def __await__(self) -> Generator[object, None, bytes]:
        return self._future.__await__()


class Subscription(QueuedSubscription):
    """The messages of one pattern; read them with ``async for``, `get` or `get_many`."""

    async def get(self) -> Message:
        """Wait for the next message and return it.

        :raises sbus.errors.Disconnected: if no more messages will come, because the connection is gone.
        :raises sbus.errors.Closed: if no more messages will come, because the subscription or the bus was closed.
        :raises sbus.errors.NotAllowed: if no more messages will come, because the server refuses the subscription.
        """
        return await self._get()

    async def get_many(self) -> list[Message]:
        """Wait for a message, then return all that are here.

        :raises: as `get`.
        """
        return await self._get_many()


class Watch(WatchQueue):
    """Whether anybody subscribes to a key; read it with ``async for`` or `get`.

    :ivar key: the key.
    :ivar has_subscribers: the newest state; None until the server has reported one.
    """

    async def get(self) -> bool:
        """Wait for the state at first, and then for each change; return the newest state.

        :raises sbus.errors.Disconnected: if no more changes will come, because the connection is gone.
        :raises sbus.errors.Closed: if no more changes will come, because the watch or the bus was closed.
        :raises sbus.errors.UsageError: if the server does not report this.
        """
        return await self._get()


def _watch_hangup(sock: Socket) -> select.epoll | None:
    """Return an epoll(7) set that becomes readable when a socket hangs up; None if the kernel refuses one."""
    try:
        hangup = select.epoll()
    except OSError:
        return None
    try:
        hangup.register(sock, 0)
    except OSError:
        hangup.close()
        return None
    return hangup


async def connect(address: str | os.PathLike[str] | None = None, **options: Unpack[Keywords]) -> Bus:
    """Connect to a bus.

    :param address: path or abstract address of the bus; by default the result of
        `sbus.client.connecting.find_address`.
    :param options: the fields of `sbus.client.options.ConnectOptions`: dialect, max_packet, bundles, timeout,
        reconnect, reconnect_buffer, on_gap, on_lost, on_denied, sender, payloads, on_control.
    :raises sbus.errors.ConnectError: with the reason and the remedy.
    """
    bus = Bus(address, ConnectOptions(**options))
    await bus._open_initially()
    return bus


class Bus(Session[Subscription]):
    """A connection to a bus, made by `connect`.

    `close`, or the end of ``async with``, closes it.

    Every wait may be cancelled. A message whose `publish` is cancelled is not sent, unless it has left already; of
    `publish_many` all are sent once one has left. Packets written before are still sent.
    """

    _callback_errors = (Exception, asyncio.CancelledError)

    def __init__(self, address: str | os.PathLike[str] | None, options: ConnectOptions) -> None:
        super().__init__(address, options)
        self._loop = asyncio.get_running_loop()
        self._reader = (PayloadInlet if options.payloads else Inlet)(self.core, options.receive_size)
        self._send_some = PayloadSender(self.core).send if options.payloads else send_some
        self._sock: socket.socket | None = None
        self._hangup: select.epoll | None = None
        self._writing = False
        self._write_failed = False
        self._task: asyncio.Task[None] | None = None
        self._handlers: set[asyncio.Task[None]] = set()
        self._end_future: asyncio.Future[None] = self._loop.create_future()

    # --- what users call (documented in `ClientApi`) -----------------------------------------

    async def publish(self, key: bytes | str, payload: Buffer = b"") -> None:
        self._check_open()
        try:
            packets = [] if self._in_line else [self.core.publish(key, payload)]
        except PacketTooLong:
            packets = []
        if packets:
            self._write(packets)
        else:
            await self._write_in_turn(lambda: [self.core.publish(key, payload)])
        if len(self.outbox):
            await self._sent(1)

    async def publish_many(self, messages: Iterable[tuple[bytes | str, Buffer]]) -> None:
        self._check_open()
        messages = list(messages)
        try:
            packets = [] if self._in_line else self.core.publish_many(messages)
        except PacketTooLong:
            packets = []
        if packets:
            self._write(packets)
        elif messages:
            packets = await self._write_in_turn(lambda: self.core.publish_many(messages))
        if packets and len(self.outbox):
            await self._sent(len(packets))

    async def whoami(self, timeout: float | None = None) -> bytes:
        return await self._run(self._whoami(), timeout)

    async def fence(self, timeout: float | None = None) -> None:
        await self._run(self._fence(), timeout)

    async def has_subscribers(self, key: bytes | str, timeout: float | None = 10.0) -> bool:
        return await self._run(self._has_subscribers(key), timeout)

    def watch_subscribers(self, key: bytes | str) -> Watch:
        return self._start(Watch(self, as_bytes(key)))

    async def inbox(self, name: bytes | str) -> Inbox[Subscription]:
        return await self._inbox(name)

    async def request(self, key: bytes | str, payload: bytes = b"", timeout: float | None = 10.0) -> bytes:
        return await self._run(self._request(key, payload), timeout)

    async def enqueue(
        self,
        queue: str,
        key: bytes | str,
        payload: bytes = b"",
        *,
        id: bytes | str | None = None,
        delay: float = 0.0,
        timeout: float | None = 10.0,
    ) -> int:
        return await self._run(self._enqueue(queue, key, payload, id, delay), timeout)

    async def answer_proofs(self) -> Subscription:
        return await self._answer_proofs()

    async def verify(self, peer: bytes | str, timeout: float | None = 10.0) -> bool:
        try:
            return await self._run(self._verify(peer), timeout)
        except TimedOut:
            return False

    async def close(self) -> None:
        """Send the packets that are waiting, then close.

        If this is cancelled, nothing is closed.
        """
        await self._finish()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def wait_closed(self) -> None:
        """Wait until the connection is gone and not made again.

        :raises sbus.errors.Disconnected: with the reason, unless this client closed the connection.
        :raises sbus.errors.UsageError: if the server names no senders, and this client asked for them.
        """
        await asyncio.shield(self._end_future)

    @property
    def socket(self) -> socket.socket:
        """The socket, for its options.

        :raises sbus.errors.Disconnected: if there is none at present.
        """
        if self._sock is None:
            raise self._error or Disconnected("not connected at present")
        return self._sock

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and not issubclass(kind, Exception):  # cancelled: do not wait for the server
            self.close_now()
        try:
            await self.close()
        except asyncio.CancelledError:
            self.close_now()
            raise

    # --- what `Session` needs ----------------------------------------------------------------

    def waiter(self) -> _Waiter:
        """Return a new waiter.

        :raises sbus.errors.UsageError: if another event loop is running, whose coroutines nobody would wake up.
        """
        if asyncio.get_running_loop() is not self._loop:
            self._check_open()
            raise UsageError("this connection to the bus is that of another event loop: connect in each loop")
        return _Waiter(self._loop)

    def callback_failed(self, error: BaseException) -> None:
        """See `sbus.client.session.Session`."""
        self._loop.call_exception_handler({"message": "an sbus callback failed", "exception": error})

    def run_handler(self, handler: Coroutine[Any, Any, None], ended: Callable[[], None]) -> bool:
        """Run the rest of a handler as a task, which the end of the connection cancels."""

        def done(task: asyncio.Task[None]) -> None:
            self._handlers.discard(task)
            ended()

        task = self._loop.create_task(handler)
        self._handlers.add(task)
        task.add_done_callback(done)
        return True

    def _make_subscription(self, callback: Callable[[Message], object] | None) -> Subscription:
        return Subscription(self, callback)

    async def _run(self, call: Coroutine[Any, Any, T], timeout: float | None) -> T:
        try:
            seconds = None if timeout is None else max(0.0, check_seconds(timeout))  # nan has ended, too
            async with asyncio.timeout(seconds):
                return await call
        except TimeoutError as e:
            if isinstance(e, TimedOut):
                raise
            raise TimedOut(f"no answer within {timeout} s") from None
        finally:
            call.close()

    async def _open_initially(self) -> None:
        """Connect for the first time; with ``reconnect``, wait for a server that is not there yet."""
        absent: ConnectError | None = None
        delays = Backoff().delays() if self._backoff is None else self._backoff.delays()
        next(delays)
        try:
            async with asyncio.timeout(self._options.timeout):
                while True:
                    try:
                        return await self._open()
                    except ConnectError as error:
                        if self._backoff is None or not is_absent(error):
                            raise
                        absent = error
                    await asyncio.sleep(next(delays))
        except TimeoutError:
            raise absent or ConnectError(backlog_full(self.address)) from None

    async def _open(self) -> None:
        while (sock := connect_once(self.address, self._options.buffer_size)) is None:
            await asyncio.sleep(BACKLOG_RETRY)
        self._sock = sock
        self.core.connected(max_sendable(sock))
        self._reader.connected()
        self._begin_reading()
        self._flush()

    def _make_room(self, size: int) -> None:
        self._reader.make_room(size)
        if self._sock is not None and size > self.core.max_packet:
            self.core.can_send(grow_send_buffer(self._sock, size))

    def _try_send(self, packets: list[bytes]) -> int:
        if self._sock is None or self._write_failed:
            return 0
        try:
            return self._send_some(self._sock, packets, self.core.bundle_limit)
        except OSError:
            return 0

    def _call_soon(self, call: Callable[[], None]) -> None:
        self._loop.call_soon(call)

    def is_connected(self) -> bool:
        """See `sbus.client.session.Session`."""
        return self._sock is not None

    def _set_reading(self, reading: bool) -> None:
        sock = self._sock
        if sock is None:
            return
        # The loop does not notice the end of a connection that it does not read. An epoll(7) set of its own does: it
        # becomes readable when the socket hangs up. While no descriptor is free for it, the client reads on.
        hangup = None if reading else _watch_hangup(sock)
        self._unwatch()
        if hangup is None:
            self._loop.add_reader(sock, self._readable)
        else:
            self._hangup = hangup
            self._loop.add_reader(hangup, self._read_rest, sock, SERVER_CLOSED)

    def _unwatch(self) -> None:
        if self._sock is not None:
            self._loop.remove_reader(self._sock)
        if self._hangup is not None:
            self._loop.remove_reader(self._hangup)
            self._hangup.close()
            self._hangup = None

    def _readable(self) -> None:
        assert self._sock is not None
        try:
            packets, ended = self._reader.read(self._sock)
        except OSError as e:
            self._disconnected(describe_loss(e))
            return
        self._receive_packets(packets)
        if ended and self._sock is not None:
            self._disconnected(SERVER_CLOSED)
        elif not self._is_reading and self._hangup is None:
            self._set_reading(False)  # there was no descriptor for that before

    async def wait_drained(self) -> None:
        """See `sbus.client.session.Session`."""
        self._check_open()
        await self._sent(0)

    def _flush(self) -> None:
        outbox, sock = self.outbox, self._sock
        if sock is None or self._write_failed:
            return
        limit = self.core.bundle_limit
        while taken := outbox.take(send_limit(limit)):
            try:
                sent = self._send_some(sock, taken, limit)
            except OSError as e:
                self._stop_writing()
                if e.errno in NO_ROOM:
                    self._loop.call_later(_MEMORY_RETRY, self._flush)
                else:
                    # Packets that the server sent before are still in the socket; read them once this call is done.
                    self._write_failed = True
                    self._loop.call_soon(self._read_rest, sock, describe_loss(e))
                return
            outbox.ack(taken, sent)
            if not sent:
                if not self._writing:
                    self._writing = True
                    self._loop.add_writer(sock, self._flush)
                return
        self._stop_writing()

    def _stop_writing(self) -> None:
        if self._writing and self._sock is not None:
            self._writing = False
            self._loop.remove_writer(self._sock)

    def _read_rest(self, sock: Socket, why: str) -> None:
        """Read what the server sent before the loss, then close the connection."""
        packets, ended = [b""], False
        while self._sock is sock and packets and not ended:
            try:
                packets, ended = self._reader.read(sock)
            except OSError:
                break
            self._receive_packets(packets)
        if self._sock is sock:
            self._disconnected(why)

    def _detach(self) -> None:
        if self._sock is not None:
            self._unwatch()
            self._stop_writing()
            self._sock.close()
            self._sock, self._write_failed = None, False

    def forked(self, error: Forked) -> None:
        """See `sbus.client.session.Session`."""
        super().forked(error)
        for copy in (self._sock, self._hangup):
            if copy is not None:
                copy.close()
        self._sock = self._hangup = self._task = None

    def _sleep(self, seconds: float) -> Awaitable[None]:
        return asyncio.sleep(seconds)

    def _start_reconnecting(self) -> None:
        self._task = self._loop.create_task(self._reconnect_loop())

    def _on_end(self, error: Exception) -> None:
        current = asyncio.current_task(self._loop)  # a handler may close the connection itself
        for task in self._handlers:
            if task is not current:
                task.cancel()
        if isinstance(error, Closed):
            self._end_future.set_result(None)
        else:
            self._end_future.set_exception(error)
            self._end_future.exception()  # mark as retrieved: the application need not call `wait_closed`
