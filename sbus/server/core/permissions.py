"""Permissions: the rights of a bus's clients to publish and subscribe.

.. rubric:: Theory of operation

The first rule is that of the kernel's credentials: the secrets that a client may read (`sbus.server.core.credentials`).
A policy (`sbus.policy`), or a credentials plugin, can restrict open keys further. Neither is asked for each message.
Clients that are judged alike are a *class*, and share one object, their rights (`sbus.server.core.interfaces.Rights`).
Keys that are judged alike have one *zone*. The keys of one route have one zone, so the route remembers the verdict on
each class that publishes there (`sbus.routing.route`), and a run of messages needs one look-up.

========================  =======================  =======================  ===============================
what restricts clients    their class              zone of a key            a verdict is in force
========================  =======================  =======================  ===============================
nothing                   `FREE`, all of them      none                     no question is asked
a policy                  the rules that match     the patterns of the      until the next policy
                                                   policy that match it
a plugin                  the peer                 the key                  for its ``verdictSeconds``
both                      both                     both                     as long as the plugin says
========================  =======================  =======================  ===============================

The bus itself is never judged: the messages and subscriptions of the program around it, and those of the recorder and
the link that it has started. Any other link is judged as a client, and not as the authors whom it names.

A refusal is a `Refusal`, with the name of the rule. A client that has asked (``denied/on``) gets a denial, and
stays connected (`sbus.server.bus.denials`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from sbus.errors import Violation, ViolationReason
from sbus.policy.rules import ALLOWED, Verdict
from sbus.protocol.keys import PeerCredentials, SecretKey
from sbus.server.core.interfaces import ICredentials, Rights
from sbus.server.core.users import LINK, RECORDER

if TYPE_CHECKING:
    from sbus.policy import Policy
    from sbus.routing.route import Route

__all__ = ["FREE", "Permissions", "Refusal", "is_judged", "verdict_of"]

_RECENT = 16
"""Connections whose rights are kept: else a user who connects and leaves would have them made each time, for 100 ms if
10,000 rules are for everybody. They take 10 MB then."""
_SECRET = Verdict(False, "secret")
"""The verdict of the rule of secret keys."""
_PLUGIN = Verdict(False, "credentials")


class Refusal(Violation):
    """A client may not publish or subscribe to something.

    :ivar verdict: with the rule that decided.
    """

    def __init__(self, reason: ViolationReason, verdict: Verdict) -> None:
        super().__init__(reason)
        self.verdict = verdict

    def __str__(self) -> str:
        return f"{self.reason.value} (rule {self.verdict.rule})"


class _Free:
    publishes_all = True
    rates = ()

    def payloads(self) -> Verdict:
        return ALLOWED

    def publication(self, zone: Any) -> Verdict:
        return ALLOWED

    def subscription(self, pattern: bytes) -> Verdict:
        return ALLOWED


FREE: Rights = _Free()
"""The rights of clients that nothing restricts."""


@dataclass(frozen=True, eq=False)
class _PeerRights:
    """The verdicts of a credentials plugin about one peer."""

    credentials: ICredentials
    peer: PeerCredentials
    publishes_all = False
    rates = ()

    def payloads(self) -> Verdict:
        return ALLOWED

    def publication(self, zone: bytes) -> Verdict:
        return ALLOWED if self.credentials.mayPublish(self.peer, zone) else _PLUGIN

    def subscription(self, pattern: bytes) -> Verdict:
        return ALLOWED  # `checkSubscription` has already asked the plugin


@dataclass(frozen=True, eq=False)
class _Both:
    """The combined verdicts of a policy and a plugin: if either refuses, the verdict is a refusal."""

    policy: Rights
    plugin: Rights
    publishes_all = False

    @property
    def rates(self) -> tuple[float, ...]:
        return self.policy.rates

    def payloads(self) -> Verdict:
        return self.policy.payloads()

    def publication(self, zone: tuple[Any, bytes]) -> Verdict:
        verdict = self.plugin.publication(zone[1])  # first: it is in force also where the policy only observes
        return self.policy.publication(zone[0]) if verdict.is_allowed else verdict

    def subscription(self, pattern: bytes) -> Verdict:
        return self.policy.subscription(pattern)


class Permissions:
    """The rights of all clients of a bus.

    :param credentials: the kernel's rules, or those of a plugin.
    :ivar policy: the policy in force; None without one. `adopt` changes it.
    :ivar coming: the policy that is about to be adopted; subscriptions must satisfy it already.
    :ivar zone_of: returns the zone of a key; None if nothing restricts publishing.
    """

    def __init__(self, credentials: ICredentials, policy: Policy | None = None) -> None:
        self._credentials = credentials
        self._has_plugin = bool(credentials.restrictsPublishing)
        self._classes: WeakValueDictionary[Hashable, Rights] = WeakValueDictionary()
        self._recent: deque[Rights] = deque(maxlen=_RECENT)
        self.coming: Policy | None = None
        self.adopt(policy)

    def adopt(self, policy: Policy | None) -> None:
        """Put a policy into force. The rights of all clients have to be asked for again."""
        self.policy = policy
        self.coming = None
        self._recent.clear()
        self.zone_of: Callable[[bytes], Hashable] | None
        if self._has_plugin:
            self.zone_of = _itself if policy is None else lambda key: (policy.zone(key), key)
        else:
            self.zone_of = None if policy is None else policy.zone

    @property
    def verdict_seconds(self) -> float | None:
        """Seconds for which a verdict may be kept; 0: each message is judged anew; None: until the next policy."""
        return float(getattr(self._credentials, "verdictSeconds", 0)) if self._has_plugin else None

    @property
    def is_audit(self) -> bool:
        """Whether the policy only observes: packets that it refuses are handled all the same."""
        return self.policy is not None and self.policy.is_audit

    def enforces(self, verdict: Verdict) -> bool:
        """Return whether to enforce a refusal: that of a plugin always, that of a policy unless it only observes."""
        return verdict is _PLUGIN or not self.is_audit

    def rights_of(self, client: Any) -> Rights:
        """Return the rights of a connected client."""
        if not is_judged(client):
            return FREE
        rights: Rights | None = None if self.policy is None else self.policy.rights_of(client.identity)
        if rights is not None:
            self._recent.append(rights)
        if not self._has_plugin:
            return FREE if rights is None else rights
        plugin = self._intern(client.peer, lambda: _PeerRights(self._credentials, client.peer))
        return plugin if rights is None else self._intern((rights, plugin), lambda: _Both(rights, plugin))

    def _intern(self, of: Hashable, make: Callable[[], Rights]) -> Rights:
        rights = self._classes.get(of)
        if rights is None:
            rights = self._classes[of] = make()
        return rights

    def publication(self, rights: Rights, key: bytes, route: Route[Any] | None = None) -> Verdict:
        """Return whether a class may publish a key; a route remembers the verdict."""
        if rights.publishes_all:
            return ALLOWED
        zone = None if route is None else route.zone
        if zone is None and self.zone_of is not None:
            zone = self.zone_of(key)
        verdict = rights.publication(zone)
        if route is not None:
            route.remember(rights, verdict)
        return verdict

    def check_subscription(self, client: Any, pattern: bytes, secret: SecretKey | None) -> Verdict:
        """Return the verdict on a subscription that is made; it is a refusal only if the policy just observes.

        :raises Violation: if the kernel's rule of secret keys, or a plugin, refuses it.
        :raises Refusal: if the policy does.
        """
        self._credentials.checkSubscription(client.peer, pattern, secret)
        coming = self.coming
        if secret is not None or (self.policy is None and coming is None) or not is_judged(client):
            return ALLOWED
        if coming is not None and not coming.is_audit:
            _enforce(coming.rights_of(client.identity).subscription(pattern))
        verdict: Verdict = ALLOWED if self.policy is None else client.rights.subscription(pattern)
        if not self.is_audit:
            _enforce(verdict)
        return verdict


def is_judged(client: Any) -> bool:
    """Return whether the rights of a receiver are looked at: it does not belong to the bus or to its program."""
    return hasattr(client, "use_rights") and client.user.uid not in (RECORDER, LINK)


def _enforce(verdict: Verdict) -> None:
    if not verdict.is_allowed:
        raise Refusal(ViolationReason.REFUSED_SUBSCRIPTION, verdict)


def verdict_of(violation: Violation) -> Verdict | None:
    """Return the verdict that caused a violation; None if no permission did."""
    if isinstance(violation, Refusal):
        return violation.verdict
    return _VERDICTS.get(violation.reason)


_VERDICTS = {
    ViolationReason.FOREIGN_SECRET: _SECRET,
    ViolationReason.UNPROVEN_IDENTITY: _SECRET,
    ViolationReason.REFUSED_SUBSCRIPTION: _PLUGIN,
    ViolationReason.REFUSED_PUBLICATION: _PLUGIN,
}


def _itself(key: bytes) -> bytes:
    return key
