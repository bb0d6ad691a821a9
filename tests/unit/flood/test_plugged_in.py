"""Strategies and orders of plugins."""

from __future__ import annotations

from typing import Any

import pytest
from zope.interface import implementer

from sbus.errors import CloseReason
from sbus.flood import (
    Verdict,
)
from sbus.interfaces import IQueueOrder, ISoftStrategy
from tests.unit.flood.connection import (
    ORDER,
    A,
    Asked,
    B,
    C,
    Connection,
    D,
    DropOldest,
    E,
    packets,
)


@implementer(ISoftStrategy)
class Raising:
    """A strategy that keeps one message, drops another, and fails at the next."""

    selector = b"blocking/soft/raising"
    always = None

    def __init__(self) -> None:
        self.verdicts = iter([Verdict.KEEP, Verdict.DROP])

    def decide(self, queue: Any, packet: bytes) -> Verdict:
        return next(self.verdicts)


@pytest.mark.parametrize("congested", [False, True])
def test_messages_of_a_strategy_that_fails_are_counted(congested):
    """When a strategy fails in the middle of a run, every message of the run is dropped and counted once."""
    connection = Connection()
    if congested:
        connection.stall(*packets(7))
    connection.set_strategies(soft=Raising())
    run = packets(10, 20, 30, 40)
    with pytest.raises(StopIteration):
        connection.stall(*run)
    connection.queue.discard_all()
    assert connection.lost == ([5, 107] if congested else [4, 100])
    assert len(connection.queue) == connection.queue.messages == connection.budget.bytes == 0


def test_soft_strategy_of_others():
    """A strategy that has to be asked is asked about each message that waits, and obeyed."""
    strategy = Asked(Verdict.KEEP, Verdict.DROP, Verdict.BLOCK, Verdict.CLOSE)
    connection = Connection()
    connection.set_strategies(soft=strategy)
    assert connection.queue.settings.can_block()
    connection.publish(A, B)
    connection.queue.write(b"reply")
    connection.stall(C)
    assert strategy.asked == [A, B, C]
    assert connection.lost == [1, 2]
    assert connection.blocks == [True]
    assert len(connection.queue) == 3
    connection.publish(D)
    assert connection.closed is CloseReason.SOCKET_FULL
    assert connection.lost == [4, 10]


def test_hard_strategy_of_others():
    """A hard strategy is asked at the limit only; what it says to keep is kept past it."""
    strategy = Asked(Verdict.KEEP, Verdict.DROP, Verdict.BLOCK, Verdict.CLOSE)
    connection = Connection(messages=1)
    connection.set_strategies(hard=strategy)
    assert connection.queue.settings.can_block()
    connection.stall(A, B, C, D)
    assert strategy.asked == [B, C, D]
    assert connection.queue.messages == 3
    assert connection.lost == [1, 3]
    assert connection.blocks == [False]
    connection.publish(E)
    assert connection.closed is CloseReason.QUEUE_FULL
    assert connection.lost == [5, 15]


def test_hard_strategy_is_not_asked_for_nothing():
    """Toward publishers that soft/block may not block, the hard strategy does not count, so it is not asked."""
    strategy = Asked()
    connection = Connection(soft="block", messages=1)
    connection.set_strategies(hard=strategy)
    connection.may_block = False
    connection.stall(A, B)
    assert connection.lost == [1, 2]
    assert strategy.asked == []


@pytest.mark.parametrize(("order", "kept"), [("queue", [C, D]), ("stack", [D, B, A]), ("random", [D, B, A])])
def test_drop_next(order, kept):
    """A strategy can make room by dropping what would be sent next, in any order; replies stay."""
    connection = Connection(messages=3)
    connection.set_strategies(hard=DropOldest(7))
    connection.stall(A, B, C)
    connection.queue.write(b"reply")
    connection.set_order(ORDER[order])
    connection.publish(D)
    assert connection.lost[0] + connection.queue.messages == 4
    assert connection.queue.size == sum(map(len, kept)) == connection.budget.bytes
    assert [packet for packet in connection.drain() if packet != b"reply"] == kept
    assert not connection.queue.drop_next()


@pytest.mark.parametrize("order", ORDER)
def test_drop_next_of_nothing_but_replies(order):
    """Where only replies wait there is nothing to drop."""
    connection = Connection(order=order)
    connection.queue.write(b"reply")
    connection.stall()
    assert not connection.queue.drop_next()
    assert connection.drain() == [b"reply"]


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_all_is_dropped(kind):
    """If a strategy drops the backlog and the new message too, the queue is no longer congested and blocks nothing."""
    connection = Connection(messages=2)
    connection.stall(A, B)
    connection.set_strategies(**{kind: DropOldest(0, Verdict.DROP)})
    connection.publish(C)
    assert connection.lost == [3, 6]
    assert not connection.queue.is_congested
    assert connection.moves == [(True, True)]
    connection.publish(D)
    assert connection.drain() == [D]


def test_order_of_others():
    """An order of a plugin gets the arrival, the size and the order chosen before; the lowest rank goes first."""

    @implementer(IQueueOrder)
    class Shortest:
        selector = b"order/shortest"
        newestFirst = None
        arrival = False

        def rank(self, arrival: int, size: int, newest_first: bool) -> Any:
            seen.append((arrival, size, newest_first))
            return size

    seen: list[tuple[int, int, bool]] = []
    connection = Connection(order="stack")
    connection.set_order(Shortest())
    connection.stall(C, A, b"c" * 3, B)
    assert connection.drain() == [A, B, C, b"c" * 3]  # equal ranks in order of arrival
    assert seen == [(1, 3, True), (2, 1, True), (3, 3, True), (4, 2, True)]
