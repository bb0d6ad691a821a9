"""The judge: a policy, the rights of a class of clients, and the zone of a key.

Theory of operation
-------------------

A verdict depends on a client only by the rules that match it, and on a key only by the patterns that match it. So the
clients with the same rules share one `Rights`, and the keys with the same patterns one `Zone`; both are compared by
identity, and a verdict is remembered for the pair.

The rules of a client are found by its IDs: each rule stands under its users, else under its groups, else under its
listeners. The patterns of a key are found in a trie. So neither look-up grows with the number of rules.

==================  ==================================================================================================
question            answer
==================  ==================================================================================================
a key               a denied pattern matches it: no; else an allowed one does: yes; else it is closed: no; else the
                    default
a secret key        no if a denied pattern below ``!/cred/`` matches its text; else yes
a pattern           a denied one shares a key with it: no; else one allowed pattern covers it: yes; else a closed one
                    shares a key with it: no; else the default
==================  ==================================================================================================

Invariants:

* The order of rules and files decides at most which rule a verdict names: if several deny, one of them.
* Adding an allow never takes a right, and adding a deny never gives one; property tests say so.
* Rights and zones live as long as something holds them, so there are no more than clients and cached routes.
* Judging cannot fail: everything that can was checked when the files were read.

Rejected: judging a pattern at delivery. A client that subscribes to everything would get a part, silently.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from weakref import WeakValueDictionary

from sbus.policy.rules import ALLOWED, Identity, Rule, UserLimits, Verdict
from sbus.policy.shapes import ShapeIndex
from sbus.protocol.keys import CURRENT, PeerCredentials
from sbus.protocol.patterns import Shape, shape
from sbus.routing.trie import PatternIndex
from sbus.syscalls.sockets import UNKNOWN_GROUPS

__all__ = ["SECRET", "Policy", "Rights", "Zone"]

SECRET = b"!/cred/"
"""How secret keys begin, and the patterns that match them."""
_NOTHING = Rule(-1, "credentials", "", deny_publish=(b"", SECRET), deny_subscribe=(b"",))
"""The only rule of a client whose groups are not known, or too many to look at, if there are rules for groups."""
_NOBODY = PeerCredentials(0, 0, 0)
"""For the index of patterns, which asks for credentials only where a pattern is secret to it."""


class Zone:
    """The keys that the same patterns of a policy match.

    :ivar patterns: these patterns, sorted, so that the same rule is named each time.
    :ivar closed: the verdict on what no rule allows here; None for the default.
    """

    __slots__ = ("__weakref__", "closed", "is_secret", "patterns")

    def __init__(self, patterns: tuple[bytes, ...], is_secret: bool, closed: Verdict | None) -> None:
        self.patterns = patterns
        self.is_secret = is_secret
        self.closed = closed


class Rights:
    """The rights of a class of clients: those that the same rules match.

    :ivar publishes_all: whether every publication is allowed and none is audited, so that nothing has to be asked.
    :ivar rates: the ``max_rate`` s of the rules, from the lowest one on, in messages a second of one user.
    :ivar payload: whether these clients may send ``FMSG``.
    """

    __slots__ = (
        "__weakref__",
        "_allowed",
        "_denied",
        "_exact",
        "_may_share",
        "_not_share",
        "payload",
        "policy",
        "publishes_all",
        "rates",
        "rules",
    )

    def __init__(self, policy: Policy, rules: tuple[Rule, ...]) -> None:
        self.policy = policy
        self.rules = rules
        self.rates = tuple(sorted({rule.max_rate for rule in rules if rule.max_rate is not None}))
        self.payload = not any(rule.payload is False for rule in rules)
        self._denied: dict[bytes, Verdict] = {}
        self._allowed: dict[bytes, Verdict] = {}
        self._not_share: ShapeIndex[Verdict] = ShapeIndex()
        self._may_share: ShapeIndex[Verdict] = ShapeIndex()
        self._exact: ShapeIndex[Verdict] = ShapeIndex()
        for rule in rules:
            self._add(rule, rule.denial(), rule.permission())
        self.publishes_all = self._publishes_all()

    def _add(self, rule: Rule, no: Verdict, yes: Verdict) -> None:
        for pattern in rule.deny_publish:
            self._denied.setdefault(pattern, no)
        for pattern in rule.publish:
            if yes.is_audited or pattern not in self._allowed:
                self._allowed[pattern] = yes
        for patterns, index, verdict in (
            (rule.deny_subscribe, self._not_share, no),
            (rule.subscribe, self._may_share, yes),
            (rule.subscribe_exact, self._exact, yes),
        ):
            for pattern in patterns:
                index.add(self.policy.shape(pattern), verdict)

    def _publishes_all(self) -> bool:
        if self._denied or any(verdict.is_audited for verdict in self._allowed.values()):
            return False
        allowed: ShapeIndex[bytes] = ShapeIndex()
        for pattern in self._allowed:
            allowed.add(self.policy.shape(pattern), pattern)
        needed = (b"",) if self.policy.is_closed else self.policy.closed
        return all(any(True for _ in allowed.covering(self.policy.shape(pattern))) for pattern in needed)

    @property
    def rate(self) -> float | None:
        """The lowest of the rates; None without one."""
        return min(self.rates, default=None)

    def payloads(self) -> Verdict:
        """Judge the publication of payloads in sealed memory."""
        return next((rule.denial() for rule in self.rules if rule.payload is False), ALLOWED)

    def publication(self, zone: Zone) -> Verdict:
        """Judge the publication of a key.

        :param zone: `Policy.zone` of the key.
        """
        for pattern in zone.patterns:
            if pattern in self._denied:
                return self._denied[pattern]
        if zone.is_secret:
            return ALLOWED
        found = None
        for pattern in zone.patterns:
            if pattern in self._allowed:
                found = self._allowed[pattern]
                if found.is_audited:
                    return found
        return found or zone.closed or self.policy.otherwise

    def subscription(self, pattern: bytes) -> Verdict:
        """Judge the subscription to an open pattern."""
        wanted = shape(pattern)
        if wanted is None:  # it matches nothing, so every pattern covers it, and none shares a key with it
            return ALLOWED if any(rule.subscribe for rule in self.rules) else self.policy.otherwise
        for denied in self._not_share.sharing(wanted):
            return denied
        found = None
        is_exact = not wanted.is_below and not any(part.endswith(b"*") for part in wanted.parts)
        for index in (self._may_share, self._exact) if is_exact else (self._may_share,):
            for found in index.covering(wanted):
                if found.is_audited:
                    return found
        if found is not None:
            return found
        for closed in self.policy.closed_shapes.sharing(wanted):
            return closed
        return self.policy.otherwise


class Policy:
    """Rules for all clients, and shares for users.

    :ivar generation: 1 at the start; the server raises it at each reload.
    :ivar is_audit: whether refusals are only logged (``mode = "audit"``).
    :ivar files: the files that were read.
    :ivar digest: tells whether the text of the files is the same: SHA-256, in hexadecimal digits; empty without files.
    :ivar limits: the ``[[limits]]``, in order.
    :ivar is_closed: whether the default is "deny".
    :ivar otherwise: the verdict where neither a rule nor `closed` decides.
    :ivar closed: the patterns that need an allow, with the verdict where there is none.
    """

    def __init__(
        self,
        rules: Iterable[Rule] = (),
        *,
        closed: Iterable[tuple[bytes, str]] = (),
        is_closed: bool = False,
        default_where: str = "",
        is_audit: bool = False,
        limits: Iterable[UserLimits] = (),
        files: Iterable[str] = (),
        digest: str = "",
    ) -> None:
        self.generation = 1
        self.is_audit = is_audit
        self.files = tuple(files)
        self.digest = digest
        self.rules = tuple(rules)
        self.limits = tuple(limits)
        self.is_closed = is_closed
        self.otherwise = Verdict(False, "default", default_where) if is_closed else ALLOWED
        self.closed: dict[bytes, Verdict] = {}
        self.closed_shapes: ShapeIndex[Verdict] = ShapeIndex()
        for pattern, where in closed:
            verdict = self.closed.setdefault(pattern, Verdict(False, "closed", where))
            self.closed_shapes.add(self.shape(pattern), verdict)
        self._rights: WeakValueDictionary[tuple[int, ...], Rights] = WeakValueDictionary()
        self._zones: WeakValueDictionary[tuple[frozenset[bytes], bool], Zone] = WeakValueDictionary()
        self._index_rules()
        self._index_patterns()

    def _index_rules(self) -> None:
        self._by_uid: defaultdict[int, list[int]] = defaultdict(list)
        self._by_gid: defaultdict[int, list[int]] = defaultdict(list)
        self._by_listener: defaultdict[str, list[int]] = defaultdict(list)
        everybody = []
        self._has_groups = any(rule.groups is not None for rule in self.rules)
        for rule in self.rules:
            if rule.users is not None:
                for uid in rule.users:
                    self._by_uid[uid].append(rule.number)
            elif rule.groups is not None:
                for gid in rule.groups:
                    self._by_gid[gid].append(rule.number)
            elif rule.listeners is not None:
                for listener in rule.listeners:
                    self._by_listener[listener].append(rule.number)
            else:
                everybody.append(rule)
        self._everybody = tuple(everybody)

    def _index_patterns(self) -> None:
        self._open: PatternIndex[bytes] = PatternIndex(CURRENT)
        self._secret: PatternIndex[bytes] = PatternIndex(CURRENT)
        known = {*self.closed, *(_NOTHING.deny_publish if self._has_groups else ())}
        for rule in self.rules:
            known.update(rule.publish)
            known.update(rule.deny_publish)
        for pattern in known:
            # A secret pattern is compared with the whole text of a key: to this index it is an open one.
            (self._secret if pattern.startswith(SECRET) else self._open).subscribe(pattern, pattern, None, _NOBODY)

    def shape(self, pattern: bytes) -> Shape:
        """Return the shape of a pattern of this policy."""
        found = shape(pattern)
        assert found is not None, pattern  # checked when its file was read
        return found

    def rights_of(self, identity: Identity) -> Rights:
        """Return what a client may do; clients that the same rules match share one object."""
        is_crowd = self._has_groups and identity.groups == UNKNOWN_GROUPS
        numbers = (_NOTHING.number,) if is_crowd else self._numbers_of(identity)
        rights = self._rights.get(numbers)
        if rights is None:
            rules = (_NOTHING,) if is_crowd else (*self._everybody, *(self.rules[number] for number in numbers))
            rights = self._rights[numbers] = Rights(self, tuple(sorted(rules, key=lambda rule: rule.number)))
        return rights

    def _numbers_of(self, identity: Identity) -> tuple[int, ...]:
        """Return the rules that match a client, those for everybody aside."""
        near: Sequence[Sequence[int]] = (
            self._by_uid.get(identity.uid, ()),
            *(self._by_gid.get(gid, ()) for gid in {identity.gid, *identity.groups}),
            self._by_listener.get(identity.listener, ()),
        )
        return tuple(sorted({number for group in near for number in group if self.rules[number].matches(identity)}))

    def zone(self, key: bytes) -> Zone:
        """Return the zone of a key, open or secret; two keys that the same patterns match have the same one."""
        is_secret = CURRENT.is_secret(key)
        tables, _ = (self._secret if is_secret else self._open).open_tables(key)
        found = frozenset(pattern for table in tables for pattern in table)
        zone = self._zones.get((found, is_secret))
        if zone is None:
            patterns = tuple(sorted(found))
            closed = next((self.closed[pattern] for pattern in patterns if pattern in self.closed), None)
            zone = self._zones[found, is_secret] = Zone(patterns, is_secret, closed)
        return zone
