"""The counters of a bus."""

from __future__ import annotations

from dataclasses import dataclass, field

from sbus.protocol.notices import LossReason

__all__ = ["Counters"]


@dataclass(slots=True)
class Counters:
    """What has happened on a bus since it was started, in numbers of events.

    :ivar connected: clients that were admitted.
    :ivar refused: connections that were accepted only to be closed.
    :ivar user_limits: connections and subscriptions that were refused because of a limit for one user.
    :ivar published: messages that clients (or the program around the bus) have published.
    :ivar routed: copies of these that were meant for a receiver.
    :ivar dropped: of those copies, the ones that flood control dropped or that were left for a lost receiver.
    :ivar dropped_by: the same, by cause.
    :ivar conflated: of those copies, the ones that a newer message replaced (``blocking/soft/latest``).
    :ivar violations: packets that broke the protocol.
    :ivar unknown_controls: control messages that the server does not know.
    :ivar unknown_unsubscriptions: ``UNSUB`` of a pattern that the client was not subscribed to.
    """

    connected: int = 0
    refused: int = 0
    user_limits: int = 0
    published: int = 0
    routed: int = 0
    dropped: int = 0
    dropped_by: dict[LossReason, int] = field(default_factory=lambda: dict.fromkeys(LossReason, 0))
    conflated: int = 0
    violations: int = 0
    unknown_controls: int = 0
    unknown_unsubscriptions: int = 0
