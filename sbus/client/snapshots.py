"""Snapshots: the last values that the server sends to a client that comes late.

Theory of operation
-------------------

``CMSG last`` subscribes and makes the server send the last values of matching keys, as ordinary messages, and then
``last/done``. The client has to distinguish these messages from those that waited before: a snapshot is only for the
subscription that asked for it, as another one with a matching pattern has had these values.

So the request is sent between two questions. Answers come in order, and a message stands where it was queued. From the
answer to ``bye/on``, which follows everything queued before, until ``last/done``, every message with a matching key
belongs to the snapshot. A server without extensions does not answer ``bye/on``, so that no snapshot begins; its answer
to ``whoami`` ends one that a server without last values cannot end. After that, the subscription gets other messages
too: earlier ones are older than the snapshot.

``SUB`` follows ``last`` for such servers. Identical subscriptions are counted, so the client ends each: one ``UNSUB``
for the ``SUB``, and one for every ``last``. If the server refuses the pattern, it denies ``last`` and ``SUB``; the
answer to ``whoami`` follows both.

Under another order than ``order/queue`` the answer to ``bye/on`` overtakes waiting messages. One of them may count as a
part of the snapshot. To lose none, the other subscriptions get the snapshot too.

After a reconnect the client asks for the snapshot again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sbus.client.dispatch import Dispatcher, Message, Sink
from sbus.client.identity import Sender
from sbus.client.questions import CallingWaiter, Questions
from sbus.protocol.controls import BYE_ON, WHOAMI
from sbus.protocol.keys import matches_open
from sbus.protocol.notices import LONGEST_DENIED
from sbus.protocol.packets import MSG

__all__ = ["LastValue", "Snapshots"]

_MESSAGE = MSG + b" "


class LastValue(Message):
    """A message of a snapshot.

    :ivar pattern: the pattern of the subscription that it is for; None if it is for all whose patterns match.
    """

    pattern: bytes | None
    sender: Sender | None = None

    @property
    def is_last_value(self) -> bool:
        """True: it was published before this client subscribed."""
        return True


class _Snapshot:
    """One snapshot.

    :param sinks: the subscriptions that it is for.
    :param dispatcher: has all subscriptions, and the current sender.
    :param exclusive: whether no other subscription gets it.
    """

    def __init__(self, pattern: bytes, sinks: Iterable[Sink], dispatcher: Dispatcher, exclusive: bool) -> None:
        self.pattern = pattern
        self._sinks = sorted(sinks, key=lambda sink: sink.callback is not None)
        self._dispatcher = dispatcher
        self._exclusive = exclusive
        self._has_begun = False

    def begin(self) -> None:
        """Have the subscriptions get nothing that came before."""
        self._has_begun = True
        for sink in self._sinks:
            self._dispatcher.begin(sink)

    def end(self) -> None:
        """Have the subscriptions get all messages from here on."""
        if not self._has_begun:
            self.begin()
        for sink in self._sinks:
            self._dispatcher.join(sink)

    def take(self, packet: bytes) -> bool:
        """Deliver a message of this snapshot; return False for any other packet."""
        if not packet.startswith(_MESSAGE):
            return False
        key, _, payload = packet[len(_MESSAGE) :].partition(b"\0")
        if not matches_open(self.pattern, key):
            return False
        value = LastValue(key, payload)
        value.pattern = self.pattern if self._exclusive else None
        value.sender = self._dispatcher.kind(key, payload).sender
        messages: list[Message] = [value]  # one list, by which sinks that share a queue know it
        sinks = self._sinks
        if not self._exclusive:
            others = [sink for sink in self._dispatcher.sinks_for(key) if sink not in sinks]
            sinks = sorted([*sinks, *others], key=lambda sink: sink.callback is not None)  # it may read on
        for sink in sinks:
            sink.deliver(messages)
        return True


class Snapshots:
    """The snapshots of one client.

    :param dispatcher: has the subscriptions, and shows each packet to a snapshot that is arriving.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._sinks: dict[bytes, list[Sink]] = {}
        self._requests: Counter[bytes] = Counter()
        self._unanswered: Counter[bytes] = Counter()  # requests whose ``whoami`` has not been answered
        self._current: _Snapshot | None = None

    def add(self, sink: Sink) -> None:
        """Note a subscription that gets a snapshot on each connection."""
        self._sinks.setdefault(sink.pattern, []).append(sink)

    def discard(self, sink: Sink) -> None:
        """Forget a subscription, if it gets snapshots."""
        sinks = self._sinks.get(sink.pattern, [])
        if sink in sinks:
            sinks.remove(sink)
            if not sinks:
                del self._sinks[sink.pattern]

    def patterns(self) -> tuple[bytes, ...]:
        """Return the patterns with subscriptions that get snapshots."""
        return tuple(self._sinks)

    def request(
        self, questions: Questions, pattern: bytes, sink: Sink | None = None, *, exclusive: bool = True
    ) -> None:
        """Expect a snapshot, asked for with `sbus.client.choices.last_packets`.

        :param exclusive: whether the server's queue for this client is in ``order/queue``.
        :param sink: the subscription that it is for; None: all with this pattern.
        """
        snapshot = _Snapshot(pattern, self._sinks[pattern] if sink is None else [sink], self._dispatcher, exclusive)
        self._requests[pattern] += 1
        self._unanswered[pattern] += 1
        questions.ask(BYE_ON, b"", CallingWaiter(lambda _: self._begin(snapshot)))
        questions.ask(WHOAMI, b"", CallingWaiter(lambda _: self._answered(snapshot)))

    def take_requests(self, pattern: bytes) -> int:
        """Return how many requests for a pattern were sent on this connection, and forget them."""
        return self._requests.pop(pattern, 0)

    def done(self, pattern: bytes) -> bool:
        """End the snapshot of a pattern; return whether it was expected."""
        snapshot = self._current
        if snapshot is None or snapshot.pattern != pattern:
            return False
        self._end(snapshot)
        return True

    def refuse(self, pattern: bytes) -> bool:
        """End the snapshot of a pattern that the server has refused; return whether it may refuse the pattern again."""
        if self._current is not None and self._current.pattern[:LONGEST_DENIED] == pattern:
            self._end(self._current)
        return any(each[:LONGEST_DENIED] == pattern for each in self._unanswered)

    def disconnected(self) -> None:
        """Forget what the lost connection was asked for."""
        self._requests.clear()
        self._unanswered.clear()
        self._stop()

    def _begin(self, snapshot: _Snapshot) -> None:
        self._current = snapshot
        self._dispatcher.intercept = snapshot.take
        snapshot.begin()

    def _answered(self, snapshot: _Snapshot) -> None:
        self._unanswered -= Counter([snapshot.pattern])
        self._end(snapshot)

    def _end(self, snapshot: _Snapshot) -> None:
        snapshot.end()
        if self._current is snapshot:
            self._stop()

    def _stop(self) -> None:
        self._current = None
        self._dispatcher.intercept = None
