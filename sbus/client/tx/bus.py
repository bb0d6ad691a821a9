"""The client for Twisted.

::

    bus = await connect(reactor, "/run/sbus.sock")
    async for message in bus.subscribe("weather/"):
        print(message.key, message.payload)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable
from typing import Any, TypeVar

from twisted.internet import defer, error
from twisted.internet.endpoints import clientFromString
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from sbus.client.api import Inbox
from sbus.client.connecting import Backoff, backlog_full, describe_connect_error, find_address
from sbus.client.core import Message
from sbus.client.options import Settings
from sbus.client.session import QueuedSubscription, Session
from sbus.client.tx.producer import ProducerAdapter
from sbus.client.tx.protocol import BusFactory, BusProtocol
from sbus.errors import Closed, ConnectError, Disconnected, TimedOut, UsageError
from sbus.protocol.packets import DEFAULT_MAX_PACKET
from sbus.seqpacket.endpoints import SeqpacketClientEndpoint
from sbus.seqpacket.multiplexer import Multiplexer
from sbus.seqpacket.transport import PacketTransport
from sbus.syscalls.sockets import grow_send_buffer, max_sendable

__all__ = ["Bus", "Subscription", "connect"]

T = TypeVar("T")


class _Waiter:
    """A waiter (see `sbus.client.core.Waiter`) on a Deferred; cancelling that ends the waiting."""

    __slots__ = ("deferred",)

    def __init__(self) -> None:
        self.deferred: defer.Deferred[bytes] = defer.Deferred()

    def set_result(self, value: bytes) -> None:
        if not self.deferred.called:
            self.deferred.callback(value)

    def set_exception(self, error: Exception) -> None:
        if not self.deferred.called:
            self.deferred.errback(error)

    def __await__(self) -> Generator[Any, None, bytes]:
        return self.deferred.__await__()


class _Sending(_Waiter):
    """Who waits until packets are sent, and wants no value."""

    __slots__ = ()

    def set_result(self, value: bytes) -> None:
        if not self.deferred.called:
            self.deferred.callback(None)  # type: ignore[arg-type]


class Subscription(QueuedSubscription):
    """The messages of one pattern, to be read with ``async for`` or `get`."""

    def get(self) -> defer.Deferred[Message]:
        """The next message.

        Fails with `sbus.errors.Disconnected` if none will come, as the connection is gone, and with
        `sbus.errors.Closed` if none will come, as the subscription or the bus was closed.
        """
        return defer.Deferred.fromCoroutine(self._get())

    def get_many(self) -> defer.Deferred[list[Message]]:
        """Wait for a message, then give all that are here, in one list; fails as `get`."""
        return defer.Deferred.fromCoroutine(self._get_many())

    def __aiter__(self) -> AsyncIterator[Message]:
        return self

    async def __anext__(self) -> Message:
        try:
            return self._next() or await self._get()
        except Closed:
            raise StopAsyncIteration from None


def connect(
    reactor: Any,
    address: str | IStreamClientEndpoint | None = None,
    *,
    dialect: str = "current",
    max_packet: int = DEFAULT_MAX_PACKET,
    bundles: bool = True,
    timeout: float = 30.0,
    reconnect: bool | Backoff = False,
    on_gap: Callable[[Exception], Any] | None = None,
    on_control: Callable[[bytes, bytes], Any] | None = None,
) -> defer.Deferred[Bus]:
    """Connect to a bus.

    :param address: where it is, or an endpoint (also as a string, ``seqpacket:PATH``); without one,
        see `sbus.client.connecting.find_address`.
    :param dialect: ``current``, or ``early`` for servers of the first revision.
    :param max_packet: bytes in the longest packet, as at the server.
    :param bundles: ask the server for :doc:`bundles </bundles>`, and use them if it has any.
    :param timeout: seconds to try for while the server's backlog is full.
    :param reconnect: connect and subscribe again when the connection is lost.
    :param on_gap: called with the reason when that has happened: messages may have been missed.
    :param on_control: called with (key, payload) of control messages that this client does not know.

    Fails with `sbus.errors.ConnectError`, with the reason and the remedy.
    """
    settings = Settings(
        dialect=dialect,
        max_packet=max_packet,
        bundles=bundles,
        reconnect=reconnect,
        on_gap=on_gap,
        on_control=on_control,
    )
    bus = Bus(reactor, address, settings, timeout)
    return defer.Deferred.fromCoroutine(bus._open()).addCallback(lambda _: bus)


class Bus(Session[Subscription]):
    """A connection to a bus, made by `connect`.

    Deferreds may be cancelled; what was to be sent by then is sent all the same.
    """

    _log = Logger(namespace="sbus.client")

    def __init__(
        self, reactor: Any, address: str | IStreamClientEndpoint | None, settings: Settings, timeout: float = 30.0
    ) -> None:
        self._reactor = reactor
        if address is None or (isinstance(address, str) and not address.startswith("seqpacket:")):
            text = find_address(address)
            endpoint: IStreamClientEndpoint = SeqpacketClientEndpoint(
                reactor, text, timeout=timeout, max_packet=settings.longest
            )
        elif isinstance(address, str):
            text, endpoint = address, clientFromString(reactor, address)
        else:
            text, endpoint = str(address), address
        super().__init__(text, settings)
        self._endpoint = endpoint
        self._protocol: BusProtocol | None = None  # the newest, which may be gone
        self._attached = False
        self._pause: defer.Deferred[Any] | None = None  # what `_reconnect_loop` waits for
        self._gone: list[defer.Deferred[None]] = []
        self._producer: ProducerAdapter | None = None

    # --- what users do -----------------------------------------------------------------------

    def publish(self, key: bytes | str, payload: bytes = b"") -> defer.Deferred[None]:
        """Publish a message; fires when it is handed to the kernel.

        :raises sbus.errors.InvalidKey: if nobody may publish with this key.
        :raises sbus.errors.PacketTooLong: if it does not fit a packet.
        :raises sbus.errors.Disconnected: if it cannot be sent any more (as the Deferred's failure,
            if it could have been when it was published).
        """
        self._check_open()
        self._write([self.core.publish(key, payload)])
        return self._drained()

    def publish_many(self, messages: Iterable[tuple[bytes | str, bytes]]) -> defer.Deferred[None]:
        """Publish messages, (key, payload) each, in order; fires when all are handed to the kernel.

        :raises: as `publish`; if one of them cannot be published none is.
        """
        self._check_open()
        packets = self.core.publish_many(messages)
        if packets:
            self._write(packets)
        return self._drained()

    def whoami(self, timeout: float | None = None) -> defer.Deferred[bytes]:
        """Our name at the server, ``!/cred/<gid>/<uid>/<pid>``: what our private keys begin with."""
        return self._run(self._whoami(), timeout)

    def fence(self, timeout: float | None = None) -> defer.Deferred[None]:
        """Fires when the server has dealt with everything that we have sent before."""
        return self._run(self._fence(), timeout)

    def inbox(self, name: bytes | str) -> defer.Deferred[Inbox[Subscription]]:
        """Subscribe to a private key of ours, which nobody else can read."""
        return self._run(self._inbox(name), None)

    def request(self, key: bytes | str, payload: bytes = b"", timeout: float | None = 10.0) -> defer.Deferred[bytes]:
        """Ask somebody; fires with the answer.

        Fails with `sbus.errors.TimedOut` if none came in so many seconds, and with
        `sbus.errors.RequestFailed` if the answer is an error.
        """
        return self._run(self._request(key, payload), timeout)

    def answer_proofs(self) -> defer.Deferred[Subscription]:
        """Let others `verify` that we are who we say."""
        return self._run(self._answer_proofs(), None)

    def verify(self, peer: bytes | str, timeout: float | None = 10.0) -> defer.Deferred[bool]:
        """Whether somebody called `peer` (by ``whoami``) is there and can read what only he can.

        False if that is not proved in so many seconds.
        """

        def silent(failure: Failure) -> bool:
            failure.trap(TimedOut)
            return False

        return self._run(self._verify(peer), timeout).addErrback(silent)

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        """Let a producer that publishes here follow the socket's pace (as `twisted.internet.interfaces.IConsumer`).

        While the connection is made again it is paused; when there will be none it is stopped.

        :param streaming: it publishes of its own accord (`IPushProducer`); else once each time it is asked to
            (`IPullProducer`).
        :raises RuntimeError: if there is one already.
        """
        if self._producer is not None:
            raise RuntimeError(f"cannot register {producer!r}: {self._producer.producer!r} was never unregistered")
        if self._error is not None:
            producer.stopProducing()
            return
        self._producer = ProducerAdapter(self, producer, streaming)
        self._producer.start()

    def unregisterProducer(self) -> None:
        """The producer has no more to send."""
        pace, self._producer = self._producer, None
        if pace is not None:
            pace.stop()

    def close(self) -> defer.Deferred[None]:
        """Send what waits, close, and end everything that waits for us; fires when that is done."""
        return defer.Deferred.fromCoroutine(self._close())

    async def _close(self) -> None:
        await self._finish()
        pause, self._pause = self._pause, None
        if pause is not None:
            pause.cancel()
        protocol = self._protocol
        if protocol is not None and protocol.transport is not None:
            waiter = _Waiter()
            protocol.waiting.append(waiter)
            await waiter

    def whenClosed(self) -> defer.Deferred[None]:
        """Fires when the connection is gone for good; fails with the reason, unless we closed it ourselves."""
        if isinstance(self._error, Closed):
            return defer.succeed(None)
        if self._error is not None:
            return defer.fail(self._error)
        gone: defer.Deferred[None] = defer.Deferred()
        self._gone.append(gone)
        return gone

    @property
    def transport(self) -> PacketTransport:
        """The transport; its ``getHandle()`` is the socket, for its options.

        :raises sbus.errors.Disconnected: if there is none just now.
        """
        transport = self._transport
        if transport is None:
            raise self._error or Disconnected("not connected just now")
        return transport

    @property
    def _transport(self) -> PacketTransport | None:
        return self._protocol.transport if self._is_connected() and self._protocol is not None else None

    # --- what the session needs --------------------------------------------------------------

    def waiter(self) -> _Waiter:
        """See `sbus.client.api.ClientApi.waiter`."""
        return _Waiter()

    def callback_failed(self, error: BaseException | Failure) -> None:
        """See `sbus.client.session.Session`."""
        failure = error if isinstance(error, Failure) else Failure(error)
        self._log.failure("an sbus callback failed", failure=failure)

    def _make_subscription(self, callback: Callable[[Message], Any] | None) -> Subscription:
        return Subscription(self, callback)

    def _run(self, call: Coroutine[Any, Any, T], timeout: float | None) -> defer.Deferred[T]:
        deferred = defer.Deferred.fromCoroutine(call)
        if timeout is not None:

            def too_late(value: Any, seconds: float) -> Any:
                if isinstance(value, Failure) and value.check(defer.CancelledError):
                    raise TimedOut(f"no answer within {seconds} seconds")
                return value

            deferred.addTimeout(timeout, self._reactor, too_late)
        return deferred

    async def _open(self) -> None:
        try:
            self._pause = self._endpoint.connect(BusFactory(self))
            await self._pause
        except error.TimeoutError as e:
            raise ConnectError(backlog_full(self.address)) from e
        except (error.ConnectError, OSError) as e:
            raise ConnectError(describe_connect_error(self.address, e)) from e
        if not self._attached:
            raise UsageError(f"{self.address} does not keep packets apart: give a seqpacket endpoint")
        self._flush()

    def _connected(self, protocol: BusProtocol, transport: PacketTransport) -> None:
        self._protocol = protocol
        self._attached = True
        sock = transport.getHandle()
        if max_sendable(sock) < self._settings.longest:  # an endpoint that somebody gave us may know of no bundles
            grow_send_buffer(sock, self._settings.longest)
        transport.ensure_max_packet(self._settings.longest)
        self.core.connected(max_sendable(sock))
        self._set_reading(not self._crowded)

    def _received(self, packets: list[bytes]) -> None:
        had_bundles = self.core.bundle_limit
        self._arrived(packets)
        transport = self._transport
        if transport is not None and self.core.bundle_limit and not had_bundles:
            transport.start_bundling(self.core.bundle_limit)
            transport.flush()

    def _send_now(self, packets: list[bytes]) -> int:
        transport = self._transport
        return 0 if transport is None or len(packets) > 1 else transport.try_send(packets)

    def _soon(self, call: Callable[[], None]) -> None:
        Multiplexer.of(self._reactor).call_soon(call)

    def _is_connected(self) -> bool:
        return self._attached

    def _set_reading(self, reading: bool) -> None:
        transport = self._transport
        if transport is not None:
            if reading or (self._protocol is not None and self._protocol.is_ending):
                transport.resumeProducing()
            else:
                transport.pauseProducing()

    def _drained(self) -> defer.Deferred[None]:
        if self._error is not None:
            return defer.fail(self._error)
        if not len(self.outbox):
            return defer.succeed(None)
        waiter = _Sending()
        self.outbox.wait(waiter)
        return waiter.deferred  # type: ignore[return-value]

    def _flush(self) -> None:
        transport = self._transport
        if transport is not None:
            transport.flush()
        if self._producer is not None:
            self._producer.flushed()

    def _connection_lost(self, protocol: BusProtocol, why: str) -> None:
        if protocol is self._protocol and self._attached:
            self._disconnected(why)
            if self._producer is not None:
                self._producer.flushed()  # what is to be said on the next connection waits already

    def _detach(self) -> None:
        transport = self._transport
        self._attached = False
        if transport is not None:
            transport.abortConnection()

    def _sleep(self, seconds: float) -> defer.Deferred[None]:
        self._pause = deferLater(self._reactor, seconds)
        return self._pause

    def _reconnect(self) -> None:
        attempt = defer.Deferred.fromCoroutine(self._reconnect_loop())
        attempt.addErrback(lambda failure: failure.trap(defer.CancelledError))

    def _ended(self, error: Exception) -> None:
        if self._producer is not None:
            producer = self._producer.producer
            self.unregisterProducer()
            self._call_user(producer.stopProducing)
        gone, self._gone = self._gone, []
        for deferred in gone:
            if isinstance(error, Closed):
                deferred.callback(None)
            else:
                deferred.errback(error)
