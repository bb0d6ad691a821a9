"""The guard of a bus: it judges, counts and reports refusals, and puts a new policy into force.

.. rubric:: Theory of operation

`sbus.server.core.permissions` knows the rights of a class of clients; the guard gives each client its rights when it
connects, and asks them for verdicts that a route does not know yet. A refusal is counted for the rule and for the user,
and observers are notified. A client that has asked gets a denial, and stays connected (`sbus.server.bus.denials`); for
any other the refusal is a violation.

A new policy comes into force between two batches, at one moment for publishing and for subscribing:

=============  =======================================================================================================
step           what happens
=============  =======================================================================================================
announced      From now on, a new subscription has to satisfy both policies.
judged         In slices, while the bus continues, the new policy judges each subscription. A refused one ends at once:
               the client gets a denial, or is disconnected (``revoked``).
in force       In one step, all users get their new limits, and all rights and routes are forgotten, with the verdicts.
               Each client gets its new rights with its next batch, or in slices, whichever comes first.
=============  =======================================================================================================

So at every moment, each permission comes from the old policy or from the new one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from twisted.internet import defer
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import deferLater

from sbus.errors import CloseReason, UsageError, ViolationReason
from sbus.policy.rules import ALLOWED, Verdict
from sbus.protocol.keys import CURRENT
from sbus.protocol.packets import FMSG, MSG, SUB
from sbus.routing.route import Route
from sbus.server.asks.interest import Interest
from sbus.server.bus.denials import tell
from sbus.server.bus.pace import Paces
from sbus.server.bus.router import Router
from sbus.server.core.counters import Counters
from sbus.server.core.interfaces import Client, Receiver, Rights
from sbus.server.core.observers import Events, redact
from sbus.server.core.permissions import FREE, Permissions, Refusal, is_judged
from sbus.server.core.users import Users

if TYPE_CHECKING:
    from sbus.policy import Policy

__all__ = ["Guard"]

_STEPS_AT_ONCE = 128
"""Subscriptions that a new policy judges, or clients that get new rights, in one turn of the reactor: about 2 ms."""
_SECONDS_AT_ONCE = 0.002
"""Seconds after which that turn ends: with thousands of rules, a pattern can take milliseconds, and users choose it."""


class Guard:
    """Judges the messages and subscriptions of clients.

    :param users: the users, whose limits a policy can override.
    :param clients: the connected clients by their numbers.
    :param unsubscribe: ends a subscription of a client, however often the client has subscribed.
    :param flush: sends the denials to clients.
    """

    def __init__(
        self,
        permissions: Permissions,
        router: Router,
        users: Users,
        clients: dict[int, Client],
        interest: Interest,
        counters: Counters,
        events: Events,
        clock: IReactorTime,
        unsubscribe: Callable[[Client, bytes], None],
        flush: Callable[[], None],
    ) -> None:
        self.permissions = permissions
        self.paces = Paces(clock)
        self._router = router
        self._users = users
        self._clients = clients
        self._interest = interest
        self._counters = counters
        self._events = events
        self._clock = clock
        self._unsubscribe = unsubscribe
        self._flush = flush
        self._expiry: IDelayedCall | None = None
        self._judge: Policy | None = None
        self._adopting = defer.DeferredLock()
        router.judge_by(permissions.zone_of)
        if permissions.policy is not None:
            self._check_dialect()
            users.set_limits(permissions.policy.limits)

    @property
    def asks_always(self) -> bool:
        """Whether each message must be judged anew, so that messages cannot be handled in runs."""
        return self.permissions.verdict_seconds == 0

    @property
    def generation(self) -> int:
        """The number of loads of the policy whose verdict is being counted; 0 without a policy."""
        policy = self._judge or self.permissions.policy
        return 0 if policy is None else policy.generation

    # --- messages and subscriptions ----------------------------------------------------------

    def admit(self, client: Client) -> Rights:
        """Give a client its rights, and return them."""
        rights = self.permissions.rights_of(client)
        client.use_rights(rights)
        return rights

    def allows_run(self, client: Client, packet: bytes, route: Route[Receiver]) -> bool:
        """Return whether a client may publish the keys of a route, and nothing is to be noted for each message.

        :param packet: the first message of the run.
        """
        known = route.verdicts.get(client.rights)
        if known is None:
            known = self._verdict(client.rights, packet[4 : packet.index(0)], route)
        return known is ALLOWED

    @property
    def asks_payload(self) -> bool:
        """Whether an observer has to see the payload of each message."""
        return bool(self._events.published)

    def check_payloads(self, client: Client, key: bytes) -> None:
        """Judge whether a client may publish payloads in sealed memory.

        :raises Refusal: if it may not.
        """
        verdict = client.rights.payloads()
        if verdict is not ALLOWED:
            self._check(client, key, verdict, FMSG)

    def check_publication(
        self, client: Client, key: bytes, payload: bytes | None, route: Route[Receiver], verb: bytes = MSG
    ) -> None:
        """Judge one message, and notify observers of it.

        :param payload: None if it is too long to be looked at.
        :raises Refusal: if the client may not publish it.
        """
        verdict = self._verdict(client.rights, key, route)
        if verdict is not ALLOWED:
            self._check(client, key, verdict, verb)
        if self._events.published:
            dialect = self._router.dialect
            for notify in self._events.published:
                notify(client, redact(dialect, key), None if dialect.is_secret(key) else payload)

    def _check(self, client: Client, key: bytes, verdict: Verdict, verb: bytes) -> None:
        if verdict.is_allowed:
            for notify in self._events.audited:
                notify(client, verb, redact(self._router.dialect, key), verdict, 1)
        elif self.permissions.enforces(verdict):
            raise Refusal(ViolationReason.REFUSED_PUBLICATION, verdict)
        else:
            self.count(client, verb, key, verdict, False)

    def _verdict(self, rights: Rights, key: bytes, route: Route[Receiver]) -> Verdict:
        if rights.publishes_all:
            return ALLOWED
        if self._router.upstream is not None:
            key = self._router.upstream.local(key)  # the link's name in front of a key is no way around a verdict
        seconds = self.permissions.verdict_seconds
        if seconds == 0:
            return self.permissions.publication(rights, key)
        verdict: Verdict | None = route.verdicts.get(rights)
        if verdict is None:
            verdict = self.permissions.publication(rights, key, route)
            if seconds is not None and seconds < math.inf and self._expiry is None:
                self._expiry = self._clock.callLater(seconds, self._expire)
        return verdict

    def _expire(self) -> None:
        self._expiry = None
        self._router.forget_verdicts()

    def may_learn(self, client: Receiver, key: bytes) -> bool:
        """Return whether a client may learn who subscribes to an open key: whether it may publish the key."""
        rights: Rights = getattr(client, "rights", FREE)
        verdict = self.permissions.publication(rights, key)
        return verdict.is_allowed or not self.permissions.enforces(verdict)

    def subscribed(self, client: Receiver, pattern: bytes, verdict: Verdict) -> None:
        """Note a subscription that was made, if that is to be noted."""
        if verdict is ALLOWED:
            return
        if not verdict.is_allowed:
            self.count(client, SUB, pattern, verdict, False)
            return
        for notify in self._events.audited:
            notify(client, SUB, pattern, verdict, 1)

    def deny(self, client: Client, verb: bytes, key: bytes, verdict: Verdict) -> bool:
        """Count a refusal, and send a denial if the client has asked; return whether it has.

        :param verb: the verb of the packet; one that is not ``MSG`` or ``FMSG`` has tried to subscribe.
        """
        verb = verb if verb in (MSG, FMSG) else SUB
        self.count(client, verb, key, verdict, True)
        if client.settings.denied:
            tell(client, verb, key, verdict.rule)
        return client.settings.denied

    def count(self, client: Receiver, verb: bytes, key: bytes, verdict: Verdict, is_enforced: bool) -> None:
        """Count something that is forbidden, and notify observers."""
        if is_enforced:
            self._counters.denied += 1
            self._counters.denied_by[verdict.rule] += 1
            self._users.denied.add(client.user.uid, verdict.rule)
        for notify in self._events.denied:
            notify(client, verb, redact(self._router.dialect, key), verdict, is_enforced)

    # --- a new policy ------------------------------------------------------------------------

    async def adopt(self, policy: Policy) -> int:
        """Put a policy into force in the running bus, after any other that is on its way; return its generation.

        :raises UsageError: if the bus is of the early dialect.
        """
        self._check_dialect()
        permissions = self.permissions
        await self._adopting.acquire()
        try:
            await deferLater(self._clock, 0)  # an observer may have asked for it in the middle of a batch
            policy.generation = 1 if permissions.policy is None else permissions.policy.generation + 1
            permissions.coming = policy
            classes: set[Rights] = set()  # which are forgotten, unless somebody holds them
            await self._in_slices(self._judge_all(policy, classes))
            self._put_into_force(policy)
            await self._in_slices(self._admit_all())
            return policy.generation
        finally:
            permissions.coming = None
            self._adopting.release()

    def _check_dialect(self) -> None:
        if self._router.dialect != CURRENT:  # its patterns would match no key, and deny nothing
            raise UsageError("a policy needs a bus of the current dialect: leave the dialect or the policy out")

    async def _in_slices(self, steps: Iterator[None]) -> None:
        """Take all steps: in each turn of the reactor, as many as there is time for."""
        is_over = False
        while not is_over:
            now = self._clock.seconds
            until = now() + _SECONDS_AT_ONCE
            is_over = all(number < _STEPS_AT_ONCE and now() < until for number, _ in enumerate(steps, 1))
            self._flush()
            if not is_over:
                await deferLater(self._clock, 0)

    def _judge_all(self, policy: Policy, classes: set[Rights]) -> Iterator[None]:
        """Judge the subscriptions of all clients, one at each step, and end those that the policy refuses."""
        for client in filter(is_judged, list(self._clients.values())):
            rights = policy.rights_of(client.identity)
            classes.add(rights)
            for pattern, (_, secret) in list(client.patterns.items()):
                yield
                if client.reason is not None:
                    break
                if secret is not None or pattern not in client.patterns:
                    continue
                verdict = rights.subscription(pattern)
                if verdict.is_allowed:
                    continue
                self._count_by(policy, client, pattern, verdict)
                if policy.is_audit:
                    continue
                if not client.settings.denied:
                    client.close(CloseReason.REVOKED, f"rule {verdict.rule}")
                    break
                self._unsubscribe(client, pattern)
                tell(client, SUB, pattern, verdict.rule)
            yield

    def _count_by(self, policy: Policy, client: Client, pattern: bytes, verdict: Verdict) -> None:
        """Count a subscription that a coming policy forbids, under its own generation."""
        self._judge = policy
        try:
            self.count(client, SUB, pattern, verdict, not policy.is_audit)
        finally:
            self._judge = None

    def _put_into_force(self, policy: Policy) -> None:
        self.permissions.adopt(policy)
        self._router.judge_by(self.permissions.zone_of)
        self.paces.forget_all()
        self._users.set_limits(policy.limits)
        self._counters.keep_rules({rule.name for rule in policy.rules})
        for client in self._clients.values():
            client.forget_rights()

    def _admit_all(self) -> Iterator[None]:
        """Give all clients their new rights, one at each step, and have the keys that they watch looked up."""
        for client in list(self._clients.values()):
            if client.reason is None:
                _ = client.rights
            yield
        yield from self._interest.judge_anew()
