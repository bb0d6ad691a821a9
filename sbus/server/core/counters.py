"""The counters of a bus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import Any

from sbus.errors import CloseReason, ViolationReason
from sbus.policy.rules import RESERVED_NAMES
from sbus.protocol.notices import LossReason
from sbus.routing.runs import Tally

__all__ = ["Counters", "word_of"]


@dataclass(slots=True)
class Counters:
    """The numbers of events on a bus since it was started.

    :ivar connected: clients that were admitted.
    :ivar disconnected_by: clients that have left since, by the reason.
    :ivar refused: connections that were accepted only to be closed.
    :ivar refused_by: the same, by the reason.
    :ivar user_limits: connections and subscriptions that were refused because of a limit for one user.
    :ivar tally: what `published`, `published_bytes`, `routed` and `routed_bytes` are read from.
    :ivar unrouted: of the published messages, the ones that nobody was subscribed to (`sbus.server.bus.unrouted`).
    :ivar dropped: of the routed copies, the ones that flood control dropped or that were left for a lost receiver.
    :ivar dropped_bytes: the bytes of these.
    :ivar dropped_by: the same, by cause.
    :ivar payloads: of the published messages, the ones whose payload was in sealed memory.
    :ivar payload_bytes: the bytes of these payloads.
    :ivar payloads_missing: payloads that have arrived without their memory.
    :ivar conflated: routed copies that a newer message replaced (``blocking/soft/latest``).
    :ivar violations: packets that broke the protocol.
    :ivar violations_by: the same, by the rule.
    :ivar denied: packets that clients were not allowed to send (`sbus.server.core.permissions`).
    :ivar denied_by: the same, by the name of the rule, of the rules in force.
    :ivar unknown_controls: control messages that the server does not know.
    :ivar unknown_unsubscriptions: ``UNSUB`` of a pattern that the client was not subscribed to.
    """

    connected: int = 0
    disconnected_by: dict[CloseReason, int] = field(default_factory=lambda: dict.fromkeys(CloseReason, 0))
    refused: int = 0
    refused_by: dict[CloseReason, int] = field(default_factory=lambda: dict.fromkeys(CloseReason, 0))
    user_limits: int = 0
    tally: Tally = field(default_factory=Tally)
    unrouted: int = 0
    dropped: int = 0
    dropped_bytes: int = 0
    dropped_by: dict[LossReason, int] = field(default_factory=lambda: dict.fromkeys(LossReason, 0))
    payloads: int = 0
    payload_bytes: int = 0
    payloads_missing: int = 0
    conflated: int = 0
    violations: int = 0
    violations_by: dict[ViolationReason, int] = field(default_factory=lambda: dict.fromkeys(ViolationReason, 0))
    denied: int = 0
    denied_by: Counter[str] = field(default_factory=Counter)
    unknown_controls: int = 0
    unknown_unsubscriptions: int = 0

    @property
    def published(self) -> int:
        """Messages that clients (or the program around the bus) have published."""
        return self.tally.messages

    @property
    def published_bytes(self) -> int:
        """The bytes of their packets."""
        return self.tally.size

    @property
    def routed(self) -> int:
        """Copies of these messages that were meant for a receiver."""
        return self.tally.copies

    @property
    def routed_bytes(self) -> int:
        """The bytes of the copies."""
        return self.tally.copied_size

    def no_copy(self, messages: int, size: int) -> None:
        """Take back one copy of each of some messages of `size` bytes together: it was meant for nobody."""
        self.tally.count(-messages, -size, 1)
        self.tally.count(messages, size, 0)

    def keep_rules(self, names: Collection[str]) -> None:
        """Forget the refusals of rules that are gone: else policies that come and go would make `denied_by` grow."""
        for name in [name for name in self.denied_by if name not in names and name not in RESERVED_NAMES]:
            del self.denied_by[name]

    def as_dict(self) -> dict[str, Any]:
        """Return the counters as JSON can write them; those by a reason are dictionaries from its word."""
        found: dict[str, Any] = {}
        for name in _NAMES:
            value = getattr(self, name)
            if isinstance(value, dict):
                value = {word_of(why): count for why, count in value.items()}
            found[name] = value
        return found


_NAMES = tuple(
    name
    for each in fields(Counters)
    for name in (("published", "published_bytes", "routed", "routed_bytes") if each.name == "tally" else (each.name,))
)


def word_of(why: CloseReason | ViolationReason | LossReason | str) -> str:
    """Return the word for a reason, or the name of a rule, in answers, metrics and labels, such as ``peer-closed``."""
    if isinstance(why, str):
        return why
    return why.value if isinstance(why, LossReason) else why.name.lower().replace("_", "-")
