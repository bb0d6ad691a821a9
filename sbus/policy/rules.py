"""The parts of a policy: identities, rules, shares of users, and verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = [
    "ALLOWED",
    "LEAST_USER_MEMORY",
    "PATTERN_FIELDS",
    "RESERVED_NAMES",
    "UNNAMED",
    "Identity",
    "Rule",
    "UserLimits",
    "Verb",
    "Verdict",
]

Verb = Literal["publish", "subscribe"]

PATTERN_FIELDS = ("publish", "subscribe", "subscribe_exact", "deny_publish", "deny_subscribe")
"""The fields of a rule that are patterns."""

RESERVED_NAMES = frozenset({"closed", "credentials", "default", "secret", "several"})
"""The names that refusals report if no rule of a policy decided."""

LEAST_USER_MEMORY = 64 << 10
"""The smallest share of memory of a user, in bytes, here and of ``--user-memory``: enough for a few clients."""

UNNAMED = 2**32 - 1
"""The ID of an example for all users, or all groups, that no rule names: nobody has it (chown(2))."""


class Identity(NamedTuple):
    """Whom a policy judges: the kernel's word on a client, and the label of its socket.

    :ivar groups: the supplementary groups (``SO_PEERGROUPS``).
    :ivar is_proven: False for the IDs that many processes share: overflow IDs, and PID 0.
    """

    uid: int
    gid: int
    groups: frozenset[int]
    listener: str
    is_proven: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """An answer, and the rule behind it. A policy has one object for each rule and answer.

    :ivar rule: the name of the deciding rule; one of `RESERVED_NAMES` if no rule decided.
    :ivar where: ``FILE:LINE`` of what decided; empty for a default that no file gives.
    :ivar is_audited: whether an allowed use leaves a line in the audit log; every refusal does.
    """

    is_allowed: bool
    rule: str = ""
    where: str = ""
    is_audited: bool = False


ALLOWED = Verdict(True)
"""The verdict for an action that is allowed and not audited, whichever rule allowed it."""


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A ``[[rule]]``: some clients, and what changes for them.

    :ivar number: the rule's place in the policy, over all files.
    :ivar users: UIDs; None for all. So with `groups` and `listeners`; a client has to match all three.
    :ivar payload: whether these clients may send ``FMSG``; None if the rule does not say.
    """

    number: int
    name: str
    where: str
    users: frozenset[int] | None = None
    groups: frozenset[int] | None = None
    listeners: frozenset[str] | None = None
    publish: tuple[bytes, ...] = ()
    subscribe: tuple[bytes, ...] = ()
    subscribe_exact: tuple[bytes, ...] = ()
    deny_publish: tuple[bytes, ...] = ()
    deny_subscribe: tuple[bytes, ...] = ()
    max_rate: float | None = None
    payload: bool | None = None
    audit: bool = False

    @property
    def needs_proof(self) -> bool:
        """Whether only clients whose IDs prove something match."""
        return self.users is not None or self.groups is not None

    def matches(self, who: Identity) -> bool:
        """Return whether the rule is about this client."""
        if self.needs_proof and not who.is_proven:
            return False
        if self.users is not None and who.uid not in self.users:
            return False
        if self.groups is not None and who.gid not in self.groups and self.groups.isdisjoint(who.groups):
            return False
        return self.listeners is None or who.listener in self.listeners

    def denial(self) -> Verdict:
        """Return the verdict of this rule's denials."""
        return Verdict(False, self.name, self.where)

    def permission(self) -> Verdict:
        """Return the verdict of this rule's allowed patterns."""
        return Verdict(True, self.name, self.where, True) if self.audit else ALLOWED


class UserLimits(NamedTuple):
    """A ``[[limits]]`` table: shares of each of these users.

    :ivar memory: bytes, `LEAST_USER_MEMORY` at least.
    :ivar accepts: connections a second.
    """

    users: frozenset[int]
    clients: int | None
    patterns: int | None
    memory: int | None
    accepts: int | None
    where: str
