"""The observer that writes Twisted's log: connections, violations and losses.

The lines give the client, the cause and numbers. A `LogLimiter` decides their number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import LogLevel, globalLogPublisher

from sbus.daemon.log_budget import LogBudget
from sbus.daemon.log_limiter import INTERVAL, LimitedLogger, LogLimiter
from sbus.errors import CloseReason, Violation, ViolationReason
from sbus.protocol.keys import CURRENT, Dialect, PeerCredentials
from sbus.server.core.listeners import MAIN, Listener
from sbus.server.core.observers import Observer
from sbus.server.core.shares import Share

__all__ = ["LogObserver", "peer_fields"]

_CONNECTED = "clients connected"
_DROPPED = "messages dropped"
_REFUSED = {reason: f"connections refused ({reason.name})" for reason in CloseReason}
_CLOSED = {reason: f"clients disconnected ({reason.name})" for reason in CloseReason}
_VIOLATED = {reason: f"violations ({reason.name})" for reason in ViolationReason}
_LIMITS: dict[CloseReason | ViolationReason, str] = {
    CloseReason.TOO_MANY_USER_CLIENTS: "clients",
    CloseReason.TOO_MANY_USER_CONNECTS: "accepts",
    CloseReason.USER_MEMORY: "memory",
    ViolationReason.TOO_MANY_USER_PATTERNS: "patterns",
    ViolationReason.USER_MEMORY: "memory",
}
"""The limits of one user that reasons name as options."""
_ORDINARY = (CloseReason.PEER_CLOSED, CloseReason.PEER_RESET, CloseReason.SERVER_STOPPED)


class LogObserver(Observer):
    """Writes the events that an operator needs to know to Twisted's log.

    Losses come in large numbers. So the first loss of each user is logged at once, and the others in one line for each
    client that lost messages within `INTERVAL` seconds. The limiter decides which of these lines are written, and sums
    up the others by user.

    :param clock: for the intervals.
    :param dialect: the revision of the protocol, which says how to show a key.
    :param budget: the bytes that the log may grow by; by default a separate budget of the observer.
    :param share_of: returns the limits of a user, for the lines that name one; without it, they name the option.
    :param owner_of: returns the UID that a UID counts as; by default each is its own. Lines name the UID itself, but
        sums and limits go by the owner, so that a range of UIDs makes the log no longer.
    :ivar limiter: decides which lines there are, also for the audit log.
    """

    def __init__(
        self,
        clock: IReactorTime,
        dialect: Dialect = CURRENT,
        budget: LogBudget | None = None,
        owner_of: Callable[[int], int] | None = None,
        share_of: Callable[[int], Share] | None = None,
    ) -> None:
        self._clock = clock
        self._dialect = dialect
        self._owner_of = owner_of or _itself
        self._share_of = share_of
        self.limiter = LogLimiter(clock, globalLogPublisher, budget or LogBudget(clock.seconds))
        self._log = LimitedLogger("sbus.server", self.limiter)
        self._lost: dict[Any, list[int]] = {}
        self._losers: set[int] = set()
        self._loss_timer: IDelayedCall | None = None

    def connected(self, client: Any) -> None:
        if self.limiter.wants(self._owner_of(client.peer.uid), _CONNECTED, LogLevel.debug):
            self._log.debug(
                "client {number} connected: {peer}",
                number=client.number,
                kind=_CONNECTED,
                **peer_fields(client.peer, client.listener, self._owner_of),
            )

    def refused(self, peer: PeerCredentials, reason: CloseReason, listener: Listener) -> None:
        if self.limiter.wants(self._owner_of(peer.uid), _REFUSED[reason], LogLevel.warn):
            self._log.warn(
                "refused a connection from {peer}: {why}",
                reason=reason.name,
                why=self._why(peer, reason),
                kind=_REFUSED[reason],
                **peer_fields(peer, listener, self._owner_of),
            )

    def violated(self, client: Any, violation: Violation, key: bytes) -> None:
        reason = violation.reason
        if self.limiter.wants(self._owner_of(client.peer.uid), _VIOLATED[reason], LogLevel.warn):
            self._log.warn(
                "violation by client {number}, {peer}: {why} (key {key!r})",
                number=client.number,
                reason=reason.name,
                why=self._why(client.peer, reason),
                key=self._dialect.shown(key),
                kind=_VIOLATED[reason],
                **peer_fields(client.peer, client.listener, self._owner_of),
            )

    def closed(self, client: Any, reason: CloseReason) -> None:
        self._log_loss(client)
        level = LogLevel.debug if reason in _ORDINARY else LogLevel.warn
        if self.limiter.wants(self._owner_of(client.peer.uid), _CLOSED[reason], level):
            self._log.emit(
                level,
                "client {number} disconnected: {peer}: {why}",
                number=client.number,
                reason=reason.name,
                why=self._why(client.peer, reason),
                kind=_CLOSED[reason],
                **peer_fields(client.peer, client.listener, self._owner_of),
            )

    def dropped(self, client: Any, packets: int, size: int) -> None:
        lost = self._lost.setdefault(client, [0, 0])
        lost[0] += packets
        lost[1] += size
        owner = self._owner_of(client.peer.uid)
        if owner not in self._losers:
            self._losers.add(owner)
            self._log_loss(client)
            if self._loss_timer is None:
                self._loss_timer = self._clock.callLater(INTERVAL, self._log_losses)

    def _log_losses(self) -> None:
        self._loss_timer = None
        self._losers = {self._owner_of(client.peer.uid) for client in self._lost}
        if self._lost:
            for client in tuple(self._lost):
                self._log_loss(client)
            self._loss_timer = self._clock.callLater(INTERVAL, self._log_losses)

    def _log_loss(self, client: Any) -> None:
        lost = self._lost.pop(client, None)
        if lost and self.limiter.wants(self._owner_of(client.peer.uid), _DROPPED, LogLevel.warn, lost[0]):
            self._log.warn(
                "dropped {messages} messages ({size} bytes) for client {number}, {peer}; {total} in all",
                messages=lost[0],
                size=lost[1],
                number=client.number,
                total=client.lost,
                kind=_DROPPED,
                times=lost[0],
                **peer_fields(client.peer, client.listener, self._owner_of),
            )

    def stop(self) -> None:
        """Log the remaining sums and stop the timers."""
        for client in tuple(self._lost):
            self._log_loss(client)
        self._losers.clear()
        if self._loss_timer is not None:
            self._loss_timer.cancel()
            self._loss_timer = None
        self.limiter.stop()

    def _why(self, peer: PeerCredentials, reason: CloseReason | ViolationReason) -> str:
        """Return a reason in words, with the source of this user's limit where users can have different limits."""
        why = str(reason.value)
        name = _LIMITS.get(reason)
        if name is None or self._share_of is None:
            return why
        return why.replace(f"--user-{name}", self._share_of(self._owner_of(peer.uid)).setting(name))


def peer_fields(peer: PeerCredentials, listener: Listener, owner_of: Callable[[int], int]) -> dict[str, Any]:
    """Return the fields of an event about the connection that it concerns; ``peer`` is for people."""
    at = "" if listener.name == MAIN.name else f" at {listener.name}"
    return {
        "peer": "pid {} uid {} gid {}{}".format(*peer, at),
        "pid": peer.pid,
        "uid": peer.uid,
        "gid": peer.gid,
        "owner": owner_of(peer.uid),
        "listener": listener.name,
    }


def _itself(uid: int) -> int:
    return uid
