"""Observers of a bus: the base to derive from, how events reach them, and the log."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from zope.interface import implementer

from sbus.errors import CloseReason, Violation
from sbus.protocol.keys import CURRENT, Dialect, PeerCredentials
from sbus.server.interfaces import IObserver

__all__ = ["LogObserver", "Observer", "listeners"]

_log = Logger(namespace="sbus.bus")

_FEW_VIOLATIONS = 8
"""Violations of one client that are logged one by one, before the others are counted."""


@implementer(IObserver)
class Observer:
    """An observer of nothing: override the events that you need (see `IObserver`)."""

    def connected(self, client: Any) -> None:
        pass

    def subscribed(self, client: Any, pattern: bytes) -> None:
        pass

    def unsubscribed(self, client: Any, pattern: bytes) -> None:
        pass

    def published(self, client: Any, key: bytes, payload: bytes | None) -> None:
        pass

    def delivered(self, client: Any, packets: int, size: int) -> None:
        pass

    def dropped(self, client: Any, packets: int, size: int) -> None:
        pass

    def violated(self, client: Any, violation: Violation, key: bytes) -> None:
        pass

    def refused(self, peer: PeerCredentials, reason: CloseReason) -> None:
        pass

    def closed(self, client: Any, reason: CloseReason) -> None:
        pass


def listeners(observers: Iterable[Any], event: str) -> tuple[Callable[..., None], ...]:
    """What to call for an event: the methods of those observers only that have one of their own.

    What an observer raises is logged and goes no further: the bus is not its to stop.
    """
    return tuple(
        _guarded(getattr(observer, event))
        for observer in observers
        if getattr(type(observer), event, None) is not getattr(Observer, event)
    )


def _guarded(method: Callable[..., None]) -> Callable[..., None]:
    def tell(*event: Any) -> None:
        try:
            method(*event)
        except Exception:
            _log.failure("An observer failed in {method}", method=method)

    return tell


class LogObserver(Observer):
    """Writes what an operator wants to know to Twisted's log, with who, what and why.

    Drops are many when there are any: the first is logged at once, the rest in sums, one line for
    each client that lost messages in `interval` seconds. So it is with the violations of a client
    that is kept in spite of them, of which the first few are told, as they may be of several kinds.

    :param clock: an `IReactorTime`.
    """

    log = Logger(namespace="sbus.server")

    def __init__(self, clock: IReactorTime, dialect: Dialect = CURRENT, interval: float = 10.0) -> None:
        self._clock = clock
        self._dialect = dialect
        self._interval = interval
        self._lost: dict[Any, list[int]] = {}
        self._report: Any = None
        self._violations: dict[Any, int] = {}
        self._violations_report: Any = None

    def connected(self, client: Any) -> None:
        self.log.debug("client {number} connected: {peer}", number=client.number, **_who(client.peer))

    def refused(self, peer: PeerCredentials, reason: CloseReason) -> None:
        self.log.warn("refused a connection from {peer}: {why}", reason=reason.name, why=reason.value, **_who(peer))

    def violated(self, client: Any, violation: Violation, key: bytes) -> None:
        count = self._violations[client] = self._violations.get(client, 0) + 1
        if count > _FEW_VIOLATIONS:
            return
        if self._violations_report is None:
            self._violations_report = self._clock.callLater(self._interval, self._tell_of_violations)
        self.log.warn(
            "violation by client {number}, {peer}: {why} (key {key!r})",
            number=client.number,
            reason=violation.reason.name,
            why=violation.reason.value,
            key=self._dialect.shown(key),
            **_who(client.peer),
        )

    def closed(self, client: Any, reason: CloseReason) -> None:
        self._tell(client)
        self._tell_of_violator(client)
        ordinary = reason in (CloseReason.PEER_CLOSED, CloseReason.PEER_RESET, CloseReason.SERVER_STOPPED)
        (self.log.debug if ordinary else self.log.warn)(
            "client {number} disconnected: {peer}: {why}",
            number=client.number,
            reason=reason.name,
            why=reason.value,
            **_who(client.peer),
        )

    def dropped(self, client: Any, packets: int, size: int) -> None:
        lost = self._lost.setdefault(client, [0, 0])
        lost[0] += packets
        lost[1] += size
        if self._report is None:
            self._tell(client)
            self._report = self._clock.callLater(self._interval, self._tell_all)

    def _tell_all(self) -> None:
        self._report = None
        if self._lost:
            for client in tuple(self._lost):
                self._tell(client)
            self._report = self._clock.callLater(self._interval, self._tell_all)

    def _tell(self, client: Any) -> None:
        lost = self._lost.pop(client, None)
        if lost:
            self.log.warn(
                "dropped {messages} messages ({size} bytes) for client {number}, {peer}; {total} in all",
                messages=lost[0],
                size=lost[1],
                number=client.number,
                total=client.lost,
                **_who(client.peer),
            )

    def _tell_of_violations(self) -> None:
        """Who has broken the protocol again is told of in one line, and goes on to be; the others start afresh."""
        self._violations_report = None
        again = [client for client in tuple(self._violations) if self._tell_of_violator(client)]
        if again:
            self._violations = dict.fromkeys(again, _FEW_VIOLATIONS)
            self._violations_report = self._clock.callLater(self._interval, self._tell_of_violations)

    def _tell_of_violator(self, client: Any) -> int:
        """How many violations of a client were not told of yet; now they are."""
        more = self._violations.pop(client, 0) - _FEW_VIOLATIONS
        if more > 0:
            self.log.warn(
                "{violations} more violations by client {number}, {peer}",
                violations=more,
                number=client.number,
                **_who(client.peer),
            )
        return max(more, 0)

    def stop(self) -> None:
        """Report what is left, and leave the clock alone."""
        for client in tuple(self._violations):
            self._tell_of_violator(client)
        if self._violations_report is not None:
            self._violations_report.cancel()
            self._violations_report = None
        for client in tuple(self._lost):
            self._tell(client)
        if self._report is not None:
            self._report.cancel()
            self._report = None


def _who(peer: PeerCredentials) -> dict[str, Any]:
    return {"peer": "pid {} uid {} gid {}".format(*peer), "pid": peer.pid, "uid": peer.uid, "gid": peer.gid}
