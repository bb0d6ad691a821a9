"""Find patterns that change nothing, the rules that make them so, and rules that match nobody.

An allowed pattern changes nothing if a denied one takes all of it, if its keys are allowed anyway, or if another
allowed pattern covers it. A denied one changes nothing if another covers it, or if there is nothing to deny. A pattern
can only make another one useless if its rule is about all clients that the other's rule is about. Of two patterns that
are the same for the same clients, the later one is reported. A property test takes out what is reported, and finds
every verdict as it was.
"""

from __future__ import annotations

import functools
import grp
import pwd
from collections.abc import Iterator
from typing import NamedTuple

from sbus.policy.policy import SECRET, Policy
from sbus.policy.rules import PATTERN_FIELDS, Identity, Rule, Verb
from sbus.policy.shapes import ShapeIndex
from sbus.protocol.explain import hint
from sbus.protocol.keys import CURRENT
from sbus.protocol.patterns import Shape

__all__ = ["Finding", "review"]


class Finding(NamedTuple):
    """Something in a policy that is allowed, and likely a mistake.

    :ivar rule: the rule's name; ``closed`` for a closed pattern.
    :ivar useless: the field and the pattern, for a pattern that changes nothing.
    """

    where: str
    rule: str
    text: str
    useless: tuple[str, bytes] | None = None


class _Entry(NamedTuple):
    """A pattern of a rule.

    :ivar order: its place in the policy.
    """

    order: tuple[int, int, int]
    rule: Rule
    field: str
    pattern: bytes
    shape: Shape

    def __str__(self) -> str:
        return f"{self.field} {_text(self.pattern)} of the rule {self.rule.name} ({self.rule.where})"

    def replaces(self, other: _Entry) -> bool:
        """Return whether the other one, which this one covers, is of no use beside it."""
        if not _is_about_all_of(self.rule, other.rule) or self.order == other.order:
            return False
        is_same = self.shape == other.shape and self.field == other.field and _is_about_all_of(other.rule, self.rule)
        return not is_same or self.rule.audit > other.rule.audit or self.order < other.order


def review(policy: Policy) -> list[Finding]:
    """Return what changes nothing or matches nobody, in the order of the files."""
    return [*_review_closed(policy), *_Reviewer(policy).warnings()]


def _text(pattern: bytes) -> str:
    return f'"{pattern.decode(errors="backslashreplace")}"'


def _is_about_all_of(one: Rule, other: Rule) -> bool:
    """Return whether every client that the other rule matches is one that this one matches, too."""
    return all(
        mine is None or (its is not None and mine >= its)
        for mine, its in (
            (one.users, other.users),
            (one.groups, other.groups),
            (one.listeners, other.listeners),
        )
    )


def _may_share_a_client(one: Rule, other: Rule) -> bool:
    # A client can be in one group of each.
    users = one.users is None or other.users is None or not one.users.isdisjoint(other.users)
    return users and (one.listeners is None or other.listeners is None or not one.listeners.isdisjoint(other.listeners))


def _review_closed(policy: Policy) -> Iterator[Finding]:
    shapes: ShapeIndex[bytes] = ShapeIndex()
    for pattern in policy.closed:
        shapes.add(policy.shape(pattern), pattern)
    for pattern, verdict in policy.closed.items():
        wider = next((each for each in shapes.covering(policy.shape(pattern)) if each != pattern), None)
        why = None
        if policy.is_closed:
            why = "the default is deny"
        elif wider is not None and policy.shape(wider) != policy.shape(pattern):
            why = f"{_text(wider)} is closed"
        if why is not None:
            text = f"{_text(pattern)} changes nothing: {why}"
            yield Finding(verdict.where, "closed", text, ("closed", pattern))
        if (advice := hint(pattern, CURRENT)) is not None:
            yield Finding(verdict.where, "closed", f"{_text(pattern)}: {advice}")


class _Reviewer:
    """All patterns of a policy's rules, found by their shapes."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._entries: dict[int, list[_Entry]] = {}
        self._allowed: dict[Verb, ShapeIndex[_Entry]] = {"publish": ShapeIndex(), "subscribe": ShapeIndex()}
        self._exact: ShapeIndex[_Entry] = ShapeIndex()
        self._denied: dict[Verb, ShapeIndex[_Entry]] = {"publish": ShapeIndex(), "subscribe": ShapeIndex()}
        self._secret: ShapeIndex[_Entry] = ShapeIndex()
        for rule in policy.rules:
            mine = self._entries[rule.number] = []
            for at, field in enumerate(PATTERN_FIELDS):
                for place, pattern in enumerate(getattr(rule, field)):
                    entry = _Entry((rule.number, at, place), rule, field, pattern, policy.shape(pattern))
                    mine.append(entry)
                    self._index_of(entry).add(entry.shape, entry)

    def _index_of(self, entry: _Entry) -> ShapeIndex[_Entry]:
        match entry.field:
            case "publish" | "subscribe":
                return self._allowed[entry.field]
            case "subscribe_exact":
                return self._exact
            case "deny_publish":
                return self._secret if entry.pattern.startswith(SECRET) else self._denied["publish"]
            case _:
                return self._denied["subscribe"]

    def warnings(self) -> Iterator[Finding]:
        for rule in self._policy.rules:
            for entry in self._entries[rule.number]:
                if entry.field == "deny_publish" and entry.pattern.startswith(SECRET) and b"" in entry.shape.parts[2:5]:
                    continue  # it is in no file, but stands beside the one that is (`sbus.policy.reading`)
                why = self._useless_deny(entry) if entry.field.startswith("deny") else self._useless_allow(entry)
                if why is not None:
                    text = f"{entry.field} {_text(entry.pattern)} changes nothing: {why}"
                    yield Finding(rule.where, rule.name, text, (entry.field, entry.pattern))
                advice = None if entry.pattern.startswith(SECRET) else hint(entry.pattern, CURRENT)
                if advice is not None:
                    yield Finding(rule.where, rule.name, f"{entry.field} {_text(entry.pattern)}: {advice}")
            yield from self._review_settings(rule)
            yield from self._review_people(rule)

    def _useless_allow(self, entry: _Entry) -> str | None:
        verb: Verb = "publish" if entry.field == "publish" else "subscribe"
        for denied in self._denied[verb].covering(entry.shape):
            if _is_about_all_of(denied.rule, entry.rule):
                return f"{denied} denies all of it"
        is_needed = self._policy.is_closed or any(True for _ in self._policy.closed_shapes.sharing(entry.shape))
        if not is_needed and not entry.rule.audit:
            return "the default is allow, and nothing of it is closed"
        for index in (self._allowed[verb], self._exact) if entry.field == "subscribe_exact" else (self._allowed[verb],):
            for other in index.covering(entry.shape):
                if other.replaces(entry) and other.rule.audit >= entry.rule.audit:
                    return f"{other} allows it"
        return None

    def _useless_deny(self, entry: _Entry) -> str | None:
        for other in self._index_of(entry).covering(entry.shape):
            if _is_about_all_of(other.rule, entry.rule) and other.order != entry.order:
                is_same = other.shape == entry.shape and _is_about_all_of(entry.rule, other.rule)
                if not is_same or other.order < entry.order:
                    return f"{other} denies it"
        if entry.pattern.startswith(SECRET):
            return None
        verb: Verb = "publish" if entry.field == "deny_publish" else "subscribe"
        if verb == "publish":
            allowed = [*self._allowed["publish"].sharing(entry.shape)]
        else:
            allowed = [*self._allowed["subscribe"].sharing(entry.shape), *self._exact.sharing(entry.shape)]
        if any(_may_share_a_client(entry.rule, other.rule) for other in allowed):
            return None
        if self._policy.is_closed:
            return "the default is deny, and no rule allows any of it to these clients"
        for closed in self._policy.closed_shapes.covering(entry.shape):
            return f"all of it is closed ({closed.where}), and no rule allows any of it to these clients"
        return None

    def _review_settings(self, rule: Rule) -> Iterator[Finding]:
        if rule.audit and not (rule.publish or rule.subscribe or rule.subscribe_exact):
            yield Finding(
                rule.where, rule.name, "audit changes nothing: it logs what the rule allows; refusals are logged anyway"
            )
        if rule.payload:
            yield Finding(rule.where, rule.name, "payload = true changes nothing: all may, unless a rule says false")
        if rule.max_rate is not None:
            for other in self._policy.rights_of(_client_of(rule)).rules:
                if other.max_rate is None or not _is_about_all_of(other, rule):
                    continue
                if (other.max_rate, other.number) < (rule.max_rate, rule.number):
                    text = f"max_rate changes nothing: that of the rule {other.name} ({other.where}) is no higher"
                    yield Finding(rule.where, rule.name, text)
                    break

    def _review_people(self, rule: Rule) -> Iterator[Finding]:
        """Report a rule about groups in which nobody is, as far as the system's databases list their members."""
        if rule.groups is None:
            return
        members: set[int] = set()
        for gid in rule.groups:
            try:
                names = grp.getgrgid(gid).gr_mem
            except KeyError:
                return  # a number that the system does not know: a service can run with it
            members |= {user.pw_uid for user in self._users if user.pw_gid == gid or user.pw_name in names}
        text = None
        if not members:
            text = "nobody is in its groups"
        elif rule.users is not None and members.isdisjoint(rule.users):
            text = "none of its users is in one of its groups"
        if text is not None:
            yield Finding(rule.where, rule.name, f"{text}; a service can still be (SupplementaryGroups=)")

    @functools.cached_property
    def _users(self) -> list[pwd.struct_passwd]:
        return pwd.getpwall()


def _client_of(rule: Rule) -> Identity:
    """Return a client that a rule matches, and as few other rules as possible."""
    return Identity(
        min(rule.users) if rule.users else -1,
        min(rule.groups) if rule.groups else -1,
        frozenset(),
        min(rule.listeners) if rule.listeners else "",
        rule.needs_proof,
    )
