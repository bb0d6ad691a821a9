"""The observer that writes Twisted's log: connections, violations and losses.

The lines give the client, the cause and numbers.
"""

from __future__ import annotations

from typing import Any

from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from sbus.errors import CloseReason, Violation
from sbus.protocol.keys import CURRENT, Dialect, PeerCredentials
from sbus.server.observers import Observer

__all__ = ["LogObserver"]

_MAX_VIOLATION_LINES = 8
"""Violations of one client that are logged one by one, before the others are counted."""


class LogObserver(Observer):
    """Writes what an operator needs to know to Twisted's log.

    Where messages are dropped, many are. So the first loss is logged at once, and the others in sums: one
    line for each client that lost messages within `interval`. A client that is kept in spite of its violations is
    treated alike; its first eight violations are logged one by one, as they may be of several kinds.

    :param clock: for the interval.
    :param dialect: the revision of the protocol, which says how to show a key.
    :param interval: seconds between two sums.
    """

    log = Logger(namespace="sbus.server")

    def __init__(self, clock: IReactorTime, dialect: Dialect = CURRENT, interval: float = 10.0) -> None:
        self._clock = clock
        self._dialect = dialect
        self._interval = interval
        self._lost: dict[Any, list[int]] = {}
        self._loss_timer: IDelayedCall | None = None
        self._violations: dict[Any, int] = {}
        self._violation_timer: IDelayedCall | None = None

    def connected(self, client: Any) -> None:
        self.log.debug("client {number} connected: {peer}", number=client.number, **_peer_fields(client.peer))

    def refused(self, peer: PeerCredentials, reason: CloseReason) -> None:
        self.log.warn(
            "refused a connection from {peer}: {why}", reason=reason.name, why=reason.value, **_peer_fields(peer)
        )

    def violated(self, client: Any, violation: Violation, key: bytes) -> None:
        count = self._violations[client] = self._violations.get(client, 0) + 1
        if count > _MAX_VIOLATION_LINES:
            return
        if self._violation_timer is None:
            self._violation_timer = self._clock.callLater(self._interval, self._log_violation_sums)
        self.log.warn(
            "violation by client {number}, {peer}: {why} (key {key!r})",
            number=client.number,
            reason=violation.reason.name,
            why=violation.reason.value,
            key=self._dialect.shown(key),
            **_peer_fields(client.peer),
        )

    def closed(self, client: Any, reason: CloseReason) -> None:
        self._log_loss(client)
        self._log_violation_sum(client)
        ordinary = reason in (CloseReason.PEER_CLOSED, CloseReason.PEER_RESET, CloseReason.SERVER_STOPPED)
        (self.log.debug if ordinary else self.log.warn)(
            "client {number} disconnected: {peer}: {why}",
            number=client.number,
            reason=reason.name,
            why=reason.value,
            **_peer_fields(client.peer),
        )

    def dropped(self, client: Any, packets: int, size: int) -> None:
        lost = self._lost.setdefault(client, [0, 0])
        lost[0] += packets
        lost[1] += size
        if self._loss_timer is None:
            self._log_loss(client)
            self._loss_timer = self._clock.callLater(self._interval, self._log_losses)

    def _log_losses(self) -> None:
        self._loss_timer = None
        if self._lost:
            for client in tuple(self._lost):
                self._log_loss(client)
            self._loss_timer = self._clock.callLater(self._interval, self._log_losses)

    def _log_loss(self, client: Any) -> None:
        lost = self._lost.pop(client, None)
        if lost:
            self.log.warn(
                "dropped {messages} messages ({size} bytes) for client {number}, {peer}; {total} in all",
                messages=lost[0],
                size=lost[1],
                number=client.number,
                total=client.lost,
                **_peer_fields(client.peer),
            )

    def _log_violation_sums(self) -> None:
        """Log the sums of the interval.

        The clients in them are counted further; the others start from zero.
        """
        self._violation_timer = None
        again = [client for client in tuple(self._violations) if self._log_violation_sum(client)]
        if again:
            self._violations = dict.fromkeys(again, _MAX_VIOLATION_LINES)
            self._violation_timer = self._clock.callLater(self._interval, self._log_violation_sums)

    def _log_violation_sum(self, client: Any) -> int:
        """Log the violations of a client that were counted only; return their number."""
        more = self._violations.pop(client, 0) - _MAX_VIOLATION_LINES
        if more > 0:
            self.log.warn(
                "{violations} more violations by client {number}, {peer}",
                violations=more,
                number=client.number,
                **_peer_fields(client.peer),
            )
        return max(more, 0)

    def stop(self) -> None:
        """Log the remaining sums and stop the timers."""
        for client in tuple(self._violations):
            self._log_violation_sum(client)
        if self._violation_timer is not None:
            self._violation_timer.cancel()
            self._violation_timer = None
        for client in tuple(self._lost):
            self._log_loss(client)
        if self._loss_timer is not None:
            self._loss_timer.cancel()
            self._loss_timer = None


def _peer_fields(peer: PeerCredentials) -> dict[str, Any]:
    return {"peer": "pid {} uid {} gid {}".format(*peer), "pid": peer.pid, "uid": peer.uid, "gid": peer.gid}
