"""Compare two policies: for each change of rights, an example of a client and a key or pattern.

Judging by both policies confirms every change that is reported. The examples tried are enough to find every change:

* A verdict is positive because of one allowed pattern, or negative because of one denied or closed one. So a change
  shows within a pattern of one policy, or where two patterns overlap. What else could decide is kept out: every part of
  the pattern that may be anything becomes text that occurs in no pattern, and all depths are tried.
* A change shows for a client that at most two rules have to match. So two groups are enough, and one client stands for
  all that the same rules match.
* A pattern is refused where it is wide, too: it covers closed keys, and no allowed pattern covers all of it. So each
  part is tried as a prefix of every length, as far as `_WIDEST` permits.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple, TypeVar

from sbus.policy.policy import SECRET, Policy
from sbus.policy.reasons import Reason, explain
from sbus.policy.rules import UNNAMED, Identity, Rule, Verb, Verdict
from sbus.policy.shapes import ShapeIndex
from sbus.protocol.patterns import Shape, intersect, shape

__all__ = ["Change", "SettingChange", "compare", "compare_settings"]

_T = TypeVar("_T", int, str)
_WIDEST = 4096
"""Patterns that are tried for one overlap: enough for every length of prefix in four parts of six bytes."""
_EVERYTHING = Shape((), True)


class Change(NamedTuple):
    """A client that may do something by one of two policies, and not by the other.

    :ivar key: the key to publish, or the pattern to subscribe to.
    """

    who: Identity
    verb: Verb
    key: bytes
    before: Verdict
    after: Verdict
    why_before: Reason
    why_after: Reason


class SettingChange(NamedTuple):
    """A setting that two policies give a client, or all, differently.

    :ivar who: such a client; None if the setting is one of the whole policy, or of a user.
    :ivar setting: ``mode``, ``max_rate`` or ``payload``; of a user, ``clients``, ``patterns``, ``memory``, ``accepts``.
    :ivar uid: the user whose share it is, else None.
    """

    who: Identity | None
    setting: str
    before: object
    after: object
    uid: int | None = None


def compare(old: Policy, new: Policy, clients: Collection[Identity] | None = None) -> Iterator[Change]:
    """Yield a counterexample for each pair of reasons by which an answer changes; nothing if there is no change.

    :param clients: the clients to judge; None for all that the rules tell apart.
    """
    seen = set()
    verbs: tuple[Verb, ...] = ("publish", "subscribe")
    for verb in verbs:
        comparison = _Comparison(old, new, verb)
        for key in comparison.candidates():
            for who in comparison.clients(key, clients):
                before, after = (_judge(policy, who, verb, key) for policy in (old, new))
                if before.is_allowed == after.is_allowed:
                    continue
                why = [explain(policy, who, verb, key).reasons[0] for policy in (old, new)]
                what = (verb, *((each.rule, each.field, each.pattern) for each in why))
                if what not in seen:
                    seen.add(what)
                    yield Change(who, verb, key, before, after, *why)


def _judge(policy: Policy, who: Identity, verb: Verb, key: bytes) -> Verdict:
    rights = policy.rights_of(who)
    return rights.publication(policy.zone(key)) if verb == "publish" else rights.subscription(key)


def compare_settings(old: Policy, new: Policy) -> Iterator[SettingChange]:
    """Yield the settings that differ: of the policy, of clients (one example for each change), and of users."""
    if old.is_audit != new.is_audit:
        before, after = ("audit" if policy.is_audit else "enforce" for policy in (old, new))
        yield SettingChange(None, "mode", before, after)
    rules = [*old.rules, *new.rules]
    seen = set()
    for who in _Crowd(rules).clients(rule for rule in rules if rule.max_rate is not None or rule.payload is not None):
        mine, its = old.rights_of(who), new.rights_of(who)
        for setting, one, other in (("max_rate", mine.rate, its.rate), ("payload", mine.payload, its.payload)):
            if one != other and (setting, one, other) not in seen:
                seen.add((setting, one, other))
                yield SettingChange(who, setting, one, other)
    shares = [_shares(policy) for policy in (old, new)]
    for uid, setting in sorted({*shares[0], *shares[1]}):
        one, other = (share.get((uid, setting)) for share in shares)
        if one != other:
            yield SettingChange(None, setting, one, other, uid)


def _shares(policy: Policy) -> dict[tuple[int, str], int]:
    """Return the shares of users: those of the last table that gives one."""
    return {
        (uid, setting): getattr(table, setting)
        for table in policy.limits
        for setting in ("clients", "patterns", "memory", "accepts")
        if getattr(table, setting) is not None
        for uid in table.users
    }


class _Comparison:
    """The verdicts of two policies about one verb."""

    def __init__(self, old: Policy, new: Policy, verb: Verb) -> None:
        self._verb = verb
        self._allowing = ("publish",) if verb == "publish" else ("subscribe", "subscribe_exact")
        self._policies = (old, new)
        self._open = tuple(self._index(policy, is_secret=False) for policy in self._policies)
        self._secret = tuple(self._index(policy, is_secret=True) for policy in self._policies)
        self._crowd = _Crowd([*old.rules, *new.rules])

    def _index(self, policy: Policy, *, is_secret: bool) -> ShapeIndex[tuple[Rule, str, bytes]]:
        found: ShapeIndex[tuple[Rule, str, bytes]] = ShapeIndex()
        for rule in policy.rules:
            for field in (*self._allowing, f"deny_{self._verb}"):
                for pattern in getattr(rule, field):
                    if pattern.startswith(SECRET) is is_secret:
                        found.add(policy.shape(pattern), (rule, field, pattern))
        return found

    def _shapes(self, fields: Iterable[str], *, is_secret: bool = False) -> set[Shape]:
        return {
            policy.shape(pattern)
            for policy in self._policies
            for rule in policy.rules
            for field in fields
            for pattern in getattr(rule, field)
            if pattern.startswith(SECRET) is is_secret
        }

    def candidates(self) -> Iterator[bytes]:
        """Yield the keys or patterns for which a change shows, if there is one; each once."""
        allowed = {_EVERYTHING, *self._shapes(self._allowing)}
        closed = {policy.shape(pattern) for policy in self._policies for pattern in policy.closed}
        fill = _Fill(allowed | closed | self._shapes((f"deny_{self._verb}",)))
        shapes = (
            found
            for one, other in _pairs(fill.shapes, fill.shapes)
            for found in (fill.keys(one, other) if self._verb == "publish" else fill.patterns(one, other))
        )
        wide = (
            found
            for one, other in (_pairs(allowed, closed) if self._verb == "subscribe" else ())
            for found in fill.wide_patterns(one, other)
        )
        seen = set()
        for each in itertools.chain(shapes, wide):
            if each not in seen:
                seen.add(each)
                yield each.pattern()
        if self._verb == "publish":
            secret = _Fill(self._shapes(("deny_publish",), is_secret=True))
            for one, other in _pairs(secret.shapes, secret.shapes):
                for found in secret.secret_keys(one, other):
                    yield found.pattern()

    def clients(self, key: bytes, given: Collection[Identity] | None) -> Iterator[Identity]:
        """Yield clients, one of each kind that the rules about a key or pattern tell apart, or those given."""
        asked = shape(key)
        assert asked is not None
        found = [list(index.sharing(asked)) for index in (self._secret if key.startswith(SECRET) else self._open)]
        if not self._is_same(asked, found, key.startswith(SECRET)):
            rules = {rule for entries in found for rule, _, _ in entries}
            yield from self._crowd.clients(rules) if given is None else given

    def _is_same(self, asked: Shape, found: list[list[tuple[Rule, str, bytes]]], is_secret: bool) -> bool:
        """Return whether both policies give the same verdict on the question, for all clients."""
        one, other = (
            {(rule.users, rule.groups, rule.listeners, field, pattern) for rule, field, pattern in entries}
            for entries in found
        )
        if one != other:
            return False
        old, new = self._policies
        closed = [bool(next(policy.closed_shapes.sharing(asked), None)) for policy in self._policies]
        return is_secret or (old.is_closed == new.is_closed and closed[0] == closed[1])


class _Crowd:
    """Clients for the rules of two policies: the IDs that rules name, and ones that none does."""

    def __init__(self, rules: list[Rule]) -> None:
        listeners = {name for rule in rules for name in rule.listeners or ()}
        names = itertools.chain(("main",), map("other-{}".format, itertools.count(1)))
        self._listener = next(name for name in names if name not in listeners)

    def clients(self, rules: Iterable[Rule]) -> Iterator[Identity]:
        """Yield clients, one of each kind that these rules tell apart, with two groups at most."""
        rules = list(rules)
        gids = _representatives([rule.groups for rule in rules])
        uids = [UNNAMED, *_representatives([rule.users for rule in rules])]
        listeners = [self._listener, *_representatives([rule.listeners for rule in rules])]
        for size in range(3):
            for groups in itertools.combinations(gids, size):
                gid, *others = groups or (UNNAMED,)
                for uid, listener in itertools.product(uids, listeners):
                    yield Identity(uid, gid, frozenset(others), listener, True)


def _representatives(named: list[frozenset[_T] | None]) -> list[_T]:
    """Return one of the values that the same rules name, for each set of rules."""
    rules_of: defaultdict[_T, set[int]] = defaultdict(set)
    for number, values in enumerate(named):
        for value in values or ():
            rules_of[value].add(number)
    first: dict[frozenset[int], _T] = {}
    for value in sorted(rules_of):
        first.setdefault(frozenset(rules_of[value]), value)
    return list(first.values())


def _pairs(ones: Iterable[Shape], others: Iterable[Shape]) -> Iterator[tuple[Shape, Shape]]:
    """Yield the pairs that share a key."""
    index: ShapeIndex[Shape] = ShapeIndex()
    for each in others:
        index.add(each, each)
    for one in ones:
        for other in index.sharing(one):
            yield one, other


class _Fill:
    """Keys and patterns within the overlap of two shapes, that match as few other shapes as possible."""

    def __init__(self, shapes: Iterable[Shape]) -> None:
        self.shapes = sorted(shapes)
        parts = {part for each in self.shapes for part in each.parts}
        self._depth = 1 + max((len(each.parts) for each in self.shapes), default=0)
        begun = {part[:at] for part in parts for at in range(len(part.removesuffix(b"*")) + 1)}
        free = {b"", *(part[:-1] for part in parts if part.endswith(b"*"))}
        letters = itertools.chain(b"xyzabcdefghijklmnopqrstuvw0123456789", range(0x100, 0x110000))
        words = (chr(letter).encode(errors="surrogatepass") for letter in letters)
        self._word = next(word for word in words if not any(part + word in begun for part in free))

    def _filled(self, part: bytes) -> bytes:
        return part[:-1] + self._word if part.endswith(b"*") else part

    def _deeper(self, parts: tuple[bytes, ...], least: int) -> Iterator[tuple[bytes, ...]]:
        for depth in range(least, max(least, self._depth - len(parts)) + 1):
            yield parts + (self._word,) * depth

    def keys(self, one: Shape, other: Shape) -> Iterator[Shape]:
        """Yield keys that both match: one for each number of segments."""
        both = intersect(one, other)
        assert both is not None
        parts = tuple(map(self._filled, both.parts))
        for found in self._deeper(parts, 1) if both.is_below else (parts,):
            yield Shape(found, False)

    def patterns(self, one: Shape, other: Shape) -> Iterator[Shape]:
        """Yield patterns that both cover: keys, some with ``*`` at the end, and all that is below."""
        both = intersect(one, other)
        assert both is not None
        yield from self.keys(one, other)
        parts = tuple(map(self._filled, both.parts))
        if both.is_below:
            for found in self._deeper(parts, 0):
                yield Shape(found, True)
                if len(found) > len(parts):
                    yield Shape((*found[:-1], found[-1] + b"*"), False)
            return
        for at, part in enumerate(both.parts):
            if part.endswith(b"*"):
                yield Shape((*parts[:at], parts[at] + b"*", *parts[at + 1 :]), False)
                return

    def wide_patterns(self, allowed: Shape, closed: Shape) -> Iterator[Shape]:
        """Yield patterns that the first shape covers, and that share a key with the second one."""
        both = intersect(allowed, closed)
        assert both is not None
        options = []
        for at, part in enumerate(both.parts):
            mine = allowed.parts[at] if at < len(allowed.parts) else b"*"
            options.append([self._filled(part)])
            if mine.endswith(b"*"):
                literal = part.removesuffix(b"*")
                options[-1] += [literal[:length] + b"*" for length in range(len(mine) - 1, len(literal) + 1)]
        for depth in range(len(allowed.parts), len(options) + 1):
            for parts in itertools.islice(itertools.product(*options[:depth]), _WIDEST):
                if allowed.is_below and (both.is_below or depth < len(options)):
                    yield Shape(parts, True)
                if depth == len(options):
                    for found in self._deeper(parts, 1) if both.is_below else (parts,):
                        yield Shape(found, False)

    def secret_keys(self, one: Shape, other: Shape) -> Iterator[Shape]:
        """Yield secret keys that both match."""
        both = intersect(one, other)
        assert both is not None
        ids = [part if not part.endswith(b"*") else self._id(part[:-1]) for part in both.parts[2:5]]
        ids += [self._id(b"")] * (3 - len(ids))
        rest = tuple(map(self._filled, both.parts[5:]))
        for found in self._deeper(rest, 1) if both.is_below else (rest,):
            yield Shape((*both.parts[:2], *ids, *found), False)

    def _id(self, begin: bytes) -> bytes:
        """Return an ID that begins like this, and that matches as little else as possible."""
        taken = {part for each in self.shapes for part in each.parts[2:5]}
        for number in itertools.chain((begin,), (begin + b"%d" % each for each in range(1000))):
            longer = {number[:length] + b"*" for length in range(len(begin) + 1, len(number) + 1)}
            if number and not number.startswith(b"0") and number not in taken and taken.isdisjoint(longer):
                return number
        return begin
