"""A connection without sockets, whose receiver takes what the test says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zope.interface import implementer

from sbus.errors import CloseReason
from sbus.flood import (
    HARD_STRATEGIES,
    ORDERS,
    SOFT_STRATEGIES,
    Loss,
    Outcome,
    QueueLimits,
    Run,
    SendQueue,
    SharedBudget,
    Until,
    UserShare,
    Verdict,
)
from sbus.interfaces import IHardStrategy, IQueueOrder, ISoftStrategy

BATCH = 64
SOFT = {strategy.selector.rsplit(b"/", 1)[1].decode(): strategy for strategy in SOFT_STRATEGIES}
HARD = {strategy.selector.rsplit(b"/", 1)[1].decode(): strategy for strategy in HARD_STRATEGIES}
ORDER = {order.selector.rsplit(b"/", 1)[1].decode(): order for order in ORDERS}


def share_of(budget: SharedBudget, user: object) -> UserShare:
    """The share of a user in a budget; without a user, one of its own."""
    return UserShare(budget) if user is None else SHARES.setdefault((budget, user), UserShare(budget))


def fair_share(budget: SharedBudget, user: str) -> int:
    return share_of(budget, user).fair_share()


SHARES: dict[tuple[SharedBudget, object], UserShare] = {}
"""The users of the tests, by name."""


class Connection:
    """A receiver with its queue, and a socket that takes as much as the test says; it records every outcome."""

    def __init__(
        self,
        *,
        messages: int = 1000,
        size: int = 1 << 20,
        budget: SharedBudget | None = None,
        user: object = None,
        soft: str | None = None,
        hard: str | None = None,
        order: str | None = None,
    ) -> None:
        self.budget = budget or SharedBudget()
        self.queue = SendQueue(self, QueueLimits(messages, size), share_of(self.budget, user))
        if soft:
            self.set_strategies(soft=SOFT[soft])
        if hard:
            self.set_strategies(hard=HARD[hard])
        if order:
            self.set_order(ORDER[order])
        self.may_block = True
        self.delivered: list[bytes] = []
        self.lost = [0, 0]
        self.blocks: list[bool] = []
        self.moves: list[tuple[bool, bool]] = []
        self.closed: CloseReason | None = None

    def on_drained(self, has_room: bool, is_empty: bool) -> None:
        """See `sbus.flood.QueueOwner`."""
        self.moves.append((has_room, is_empty))

    def on_lost(self, losses: tuple[Loss, ...]) -> None:
        """See `sbus.flood.QueueOwner`."""
        for _, messages, size in losses:
            assert messages
            self.count(messages, size)

    def count(self, dropped: int, dropped_bytes: int) -> None:
        self.lost[0] += dropped
        self.lost[1] += dropped_bytes

    def act(self, outcome: Outcome | None) -> None:
        """Record what became of messages that were not simply kept."""
        if outcome is None:
            return
        assert outcome != Outcome()
        self.count(outcome.dropped, outcome.dropped_bytes)
        assert sum(loss.messages for loss in outcome.losses) == outcome.dropped
        assert sum(loss.size for loss in outcome.losses) == outcome.dropped_bytes
        if outcome.close is not None:
            assert self.closed is None
            self.closed = outcome.close
        if outcome.block is not None:
            assert len(self.queue)
            self.blocks.append(outcome.block is Until.EMPTY)

    def set_strategies(self, **strategies: Any) -> None:
        """Choose other strategies."""
        self.queue.configure(replace(self.queue.settings, **strategies))

    def set_order(self, order: IQueueOrder) -> None:
        """Choose another order."""
        self.queue.configure(self.queue.settings.with_order(order))

    # What a server does.

    def publish(self, *packets: bytes, singly: bool = False) -> None:
        """Messages come for this receiver, all in one batch.

        :param singly: have each decided about by itself.
        """
        if self.queue.is_congested:
            if singly:
                self.act(self.queue.admit_each(list(packets), self.may_block))
            elif packets:
                self.act(self.queue.admit(Run(list(packets)), self.may_block))
        else:
            self.queue.pending += packets

    def flush(self, room: int = 0) -> list[bytes]:
        """Send to a socket that is full after `room` packets; return the packets that were sent."""
        before = len(self.delivered)
        while taken := self.queue.take(BATCH):
            sent = min(room, len(taken))
            room -= sent
            self.delivered += taken[:sent]
            self.ack(taken, sent)
            if sent < len(taken):
                break
        return self.delivered[before:]

    def ack(self, taken: list[bytes], sent: int) -> None:
        """Report what was sent, and settle what a first flush has left."""
        self.queue.ack(taken, sent)
        if self.queue.is_congested and self.queue.pending:
            self.act(self.queue.settle(self.may_block))

    def stall(self, *packets: bytes) -> None:
        """Messages come while the socket is full."""
        self.publish(*packets)
        self.flush(0)

    def drain(self) -> list[bytes]:
        """The socket takes everything."""
        return self.flush(1 << 30)


def packets(*sizes: int) -> list[bytes]:
    """A message of each of these sizes, no two alike."""
    return [bytes([i]) * size for i, size in enumerate(sizes)]


A, B, C, D, E = packets(1, 2, 3, 4, 5)
"""Messages of 1 to 5 bytes."""


@implementer(ISoftStrategy, IHardStrategy)
class Asked:
    """A strategy that answers what the test wants, and remembers what it was asked."""

    selector = b"blocking/soft/asked"
    always = None

    def __init__(self, *verdicts: Verdict) -> None:
        self.verdicts = list(verdicts)
        self.asked: list[bytes] = []

    def decide(self, queue: SendQueue, packet: bytes) -> Verdict:
        self.asked.append(packet)
        return self.verdicts.pop(0)


@implementer(ISoftStrategy, IHardStrategy)
class DropOldest:
    """Makes room by dropping what would be sent next; if that is not enough, drops the message."""

    selector = b"blocking/hard/oldest"
    always = None

    def __init__(self, size: int, verdict: Verdict = Verdict.KEEP) -> None:
        self.size = size
        self.verdict = verdict

    def decide(self, queue: SendQueue, packet: bytes) -> Verdict:
        while queue.size + len(packet) > self.size and queue.drop_next():
            pass
        return self.verdict
