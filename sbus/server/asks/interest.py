"""Interest: whether a subscriber would receive a message with a watched key, and the clients that want to know.

.. rubric:: Theory of operation

A client *watches* a key. The server answers 1 if a message with that key would reach a subscriber, else 0, and sends a
notice when the answer changes. *Observers*, such as a recorder, do not count as subscribers, and neither does the
watcher itself while its echo is off. For a secret key, and for a key that the client may not publish, the answer is
always 1: it reveals nothing.

Nothing here is on the way of a message. The router calls `Interest.added` and `Interest.removed` for each subscription
that comes or goes, and only from the first watch to the last one.

============================  ========================================================================================
step                          what happens
============================  ========================================================================================
a subscription comes          a *walk* over each user's tree of watched keys (`sbus.server.asks.watched_keys`) finds
                              those that the pattern matches and whose answer is 0
a subscription ends           it lingers for 100 ms (`sbus.server.asks.lingering`) and still counts for watches whose
                              answer is 1; then the same walk, for these
a walk finds a watch          a look-up in the index of subscriptions: the first subscriber that counts decides
the answer has changed        a notice, when the batch or the turn in hand is over
============================  ========================================================================================

Walking and looking up is a chore of the watcher's user (`sbus.fair`). The batch that changed the subscription does it
as far as that user has time, and `_AT_ONCE` for all users, and turns do the rest. A user for whom more than 64 walks
wait gets one walk over all watched keys instead.

Invariants:

* When no walk waits and no subscription lingers, each watch has the answer that a look-up would give.
* No notice and no answer names a client or a pattern.

Rejected: looking up every watched key at each change (with 100 clients that watch 1,024 keys each, 0.3 s); counting the
matching patterns of each key (own subscriptions and observers count for some watchers only).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

from twisted.internet.interfaces import IDelayedCall, IReactorTime

from sbus.errors import Violation, ViolationReason
from sbus.fair import Scheduler
from sbus.protocol.keys import Dialect
from sbus.protocol.patterns import pattern_cost
from sbus.server.asks.lingering import Lingering
from sbus.server.asks.watched_keys import MAX_WALKS, Watch, WatchedKeys
from sbus.server.core.interfaces import Client, PatternEvents, Receiver
from sbus.server.core.users import User

__all__ = ["LONGEST_WATCHED", "MAX_WATCHED", "Interest", "Patterns", "watch_memory"]

MAX_WATCHED = 1024
"""Keys that one client may watch."""
LONGEST_WATCHED = 1024
"""Bytes in the longest key that may be watched."""
_AT_ONCE = 500_000
"""Nanoseconds in one turn of the reactor after which no more walks begin at once."""
_LOOK_STEPS = 2_000
"""Steps of walks and look-ups between two looks at the clock: 0.1 µs each, about."""
_WATCH_STEPS = 12
"""Steps that a watch costs when a walk finds it, besides those of its look-up."""
_NOTICE_STEPS = 20
"""Steps that a changed answer costs besides: the notice is made and queued."""
_DROPPED_AT_ONCE = 32
"""Ended watches that are removed between two looks at the clock."""
_WATCH_MEMORY = 700
"""Bytes of memory that a watched key takes, besides its own and those of its segments."""
_SEGMENT_MEMORY = 400
"""Bytes of memory that a segment of a watched key takes."""
_OBSERVED = 1.0
"""Seconds between two looks at all watched keys because clients with many patterns became observers, or no longer are:
a look takes the watchers' time, and a client can change its mind as often as it likes."""
_EXPIRE_AT_ONCE = 256
"""Lingering subscriptions that end in one turn of the reactor: about 3 ms."""


class Patterns(Protocol):
    """The patterns of all receivers: the part of `sbus.server.bus.router.Router` that is needed here."""

    listeners: tuple[PatternEvents, ...]

    @property
    def muted(self) -> Collection[Receiver]: ...
    def open_tables(self, key: bytes) -> tuple[list[dict[Receiver, int]], int]: ...


class _EndedWatches:
    """Watches of a client that have ended, to be removed: a chore of its user."""

    __slots__ = ("_client", "_interest", "_watches")

    def __init__(self, interest: Interest, client: Receiver, watches: dict[bytes, Watch]) -> None:
        self._interest = interest
        self._client = client
        self._watches = watches

    def run(self, until: int) -> bool:
        """See `sbus.fair.Entry`."""
        clock = self._interest.scheduler.clock
        while self._watches:
            self._interest.drop_some(self._client, self._watches)
            if clock() >= until:
                break
        return not self._watches

    def describe(self) -> dict[str, Any]:
        """See `sbus.fair.Entry`."""
        return {"watches": list(self._watches)}


class Interest:
    """The watched keys of one bus.

    :param may_learn: returns whether a client may ask about an open key: whether it may publish it.
    :param scheduler: when users walk.
    :param notify: sends the new answer of a watch; called once for each change.
    :param flush: sends the notices that `notify` has queued, after a timer or a turn.
    :param forget_user: called when watches of a user have ended; the user may have left since.
    :ivar uncounted: receivers whose subscriptions do not count; a client becomes one with `observe`.
    """

    def __init__(
        self,
        router: Patterns,
        dialect: Dialect,
        clock: IReactorTime,
        scheduler: Scheduler,
        *,
        may_learn: Callable[[Client, bytes], bool],
        notify: Callable[[Watch], None],
        flush: Callable[[], None],
        forget_user: Callable[[User], None],
    ) -> None:
        self.uncounted: set[Receiver] = set()
        self._router = router
        self._dialect = dialect
        self._separator = dialect.separator
        self._may_learn = may_learn
        self._clock = clock
        self.scheduler = scheduler
        self._notify = notify
        self._flush = flush
        self._forget_user = forget_user
        self._watches: dict[Receiver, dict[bytes, Watch]] = {}
        self._watched: dict[User, WatchedKeys] = {}
        self._by_key: dict[bytes, dict[WatchedKeys, int]] = {}
        self._lingering = Lingering(dialect)
        self._timer: IDelayedCall | None = None
        self._observer_timer: IDelayedCall | None = None
        self._steps = 0  # since the last look at the clock
        self._is_due = False
        self._left = _AT_ONCE

    # --- questions of clients ----------------------------------------------------------------

    def count(self, client: Receiver) -> int:
        """Return the number of keys that a client watches."""
        return len(self._watches.get(client, ()))

    def find(self, client: Receiver, key: bytes) -> Watch | None:
        """Return the watch of a client, if there is one."""
        return self._watches.get(client, {}).get(key)

    def watch(self, client: Client, key: bytes) -> Watch:
        """Watch a key for a client, or look the key up again if it is watched.

        The caller has checked the client's limits of patterns and of their bytes.

        :raises Violation: if the key is malformed or too long, or the client watches too many keys.
        """
        watch = self.find(client, key)
        if watch is not None:
            if watch.is_open:
                self._watched[client.user].answer(watch, self._ask(watch))
            return watch
        is_open = self._dialect.check(key) is None
        mine = self._watches.get(client, {})
        if len(key) > LONGEST_WATCHED or len(mine) >= MAX_WATCHED:
            raise Violation(ViolationReason.TOO_MANY_WATCHED_KEYS)
        if not self._watches:
            self._listen(True)
        self._watches[client] = mine
        cost = pattern_cost(key, self._separator)
        watch = mine[key] = Watch(client, key, cost, is_open)
        client.pattern_bytes += cost
        client.user.patterns += 1
        client.pattern_memory += watch_memory(key, self._separator)
        client.user.charge_memory(watch_memory(key, self._separator))
        if is_open:
            watched = self._watched.get(client.user)
            if watched is None:
                watched = self._watched[client.user] = WatchedKeys(client.user, self._separator, self._walk_on)
            users = self._by_key.setdefault(key, {})
            users[watched] = users.get(watched, 0) + 1
            watch.value = 0  # so that lingering subscriptions do not count
            watch.value = self._ask(watch)
            watched.add(watch)
        return watch

    def unwatch(self, client: Client, key: bytes) -> int:
        """End a watch, if there is one; return the answer now.

        :raises Violation: if the key is malformed.
        """
        if self.find(client, key) is None:
            return min(1, self.probe(client, key))
        value = self.watch(client, key).value
        mine = self._watches[client]
        ended = {key: mine.pop(key)}
        if not mine:
            del self._watches[client]
        self._end(client, ended)
        return value

    def unwatch_all(self, client: Receiver) -> None:
        """End all watches of a client."""
        mine = self._watches.pop(client, None)
        if mine:
            self._end(client, mine)

    def probe(self, client: Client, key: bytes) -> int:
        """Return how many subscribers a message with this key from this client would reach now.

        For a key that the client may learn nothing about, it is 1.

        :raises Violation: if the key is malformed.
        """
        if self._dialect.check(key) is not None or not self._may_learn(client, key):
            return 1
        tables, _ = self._router.open_tables(key)
        found: set[Receiver] = set().union(*tables)
        found -= self.uncounted
        if not client.settings.echo:
            found.discard(client)
        return sum(receiver not in self._router.muted for receiver in found)

    def observe(self, client: Client, is_observer: bool) -> None:
        """Let a client's subscriptions no longer count, or count again."""
        is_small = len(client.patterns) <= MAX_WALKS
        patterns = [each for each, (_, secret) in client.patterns.items() if not secret] if is_small else []
        if is_observer:
            for pattern in patterns:
                self.removed(client, pattern)
            self.uncounted.add(client)
        else:
            self.uncounted.discard(client)
            for pattern in patterns:
                self.added(client, pattern)
        if not is_small and self._watched and self._observer_timer is None:
            self._observer_timer = self._clock.callLater(_OBSERVED, self._observers_changed)

    def echo_changed(self, client: Client) -> None:
        """Look up the keys that a client watches: its own subscriptions count, or do not count, from now on."""
        if client.patterns and client in self._watches and (watched := self._watched.get(client.user)) is not None:
            watched.enqueue(b"", None)
            self._walk(watched)

    def judge_anew(self) -> Iterator[None]:
        """Look up the keys that all clients watch, those of one user at each step."""
        for watched in tuple(self._watched.values()):
            if watched.count:
                watched.enqueue(b"", None)
                self._walk(watched)
            yield

    def left(self, receiver: Receiver) -> None:
        """Forget a receiver whose last subscription was dropped, since it has disconnected."""
        self.uncounted.discard(receiver)

    # --- reports of the router ---------------------------------------------------------------

    def added(self, receiver: Receiver, pattern: bytes) -> None:
        """A subscription to an open pattern has come."""
        if receiver not in self.uncounted:
            self._lingering.discard(receiver, pattern)
            self._enqueue(pattern, 0)

    def removed(self, receiver: Receiver, pattern: bytes) -> None:
        """A subscription to an open pattern has gone."""
        is_plain = self._is_plain(pattern)
        if receiver in self.uncounted or (is_plain and pattern not in self._by_key):
            return
        early = self._lingering.add(receiver, pattern, not is_plain, self._clock.seconds())
        if early is not None:
            self._enqueue(early, 1)
        self._set_timer()

    # --- time --------------------------------------------------------------------------------

    def _set_timer(self) -> None:
        if self._timer is None and self._lingering:
            wait = self._lingering.first_due - self._clock.seconds()
            self._timer = self._clock.callLater(max(0.0, wait), self._time_is_up)

    def _time_is_up(self) -> None:
        """End the subscriptions that have lingered long enough."""
        self._timer = None
        for pattern in self._lingering.expire(self._clock.seconds(), _EXPIRE_AT_ONCE):
            self._enqueue(pattern, 1)
        self._set_timer()
        self._flush()

    def _observers_changed(self) -> None:
        self._observer_timer = None
        for _ in self.judge_anew():
            pass
        self._flush()

    # --- walks -------------------------------------------------------------------------------

    def _enqueue(self, pattern: bytes, concerns: int) -> None:
        """Let a walk begin for each user whose watches a changed pattern may concern."""
        found = self._by_key.get(pattern, ()) if self._is_plain(pattern) else self._watched.values()
        for watched in tuple(found):
            if watched.enqueue(pattern, concerns):
                self._walk(watched)

    def _walk(self, watched: WatchedKeys) -> None:
        """Have the walks of a user done: as far as there is time now, and the rest in turns."""
        scheduler, lines = self.scheduler, watched.user.lines
        if self._left <= 0:
            scheduler.add_chore(lines, watched)
            return
        began = scheduler.clock()
        scheduler.do(lines, watched)
        self._left -= scheduler.clock() - began
        self._flush_soon()

    def _walk_on(self, watched: WatchedKeys, until: int) -> bool:
        """Continue the walks of a user; return whether all are done."""
        clock = self.scheduler.clock
        self._steps = 0
        while watched.walks:
            walk = watched.walks[0]
            for found in walk.steps:
                if isinstance(found, int):
                    self._steps += found
                else:
                    self._steps += _WATCH_STEPS
                    if not found.is_over and (walk.concerns is None or walk.concerns == found.value):
                        value = self._is_wanted(found)
                        if value != found.value:
                            watched.answer(found, value)
                            self._notify(found)
                            self._steps += _NOTICE_STEPS
                if self._steps >= _LOOK_STEPS:
                    self._steps = 0
                    if clock() >= until:
                        self._flush_soon()
                        return False
            else:
                watched.finish()
        self._flush_soon()
        return True

    def _flush_soon(self) -> None:
        """Send the notices when the batch or the turn in hand is over."""
        if not self._is_due:
            self._is_due = True
            self._clock.callLater(0, self._flush_now)

    def _flush_now(self) -> None:
        self._is_due = False
        self._left = _AT_ONCE
        self._flush()

    # --- answers -----------------------------------------------------------------------------

    def _is_plain(self, pattern: bytes) -> bool:
        return pattern != b"" and b"*" not in pattern and not pattern.endswith(self._separator)

    def _is_wanted(self, watch: Watch) -> int:
        """Return the answer for an open watch, and count the steps of finding it."""
        if not self._may_learn(watch.client, watch.key):
            return 1
        own = None if watch.client.settings.echo else watch.client
        tables, steps = self._router.open_tables(watch.key)
        self._steps += steps
        for table in tables:
            for receiver in table:
                if (
                    receiver is not own
                    and receiver not in self.uncounted
                    and (watch.value or receiver not in self._router.muted)  # one that has left will linger
                ):
                    return 1
                self._steps += 1
        if watch.value and self._lingering:
            receivers, steps = self._lingering.look_up(watch.key)
            self._steps += steps
            return int(any(receiver is not own for receiver in receivers))
        return 0

    def _ask(self, watch: Watch) -> int:
        """Return the answer for an open watch, for its client."""
        before = self._steps
        value = self._is_wanted(watch)
        self._steps = before
        return value

    # --- the end of watches ------------------------------------------------------------------

    def _end(self, client: Receiver, watches: dict[bytes, Watch]) -> None:
        """End watches of a client: they no longer count as patterns. Their memory is released in slices."""
        cost = 0
        for watch in watches.values():
            watch.is_over = True
            cost += watch.cost
        client.pattern_bytes -= cost
        client.user.patterns -= len(watches)
        if not self._watches:
            self._listen(False)
        self.scheduler.do(client.user.lines, _EndedWatches(self, client, watches))

    def _remove(self, watch: Watch) -> None:
        if not watch.is_open:
            return
        watched = self._watched[watch.client.user]
        watched.remove(watch)
        users = self._by_key[watch.key]
        users[watched] -= 1
        if not users[watched]:
            del users[watched]
            if not users:
                del self._by_key[watch.key]
        if not watched.count:
            del self._watched[watched.user]
            watched.walks.clear()
            watched.user.lines.chores.pop(watched, None)

    def drop_some(self, client: Receiver, ended: dict[bytes, Watch]) -> None:
        """Remove some of the ended watches of a client."""
        count = memory = 0
        while ended and count < _DROPPED_AT_ONCE:
            key, watch = ended.popitem()
            self._remove(watch)
            count += 1
            memory += watch_memory(key, self._separator)
        client.pattern_memory -= memory
        client.user.charge_memory(-memory)
        self._forget_user(client.user)

    def _listen(self, on: bool) -> None:
        others = tuple(listener for listener in self._router.listeners if listener is not self)
        self._router.listeners = (*others, self) if on else others


def watch_memory(key: bytes, separator: bytes) -> int:
    """Return the memory of a watched key, in bytes."""
    return _WATCH_MEMORY + 2 * len(key) + _SEGMENT_MEMORY * key.count(separator)
