"""The reasons of a verdict: each rule that decided, and those that almost applied.

The judge (`sbus.policy.policy`) asks indexes; this module looks at every pattern of every rule. So it can name all that
decided and all that would have, and a property test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from sbus.errors import InvalidKey, Violation
from sbus.policy.policy import SECRET, Policy
from sbus.policy.rules import Identity, Rule, Verb, Verdict
from sbus.protocol.keys import CURRENT, matches_open
from sbus.protocol.patterns import covers, intersect, shape

__all__ = ["Explanation", "Reason", "explain"]


class Reason(NamedTuple):
    """One line of an explanation.

    :ivar decides: whether the verdict is this because of it; else it would have decided, had not something else.
    :ivar rule: the rule's name, ``closed`` or ``default``.
    :ivar pattern: the pattern of the rule's `field` that is meant; None for ``default`` and ``payload``.
    """

    decides: bool
    rule: str
    where: str
    field: str
    pattern: bytes | None
    text: str


class Explanation(NamedTuple):
    """A verdict with its reasons, those that decide first."""

    verdict: Verdict
    reasons: list[Reason]


def explain(policy: Policy, who: Identity, verb: Verb, key: bytes) -> Explanation:
    """Judge a publication or a subscription, and say why.

    :param key: a key to publish, or a pattern to subscribe to.
    :raises InvalidKey: if the protocol forbids it, or if no policy decides about it.
    """
    try:
        secret = CURRENT.check(key)
    except Violation as e:
        raise InvalidKey(f"{key.decode(errors='replace')!r}: {e}", e.reason) from None
    if secret is not None and verb == "subscribe":
        raise InvalidKey("no policy decides who reads secret keys: a client with these IDs does, and no other")
    rights = policy.rights_of(who)
    asked: _Key | _Pattern
    if verb == "publish":
        verdict, asked = rights.publication(policy.zone(key)), _Key(key, secret is not None)
    else:
        verdict, asked = rights.subscription(key), _Pattern(key)
    denies = list(asked.denied_by(rights.rules))
    allows = [] if secret is not None else list(asked.allowed_by(rights.rules))
    closed = [] if secret is not None else list(asked.closed_by(policy))
    steps = [found for found in (denies, allows, closed) if found] or [[_default(policy, secret is not None)]]
    reasons = [reason._replace(decides=found is steps[0]) for found in steps for reason in found]
    if not verdict.is_allowed and not denies:
        others = [rule for rule in policy.rules if not rule.matches(who)]
        reasons += (
            reason._replace(text=f"{reason.text}, but this client does not match: {_mismatch(rule, who)}")
            for rule in others
            for reason in asked.allowed_by([rule])
        )
        if isinstance(asked, _Pattern):
            reasons += asked.overlaps(rights.rules)
    if verb == "publish" and verdict.is_allowed:
        reasons += _against_payloads(rights.rules)
    return Explanation(verdict, reasons)


def _against_payloads(rules: Iterable[Rule]) -> Iterator[Reason]:
    for rule in rules:
        if rule.payload is False:
            text = "payload = false: forbids it with a payload in sealed memory, not in a packet"
            yield Reason(False, rule.name, rule.where, "payload", None, text)


def _default(policy: Policy, is_secret: bool) -> Reason:
    if is_secret:
        return Reason(False, "secret", "", "", None, "secret keys are publishable unless a rule denies them")
    word = "deny" if policy.is_closed else "allow"
    return Reason(False, "default", policy.otherwise.where, "default", None, f"the default is {word}")


def _mismatch(rule: Rule, who: Identity) -> str:
    if rule.needs_proof and not who.is_proven:
        return "its IDs prove nothing"
    if rule.users is not None and who.uid not in rule.users:
        return "it has other users"
    if rule.groups is not None and rule.groups.isdisjoint({who.gid, *who.groups}):
        return "it has other groups"
    return "it has other listeners"


class _Key:
    """A key to publish, beside the patterns of rules."""

    def __init__(self, key: bytes, is_secret: bool) -> None:
        self._key = key
        self._is_secret = is_secret

    def _matches(self, pattern: bytes) -> bool:
        return pattern.startswith(SECRET) is self._is_secret and matches_open(pattern, self._key)

    def denied_by(self, rules: Iterable[Rule]) -> Iterator[Reason]:
        for rule in rules:
            for pattern in filter(self._matches, rule.deny_publish):
                yield Reason(False, rule.name, rule.where, "deny_publish", pattern, "denies it")

    def allowed_by(self, rules: Iterable[Rule]) -> Iterator[Reason]:
        for rule in rules:
            for pattern in filter(self._matches, rule.publish):
                yield Reason(False, rule.name, rule.where, "publish", pattern, "allows it")

    def closed_by(self, policy: Policy) -> Iterator[Reason]:
        for pattern, verdict in policy.closed.items():
            if self._matches(pattern):
                yield Reason(False, "closed", verdict.where, "closed", pattern, "this key needs an allow")


class _Pattern:
    """A pattern to subscribe to, beside the patterns of rules."""

    def __init__(self, pattern: bytes) -> None:
        self._shape = shape(pattern)
        self._is_exact = bool(pattern) and b"*" not in pattern and not pattern.endswith(b"/")

    def _shared(self, pattern: bytes) -> str | None:
        """Return the keys that both match, as a pattern in words; None if there are none."""
        other = shape(pattern)
        both = intersect(self._shape, other) if self._shape is not None and other is not None else None
        if both is None:
            return None
        return both.pattern().decode(errors="backslashreplace") or "every key"

    def _covers(self, pattern: bytes) -> bool:
        other = shape(pattern)
        assert other is not None
        return self._shape is None or covers(other, self._shape)

    def denied_by(self, rules: Iterable[Rule]) -> Iterator[Reason]:
        for rule in rules:
            for pattern in rule.deny_subscribe:
                if (both := self._shared(pattern)) is not None:
                    yield Reason(False, rule.name, rule.where, "deny_subscribe", pattern, f"denies {both}")

    def allowed_by(self, rules: Iterable[Rule]) -> Iterator[Reason]:
        for rule in rules:
            for pattern in filter(self._covers, rule.subscribe):
                yield Reason(False, rule.name, rule.where, "subscribe", pattern, "allows all of it")
            if self._is_exact:
                for pattern in filter(self._covers, rule.subscribe_exact):
                    yield Reason(False, rule.name, rule.where, "subscribe_exact", pattern, "allows this key")

    def closed_by(self, policy: Policy) -> Iterator[Reason]:
        for pattern, verdict in policy.closed.items():
            if (both := self._shared(pattern)) is not None:
                yield Reason(False, "closed", verdict.where, "closed", pattern, f"{both} needs an allow")

    def overlaps(self, rules: Iterable[Rule]) -> Iterator[Reason]:
        """Yield what allows a part of the pattern, for a pattern that is refused."""
        for rule in rules:
            for field, patterns in (("subscribe", rule.subscribe), ("subscribe_exact", rule.subscribe_exact)):
                for pattern in patterns:
                    both = self._shared(pattern)
                    if both is None or (self._is_exact and self._covers(pattern)):
                        continue
                    keys = f"the keys {both} one by one" if field == "subscribe_exact" else f"no more than {both}"
                    yield Reason(False, rule.name, rule.where, field, pattern, f"allows {keys}")
