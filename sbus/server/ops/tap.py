"""The tap: a look at the messages published now, for operators.

.. rubric:: Theory of operation

Without a viewer, the registry's ``deliver`` is that of `sbus.server.bus.delivery`, and there is no tap. While at least
one `Viewer` looks, ``deliver`` is `Tap.deliver`, which delivers first and then notes the run for each viewer.

Noting has a budget: a tenth of the time that passes, and at most `BURST` at once, which is a tenth of the longest turn
of a user. Making the text of the events is charged to it as well (`Tap.charged`). As in `sbus.fair.scheduler`, each
charge has a limit, because it may include preemption. Messages beyond the budget are delivered and counted
(`Tap.missed`), but not looked at.

Attribution: flood control reports losses by receiver, as numbers, and drops the newest messages. So a loss
of n messages is that of the last n messages for that receiver before the report. A receiver that waits for mail loses
its messages some turns later, and the loss may be attributed to newer ones. A loss of older messages shows in the
counters alone.

The memory is bounded: `MOST_RUNS` runs, `MOST_LOSSES` losses, and the notes of each viewer. Notes live for `TICK` of
`sbus.admin.answers`, and so do the receivers that they refer to.

Rejected: a second subscription to every pattern (it would change routes, block publishers, and miss secrets and keys
without a route); an observer (`IObserver.published` takes the fast path from all clients as long as it exists).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from sbus.fair.scheduler import LONGEST_CHARGE
from sbus.flood import PROGRAM, PayloadMessage, Signature
from sbus.routing.route import Route
from sbus.server.bus.delivery import without
from sbus.server.bus.registry import SubscriptionRegistry
from sbus.server.core.interfaces import Publisher, Receiver

__all__ = ["BURST", "MOST_LOSSES", "MOST_RUNS", "SHARE", "Run", "Source", "Tap", "Viewer", "source_of"]

SHARE = 0.1
"""The part of all time that noting may take."""
BURST = 0.0004
"""Seconds that it may take at once."""
MOST_RUNS = 2048
"""Runs that are kept to find out who lost a message."""
MOST_LOSSES = 1024
"""Reports of losses that are kept for it."""
_NAMED = 8
"""Clients that are named for each message that was lost."""
_EFFORT = 1000
"""Runs that are looked through in one tick to find out who lost a message; each 64 receivers count as one more."""
_SETTLED = 0.05
"""Seconds between two times that the losses are settled."""


class Source(NamedTuple):
    """A publisher: its number, PID, UID and the name of its socket. The program around the bus has number 0."""

    client: int
    pid: int
    uid: int
    listener: str


class Run(NamedTuple):
    """Messages that were delivered together.

    :ivar first: the number of the first message, since the tap was opened.
    :ivar at: when, in seconds since the epoch.
    :ivar sender: the publisher as receivers see it; for a link's messages, their author.
    """

    first: int
    at: float
    packets: list[bytes]
    receivers: tuple[Receiver, ...]
    publisher: Source
    sender: Signature


class Viewer(Protocol):
    """Looks at published messages."""

    def note(self, run: Run) -> None:
        """Note a run; the time that this takes is charged to the budget."""


class _Loss:
    """A report of a loss: the receiver, the messages, and the number of the message after the last one."""

    __slots__ = ("end", "messages", "receiver")

    def __init__(self, receiver: Receiver, messages: int, end: int) -> None:
        self.receiver = receiver
        self.messages = messages
        self.end = end


class _Span(NamedTuple):
    """The place of a run, and its receivers."""

    first: int
    end: int
    receivers: tuple[Receiver, ...]


class Tap:
    """Follows published messages as long as there are viewers.

    :param registry: puts the tap into the way of messages, and takes it out again.
    :param clock: seconds for the budget.
    :ivar missed: messages that were not looked at, since the start.
    :ivar seen: messages that were delivered while the tap was open.
    """

    def __init__(self, registry: SubscriptionRegistry, clock: Callable[[], float] = time.perf_counter) -> None:
        self._registry = registry
        self._clock = clock
        self._viewers: tuple[Viewer, ...] = ()
        self._opened_at = 0  # messages handled before that
        self._left = BURST
        self._filled_at = clock()
        self._spans: list[_Span] = []
        self._losses: list[_Loss] = []
        self._lost: dict[int, list[int]] = {}
        self._lost_before: dict[int, list[int]] = {}
        self._settled_at = 0.0
        self.missed = 0
        self.seen = 0

    def add(self, viewer: Viewer) -> None:
        """Begin to note published messages for a viewer."""
        if not self._viewers:
            self._registry.open_tap(self)
            self._opened_at = self._registry.delivery.handled() - self.seen
        self._viewers = (*self._viewers, viewer)

    def remove(self, viewer: Viewer) -> None:
        """Stop noting for a viewer; without any, the tap is closed."""
        before, self._viewers = self._viewers, tuple(each for each in self._viewers if each is not viewer)
        if before and not self._viewers:
            self._registry.close_tap(self)
            self._spans, self._losses = [], []
            self._lost, self._lost_before = {}, {}

    def deliver(
        self,
        packets: list[bytes],
        route: Route[Receiver],
        publisher: Publisher | None,
        at_once: bool = False,
        has_echo: bool = True,
        /,
    ) -> int:
        """See `sbus.server.bus.delivery.Delivery.deliver`."""
        reported = len(self._losses)
        done = self._registry.delivery.deliver(packets, route, publisher, at_once, has_echo)
        self._note(packets, done, route, publisher, has_echo, reported)
        return done

    def deliver_payload(
        self, message: PayloadMessage, route: Route[Receiver], publisher: Publisher | None, has_echo: bool, /
    ) -> int:
        """See `sbus.server.bus.delivery.Delivery.deliver_payload`; viewers see the length, and no payload."""
        reported = len(self._losses)
        done = self._registry.delivery.deliver_payload(message, route, publisher, has_echo)
        self._note([message], done, route, publisher, has_echo, reported)
        return done

    def _note(
        self,
        packets: list[bytes],
        done: int,
        route: Route[Receiver],
        publisher: Publisher | None,
        has_echo: bool,
        reported: int,
    ) -> None:
        """Note a run that was delivered.

        :param done: the messages, from the front, that were dealt with.
        :param reported: the losses that were reported before.
        """
        receivers = route.receivers if has_echo else without(route.receivers, publisher)
        first = self.seen
        self.seen += done
        if len(self._losses) > reported:
            for loss in self._losses[reported:]:
                loss.end = self.seen
        now = self._clock()
        left = self._left + (now - self._filled_at) * SHARE
        self._left = left if left < BURST else BURST
        self._filled_at = now
        if left <= 0 or len(self._spans) >= MOST_RUNS:
            self.missed += done
        elif done:
            self._spans.append(_Span(first, self.seen, receivers))
            run = Run(
                first,
                time.time(),
                packets if done == len(packets) else packets[:done],
                receivers,
                source_of(publisher),
                PROGRAM if publisher is None else publisher.signature,
            )
            for viewer in self._viewers:
                viewer.note(run)
            self._charge(self._clock() - now)

    def _charge(self, took: float) -> None:
        self._left -= min(took, LONGEST_CHARGE / 1e9)

    def dropped(self, receiver: Receiver, messages: int, size: int) -> None:
        """Note that messages were dropped for a receiver (`IObserver.dropped`)."""
        if len(self._losses) < MOST_LOSSES:
            number = self._registry.delivery.number
            end = self.seen if number is None else number - self._opened_at
            self._losses.append(_Loss(receiver, messages, end))

    def charged(self, pieces: Iterator[str]) -> Iterator[str]:
        """Yield the pieces of the viewers' events, and charge the time that making them takes."""
        while True:
            began = self._clock()
            piece = next(pieces, None)
            self._charge(self._clock() - began)
            if piece is None:
                return
            yield piece

    def settle(self) -> None:
        """Find out who lost which of the messages noted so far; call it before the events are made."""
        now = self._clock()
        if now < self._settled_at + _SETTLED:
            return  # for another viewer
        self._settled_at = now
        spans, self._spans = self._spans, []
        losses, self._losses = self._losses, []
        self._lost_before, self._lost = self._lost, {}
        effort = _EFFORT
        for loss in losses:
            effort = self._mark(spans, loss, effort)
        self._charge(self._clock() - now)

    def _mark(self, spans: list[_Span], loss: _Loss, effort: int) -> int:
        """Mark the messages that one report is about; return the effort that is left."""
        receiver, messages, end = loss.receiver, loss.messages, loss.end
        number = getattr(receiver, "number", 0)
        for span in reversed(spans):
            if messages <= 0 or effort <= 0:
                break
            effort -= 1
            if span.first >= end:
                continue
            effort -= len(span.receivers) // 64
            if receiver not in span.receivers:
                continue
            last = min(span.end, end)
            count = min(messages, last - span.first)
            for at in range(last - count, last):
                lost = self._lost.setdefault(at, [0])
                lost[0] += 1
                if len(lost) <= _NAMED:
                    lost.append(number)
            messages -= count
            effort -= count
        return effort

    def lost(self, number: int) -> tuple[int, list[int]]:
        """Return how many receivers have lost a message, and the numbers of some of them."""
        lost = self._lost.get(number) or self._lost_before.get(number)
        return (0, []) if lost is None else (lost[0], lost[1:])


def source_of(publisher: Publisher | None) -> Source:
    """Return the fields of a publisher in events."""
    if publisher is None:
        return Source(0, 0, 0, "")
    listener = getattr(publisher, "listener", None)
    peer = publisher.peer
    return Source(getattr(publisher, "number", 0), peer.pid, peer.uid, "" if listener is None else listener.name)
