"""The registry of subscriptions: the switch of one bus, and the face of its parts.

A bus consists of a few parts, each in a separate module; the registry puts them together, and is the one object that
connections (`sbus.server.bus.protocol`) and the program around the bus deal with:

=================================  ==============================================================================
`sbus.server.bus.members`          the connected clients: numbers, limit, sidecars, and when all are gone
`sbus.server.core.users`           the users of these clients: connections, patterns, bytes in queues
`sbus.server.bus.admission`        the connections that a user may have, and how often
`sbus.server.bus.memory`           the memory that clients hold, and who is shed when it is too much
`sbus.server.bus.guard`            the rights of clients: verdicts, counts and denials; a new policy
`sbus.server.bus.subscriptions`    who subscribes to what: permissions, limits and charges; clients that have left
`sbus.server.bus.services`         clients of root and of the server's user that become services
`sbus.server.bus.router`           the patterns of all subscriptions, and the receivers of a routing key
`sbus.server.core.closed_clients`  the last connections that have ended, with the reasons
`sbus.server.bus.delivery`         which receivers get a message at once, and which by mail
`sbus.server.bus.handover`         messages into queues and to sockets, and the fate of those that do not fit
`sbus.server.bus.backpressure`     which receivers block which publishers, and for how long
`sbus.server.asks.interest`        the keys that clients watch: whether anybody listens
`sbus.server.asks.last_values`     the last message of each key that the operator has listed
`sbus.server.asks.requests`        the questions of clients that come with a payload
`sbus.server.ops.tap`              published messages, shown to operators
`sbus.server.asks.upstream`        the link to the bus's master: names, secrets and fences
=================================  ==============================================================================

The registry itself admits clients, sees them off, and notifies observers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from twisted.internet import defer
from twisted.internet.interfaces import IReactorTime

from sbus.daemon.service import Service
from sbus.errors import CloseReason, UsageError, Violation
from sbus.fair import Scheduler
from sbus.flood import QueueOwner, SendQueue
from sbus.protocol.keys import CURRENT, Dialect, PeerCredentials
from sbus.protocol.packets import MSG, build
from sbus.server.asks.interest import Interest
from sbus.server.asks.interest_notices import InterestNotices
from sbus.server.asks.last_values import LastValueRule, LastValues
from sbus.server.asks.pattern_lists import PatternLists
from sbus.server.asks.requests import Requests
from sbus.server.asks.upstream import Upstream
from sbus.server.bus.admission import Admission
from sbus.server.bus.backpressure import Backpressure
from sbus.server.bus.delivery import Delivery
from sbus.server.bus.guard import Guard
from sbus.server.bus.mail import drop
from sbus.server.bus.members import Members
from sbus.server.bus.memory import MemoryGuard
from sbus.server.bus.router import Router
from sbus.server.bus.services import Services
from sbus.server.bus.stall import StallTimer
from sbus.server.bus.subscriptions import Subscriptions
from sbus.server.core.closed_clients import ClosedClient, ClosedClients
from sbus.server.core.components import FloodControls
from sbus.server.core.counters import Counters
from sbus.server.core.interfaces import Client, ICredentials, MessageTap, Receiver
from sbus.server.core.limits import Limits
from sbus.server.core.listeners import MAIN, Listener
from sbus.server.core.observers import Events, redact
from sbus.server.core.permissions import Permissions
from sbus.server.core.shares import Shares
from sbus.server.core.users import User, Users, is_exempt

if TYPE_CHECKING:
    from sbus.policy import Policy

__all__ = ["Counters", "SubscriptionRegistry"]

_DISCONNECTED_AT_ONCE = 512
"""Clients whose closing begins in one turn of the reactor when the server stops: about 6 ms."""


class SubscriptionRegistry(Service):
    """The switch of one bus. Nothing in it is shared with any other bus.

    :param credentials: the permissions to connect, subscribe, publish and block.
    :param policy: the policy, which further limits publishing and subscribing; None for no policy.
    :param clock: for time-outs.
    :param ignore_violations: drop a packet that breaks the protocol, and keep the client.
    :param controls: the strategies and orders that clients may choose; by default all installed ones.
    :param observers: `sbus.interfaces.IObserver` s.
    :param owner_of: returns the UID that a UID counts as, for the limits of one user; by default each is its own.
    :param public_interest: whether all users may ask about interest; else only root and the server's user.
    :param public_senders: whether all users may ask for senders; else only root and the server's user.
    :param last_values: the patterns whose last values are kept.
    :param name: the name of the bus, for people.
    :param secrets_go_up: whether secret keys that are not of this bus are for the link to its master.
    :ivar members: the connected clients and the sidecars.
    :ivar clients: the connected clients by their numbers.
    :ivar counters: the counts since the start.
    :ivar closed: the last connections that have ended, with the reasons.
    :ivar users: the users of the connected clients.
    :ivar admission: which connections are admitted.
    :ivar memory: keeps the memory of all clients below its limit.
    :ivar scheduler: whose turn it is.
    :ivar interest: the keys that clients watch.
    :ivar last_values: the messages that are kept; None if none are.
    :ivar upstream: the link to the bus's master.
    :ivar requests: answers the questions of clients.
    :ivar backpressure: the publishers that are blocked.
    :ivar router: the subscriptions, and the route cache.
    :ivar routes: the route cache, key → route, to be read in hot loops.
    :ivar delivery: the messages on their way.
    :ivar route: see `sbus.server.bus.router.Router.route`.
    :ivar subscribe: see `sbus.server.bus.subscriptions.Subscriptions.subscribe`.
    :ivar unsubscribe: see `sbus.server.bus.subscriptions.Subscriptions.unsubscribe`.
    :ivar attached: the programs that belong to the bus, such as its recorder, and whether each is connected.
    :ivar deliver: see `sbus.server.bus.delivery.Delivery.deliver`.
    :ivar guard: judges the messages and subscriptions of clients.
    :ivar fast_path: whether messages can be handled in runs: no plugin and no observer has to see each message.
    """

    name = "registry"

    def __init__(
        self,
        credentials: ICredentials,
        clock: IReactorTime,
        *,
        limits: Limits | None = None,
        dialect: Dialect = CURRENT,
        ignore_violations: bool = False,
        policy: Policy | None = None,
        controls: FloodControls | None = None,
        observers: tuple[Any, ...] = (),
        owner_of: Callable[[int], int] | None = None,
        public_interest: bool = True,
        public_senders: bool = True,
        last_values: tuple[LastValueRule, ...] = (),
        name: str = "",
        secrets_go_up: bool = False,
    ) -> None:
        self.credentials = credentials
        self.limits = limits or Limits()
        self.dialect = dialect
        self.ignore_violations = ignore_violations
        self.controls = controls or FloodControls()
        self.counters = Counters()
        self.closed = ClosedClients()
        account, cache_bytes = self.limits.memory_account()
        shares = Shares(self.limits, account.user_limit)
        self.users = Users(self.limits.total_queue_bytes, dialect.separator, account, shares, self.limits.user_payloads)
        self.scheduler = Scheduler(clock)
        self._clock = clock
        self._queue_limits = self.limits.queue
        self._events = Events(observers)
        self._public_senders = public_senders
        self._fired: list[defer.Deferred[None]] = []
        self.members = Members(self.limits.max_clients)
        self._owner_of = owner_of
        self.admission = Admission(self.limits, self.users)
        self.router = Router(dialect, self.scheduler, cache_bytes=cache_bytes)
        self.backpressure = Backpressure(clock, self.limits.block_timeout, self.limits.queue)
        self.delivery = Delivery(
            self.counters,
            self._events,
            credentials,
            self.backpressure,
            self.scheduler,
            self.router.muted,
            self.limits.max_packet,
        )
        self.clients = self.members.clients
        self.memory = MemoryGuard(account, self.clients, self.router.muted, clock, self.users.all, self.scheduler)
        self._notices = InterestNotices(clock, self.delivery.flush)
        self.interest = Interest(
            self.router,
            dialect,
            clock,
            self.scheduler,
            may_learn=lambda client, key: self.guard.may_learn(client, key),
            notify=self._notices.notify,
            flush=self.delivery.flush,
            forget_user=self._forget_user,
        )
        self.delivery.uncounted = self.interest.uncounted
        self.last_values: LastValues | None = None
        if last_values:
            self.last_values = LastValues(last_values, dialect, self.scheduler, account.charge)
            self.delivery.keeper = self.last_values
            self.interest.uncounted.add(self.last_values)
            for pattern in self.last_values.listed:
                self.router.add(self.last_values, pattern, None)
        self._pattern_lists = PatternLists(
            self.router, self.clients, self.interest.uncounted, clock, self.scheduler, self.delivery.flush
        )
        self.upstream = self.router.upstream = Upstream(
            clock,
            name=name,
            secrets_go_up=secrets_go_up,
            flush=self.delivery.flush,
            forget_routes=self.router.forget_routes,
            rename=self._rename,
            miss=self._miss,
            number_of=self._pattern_lists.number_of,
            owner_of=owner_of,
        )
        self.guard = Guard(
            Permissions(credentials, policy),
            self.router,
            self.users,
            self.clients,
            self.interest,
            self.counters,
            self._events,
            clock,
            unsubscribe=lambda client, pattern: self._subscriptions.revoke(client, pattern),
            flush=self.delivery.flush,
        )
        self._subscriptions = Subscriptions(
            self.router,
            self.interest,
            self.upstream,
            self.guard,
            self.limits,
            dialect,
            self.counters,
            self._events,
            self.scheduler,
            clock,
            self.delivery.flush,
            self._forget_user,
        )
        self.subscribe = self._subscriptions.subscribe
        self.unsubscribe = self._subscriptions.unsubscribe
        self._services = Services(self.delivery, self.admission, self.members, self.users, self._forget_user)
        self.requests = Requests(
            self.interest,
            self._pattern_lists,
            self.last_values,
            self.subscribe,
            self._subscriptions.check_user_patterns,
            self._services.enlist,
            self.limits,
            dialect,
            self.upstream,
            public_interest=public_interest,
        )
        self.routes = self.router.routes
        self.route = self.router.route
        self.attached: dict[str, Callable[[], bool]] = {}
        self.deliver = self.delivery.deliver
        self.deliver_payload = self.delivery.deliver_payload
        self.fast_path = not self.guard.asks_always and not self._events.published

    def open_tap(self, tap: MessageTap) -> None:
        """Pass all messages to a tap, which hands them to the delivery."""
        self._events.dropped = (*self._events.dropped, tap.dropped)
        self.deliver, self.deliver_payload = tap.deliver, tap.deliver_payload

    def close_tap(self, tap: MessageTap) -> None:
        """Take a tap out of the way again."""
        self._events.dropped = tuple(each for each in self._events.dropped if each != tap.dropped)
        self.deliver, self.deliver_payload = self.delivery.deliver, self.delivery.deliver_payload

    # --- clients come and go -----------------------------------------------------------------

    def connect_user(self, peer: PeerCredentials) -> User:
        """Count a connection of the user that a peer belongs to; return the user."""
        return self.users.connect(self._uid_of(peer))

    def _uid_of(self, peer: PeerCredentials) -> int:
        """Return the UID that a peer counts as: its own, that of its owner, the recorder's or the link's."""
        if self.members.is_sidecar(peer):
            return self.members.sidecars[peer.pid]
        return peer.uid if self._owner_of is None else self._owner_of(peer.uid)

    def new_queue(self, client: Receiver, owner: QueueOwner, user: User) -> SendQueue:
        """Make the queue of packets on their way to a client."""
        queue = SendQueue(owner, self._queue_limits, user)
        if self._events.delivered:
            queue.on_sent = lambda packets: self._delivered(client, packets)
        return queue

    def stall_timer(self, sample: Callable[[], object], call: Callable[[], object]) -> StallTimer:
        """Call `call` when `sample` has returned the same for the whole block time-out; return the timer."""
        return StallTimer(self._clock, self.limits.block_timeout, sample, call)

    def admits(self, peer: PeerCredentials, listener: Listener = MAIN) -> bool:
        """Decide about a connection that was just accepted, before anything is made for it.

        The verdict of a policy comes later, in `connected`.
        """
        if not self.members.has_room(peer, listener):
            reason: CloseReason | None = CloseReason.TOO_MANY_CLIENTS
        else:
            uid = self._uid_of(peer)
            reason = self.admission.refusal(uid, self.members.count) or self._kept_at(listener, uid)
        if reason is not None:
            self._refuse(peer, reason, listener)
        return reason is None

    def connected(self, client: Client) -> CloseReason | None:
        """Admit a client, or return why not."""
        reason: CloseReason | None = None
        if not self.running:
            reason = CloseReason.SERVER_STOPPED
        elif not self.members.has_room(client.peer, client.listener):
            reason = CloseReason.TOO_MANY_CLIENTS
        elif not (client.listener.admits(client.peer) and self.credentials.mayConnect(client.peer)):
            reason = CloseReason.NOT_ALLOWED
        elif not client.user.may_hold(0):
            reason = CloseReason.USER_MEMORY
        else:
            user = client.user
            reason = self.admission.room(user.uid, user.connections - 1, self.members.count) or self._kept_at(
                client.listener, user.uid
            )
        if reason is not None:
            self._refuse(client.peer, reason, client.listener)
            return reason
        self.members.add(client)
        self.guard.admit(client)
        client.signature = self.upstream.signature_of(client)
        self.counters.connected += 1
        for notify in self._events.connected:
            notify(client)
        return None

    def _kept_at(self, listener: Listener, uid: int) -> CloseReason | None:
        """Return the reason if the places that are left at a socket are kept for other users."""
        if not is_exempt(uid) and self.members.keeps(listener, uid):
            return CloseReason.KEPT_FOR_OTHERS
        return None

    def _refuse(self, peer: PeerCredentials, reason: CloseReason, listener: Listener) -> None:
        """Count a connection that is refused, and notify observers."""
        self.counters.refused += 1
        self.counters.refused_by[reason] += 1
        self.counters.user_limits += reason in _USER_LIMITS
        for notify in self._events.refused:
            notify(peer, reason, listener)

    def may_ask_sender(self, client: Client) -> bool:
        """Return whether a client may ask for the senders of its messages."""
        return self._public_senders or is_exempt(client.peer.uid)

    def _miss(self, link: Client, key: bytes, messages: int, size: int) -> None:
        """Give the receivers of a key a receipt for messages that were lost on their way to this bus."""
        try:
            route = self.route(key)
        except Violation:
            return
        self.delivery.miss(route.receivers, link, messages, size)

    def _rename(self) -> None:
        """Give the clients signatures with their new names, because the link's name at the master has changed."""
        for client in self.clients.values():
            if not client.signature.is_vouched:
                client.signature = self.upstream.signature_of(client)

    def observe(self, client: Client, is_observer: bool) -> None:
        """Let a client's subscriptions no longer count as interest, or count again."""
        if is_observer:
            self._services.enlist(client)
        if is_observer is not (client in self.interest.uncounted):
            self.interest.observe(client, is_observer)
            self._pattern_lists.observed(client)

    def drop(self, client: Receiver) -> None:
        """Keep messages that are published from now on from a receiver; unblock its publishers.

        Its subscriptions are dropped at once, or in turns of its user; everything that it has asked for is forgotten.
        """
        self.delivery.forget(client)
        self._subscriptions.drop_all(client)
        self.interest.unwatch_all(client)
        self._notices.forget(client)
        self._pattern_lists.forget(client)
        self.upstream.forget(client)

    def _forget_user(self, user: User) -> None:
        """Forget a user that has nothing left, when it has rested."""
        if user.connections or user.patterns:
            return
        lines = user.lines
        if lines.has_rested and not self.scheduler.is_serving(lines):
            self.users.forget(user)
            self.scheduler.forget(lines)
        else:
            lines.on_rest = lambda: self._forget_user(user)
            self.scheduler.enter(lines)

    def release(self, client: Client) -> None:
        """Free the place of a client whose connection is lost; `forget` follows."""
        self.delivery.forget(client)
        self.backpressure.forget(client)
        client.user.blockers.pop(client, None)
        client.user.askers.pop(client, None)
        self.users.disconnect(client.user)
        self._fired += self.members.remove(client) if client in self.members else []

    def forget(self, client: Client) -> None:
        """Forget a client whose connection is lost, once all that was for it is accounted for."""
        reason = client.reason
        assert reason is not None
        if client.number:
            self.counters.disconnected_by[reason] += 1
            self.closed.add(
                ClosedClient(
                    client.number,
                    client.peer,
                    client.user.uid,
                    client.connected_at,
                    time.time(),
                    reason,
                    client.lost,
                    client.conflated,
                    client.listener.name,
                )
            )
            for notify in self._events.closed:
                notify(client, reason)
        self._forget_user(client.user)
        fired, self._fired = self._fired, []
        for deferred in fired:
            deferred.callback(None)

    def when_empty(self) -> defer.Deferred[None]:
        """Return a Deferred that fires when the last client, sidecars aside, leaves next."""
        return self.members.when_empty()

    def disconnect_all(self, *, sidecars: bool) -> None:
        """Disconnect all clients, because the server stops.

        :param sidecars: the sidecars, too.
        """
        if self.scheduler.is_in_turn:  # perhaps in the middle of a mail entry, which must end first
            self._clock.callLater(0, self.disconnect_all, sidecars=sidecars)
            return
        self.router.stop_caching()  # else each client that leaves would have the routes of all others looked up again
        clients = self.members.all(sidecars=sidecars)
        for client in clients:
            client.reason = client.reason or CloseReason.SERVER_STOPPED  # no more of its packets are handled
        for user in {client.user for client in clients}:
            drop(self.delivery, user)
        self._disconnect(clients)

    def _disconnect(self, clients: list[Client]) -> None:
        """Disconnect clients in slices."""
        for client in clients[:_DISCONNECTED_AT_ONCE]:
            client.close(CloseReason.SERVER_STOPPED)
        if len(clients) > _DISCONNECTED_AT_ONCE:
            self._clock.callLater(0, self._disconnect, clients[_DISCONNECTED_AT_ONCE:])

    def startService(self) -> None:
        """Admit clients."""
        self.router.start_caching()
        super().startService()

    def stopService(self) -> defer.Deferred[None]:
        """Disconnect all clients; the Deferred fires when they are gone, and nothing of them is left."""
        super().stopService()
        gone = self.members.when_gone()
        self.disconnect_all(sidecars=True)
        return gone.addCallback(lambda _: self._subscriptions.finish())

    # --- messages ----------------------------------------------------------------------------

    def publish(self, key: bytes, payload: bytes) -> None:
        """Publish a message from the program around the bus, on behalf of no client.

        :raises Violation: if the protocol forbids the key.
        :raises UsageError: if either is not bytes.
        """
        try:
            packet = build(MSG, key, payload)
        except TypeError as e:
            raise UsageError(f"a key and a payload are bytes, for example b'state/on' and text.encode(): {e}") from None
        self.dialect.check(key)
        if self._events.is_notifying:
            self._clock.callLater(0, self._publish, packet, key)  # when the batch, or the entry of mail, is over
        else:
            self._publish(packet, key)

    def _publish(self, packet: bytes, key: bytes) -> None:
        self.deliver([packet], self.route(key), None)
        self.delivery.flush()

    def _delivered(self, client: Receiver, packets: list[bytes]) -> None:
        for notify in self._events.delivered:
            notify(client, len(packets), sum(map(len, packets)))

    def violated(self, client: Client, violation: Violation, key: bytes) -> bool:
        """Count a violation and notify observers.

        Return whether the client must be disconnected.
        """
        self.counters.violations += 1
        self.counters.violations_by[violation.reason] += 1
        self.counters.user_limits += violation.reason.is_user_limit
        for notify in self._events.violated:
            notify(client, violation, redact(self.dialect, key))
        return not self.ignore_violations


_USER_LIMITS = frozenset(
    (
        CloseReason.USER_LIMIT,
        CloseReason.USER_MEMORY,
        CloseReason.TOO_MANY_USER_CLIENTS,
        CloseReason.TOO_MANY_USER_CONNECTS,
        CloseReason.KEPT_FOR_OTHERS,
    )
)
