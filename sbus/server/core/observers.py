"""Observers of a bus: the base class, and how events reach them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from twisted.logger import Logger
from zope.interface import implementer

from sbus.errors import CloseReason, Violation
from sbus.protocol.keys import Dialect, PeerCredentials
from sbus.server.core.interfaces import IObserver
from sbus.server.core.listeners import Listener

__all__ = ["Events", "Observer", "redact"]

_log = Logger(namespace="sbus.bus")


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

    def denied(self, client: Any, verb: bytes, key: bytes, verdict: Any, is_enforced: bool) -> None:
        pass

    def audited(self, client: Any, verb: bytes, key: bytes, verdict: Any, count: int) -> None:
        pass

    def refused(self, peer: PeerCredentials, reason: CloseReason, listener: Listener) -> None:
        pass

    def closed(self, client: Any, reason: CloseReason) -> None:
        pass


class Events:
    """The listeners to each event of one bus.

    An event without listeners costs a look at an empty tuple.

    An exception that an observer raises is logged and goes no further: an observer cannot stop the bus.

    :param observers: `sbus.interfaces.IObserver` s; of each, only the methods that it overrides are called.
    :ivar is_notifying: whether an observer is being called now: messages that it publishes have to wait.
    """

    __slots__ = (
        "audited",
        "closed",
        "connected",
        "delivered",
        "denied",
        "dropped",
        "is_notifying",
        "published",
        "refused",
        "subscribed",
        "unsubscribed",
        "violated",
    )

    def __init__(self, observers: Iterable[Any] = ()) -> None:
        observers = tuple(observers)
        self.is_notifying = False
        self.connected = self._listeners(observers, "connected")
        self.subscribed = self._listeners(observers, "subscribed")
        self.unsubscribed = self._listeners(observers, "unsubscribed")
        self.published = self._listeners(observers, "published")
        self.delivered = self._listeners(observers, "delivered")
        self.dropped = self._listeners(observers, "dropped")
        self.violated = self._listeners(observers, "violated")
        self.denied = self._listeners(observers, "denied")
        self.audited = self._listeners(observers, "audited")
        self.refused = self._listeners(observers, "refused")
        self.closed = self._listeners(observers, "closed")

    def _listeners(self, observers: tuple[Any, ...], event: str) -> tuple[Callable[..., None], ...]:
        return tuple(self._guarded(getattr(observer, event)) for observer in observers if _hears(observer, event))

    def _guarded(self, method: Callable[..., None]) -> Callable[..., None]:
        def notify(*event: Any) -> None:
            was_notifying, self.is_notifying = self.is_notifying, True
            try:
                method(*event)
            except Exception:
                _log.failure("An observer failed in {method}", method=method)
            finally:
                self.is_notifying = was_notifying

        return notify


def redact(dialect: Dialect, key: bytes) -> bytes:
    """Return a key as observers may see it: a secret one is cut after ``<pid>``."""
    if not dialect.is_secret(key):
        return key
    try:
        secret = dialect.check(key)
    except Violation:
        return b"!/..."
    return b"!/cred/%b/" % secret.ids if secret else key


def _hears(observer: Any, event: str) -> bool:
    return getattr(type(observer), event, None) is not getattr(Observer, event)
