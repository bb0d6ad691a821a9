"""Lists of all patterns, with every change, for clients of root and of the server's user.

.. rubric:: Theory of operation

A *link* to another bus needs the patterns that the clients of this one are subscribed to. It asks for the list
(``CMSG interest/patterns``), gets each open pattern of all other clients, a mark at the end, and from then on every
change. Observers' patterns are left out, and so are those of subscribers inside the program.

The list for one client is a *feed*. The patterns are counted only while there is a feed. When the first one begins, the
clients already connected are counted in slices. Clients that become observers, or are no longer, are recounted as
chores of their users. A `Recount` has the patterns that are left.

Each feed has a list of the patterns that were there, an agenda of those that may have changed since, and a set of the
patterns that its client knows. A pattern that ends before the client learns of it leaves the agenda. So that is bounded
by the existing patterns and those that the client knows.

Both are compared with the set only when the client's queue has room: a client that reads slowly
gets the sum of all changes, and the server keeps a pattern once. Sending is work of the client's user.

Each change has a number. Numbers never fall in a feed: a client that gets one has got all earlier ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from twisted.internet.interfaces import IReactorTime

from sbus.fair import Scheduler
from sbus.protocol import controls
from sbus.server.asks.interest import Patterns
from sbus.server.core.interfaces import Client, Receiver
from sbus.server.core.limits import MAX_REPLIES

__all__ = ["PatternLists"]

_SENT_AT_ONCE = 64
"""Patterns that are sent in one step."""
_COUNTED_AT_ONCE = 2_048
"""Patterns that are counted in one turn of the reactor: 2 ms."""
_COUNTED = 256
"""Patterns that are counted between two looks at the clock: 0.3 ms."""


class PatternFeed:
    """The list for one client.

    :param patterns: the patterns that there are.
    :param number: the number of the last change.
    :ivar listed: those of them whose turn has not come, the first one last; they come before the agenda.
    :ivar number: the number by which the client learns of them.
    :ivar agenda: the patterns that may have changed, each with the number of its last change; None is the mark.
    :ivar known: the patterns that the client knows of, each with the number by which it has learnt of it.
    :ivar has_room: whether the client's queue had room when it was looked at last.
    """

    __slots__ = ("_lists", "agenda", "client", "has_room", "known", "listed", "number")

    def __init__(self, lists: PatternLists, client: Client, patterns: dict[bytes, int], number: int) -> None:
        self._lists = lists
        self.client = client
        self.listed = list(reversed(patterns))  # an agenda of them would take 15 times as long to make
        self.number = number
        self.agenda: OrderedDict[bytes | None, int] = OrderedDict()  # unlike a dict, it finds its first item at once
        self.known: dict[bytes, int] = {}
        self.has_room = True

    @property
    def has_more(self) -> bool:
        """Whether there is more to send."""
        return bool(self.listed or self.agenda)

    def note(self, pattern: bytes | None, number: int) -> None:
        self.agenda.pop(pattern, None)
        self.agenda[pattern] = number

    def on_room(self) -> None:
        self._lists.go_on_soon(self)

    def run(self, until: int) -> bool:
        """See `sbus.fair.Entry`."""
        self._lists.go_on(self, until)
        return True

    def describe(self) -> dict[str, Any]:
        """See `sbus.fair.Entry`."""
        return {"client": self.client.number, "patterns": len(self.listed) + len(self.agenda)}


class Recount:
    """The patterns of a client that are to be counted or no longer counted, as it is an observer now or not.

    :ivar patterns: those that are left.
    """

    __slots__ = ("_lists", "client", "patterns")

    def __init__(self, lists: PatternLists, client: Receiver) -> None:
        self._lists = lists
        self.client = client
        self.patterns: set[bytes] = set()

    def run(self, until: int) -> bool:
        """See `sbus.fair.Entry`."""
        return self._lists.recount(self, until)

    def describe(self) -> dict[str, Any]:
        """See `sbus.fair.Entry`."""
        return {"client": getattr(self.client, "number", 0), "patterns": len(self.patterns)}


class PatternLists:
    """The feeds of one bus, and the patterns that they bring.

    :param clients: the connected clients by their numbers.
    :param uncounted: the receivers whose patterns do not count.
    :ivar flush: sends the packets that were queued for feeds.
    """

    def __init__(
        self,
        router: Patterns,
        clients: Mapping[int, Client],
        uncounted: set[Receiver],
        clock: IReactorTime,
        scheduler: Scheduler,
        flush: Callable[[], None],
    ) -> None:
        self.flush = flush
        self._router = router
        self._clients = clients
        self._uncounted = uncounted
        self._clock = clock
        self._scheduler = scheduler
        self._feeds: dict[Receiver, PatternFeed] = {}
        self._counts: dict[bytes, int] = {}
        self._to_count: dict[Receiver, None] = {}
        self._recounts: dict[Receiver, Recount] = {}
        self._number = 0
        self._is_due = False

    def start(self, client: Client) -> None:
        """Send a client the list, and then every change; if it has asked before, begin again."""
        self.forget(client)
        if not self._feeds:
            self._router.listeners = (*self._router.listeners, self)
            left = filter(_is_client, self._router.muted)  # their patterns are taken off one by one
            self._to_count = dict.fromkeys((*self._clients.values(), *left))
            self._count_on()
        feed = self._feeds[client] = PatternFeed(self, client, self._counts, self._number)
        client.on_room = (*client.on_room, feed.on_room)
        if not self._to_count:
            feed.note(None, self._number)
        if self._send(feed):
            self._wait(feed)

    def forget(self, client: Receiver) -> None:
        """End the feed of a client that has disconnected, or stopped reading."""
        feed = self._feeds.pop(client, None)
        if feed is None:
            return
        hooks = feed.client.on_room
        feed.client.on_room = tuple(hook for hook in hooks if hook != feed.on_room)
        feed.listed.clear()
        feed.agenda.clear()
        feed.client.user.lines.chores.pop(feed, None)
        if not self._feeds:
            self._router.listeners = tuple(each for each in self._router.listeners if each is not self)
            self._counts = {}
            self._to_count = {}
            self._recounts = {}

    def observed(self, client: Client) -> None:
        """A client has become an observer, or is no longer one."""
        if self._feeds and self._has_begun(client):
            self._to_count.pop(client, None)  # one that changes its mind all the time must not hold up the mark
            recount = self._recounts.setdefault(client, Recount(self, client))
            recount.patterns ^= _open_patterns(client)
            self._scheduler.do(client.user.lines, recount)

    def number_of(self, client: Client, pattern: bytes) -> int:
        """Return the number by which a client has learnt, or will learn, of a pattern; 0 if it does not."""
        feed = self._feeds.get(client)
        if feed is None:
            return 0
        is_listed = feed.listed and pattern in self._counts
        return feed.known.get(pattern) or feed.agenda.get(pattern, feed.number if is_listed else 0)

    def added(self, receiver: Receiver, pattern: bytes) -> None:
        """See `sbus.server.core.interfaces.PatternEvents`."""
        self._changed(receiver, pattern, 1)

    def removed(self, receiver: Receiver, pattern: bytes) -> None:
        """See `sbus.server.core.interfaces.PatternEvents`."""
        self._changed(receiver, pattern, -1)

    # --- counting ----------------------------------------------------------------------------

    def _changed(self, receiver: Receiver, pattern: bytes, by: int) -> None:
        if not _is_client(receiver) or not self._has_begun(receiver):
            return
        is_counted = self._is_counted(receiver, pattern)
        if by < 0 and receiver in self._recounts:
            self._recounts[receiver].patterns.discard(pattern)
        if is_counted:
            self._change(receiver, pattern, by)
            self._send_all()

    def _has_begun(self, receiver: Receiver) -> bool:
        """Return whether the patterns of a client have begun to be counted."""
        return receiver not in self._to_count or receiver in self._recounts

    def _is_counted(self, receiver: Receiver, pattern: bytes) -> bool:
        """Return whether a pattern of a client is counted now, or will be with its subscription."""
        recount = self._recounts.get(receiver)
        is_left = recount is not None and pattern in recount.patterns
        return self._has_begun(receiver) and (receiver in self._uncounted) is is_left

    def _change(self, receiver: Receiver, pattern: bytes, by: int) -> None:
        count = self._counts.get(pattern, 0) + by
        if count:
            self._counts[pattern] = count
        else:
            del self._counts[pattern]
        if count > 2 or (count == 2 and by < 0):
            return  # no feed shows a difference: at most one of these clients is its own
        self._number += 1
        for feed in self._feeds.values():
            if not count and pattern not in feed.known:
                feed.agenda.pop(pattern, None)  # else patterns that come and go would pile up
            elif feed.client is not receiver:
                feed.note(pattern, self._number)

    def _count_on(self) -> None:
        """Count some patterns of the clients that were there before the first feed."""
        left = _COUNTED_AT_ONCE
        while self._to_count and left > 0:
            client = next(iter(self._to_count))
            recount = self._recounts.get(client)
            if recount is None:
                recount = self._recounts[client] = Recount(self, client)
                if client not in self._uncounted:
                    recount.patterns = _open_patterns(client)
            left -= 1 + self._count_some(recount, left)
            if client not in self._recounts:
                del self._to_count[client]
        if self._to_count:
            self._clock.callLater(0, self._count_later)

    def _count_some(self, recount: Recount, most: int) -> int:
        """Count some of a client's patterns, or count them no longer; return the number."""
        client, patterns = recount.client, recount.patterns
        count, by = min(most, len(patterns)), -1 if client in self._uncounted else 1
        for _ in range(count):
            self._change(client, patterns.pop(), by)
        if not patterns:
            del self._recounts[client]
        return count

    def recount(self, recount: Recount, until: int) -> bool:
        """Count patterns of a client in a turn of its user; return whether all are."""
        while self._recounts.get(recount.client) is recount:
            self._count_some(recount, _COUNTED)
            if self._scheduler.clock() >= until:
                break
        self._send_all()
        return self._recounts.get(recount.client) is not recount

    def _count_later(self) -> None:
        if self._to_count:
            self._count_on()
            if not self._to_count:
                for feed in self._feeds.values():
                    feed.note(None, self._number)
            self._send_all()
            self.flush()

    # --- sending -----------------------------------------------------------------------------

    def _send_all(self) -> None:
        for feed in tuple(self._feeds.values()):
            if feed.has_more and self._send(feed):
                self._wait(feed)
        if not self._is_due:  # a client that leaves does so outside of every batch
            self._is_due = True
            self._clock.callLater(0, self._flush_now)

    def _flush_now(self) -> None:
        self._is_due = False
        self.flush()

    def go_on(self, feed: PatternFeed, until: int) -> None:
        """Send more of a feed, in a turn of its client's user."""
        if self._feeds.get(feed.client) is feed:
            while self._send(feed) and self._scheduler.clock() < until:
                pass
            if feed.has_room and feed.has_more:
                self._wait(feed)
            self.flush()

    def go_on_soon(self, feed: PatternFeed) -> None:
        """Continue in a turn: the client's queue has room."""
        feed.has_room = True
        if feed.has_more:
            self._wait(feed)

    def _wait(self, feed: PatternFeed) -> None:
        self._scheduler.add_chore(feed.client.user.lines, feed)

    def _send(self, feed: PatternFeed) -> bool:
        """Send some of a feed's patterns, as far as the client's queue has room.

        :returns: whether there is more to send, and room for it.
        """
        client, agenda = feed.client, feed.agenda
        for _ in range(_SENT_AT_ONCE):
            if not feed.has_more:
                return False
            feed.has_room = client.waiting_replies < MAX_REPLIES or self._has_flushed(feed)
            if not feed.has_room:
                return False  # `on_room` comes back
            pattern: bytes | None
            if feed.listed:
                pattern, number = feed.listed.pop(), feed.number
                if pattern in agenda:
                    continue  # it has changed since, and has its number there
            else:
                pattern, number = agenda.popitem(last=False)
            if pattern is None:
                client.notify(controls.INTEREST_PATTERNS, b"")
                continue
            own = pattern in client.patterns and self._is_counted(client, pattern)
            is_there = self._counts.get(pattern, 0) > own
            if is_there is not (pattern in feed.known):
                if is_there:
                    feed.known[pattern] = number
                else:
                    del feed.known[pattern]
                client.notify(controls.INTEREST_PATTERN, b"%b %d %b" % (b"+" if is_there else b"-", number, pattern))
        return feed.has_more

    def _has_flushed(self, feed: PatternFeed) -> bool:
        """Send the packets that are queued for a feed; return whether there is room now."""
        queue = feed.client.queue
        if queue is None or queue.is_congested:
            return False
        self.flush()
        return feed.client.waiting_replies < MAX_REPLIES


def _is_client(receiver: Receiver) -> bool:
    return getattr(receiver, "number", 0) > 0


def _open_patterns(client: Receiver) -> set[bytes]:
    return {pattern for pattern, (_, secret) in client.patterns.items() if secret is None}
