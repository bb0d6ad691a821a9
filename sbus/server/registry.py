"""The registry of subscriptions: who is connected, who is subscribed to what, and who gets a message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from twisted.internet import defer
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from sbus.daemon.service import Service
from sbus.errors import CloseReason, Violation, ViolationReason
from sbus.flood import SendQueue, SharedBudget
from sbus.protocol.bundles import BundleCache
from sbus.protocol.keys import CURRENT, Dialect
from sbus.protocol.packets import MSG, build
from sbus.routing.cache import RouteCache
from sbus.routing.runs import total_size
from sbus.routing.trie import PatternIndex
from sbus.server.backpressure import Backpressure
from sbus.server.components import FloodControls
from sbus.server.interfaces import ICredentials
from sbus.server.limits import Limits, pattern_cost
from sbus.server.observers import listeners
from sbus.server.protocol import BusProtocol

__all__ = ["Counters", "SubscriptionRegistry"]


@dataclass(slots=True)
class Counters:
    """What has happened on a bus since it was started; all are numbers of events.

    :ivar published: messages that clients (or the program around the bus) have published.
    :ivar routed: copies of these that were meant for a receiver.
    :ivar dropped: of those, copies that flood control or a lost receiver cost.
    """

    connected: int = 0
    refused: int = 0
    published: int = 0
    routed: int = 0
    dropped: int = 0
    violations: int = 0
    unknown_controls: int = 0
    unknown_unsubscriptions: int = 0


class SubscriptionRegistry(Service):
    """The switch of one bus. Nothing in it is shared with any other bus.

    :param credentials: decides who may connect, subscribe, publish and block.
    :param clock: an `IReactorTime`, for time-outs.
    :param ignore_violations: drop a packet that breaks the protocol, and keep the client.
    :param observers: `sbus.interfaces.IObserver` s, told of events as they happen.
    :ivar clients: those who are connected, by their numbers.
    :ivar sidecar: the PID of a process that attends on the bus, as its recorder does; as a client it does not
        count, neither toward the limit nor for `when_empty`.
    :ivar routes: the cache of `route`, to be read in hot loops.
    :ivar publisher: whose packets are in hand; None outside of a batch.
    """

    name = "registry"
    log = Logger(namespace="sbus.bus")

    def __init__(
        self,
        credentials: ICredentials,
        clock: IReactorTime,
        *,
        limits: Limits | None = None,
        dialect: Dialect = CURRENT,
        ignore_violations: bool = False,
        controls: FloodControls | None = None,
        observers: tuple[Any, ...] = (),
    ) -> None:
        self.credentials = credentials
        self.limits = limits or Limits()
        self.dialect = dialect
        self.ignore_violations = ignore_violations
        self.controls = controls or FloodControls()
        self.counters = Counters()
        self.clients: dict[int, BusProtocol] = {}
        self.sidecar: int | None = None
        self.publisher: BusProtocol | None = None
        self.budget = SharedBudget(self.limits.total_queue_bytes)
        self._clock = clock
        self._index: PatternIndex[BusProtocol] = PatternIndex(dialect)
        self._cache: RouteCache[BusProtocol] = RouteCache(dialect)
        self.routes = self._cache.routes
        self._queue_limits = self.limits.queue
        self._touched: list[BusProtocol] = []
        self._flushing = False
        self._blocking: set[BusProtocol] = set()
        self._last_number = 0
        self._sidecars: set[int] = set()
        self._when_empty: list[defer.Deferred[None]] = []
        self._when_gone: list[defer.Deferred[None]] = []
        self._on_connected = listeners(observers, "connected")
        self._on_subscribed = listeners(observers, "subscribed")
        self._on_unsubscribed = listeners(observers, "unsubscribed")
        self._on_published = listeners(observers, "published")
        self._on_delivered = listeners(observers, "delivered")
        self._on_dropped = listeners(observers, "dropped")
        self._on_violated = listeners(observers, "violated")
        self._on_refused = listeners(observers, "refused")
        self._on_closed = listeners(observers, "closed")
        self.fast_path = not credentials.restrictsPublishing and not self._on_published

    # --- clients come and go -----------------------------------------------------------------

    def new_queue(self, client: BusProtocol) -> SendQueue:
        """The queue of packets on their way to a client."""
        queue = SendQueue(client, self._queue_limits, self.budget, client.peer.uid)
        if self._on_delivered:
            queue.watch = lambda packets: self._delivered(client, packets)
        return queue

    def new_backpressure(self, client: BusProtocol) -> Backpressure:
        """The back-pressure of a client that has chosen to block."""
        return Backpressure(client, self._clock, self.limits.block_timeout)

    def call_after_block_timeout(self, call: Any) -> Any:
        """Call when the block time-out has passed; returns the delayed call."""
        return self._clock.callLater(self.limits.block_timeout, call)

    def connected(self, client: BusProtocol) -> CloseReason | None:
        """Let a client in, or say why not."""
        reason = None
        attends = client.peer.pid == self.sidecar
        if not self.running:
            reason = CloseReason.SERVER_STOPPED
        elif not attends and len(self.clients) - len(self._sidecars) >= self.limits.max_clients:
            reason = CloseReason.TOO_MANY_CLIENTS
        elif not self.credentials.mayConnect(client.peer):
            reason = CloseReason.NOT_ALLOWED
        if reason is not None:
            self.counters.refused += 1
            for tell in self._on_refused:
                tell(client.peer, reason)
            return reason
        self._last_number += 1
        client.number = self._last_number
        self.clients[client.number] = client
        if attends:
            self._sidecars.add(client.number)
        self.counters.connected += 1
        for tell in self._on_connected:
            tell(client)
        return None

    def leave(self, client: BusProtocol) -> None:
        """A client takes no more messages: drop its subscriptions."""
        for pattern, (_, secret) in client.patterns.items():
            self._index.unsubscribe(client, pattern, secret, client.peer)
            self._cache.forget(pattern, secret, client.peer)
        client.patterns.clear()
        client.pattern_bytes = 0

    def disconnected(self, client: BusProtocol, reason: CloseReason) -> None:
        """A client is gone (also one that was never let in)."""
        if self.clients.pop(client.number, None) is None:
            return
        self.leave(client)
        self._blocking.discard(client)
        for tell in self._on_closed:
            tell(client, reason)
        waiting: list[defer.Deferred[None]] = []
        if client.number in self._sidecars:
            self._sidecars.discard(client.number)
        elif len(self.clients) == len(self._sidecars):
            waiting, self._when_empty = self._when_empty, []
        if not self.clients:
            waiting += self._when_gone
            self._when_gone = []
        for deferred in waiting:
            deferred.callback(None)

    def when_empty(self) -> defer.Deferred[None]:
        """Fires when the last client that counts leaves, the next time that happens."""
        deferred: defer.Deferred[None] = defer.Deferred()
        self._when_empty.append(deferred)
        return deferred

    def disconnect_all(self, *, sidecars: bool) -> None:
        """Disconnect everyone, as the server is stopping.

        :param sidecars: also who attends on the bus.
        """
        for client in tuple(self.clients.values()):
            if sidecars or client.number not in self._sidecars:
                client.close(CloseReason.SERVER_STOPPED)

    def stopService(self) -> defer.Deferred[None]:
        """Disconnect everyone; fires when they are gone."""
        super().stopService()
        if not self.clients:
            return defer.succeed(None)
        gone: defer.Deferred[None] = defer.Deferred()
        self._when_gone.append(gone)
        self.disconnect_all(sidecars=True)
        return gone

    # --- subscriptions -----------------------------------------------------------------------

    def subscribe(self, client: BusProtocol, pattern: bytes) -> None:
        """Subscribe a client; identical subscriptions are counted.

        :raises Violation: if it may not, or has too many.
        """
        count, secret = client.patterns.get(pattern, (0, None))
        if not count:
            secret = self.dialect.check(pattern)
            self.credentials.checkSubscription(client.peer, pattern, secret)
            cost = pattern_cost(pattern, self.dialect.separator)
            if len(client.patterns) >= self.limits.max_patterns:
                raise Violation(ViolationReason.TOO_MANY_PATTERNS)
            if client.pattern_bytes + cost > self.limits.max_pattern_bytes:
                raise Violation(ViolationReason.TOO_MANY_PATTERN_BYTES)
            client.pattern_bytes += cost
            self._index.subscribe(client, pattern, secret, client.peer)
            self._cache.forget(pattern, secret, client.peer)
        client.patterns[pattern] = (count + 1, secret)
        for tell in self._on_subscribed:
            tell(client, self._redact(pattern))

    def unsubscribe(self, client: BusProtocol, pattern: bytes) -> None:
        """Take one subscription back; one that is not there is ignored and counted."""
        count, secret = client.patterns.get(pattern, (0, None))
        if not count:
            self.counters.unknown_unsubscriptions += 1
            return
        if count > 1:
            client.patterns[pattern] = (count - 1, secret)
        else:
            del client.patterns[pattern]
            client.pattern_bytes -= pattern_cost(pattern, self.dialect.separator)
            self._index.unsubscribe(client, pattern, secret, client.peer)
            self._cache.forget(pattern, secret, client.peer)
        for tell in self._on_unsubscribed:
            tell(client, self._redact(pattern))

    # --- messages ----------------------------------------------------------------------------

    def route(self, key: bytes) -> tuple[BusProtocol, ...]:
        """Who is subscribed to a key.

        :raises Violation: if it is a key that nobody may publish with.
        """
        receivers = self.routes.get(key)
        if receivers is None:
            secret = self.dialect.check(key)
            receivers = self._cache.remember(key, secret, self._index.route(key, secret))
        return receivers

    def check_publish(self, client: BusProtocol, key: bytes, payload: bytes) -> None:
        """Ask the credentials policy about a message, and tell observers of it.

        :raises Violation: if the policy refuses it.
        """
        if self.credentials.restrictsPublishing and not self.credentials.mayPublish(client.peer, key):
            raise Violation(ViolationReason.REFUSED_PUBLICATION)
        if self._on_published:
            secret = self.dialect.is_secret(key)
            for tell in self._on_published:
                tell(client, self._redact(key), None if secret else payload)

    def publish(self, key: bytes, payload: bytes) -> None:
        """Publish a message from the program around the bus, on behalf of no client.

        :raises Violation: if it is a key that nobody may publish with.
        """
        receivers = self.route(key)
        self.flush()  # what a client's batch has brought until now, in that client's name
        publisher, self.publisher = self.publisher, None
        try:
            self.deliver([build(MSG, key, payload)], receivers)
            self.flush()
        finally:
            self.publisher = publisher

    def deliver(self, packets: list[bytes], receivers: tuple[BusProtocol, ...], at_once: bool = False) -> int:
        """Queue packets for their receivers; `flush` sends them.

        :param at_once: there is nothing else to be sent with these packets, so what receivers with an
            empty queue take now need not go through it.
        :returns: how many packets, from the front, were dealt with: it stops where a receiver
            begins to hold the publisher back.
        """
        if self._blocking and len(packets) > 1 and not self._may_deliver(packets, receivers):
            # Somewhere in the midst a receiver may begin to hold the publisher back: find out where.
            half = len(packets) // 2
            done = self.deliver(packets[:half], receivers)
            if done < half or (self.publisher is not None and self.publisher.is_paused):
                return done
            return done + self.deliver(packets[half:], receivers)
        count = len(packets)
        self.counters.published += count
        self.counters.routed += count * len(receivers)
        at_once = at_once and not self._on_delivered
        packed: BundleCache = {}
        for receiver in receivers:
            queue = receiver.queue
            if queue.is_congested:
                try:
                    queue.enqueue(packets)
                except Exception:
                    self._failed(receiver)
            elif queue.pending:
                queue.pending += packets
            else:
                transport = receiver.transport
                sent = transport.try_send(packets, packed) if at_once and transport is not None else 0
                if sent < count:
                    self._touched.append(receiver)  # another list if an observer has published meanwhile
                    queue.pending += packets[sent:] if sent else packets
        return count

    def _may_deliver(self, packets: list[bytes], receivers: tuple[BusProtocol, ...]) -> bool:
        """Whether it is certain that nobody holds the publisher back for any of these packets."""
        holding = self._blocking.intersection(receivers)
        if not holding:
            return True
        messages, size = len(packets), total_size(packets)
        copies = size * len(receivers)
        return all(receiver.queue.has_room(messages, size, copies) for receiver in holding)

    def touch(self, client: BusProtocol) -> None:
        """A client has something in its queue that `flush` is to send."""
        self._touched.append(client)

    def flush(self) -> None:
        """Send what the batch in hand has brought, each receiver's share with one call.

        What is published meanwhile, as by an observer of deliveries, is sent before it returns.
        """
        if self._flushing or not self._touched:
            return
        self._flushing = True
        try:
            while self._touched:
                touched, self._touched = self._touched, []
                for client in touched:
                    transport, queue = client.transport, client.queue
                    if transport is None:
                        queue.discard_all()
                        continue
                    try:
                        transport.flush()
                        # Where a socket takes more than goes in one turn, flood control would never hear of the rest.
                        while queue.pending and not queue.is_congested:
                            transport.flush()
                    except Exception:
                        self._failed(client)
        finally:
            self._flushing = False

    def _failed(self, client: BusProtocol) -> None:
        """A component that a client has chosen failed: its own trouble, not the publisher's or another receiver's."""
        self.log.failure("Error in sending to client {number}", number=client.number)
        client.close(CloseReason.SERVER_ERROR)

    # --- flood control -----------------------------------------------------------------------

    def mayBlock(self, receiver: BusProtocol) -> bool:
        """Whether a receiver may hold back the client that is publishing."""
        publisher = self.publisher
        return (
            publisher is not None
            and publisher.transport is not None
            and self.credentials.mayBlock(receiver.peer, publisher.peer)
        )

    def congested(self, client: BusProtocol) -> None:
        """A client's queue has begun or ceased to wait, or its strategies have changed."""
        if client.queue.is_congested and client.queue.can_block:
            self._blocking.add(client)
        else:
            self._blocking.discard(client)

    def dropped(self, client: BusProtocol, packets: int, size: int) -> None:
        """Messages were dropped for a client."""
        self.counters.dropped += packets
        for tell in self._on_dropped:
            tell(client, packets, size)

    def _delivered(self, client: BusProtocol, packets: list[bytes]) -> None:
        for tell in self._on_delivered:
            tell(client, len(packets), sum(map(len, packets)))

    def violated(self, client: BusProtocol, violation: Violation, key: bytes) -> bool:
        """A client broke the protocol; whether it is to be disconnected."""
        self.counters.violations += 1
        for tell in self._on_violated:
            tell(client, violation, self._redact(key))
        return not self.ignore_violations

    def _redact(self, key: bytes) -> bytes:
        """A key as observers may see it: a secret one without its ``<rest>``."""
        if not self.dialect.is_secret(key):
            return key
        try:
            secret = self.dialect.check(key)
        except Violation:
            return b"!/..."
        return b"!/cred/%b/" % secret.ids if secret else key
