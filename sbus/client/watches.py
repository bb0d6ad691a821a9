"""Watches: keys for which the server reports whether anybody subscribes.

The server reports the state of a key at once, and again whenever it changes. Watches of the same key share one report.
A watch hands out states, not events: if a key gains and loses its subscribers before the application looks, there is
nothing to hand out.
"""

from __future__ import annotations

from sbus.errors import UsageError

__all__ = ["MAX_WATCHED_KEY", "NO_INTEREST", "Watch", "Watches"]

MAX_WATCHED_KEY = 1024
"""Bytes in the longest key that can be watched."""
MAX_WATCHED_KEYS = 1024
"""Keys that one client can watch."""
NO_INTEREST = (
    "the server does not say whether anybody subscribes to a key: it is older than this library, or was started with "
    "--no-interest; do without has_subscribers and watch_subscribers there"
)
"""The text of the error for a server without this extension."""


class Watch:
    """Whether anybody subscribes to a key, and changes of that.

    :ivar key: the key.
    :ivar has_subscribers: the newest state; None until the server has reported one.
    """

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.has_subscribers: bool | None = None
        self._handed_out: bool | None = None
        self._error: Exception | None = None

    def update(self, has_subscribers: bool) -> None:
        """Take a report of the server."""
        self.has_subscribers = has_subscribers

    def end(self, error: Exception) -> None:
        """Take no more reports; reading on raises `error`."""
        if self._error is None:
            self._error = error

    def _has_news(self) -> bool:
        """Return whether `_next` returns or raises."""
        return self.has_subscribers is not self._handed_out or self._error is not None

    def _next(self) -> bool | None:
        """Return the state if it differs from the one before, else None.

        :raises Exception: the error that has ended the watch.
        """
        if self.has_subscribers is not self._handed_out:
            self._handed_out = self.has_subscribers
            return self.has_subscribers
        if self._error is not None:
            raise self._error
        return None


class Watches:
    """The watches of one client, by key.

    :ivar changes: the number of removals that have begun.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._watches: dict[bytes, list[Watch]] = {}
        self._reported: dict[bytes, bool] = {}

    def add(self, watch: Watch) -> bool:
        """Add a watch, which gets the newest report if there is one.

        :returns: whether it is the first one of its key.
        :raises UsageError: if it is a key more than a client may watch.
        """
        watches = self._watches.get(watch.key)
        if watches is None:
            if len(self._watches) >= MAX_WATCHED_KEYS:
                raise UsageError(f"a client can watch {MAX_WATCHED_KEYS:,} keys: close a watch, or use two connections")
            self._watches[watch.key] = [watch]
            return True
        watches.append(watch)
        if watch.key in self._reported:
            watch.update(self._reported[watch.key])
        return False

    def remove(self, watch: Watch) -> bool:
        """Remove a watch; one that is not here is ignored.

        :returns: whether it was the last one of its key.
        """
        watches = self._watches.get(watch.key, [])
        if watch not in watches:
            return False
        self.changes += 1
        watches.remove(watch)
        if watches:
            return False
        del self._watches[watch.key]
        self._reported.pop(watch.key, None)
        return True

    def keys(self) -> tuple[bytes, ...]:
        """Return the watched keys, in the order of their first watches."""
        return tuple(self._watches)

    def all(self) -> list[Watch]:
        """Return the watches."""
        return [watch for watches in self._watches.values() for watch in watches]

    def report(self, key: bytes, has_subscribers: bool) -> None:
        """Pass a report of the server on; one for a key that is watched no more is ignored."""
        if key in self._watches:
            self._reported[key] = has_subscribers
            for watch in tuple(self._watches[key]):
                watch.update(has_subscribers)

    def fail(self, key: bytes, error: Exception) -> None:
        """End the watches of a key: the server does not report on it."""
        self._reported.pop(key, None)
        for watch in self._watches.pop(key, []):
            watch.end(error)

    def disconnected(self) -> None:
        """Forget the reports of the lost connection, and the keys without a watch.

        A signal handler's exception can interrupt `remove` and leave such a key.
        """
        self._reported.clear()
        self._watches = {key: watches for key, watches in self._watches.items() if watches}
