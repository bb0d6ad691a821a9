"""Notices of changed interest on their way to the watchers: at most one of each key waits.

A watcher that does not read must not fill the server's memory while its keys come and go. So a notice goes into the
client's queue only if none of its watch can still wait there, and if fewer than `MAX_REPLIES` replies and notices wait.
Otherwise the server remembers that the client is *owed* one. When the queue has no replies left, the server compares
the owed watches with the last notices: a change that was taken back is never sent.
"""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IReactorTime

from sbus.protocol import controls
from sbus.server.asks.watched_keys import Watch
from sbus.server.core.interfaces import Client, Receiver
from sbus.server.core.limits import MAX_REPLIES

__all__ = ["InterestNotices"]


class _Waiting:
    """The notices of one client that does not keep up.

    :ivar queued: the watches whose notices may still wait in the queue.
    :ivar owed: the watches whose answers may have to be sent.
    """

    __slots__ = ("is_due", "on_room", "owed", "queued")

    def __init__(self, on_room: Callable[[], None]) -> None:
        self.queued: set[Watch] = set()
        self.owed: dict[Watch, None] = {}
        self.on_room = on_room
        self.is_due = False


class InterestNotices:
    """Sends the notices of one bus.

    :param flush: sends the notices that were queued outside of a batch.
    """

    def __init__(self, clock: IReactorTime, flush: Callable[[], None]) -> None:
        self._clock = clock
        self._flush = flush
        self._waiting: dict[Receiver, _Waiting] = {}

    def notify(self, watch: Watch) -> None:
        """Send the changed answer of a watch, or owe it."""
        client = watch.client
        queue = client.queue
        waiting = self._waiting.get(client)
        if queue is None or (waiting is None and not client.is_behind):
            self._send(watch)
            return
        if waiting is None:
            waiting = self._waiting[client] = _Waiting(lambda: self._has_room(client))
            client.on_room = (*client.on_room, waiting.on_room)
        if watch in waiting.queued or client.waiting_replies >= MAX_REPLIES or not client.is_behind:
            waiting.owed[watch] = None
            if not client.is_behind:
                self._has_room(client)
        else:
            waiting.queued.add(watch)
            self._send(watch)

    def forget(self, client: Receiver) -> None:
        """Forget all that a client is owed."""
        waiting = self._waiting.pop(client, None)
        if waiting is not None:
            hooks = getattr(client, "on_room", ())
            client.on_room = tuple(hook for hook in hooks if hook is not waiting.on_room)  # type: ignore[attr-defined]

    def _send(self, watch: Watch) -> None:
        watch.sent = watch.value
        watch.client.notify(controls.INTEREST, b"%d %b" % (watch.value, watch.key))

    def _has_room(self, client: Client) -> None:
        """Packets have left a client's queue: continue soon, if no notice can wait in it."""
        waiting, queue = self._waiting.get(client), client.queue
        if waiting is None or waiting.is_due or queue is None or client.waiting_replies:
            return
        waiting.is_due = True
        self._clock.callLater(0, self._go_on, client, waiting)

    def _go_on(self, client: Client, waiting: _Waiting) -> None:
        """Send a client the notices that it is owed, as far as its queue has room."""
        if self._waiting.get(client) is not waiting:
            return
        self.forget(client)
        for watch in waiting.owed:
            if not watch.is_over and watch.value != watch.sent:
                self.notify(watch)
        self._flush()
