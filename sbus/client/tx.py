"""The client for Twisted.

::

    bus = await connect(reactor, "/run/sbus.sock")
    async for message in bus.subscribe("weather/"):
        print(message.key, message.payload)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from typing import Any, TypeVar

from twisted.application.service import Service
from twisted.internet import defer, error
from twisted.internet.endpoints import clientFromString
from twisted.internet.interfaces import IProtocol, IStreamClientEndpoint, ITransport
from twisted.internet.protocol import Factory
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from sbus.client.calls import Inbox
from sbus.client.core import Message
from sbus.client.dialing import Backoff, find_address, remedy
from sbus.client.session import QueuedSubscription, Session
from sbus.errors import Closed, ConnectError, Disconnected, TimedOut
from sbus.interfaces import IPacketReceiver
from sbus.packets import DEFAULT_MAX_PACKET
from sbus.seqpacket.endpoints import SeqpacketClientEndpoint
from sbus.seqpacket.transport import PacketTransport
from sbus.syscalls.sockets import sendable

__all__ = ["Bus", "BusClientService", "Subscription", "connect"]

T = TypeVar("T")


class _Waiter:
    """A waiter (see `sbus.client.core.Waiter`) on a Deferred; cancelling that ends the waiting."""

    __slots__ = ("deferred",)

    def __init__(self) -> None:
        self.deferred: defer.Deferred[bytes] = defer.Deferred()

    def succeed(self, value: bytes) -> None:
        if not self.deferred.called:
            self.deferred.callback(value)

    def fail(self, error: Exception) -> None:
        if not self.deferred.called:
            self.deferred.errback(error)

    def __await__(self) -> Generator[Any, None, bytes]:
        return self.deferred.__await__()


class Subscription(QueuedSubscription):
    """The messages of one pattern, to be read with ``async for`` or `get`."""

    _waiting: defer.Deferred[None] | None = None

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.called:
            waiting.callback(None)

    def get(self) -> defer.Deferred[Message]:
        """The next message.

        Fails with `sbus.errors.Disconnected` if none will come, as the connection is gone, and with
        `sbus.errors.Closed` if none will come, as the subscription or the bus was closed.
        """
        return defer.Deferred.fromCoroutine(self._get())

    async def _get(self) -> Message:
        while (message := self._next()) is None:
            if self._waiting is None:
                self._waiting = defer.Deferred()
            await self._waiting
        return message

    def __aiter__(self) -> AsyncIterator[Message]:
        return self

    async def __anext__(self) -> Message:
        try:
            return await self._get()
        except Closed:
            raise StopAsyncIteration from None


@implementer(IProtocol, IPacketReceiver)
class _Protocol:
    """The connection of a `Bus`."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def makeConnection(self, transport: ITransport) -> None:
        assert isinstance(transport, PacketTransport)
        transport.queue = self._bus.outbox
        self._bus._connected(transport)

    def connectionMade(self) -> None:
        """Nothing more to do (`IProtocol`)."""

    def dataReceived(self, data: bytes) -> None:
        self._bus.core.receive([data])

    def packetsReceived(self, packets: list[bytes]) -> int:
        """A batch has arrived (`IPacketReceiver`); what is not read is kept by the subscriptions."""
        self._bus.core.receive(packets)
        return len(packets)

    def connectionLost(self, reason: Failure) -> None:
        if reason.check(error.ConnectionDone):
            self._bus._disconnected("the server closed the connection")
        else:
            self._bus._disconnected(f"the connection broke: {reason.getErrorMessage()}")


class _Factory(Factory):
    """Makes the connections of one `Bus`, one after the other."""

    noisy = False

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def buildProtocol(self, addr: Any) -> Any:
        return _Protocol(self._bus)


def connect(
    reactor: Any,
    address: str | IStreamClientEndpoint | None = None,
    *,
    dialect: str = "current",
    max_packet: int = DEFAULT_MAX_PACKET,
    timeout: float = 30.0,
    reconnect: bool | Backoff = False,
    on_gap: Callable[[Exception], Any] | None = None,
    on_control: Callable[[bytes, bytes], Any] | None = None,
) -> defer.Deferred[Bus]:
    """Connect to a bus.

    :param address: where it is, or an endpoint (also as a string, ``seqpacket:PATH``); without one,
        see `sbus.client.dialing.find_address`.
    :param dialect: ``current``, or ``early`` for servers of the first revision.
    :param max_packet: bytes in the longest packet, as at the server.
    :param timeout: seconds to try for while the server's backlog is full.
    :param reconnect: connect and subscribe again when the connection is lost.
    :param on_gap: called with the reason when that has happened: messages may have been missed.
    :param on_control: called with (key, payload) of control messages that this client does not know.

    Fails with `sbus.errors.ConnectError`, with the reason and the remedy.
    """
    bus = Bus(
        reactor,
        address,
        timeout=timeout,
        dialect=dialect,
        max_packet=max_packet,
        reconnect=reconnect,
        on_gap=on_gap,
        on_control=on_control,
    )
    return bus._open().addCallback(lambda _: bus)


class Bus(Session[Subscription]):
    """A connection to a bus, made by `connect`. Deferreds may be cancelled."""

    _log = Logger()

    def __init__(
        self, reactor: Any, address: str | IStreamClientEndpoint | None, *, timeout: float = 30.0, **settings: Any
    ) -> None:
        self._reactor = reactor
        if address is None or (isinstance(address, str) and not address.startswith("seqpacket:")):
            text = find_address(address)
            endpoint: IStreamClientEndpoint = SeqpacketClientEndpoint(
                reactor, text, timeout=timeout, max_packet=settings["max_packet"]
            )
        elif isinstance(address, str):
            text, endpoint = address, clientFromString(reactor, address)
        else:
            text, endpoint = str(address), address
        super().__init__(text, **settings)
        self._endpoint = endpoint
        self._transport: PacketTransport | None = None
        self._attempt: defer.Deferred[Any] | None = None
        self._gone: list[defer.Deferred[None]] = []

    # --- what users do -----------------------------------------------------------------------

    def publish(self, key: bytes | str, payload: bytes = b"") -> defer.Deferred[None]:
        """Publish a message; fires when it is handed to the kernel.

        :raises sbus.errors.InvalidKey: if nobody may publish with this key.
        :raises sbus.errors.PacketTooLong: if it does not fit a packet.
        :raises sbus.errors.Disconnected: if it cannot be sent any more (as the Deferred's failure,
            if it could have been when it was published).
        """
        self._check_open()
        self.outbox.write(self.core.publish(key, payload))
        return self._drained()

    def publish_many(self, messages: list[tuple[bytes | str, bytes]]) -> defer.Deferred[None]:
        """Publish messages, (key, payload) each, in order; fires when all are handed to the kernel.

        :raises: as `publish`; if one of them cannot be published none is.
        """
        self._check_open()
        publish = self.core.publish
        self.outbox.extend([publish(key, payload) for key, payload in messages])
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
        """Whether somebody called `peer` (by ``whoami``) is there and can read what only he can."""
        return self._run(self._verify(peer), timeout)

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        """Let a producer of packets (or one that calls `publish`) follow the socket's pace (`IConsumer`)."""
        if self._transport is None:
            raise self._error or Disconnected("not connected just now")
        self._transport.registerProducer(producer, streaming)

    def unregisterProducer(self) -> None:
        """The producer has no more to send (`IConsumer`)."""
        if self._transport is not None:
            self._transport.unregisterProducer()

    def close(self) -> defer.Deferred[None]:
        """Send what waits, close, and end everything that waits for us; fires when that is done."""
        return defer.Deferred.fromCoroutine(self._close())

    async def _close(self) -> None:
        if self._error is None and self._transport is not None and len(self.outbox):
            try:
                await self._drained()
            except Disconnected:
                pass
        self._end(Closed("the connection to the bus was closed here"))
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.cancel()

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
        if self._transport is None:
            raise self._error or Disconnected("not connected just now")
        return self._transport

    # --- what the session needs --------------------------------------------------------------

    def waiter(self) -> _Waiter:
        """See `sbus.client.calls.Calls.waiter`."""
        return _Waiter()

    def callback_failed(self, error: Exception) -> None:
        """See `sbus.client.session.Session`."""
        self._log.failure("an sbus callback failed", failure=Failure(error))

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

    def _open(self) -> defer.Deferred[Any]:
        def failed(failure: Failure) -> None:
            failure.trap(error.ConnectError)
            raise ConnectError(remedy(self.address, failure.value)) from failure.value

        return self._endpoint.connect(_Factory(self)).addErrback(failed)

    def _connected(self, transport: PacketTransport) -> None:
        self._transport = transport
        self.core.max_packet = min(self._max_packet, sendable(transport.getHandle()))
        self._set_reading(not self._crowded)

    def _set_reading(self, reading: bool) -> None:
        if self._transport is not None:
            if reading:
                self._transport.resumeProducing()
            else:
                self._transport.pauseProducing()

    def _drained(self) -> defer.Deferred[None]:
        self._flush()
        if self._error is None and not len(self.outbox):
            return defer.succeed(None)
        waiter = _Waiter()
        if self._error is not None:
            waiter.fail(self._error)
        else:
            self.outbox.wait(waiter)
        return waiter.deferred.addCallback(lambda _: None)

    def _flush(self) -> None:
        if self._transport is not None:
            self._transport.flush()

    def _detach(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abortConnection()

    def _disconnected(self, why: str) -> None:
        self._transport = None
        super()._disconnected(why)

    def _reconnect(self, error: Exception) -> None:
        self._attempt = defer.Deferred.fromCoroutine(self._try_again(error))
        self._attempt.addErrback(lambda failure: failure.trap(defer.CancelledError))

    async def _try_again(self, error: Exception) -> None:
        assert self._backoff is not None
        for delay in self._backoff.delays():
            await deferLater(self._reactor, delay)
            try:
                await self._open()
                break
            except ConnectError:
                continue
        await self._greet(error)

    def _ended(self, error: Exception) -> None:
        gone, self._gone = self._gone, []
        for deferred in gone:
            if isinstance(error, Closed):
                deferred.callback(None)
            else:
                deferred.errback(error)


class BusClientService(Service):
    """A connection to a bus that is kept up for as long as the service runs.

    It connects when it is started, again whenever the connection is lost, with growing pauses, and
    subscribes again to what was subscribed to.

    :param address: as for `connect`; ``settings`` too, but for ``reconnect``.
    :param setup: called with the `Bus`, once, when it is connected for the first time: subscribe here.
    """

    def __init__(
        self,
        reactor: Any,
        address: str | IStreamClientEndpoint | None = None,
        *,
        setup: Callable[[Bus], Any] | None = None,
        backoff: Backoff | None = None,
        **settings: Any,
    ) -> None:
        self._reactor = reactor
        self._address = address
        self._setup = setup
        self._backoff = backoff or Backoff()
        defaults = {"dialect": "current", "max_packet": DEFAULT_MAX_PACKET, "on_gap": None, "on_control": None}
        self._settings: dict[str, Any] = {**defaults, **settings}
        self._bus: Bus | None = None
        self._connecting: defer.Deferred[None] | None = None
        self._waiting: list[defer.Deferred[Bus]] = []

    def startService(self) -> None:
        """Begin to connect."""
        super().startService()  # type: ignore[no-untyped-call]
        self._connecting = defer.Deferred.fromCoroutine(self._connect())
        self._connecting.addErrback(lambda failure: failure.trap(defer.CancelledError))

    async def _connect(self) -> None:
        bus = Bus(self._reactor, self._address, reconnect=self._backoff, **self._settings)
        for delay in self._backoff.delays():
            await deferLater(self._reactor, delay)
            try:
                await bus._open()
                break
            except ConnectError:
                continue
        self._bus = bus
        if self._setup is not None:
            await defer.maybeDeferred(self._setup, bus)
        waiting, self._waiting = self._waiting, []
        for deferred in waiting:
            deferred.callback(bus)

    def whenConnected(self) -> defer.Deferred[Bus]:
        """Fires with the `Bus` when it has been connected for the first time (it stays the same one)."""
        if self._bus is not None:
            return defer.succeed(self._bus)
        deferred: defer.Deferred[Bus] = defer.Deferred(lambda d: self._waiting.remove(d))
        self._waiting.append(deferred)
        return deferred

    def stopService(self) -> defer.Deferred[None]:
        """Send what waits, and disconnect."""
        super().stopService()  # type: ignore[no-untyped-call]
        bus, self._bus = self._bus, None
        if self._connecting is not None:
            self._connecting.cancel()
        waiting, self._waiting = self._waiting, []
        for deferred in waiting:
            deferred.errback(Closed("the service was stopped before it was connected"))
        return bus.close() if bus is not None else defer.succeed(None)
