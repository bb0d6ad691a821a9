"""The Twisted client.

::

    bus = await connect(reactor, "/run/sbus.sock")
    async for message in bus.subscribe("weather/"):
        print(message.key, message.payload)
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, TypeVar, Unpack, cast

from twisted.internet import defer, error
from twisted.internet.endpoints import clientFromString
from twisted.internet.interfaces import IReactorTime, IStreamClientEndpoint
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from sbus.client.api import Inbox
from sbus.client.arguments import as_bytes, check_seconds
from sbus.client.batches import AsyncPayloadBatch
from sbus.client.connecting import Backoff, backlog_full, describe_connect_error, find_address, is_absent
from sbus.client.core import Message
from sbus.client.inlet import FIRST_READS
from sbus.client.options import ConnectOptions, Keywords
from sbus.client.payload_sender import PayloadSender
from sbus.client.payloads import Buffer
from sbus.client.session import Session
from sbus.client.subscription import QueuedSubscription, WatchQueue
from sbus.client.tx.producer import Producer, ProducerAdapter
from sbus.client.tx.protocol import BusFactory, BusProtocol
from sbus.client.tx.waiter import DeferredWaiter, DoneWaiter
from sbus.errors import Closed, ConnectError, Disconnected, Forked, PacketTooLong, TimedOut, UsageError
from sbus.seqpacket.endpoints import SeqpacketClientEndpoint
from sbus.seqpacket.interfaces import Reactor
from sbus.seqpacket.multiplexer import Multiplexer
from sbus.seqpacket.transport import PacketTransport
from sbus.syscalls.sockets import LONGEST_PACKET, grow_send_buffer, max_sendable

__all__ = ["Bus", "Subscription", "Watch", "connect"]

T = TypeVar("T")


class Subscription(QueuedSubscription):
    """The messages of one pattern; read them with ``async for``, `get` or `get_many`."""

    def get(self) -> defer.Deferred[Message]:
        """Fire with the next message.

        Fails with `sbus.errors.Disconnected` if no more messages will come because the connection is gone, with
        `sbus.errors.Closed` if the subscription or the bus was closed, and with `sbus.errors.NotAllowed` if the server
        refuses the subscription.
        """
        return defer.Deferred.fromCoroutine(self._get())

    def get_many(self) -> defer.Deferred[list[Message]]:
        """Wait for a message, then fire with all that are here; fails as `get` does."""
        return defer.Deferred.fromCoroutine(self._get_many())


class Watch(WatchQueue):
    """Whether anybody subscribes to a key; read it with ``async for`` or `get`.

    :ivar key: the key.
    :ivar has_subscribers: the newest state; None until the server has reported one.
    """

    def get(self) -> defer.Deferred[bool]:
        """Fire with the state at first, and then with each change.

        Fails with `sbus.errors.Disconnected` if no more changes will come because the connection is gone, with
        `sbus.errors.Closed` if the watch or the bus was closed, and with `sbus.errors.UsageError` if the server does
        not report this.
        """
        return defer.Deferred.fromCoroutine(self._get())


def connect(
    reactor: IReactorTime,
    address: str | os.PathLike[str] | IStreamClientEndpoint | None = None,
    **options: Unpack[Keywords],
) -> defer.Deferred[Bus]:
    """Connect to a bus.

    :param reactor: the reactor.
    :param address: path or abstract address of the bus, or an endpoint, or the string of one (``seqpacket:PATH``); by
        default the result of `sbus.client.connecting.find_address`.
    :param options: the fields of `sbus.client.options.ConnectOptions`: dialect, max_packet, bundles, timeout,
        reconnect, reconnect_buffer, on_gap, on_lost, on_denied, sender, payloads, on_control.
    :returns: a Deferred that fires with the bus, or fails with `sbus.errors.ConnectError`, which contains the reason
        and the remedy.
    """
    bus = Bus(reactor, address, ConnectOptions(**options))
    return defer.Deferred.fromCoroutine(bus._open_initially()).addCallback(lambda _: bus)


class Bus(Session[Subscription]):
    """A connection to a bus, made by `connect`.

    Every Deferred may be cancelled. A message is not sent if the Deferred of its `publish` is cancelled, unless it has
    left already; of `publish_many` all are sent once one has left. Packets written before are still sent.
    """

    _log = Logger(namespace="sbus.client")
    _cancellations = (defer.CancelledError,)

    def __init__(
        self,
        reactor: IReactorTime,
        address: str | os.PathLike[str] | IStreamClientEndpoint | None,
        options: ConnectOptions,
    ) -> None:
        self._reactor = reactor
        if isinstance(address, os.PathLike):
            address = os.fspath(address)
        if address is None or (isinstance(address, str) and not address.startswith("seqpacket:")):
            text = find_address(address)
            timeout = math.inf if options.timeout is None else options.timeout
            endpoint: IStreamClientEndpoint = SeqpacketClientEndpoint(
                cast(Reactor, reactor), text, timeout=timeout, max_packet=options.buffer_size
            )
        elif isinstance(address, str):
            text, endpoint = address, clientFromString(reactor, address)
        else:
            text, endpoint = str(address), address
        super().__init__(text, options)
        self._endpoint = endpoint
        self._protocol: BusProtocol | None = None  # the newest one, connected or not
        self._attached = False
        self._pause: defer.Deferred[Any] | None = None  # of `_reconnect_loop`
        self._receive_size = options.receive_size
        self._first_left = 0  # batches that are read into the largest buffers, as in `sbus.client.inlet`
        self._bundles_itself = False  # the transport cannot: a bundle of large messages needs a descriptor
        self._end_waiters: list[defer.Deferred[None]] = []
        self._producer: ProducerAdapter | None = None

    # --- what users call (documented in `ClientApi`) -----------------------------------------

    def publish(self, key: bytes | str, payload: Buffer = b"") -> defer.Deferred[None]:
        try:
            self._check_open()
            if not self._in_line:
                self._write([self.core.publish(key, payload)])
                return self._when_sent(1)
        except PacketTooLong:
            pass
        except Exception:
            return defer.fail()
        return self._publish_in_turn(lambda: [self.core.publish(key, payload)])

    def publish_many(self, messages: Iterable[tuple[bytes | str, Buffer]]) -> defer.Deferred[None]:
        try:
            self._check_open()
            messages = list(messages)
            if not self._in_line:
                if packets := self.core.publish_many(messages):
                    self._write(packets)
                return self._when_sent(len(packets))
        except PacketTooLong:
            pass
        except Exception:
            return defer.fail()
        return self._publish_in_turn(lambda: self.core.publish_many(messages))

    def _publish_in_turn(self, build: Callable[[], list[bytes]]) -> defer.Deferred[None]:
        async def publish() -> None:
            await self._when_sent(len(await self._write_in_turn(build)))

        return defer.Deferred.fromCoroutine(publish())

    def _when_sent(self, count: int) -> defer.Deferred[None]:
        """Fire when the last `count` packets have been sent; cancelling takes them back."""
        if self._error is not None:
            return defer.fail(self._error)
        if not len(self.outbox):
            return defer.succeed(None)
        waiter = DoneWaiter(lambda: self.outbox.cancel(pending))
        pending = self.outbox.wait(waiter, count)
        return waiter.deferred

    def payloads(self) -> AsyncPayloadBatch:
        """Begin a batch of large messages (:doc:`/payloads`).

        The end of ``async with`` sends it, or its ``send``, which returns a Deferred.
        """
        self._check_open()
        return AsyncPayloadBatch(self.core, lambda batch: defer.Deferred.fromCoroutine(self._send_batch(batch)))

    def whoami(self, timeout: float | None = None) -> defer.Deferred[bytes]:
        return self._run(self._whoami(), timeout)

    def fence(self, timeout: float | None = None) -> defer.Deferred[None]:
        return self._run(self._fence(), timeout)

    def has_subscribers(self, key: bytes | str, timeout: float | None = 10.0) -> defer.Deferred[bool]:
        return self._run(self._has_subscribers(key), timeout)

    def watch_subscribers(self, key: bytes | str) -> Watch:
        return self._start(Watch(self, as_bytes(key)))

    def inbox(self, name: bytes | str) -> defer.Deferred[Inbox[Subscription]]:
        return self._run(self._inbox(name), None)

    def request(self, key: bytes | str, payload: bytes = b"", timeout: float | None = 10.0) -> defer.Deferred[bytes]:
        return self._run(self._request(key, payload), timeout)

    def enqueue(
        self,
        queue: str,
        key: bytes | str,
        payload: bytes = b"",
        *,
        id: bytes | str | None = None,
        delay: float = 0.0,
        timeout: float | None = 10.0,
    ) -> defer.Deferred[int]:
        return self._run(self._enqueue(queue, key, payload, id, delay), timeout)

    def answer_proofs(self) -> defer.Deferred[Subscription]:
        return self._run(self._answer_proofs(), None)

    def verify(self, peer: bytes | str, timeout: float | None = 10.0) -> defer.Deferred[bool]:
        def unproved(failure: Failure) -> bool:
            failure.trap(TimedOut)
            return False

        return self._run(self._verify(peer), timeout).addErrback(unproved)

    def registerProducer(self, producer: Producer, streaming: bool) -> None:
        """Pause a producer that publishes here while the socket is full.

        See `twisted.internet.interfaces.IConsumer`.

        The producer is paused while the client reconnects, and stopped when the connection ends.

        :param streaming: whether it publishes until paused (`twisted.internet.interfaces.IPushProducer`), rather than
            once each time it is resumed (`twisted.internet.interfaces.IPullProducer`).
        :raises RuntimeError: if there is a producer already.
        """
        if self._producer is not None:
            raise RuntimeError(f"cannot register {producer!r}: {self._producer.producer!r} was never unregistered")
        if self._error is not None:
            producer.stopProducing()
            return
        self._producer = ProducerAdapter(self, self._reactor, producer, streaming)
        self._producer.start()

    def unregisterProducer(self) -> None:
        """Remove the producer, which has no more to send."""
        adapter, self._producer = self._producer, None
        if adapter is not None:
            adapter.stop()

    def close(self) -> defer.Deferred[None]:
        """Send the packets that are waiting, then close; fires when the socket is closed."""
        return defer.Deferred.fromCoroutine(self._close())

    async def _close(self) -> None:
        await self._finish()
        pause, self._pause = self._pause, None
        if pause is not None:
            pause.cancel()
        protocol = self._protocol
        if protocol is not None and protocol.transport is not None:
            waiter = DeferredWaiter()
            protocol.end_waiters.append(waiter)
            await waiter

    def whenClosed(self) -> defer.Deferred[None]:
        """Fire when the connection is gone and not made again.

        It fails with the reason, unless this client closed the connection.
        """
        if isinstance(self._error, Closed):
            return defer.succeed(None)
        if self._error is not None:
            return defer.fail(self._error)
        ended: defer.Deferred[None] = defer.Deferred()
        self._end_waiters.append(ended)
        return ended

    @property
    def transport(self) -> PacketTransport:
        """The transport; ``getHandle()`` returns the socket, for its options.

        :raises sbus.errors.Disconnected: if there is none at present.
        """
        transport = self._transport
        if transport is None:
            raise self._error or Disconnected("not connected at present")
        return transport

    @property
    def _transport(self) -> PacketTransport | None:
        return self._protocol.transport if self._attached and self._protocol is not None else None

    # --- what `BusProtocol` calls ------------------------------------------------------------

    def connection_made(self, protocol: BusProtocol, transport: PacketTransport) -> None:
        """See `sbus.client.tx.protocol.Session`."""
        self._protocol = protocol
        self._attached = True
        sock = transport.getHandle()
        if max_sendable(sock) < self._options.buffer_size:  # an endpoint from the application may not know of bundles
            grow_send_buffer(sock, self._options.buffer_size)
        self._receive_size = self._options.receive_size
        self._first_left = FIRST_READS
        transport.limit_packets(LONGEST_PACKET)
        self._bundles_itself = self._options.payloads and transport.pass_payloads(True)
        if self._bundles_itself:
            sender = PayloadSender(self.core)
            transport.send_batch = partial(sender.send_all, sock)
        self.core.connected(max_sendable(sock))
        self._begin_reading()

    def packets_received(self, packets: list[bytes]) -> None:
        """See `sbus.client.tx.protocol.Session`."""
        had_bundles = self.core.bundle_limit
        self._receive_packets(packets)
        transport = self._transport
        if transport is not None and self._first_left:
            self._first_left = 0 if self.core.packet_limit.is_known else self._first_left - 1
            if not self._first_left:
                transport.limit_packets(self._receive_size)
        if transport is not None and self.core.bundle_limit and not had_bundles and not self._bundles_itself:
            transport.start_bundling(self.core.bundle_limit)
            transport.flush()

    def _make_room(self, size: int) -> None:
        transport = self._transport
        if transport is not None:
            self._receive_size = max(size, self._receive_size)
            transport.limit_packets(self._receive_size)
            if size > self.core.max_packet:
                self.core.can_send(grow_send_buffer(transport.getHandle(), size))

    def connection_lost(self, protocol: BusProtocol, why: str) -> None:
        """See `sbus.client.tx.protocol.Session`."""
        if protocol is self._protocol and self._attached:
            self._disconnected(why)
            if self._producer is not None:
                self._producer.flushed()  # the outbox already has the packets that restore the settings

    # --- what `Session` needs ----------------------------------------------------------------

    def waiter(self) -> DeferredWaiter:
        """See `sbus.client.api.ClientApi.waiter`."""
        return DeferredWaiter()

    def callback_failed(self, error: BaseException | Failure) -> None:
        """See `sbus.client.session.Session`."""
        failure = error if isinstance(error, Failure) else Failure(error)
        self._log.failure("an sbus callback failed", failure=failure)

    def _warn(self, text: str) -> None:
        """See `sbus.client.api.ClientApi._warn`."""
        self._log.warn("{text}", text=text)

    def handler_failed(self, error: Exception) -> None:
        """See `sbus.client.api.ClientApi.handler_failed`."""
        self._log.failure("a handler of requests failed", failure=Failure(error))

    def run_handler(self, handler: Coroutine[Any, Any, None], ended: Callable[[], None]) -> bool:
        """Run the rest of a handler, to its end."""

        def done(result: T) -> T:
            self._call_soon(ended)  # not in the context of this handler
            return result

        deferred = defer.Deferred.fromCoroutine(handler)
        if deferred.called:
            return False
        deferred.addBoth(done)
        return True

    def _make_subscription(self, callback: Callable[[Message], object] | None) -> Subscription:
        return Subscription(self, callback)

    def _run(self, call: Coroutine[Any, Any, T], timeout: float | None) -> defer.Deferred[T]:
        try:
            seconds = None if timeout is None else max(0.0, check_seconds(timeout))  # nan has ended, too
        except UsageError:
            call.close()
            return defer.fail()
        deferred = defer.Deferred.fromCoroutine(call)
        if seconds is not None:

            def timed_out(value: T | Failure, _: float) -> T | Failure:
                if isinstance(value, Failure) and value.check(defer.CancelledError):
                    raise TimedOut(f"no answer within {timeout} s")
                return value

            deferred.addTimeout(seconds, self._reactor, timed_out)
        return deferred

    async def _open_initially(self) -> None:
        """Connect for the first time; with ``reconnect``, wait for a server that is not there yet."""
        timeout = self._options.timeout
        deadline = None if timeout is None else self._reactor.seconds() + timeout
        delays = Backoff().delays() if self._backoff is None else self._backoff.delays()
        next(delays)
        while True:
            try:
                return await self._open()
            except ConnectError as problem:
                pause = next(delays)
                is_late = deadline is not None and self._reactor.seconds() + pause > deadline
                if self._backoff is None or not is_absent(problem) or is_late:
                    raise
            await self._sleep(pause)

    async def _open(self) -> None:
        try:
            self._pause = connecting = self._endpoint.connect(BusFactory(self, payloads=self._options.payloads))
            await connecting
        except error.TimeoutError as e:
            raise ConnectError(backlog_full(self.address)) from e
        except (error.ConnectError, OSError) as e:
            raise ConnectError(describe_connect_error(self.address, e)) from e
        if not self._attached:
            raise UsageError(f"{self.address} does not keep packets apart: give a seqpacket endpoint")
        self._flush()

    def _try_send(self, packets: list[bytes]) -> int:
        transport = self._transport
        return 0 if transport is None or len(packets) > 1 else transport.try_send(packets)

    def _call_soon(self, call: Callable[[], None]) -> None:
        Multiplexer.of(cast(Reactor, self._reactor)).call_soon(call)

    def is_connected(self) -> bool:
        """See `sbus.client.session.Session`."""
        return self._attached

    def _set_reading(self, reading: bool) -> None:
        transport = self._transport
        if transport is not None:
            if reading or (self._protocol is not None and self._protocol.is_ending):
                transport.resumeProducing()
            else:
                transport.pauseProducing()

    def wait_drained(self) -> defer.Deferred[None]:
        """See `sbus.client.session.Session`."""
        return self._when_sent(0)

    def _flush(self) -> None:
        transport = self._transport
        if transport is not None:
            transport.flush()
        if self._producer is not None:
            self._producer.flushed()

    def _detach(self) -> None:
        transport = self._transport
        self._attached = False
        if transport is not None:
            transport.abortConnection()

    def forked(self, error: Forked) -> None:
        """See `sbus.client.session.Session`."""
        super().forked(error)
        transport, self._protocol, self._attached = self._transport, None, False
        if transport is not None:
            transport.getHandle().close()

    def _sleep(self, seconds: float) -> defer.Deferred[None]:
        pause: defer.Deferred[None] = deferLater(self._reactor, seconds)
        self._pause = pause
        return pause

    def _start_reconnecting(self) -> None:
        attempt = defer.Deferred.fromCoroutine(self._reconnect_loop())
        attempt.addErrback(lambda failure: failure.trap(defer.CancelledError))

    async def _connect_later(self, delay: float) -> None:
        """Connect for the first time, after a pause, and retry (`BusClientService`)."""
        self.outbox.extend(self.core.fence(self._restored))
        await self._sleep(delay)
        await self._reconnect_loop(report=False)

    def _on_end(self, error: Exception) -> None:
        if self._producer is not None:
            producer = self._producer.producer
            self.unregisterProducer()
            self.call_user(producer.stopProducing)
        waiters, self._end_waiters = self._end_waiters, []
        for deferred in waiters:
            if isinstance(error, Closed):
                deferred.callback(None)
            else:
                deferred.errback(error)
