"""The client for asyncio, native: no Twisted in it.

::

    async with await connect() as bus:
        async for message in bus.subscribe("weather/"):
            print(message.key, message.payload)
"""

from __future__ import annotations

import asyncio
import errno
import select
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

from sbus.client.api import Inbox
from sbus.client.connecting import CLOSED, Backoff, backlog_full, connect_once, describe_loss
from sbus.client.core import Message
from sbus.client.options import Settings
from sbus.client.sending import read_at_once, send_some, share
from sbus.client.session import QueuedSubscription, Session
from sbus.errors import Closed, ConnectError, Disconnected, TimedOut
from sbus.protocol.packets import DEFAULT_MAX_PACKET
from sbus.syscalls.batch import PacketReader
from sbus.syscalls.sockets import max_sendable

__all__ = ["Bus", "Subscription", "connect"]

T = TypeVar("T")
Socket = socket.socket  # as `Bus.socket` hides the module

_RETRY = 0.05
"""Seconds until a socket is tried again for which the kernel had no memory."""


class _Waiter:
    """A waiter (see `sbus.client.core.Waiter`) that asyncio can await."""

    __slots__ = ("_future",)

    def __init__(self) -> None:
        self._future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def set_result(self, value: bytes) -> None:
        if not self._future.done():
            self._future.set_result(value)

    def set_exception(self, error: Exception) -> None:
        if not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # nobody may be waiting any more; that is no news then

    def __await__(self) -> Generator[Any, None, bytes]:
        return self._future.__await__()


class Subscription(QueuedSubscription):
    """The messages of one pattern, to be read with ``async for`` or `get`."""

    async def get(self) -> Message:
        """The next message.

        :raises sbus.errors.Disconnected: if none will come, as the connection is gone.
        :raises sbus.errors.Closed: if none will come, as the subscription or the bus was closed.
        """
        return await self._get()

    async def get_many(self) -> list[Message]:
        """Wait for a message, then give all that are here, in one list.

        :raises: as `get`.
        """
        return await self._get_many()

    def __aiter__(self) -> AsyncIterator[Message]:
        return self

    async def __anext__(self) -> Message:
        try:
            return self._next() or await self._get()
        except Closed:
            raise StopAsyncIteration from None


async def connect(
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
    await bus._open(timeout)
    return bus


class Bus(Session[Subscription]):
    """A connection to a bus; made by `connect`, closed by `close` or at the end of ``async with``.

    Whatever waits may be cancelled; what was to be sent by then is sent all the same.
    """

    _failures = (Exception, asyncio.CancelledError)

    def __init__(self, address: str | None, settings: Settings) -> None:
        super().__init__(address, settings)
        self._loop = asyncio.get_running_loop()
        self._reader = PacketReader(settings.longest)
        self._sock: socket.socket | None = None
        self._hangup: select.epoll | None = None
        self._writing = False
        self._broken = False  # nothing can be sent any more
        self._task: asyncio.Task[None] | None = None
        self._gone: asyncio.Future[None] = self._loop.create_future()

    # --- what users do -----------------------------------------------------------------------

    async def publish(self, key: bytes | str, payload: bytes = b"") -> None:
        """Publish a message; returns when it is handed to the kernel.

        :raises sbus.errors.InvalidKey: if nobody may publish with this key.
        :raises sbus.errors.PacketTooLong: if it does not fit a packet.
        :raises sbus.errors.Disconnected: if it cannot be sent any more.
        """
        self._check_open()
        self._write([self.core.publish(key, payload)])
        if len(self.outbox):
            await self._drained()

    async def publish_many(self, messages: Iterable[tuple[bytes | str, bytes]]) -> None:
        """Publish messages, (key, payload) each, in order; returns when all are handed to the kernel.

        :raises: as `publish`; if one of them cannot be published none is.
        """
        self._check_open()
        packets = self.core.publish_many(messages)
        if packets:
            self._write(packets)
            await self._drained()

    async def whoami(self, timeout: float | None = None) -> bytes:
        """Our name at the server, ``!/cred/<gid>/<uid>/<pid>``: what our private keys begin with."""
        return await self._run(self._whoami(), timeout)

    async def fence(self, timeout: float | None = None) -> None:
        """Wait until the server has dealt with everything that we have sent before."""
        await self._run(self._fence(), timeout)

    async def inbox(self, name: bytes | str) -> Inbox[Subscription]:
        """Subscribe to a private key of ours, which nobody else can read."""
        return await self._inbox(name)

    async def request(self, key: bytes | str, payload: bytes = b"", timeout: float | None = 10.0) -> bytes:
        """Ask somebody, and wait for the answer.

        :raises sbus.errors.TimedOut: if none came in so many seconds.
        :raises sbus.errors.RequestFailed: if the answer is an error.
        """
        return await self._run(self._request(key, payload), timeout)

    async def answer_proofs(self) -> Subscription:
        """Let others `verify` that we are who we say."""
        return await self._answer_proofs()

    async def verify(self, peer: bytes | str, timeout: float | None = 10.0) -> bool:
        """Whether somebody called `peer` (by ``whoami``) is there and can read what only he can.

        False if that is not proved in so many seconds.
        """
        try:
            return await self._run(self._verify(peer), timeout)
        except TimedOut:
            return False

    async def close(self) -> None:
        """Send what waits, close, and end everything that waits for us; if it is cancelled, nothing is closed."""
        await self._finish()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def wait_closed(self) -> None:
        """Wait until the connection is gone for good; it raises why, unless we closed it ourselves."""
        await asyncio.shield(self._gone)

    @property
    def socket(self) -> socket.socket:
        """The socket, for its options.

        :raises sbus.errors.Disconnected: if there is none just now.
        """
        if self._sock is None:
            raise self._error or Disconnected("not connected just now")
        return self._sock

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and not issubclass(kind, Exception):  # cancelled: nobody is to wait for the server then
            self._close_now()
        try:
            await self.close()
        except asyncio.CancelledError:
            self._close_now()
            raise

    # --- what the session needs --------------------------------------------------------------

    def waiter(self) -> _Waiter:
        """See `sbus.client.api.ClientApi.waiter`."""
        return _Waiter()

    def callback_failed(self, error: BaseException) -> None:
        """See `sbus.client.session.Session`."""
        self._loop.call_exception_handler({"message": "an sbus callback failed", "exception": error})

    def _make_subscription(self, callback: Callable[[Message], Any] | None) -> Subscription:
        return Subscription(self, callback)

    async def _run(self, call: Awaitable[T], timeout: float | None) -> T:
        try:
            async with asyncio.timeout(timeout):
                return await call
        except TimeoutError as e:
            if isinstance(e, TimedOut):
                raise
            raise TimedOut(f"no answer within {timeout} seconds") from None

    async def _open(self, timeout: float | None = None) -> None:
        try:
            async with asyncio.timeout(timeout):
                while (sock := connect_once(self.address, self._settings.longest)) is None:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise ConnectError(backlog_full(self.address)) from None
        self._sock = sock
        self.core.connected(max_sendable(sock))
        self._set_reading(not self._crowded)
        self._flush()

    def _send_now(self, packets: list[bytes]) -> int:
        if self._sock is None or self._broken:
            return 0
        try:
            return send_some(self._sock, packets, self.core.bundle_limit)
        except OSError:
            return 0

    def _soon(self, call: Callable[[], None]) -> None:
        self._loop.call_soon(call)

    def _is_connected(self) -> bool:
        return self._sock is not None

    def _set_reading(self, reading: bool) -> None:
        sock = self._sock
        if sock is None:
            return
        self._unwatch()
        if reading:
            self._loop.add_reader(sock, self._readable)
        else:
            # The loop does not see the end of a connection that is not read; an epoll(7) set that holds it alone does.
            self._hangup = select.epoll()
            self._hangup.register(sock, 0)
            self._loop.add_reader(self._hangup, self._read_rest, sock, CLOSED)

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
            packets, ended = self._reader.read(self._sock, read_at_once(self.core.bundle_limit))
        except OSError as e:
            self._disconnected(describe_loss(e))
            return
        self._arrived(packets)
        if ended and self._sock is not None:
            self._disconnected(CLOSED)

    async def _drained(self) -> None:
        self._check_open()
        if len(self.outbox):
            waiter = _Waiter()
            self.outbox.wait(waiter)
            await waiter

    def _flush(self) -> None:
        outbox, sock = self.outbox, self._sock
        if sock is None or self._broken:
            return
        limit = self.core.bundle_limit
        while taken := outbox.take(share(limit)):
            try:
                sent = send_some(sock, taken, limit)
            except OSError as e:
                self._stop_writing()
                if e.errno in (errno.ENOBUFS, errno.ENOMEM):
                    self._loop.call_later(_RETRY, self._flush)
                else:
                    # What came before is still here; it is read when what is under way now is done.
                    self._broken = True
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
        """The server is gone, or takes no more: read what it has sent before, then it is over."""
        packets, ended = [b""], False
        while self._sock is sock and packets and not ended:
            try:
                packets, ended = self._reader.read(sock)
            except OSError:
                break
            self._arrived(packets)
        if self._sock is sock:
            self._disconnected(why)

    def _detach(self) -> None:
        if self._sock is not None:
            self._unwatch()
            self._stop_writing()
            self._sock.close()
            self._sock, self._broken = None, False

    def _sleep(self, seconds: float) -> Awaitable[None]:
        return asyncio.sleep(seconds)

    def _reconnect(self) -> None:
        self._task = self._loop.create_task(self._reconnect_loop())

    def _ended(self, error: Exception) -> None:
        if isinstance(error, Closed):
            self._gone.set_result(None)
        else:
            self._gone.set_exception(error)
            self._gone.exception()  # it is told to everyone who waits; not everyone does
