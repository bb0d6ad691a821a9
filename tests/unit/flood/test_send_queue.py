"""Flood control: nothing is lost that is not counted, nothing is out of its promised order, and each limit is exact."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from zope.interface.verify import verifyObject

from sbus.flood import (
    HARD_STRATEGIES,
    ORDERS,
    SOFT_STRATEGIES,
    Run,
    SharedBudget,
    State,
)
from sbus.interfaces import IHardStrategy, IPacketQueue, IQueueOrder, ISoftStrategy
from sbus.protocol import controls
from sbus.protocol.notices import LossReason
from tests.support.costs import calls
from tests.unit.flood.connection import (
    BATCH,
    HARD,
    ORDER,
    SOFT,
    A,
    B,
    C,
    Connection,
)

# --- what the interfaces promise ------------------------------------------------------------------


def test_strategies_and_orders_by_name():
    """Each is shown by its selector, and a strategy of the protocol decides alike about every message."""
    for strategy in (*SOFT_STRATEGIES, *HARD_STRATEGIES):
        assert repr(strategy) == f"<Strategy {strategy.selector.decode()}>"
        assert strategy.decide(None, b"") is strategy.always
    for order in ORDERS:
        assert repr(order) == f"<Order {order.selector.decode()}>"


@pytest.mark.parametrize("is_congested", [False, True])
def test_deaf(is_congested):
    """A deaf queue ignores messages for good, and sends what waits, replies included."""
    receiver = Connection()
    receiver.publish(b"a")
    if is_congested:
        receiver.flush()
    receiver.queue.write(b"reply")
    receiver.queue.deafen()
    assert (receiver.queue.messages, receiver.queue.replies) == (1, 1)
    receiver.publish(b"ignored")
    receiver.queue.write(b"another")
    assert receiver.queue.lose(1, 5, LossReason.SHARE) is None
    assert receiver.flush(10) == [b"a", b"reply", b"another"]
    receiver.publish(b"ignored")
    receiver.publish(b"ignored", singly=True)
    assert receiver.queue.state is State.DEAF
    assert receiver.flush(10) == []
    assert receiver.lost == [0, 0]
    assert receiver.budget.bytes == receiver.budget.memory.held == receiver.budget.queues == 0


def test_losses_of_a_queue_in_front():
    """What is lost in front of a queue that is held stands in the receipt that comes first when it is released."""
    front, behind = Connection(messages=1, hard="discard", order="stack"), Connection()
    for each in (front, behind):
        each.queue.configure(replace(each.queue.settings, receipts=True))
    behind.queue.hold(front.queue)
    behind.publish(b"last")
    front.publish(b"a", b"bc")
    assert front.flush() == []
    front.queue.discard_all()
    behind.queue.release(front.queue)
    assert behind.flush(10) == [b"CMSG lost\0002 3 2 several", b"last"]


def test_the_newest_of_a_key_under_other_orders():
    """The newest value takes the place of an older one only in order of arrival; the index of keys goes with it."""
    one, two = b"MSG k\0001", b"MSG k\0002"
    stack = Connection(soft="latest", order="stack")
    stack.publish(one)
    stack.flush()
    stack.publish(two)
    assert stack.flush(10) == [two, one]
    queue = Connection(soft="latest")
    queue.publish(b"MSG j\000", one)
    queue.flush()
    queue.publish(two)
    queue.set_order(ORDER["stack"])
    assert queue.flush(10) == [two, b"MSG j\000"]
    assert queue.queue.conflated == 1


def test_the_newest_of_a_key_before_the_backlog_is_in_order_of_arrival():
    """A receiver that has just chosen order of arrival again has nothing replaced until its next packet is taken."""
    one, two, three = b"MSG k\0001", b"MSG k\0002", b"MSG k\0003"
    queue = Connection(soft="latest", order="stack")
    queue.publish(one)
    queue.flush()
    queue.set_order(ORDER["queue"])
    queue.publish(two)
    assert queue.queue.conflated == 0
    assert queue.flush(1) == [one]
    queue.publish(three)
    assert queue.flush(10) == [three]
    assert queue.queue.conflated == 1


def test_a_queue_without_room_for_the_newest_of_other_keys():
    """In a full queue, messages of waiting keys are replaced as far as they may grow, and the others are dropped."""
    queue = Connection(soft="latest", messages=2, size=30)
    queue.publish(b"MSG j\00", b"MSG k\00")
    queue.flush()
    queue.publish(b"MSG j\0" + bytes(100), b"MSG k\0001", b"MSG l\0")
    assert queue.flush(10) == [b"MSG j\00", b"MSG k\0001"]
    assert queue.queue.lost == 2


@pytest.mark.parametrize("most", [2, 10])
def test_a_message_that_shrinks_makes_room_for_the_next_one(most):
    """Together, messages find the room that they would find one by one."""
    old = [b"MSG j\0" + bytes(20), b"MSG k\0" + bytes(5)]
    new = [b"MSG j\0", b"MSG k\0" + bytes(21)]
    for batches in ([new], [[packet] for packet in new]):
        queue = Connection(soft="latest", messages=most, size=43)
        queue.publish(*old)
        queue.flush()
        for batch in batches:
            queue.publish(*batch)
        assert queue.queue.size == len(b"".join(new))
        assert queue.flush(10) == new
        assert (queue.queue.lost, queue.queue.conflated) == (0, 2)
        assert queue.budget.bytes == 0


@pytest.mark.parametrize(
    ("size", "batch", "sent", "conflated"),
    [
        # Only later messages of the batch make room.
        (43, [b"MSG l\0", b"MSG k\0" + bytes(12), b"MSG m\0", b"MSG j\0"], [1, 0, 2], 2),
        # The older message of a key would have room behind the newer one, after the whole batch.
        (40, [b"MSG k\0" + bytes(12), b"MSG k\0", b"MSG j\0"], [1], 3),
    ],
)
def test_no_key_waits_twice_because_messages_came_together(size, batch, sent, conflated):
    """A message takes the place of the waiting one of its key, and never goes behind it."""
    queue = Connection(soft="latest", size=size)
    queue.publish(b"MSG j\0" + bytes(20), b"MSG k\0" + bytes(5))
    queue.flush()
    queue.publish(*batch)
    assert queue.flush(10) == [batch[-1], *(batch[at] for at in sent)]
    assert (queue.queue.lost, queue.queue.conflated) == (0, conflated)
    assert queue.budget.bytes == 0


def test_a_full_queue_for_the_newest_looks_up_each_key_once():
    """A decision about a long run takes no longer in a full queue than in one with room."""
    run = Run([b"MSG %d\0%d" % (key, number) for number in range(4_500) for key in range(2)])
    queues = [Connection(soft="latest", messages=most) for most in (1, 10_000)]
    for queue in queues:
        queue.publish(b"MSG 0\0")
        queue.flush()
        queue.publish(b"MSG 0\0")
    assert run.newest.count == 2
    looks = [calls(queue.queue.admit, run, True) for queue in queues]
    assert max(looks) < 200
    assert [(queue.queue.lost, queue.queue.conflated) for queue in queues] == [(1, 9_000), (0, 9_000)]


def test_interfaces():
    """The built-in strategies, orders and the queue keep the promises of their interfaces."""
    assert all(verifyObject(ISoftStrategy, strategy) for strategy in SOFT_STRATEGIES)
    assert all(verifyObject(IHardStrategy, strategy) for strategy in HARD_STRATEGIES)
    assert all(verifyObject(IQueueOrder, order) for order in ORDERS)
    assert verifyObject(IPacketQueue, Connection().queue)


def test_selectors():
    """The control messages of the protocol, in the order of its table; the first is the default of each."""
    for group, parts in ((controls.SOFT, SOFT_STRATEGIES), (controls.HARD, HARD_STRATEGIES), (controls.ORDER, ORDERS)):
        rows = [control for control in controls.CONTROLS if control.group == group]
        assert [part.selector for part in parts] == [control.key for control in rows]
        assert [control.default for control in rows] == [True, *[False] * (len(rows) - 1)]


# --- a receiver that takes everything -------------------------------------------------------------


@pytest.mark.parametrize(("soft", "hard", "order"), list(product(SOFT, HARD, ORDER)))
def test_nothing_happens_when_nobody_is_slow(soft, hard, order):
    """While the socket takes everything no strategy, limit or order counts: all goes in the order of arrival."""
    connection = Connection(messages=1, size=1, budget=SharedBudget(1), soft=soft, hard=hard, order=order)
    for _ in range(3):
        connection.publish(C, A)
        connection.queue.write(b"reply")
        connection.publish(B)
        assert len(connection.queue) == 4
        assert connection.drain() == [C, A, b"reply", B]
    assert connection.lost == [0, 0]
    assert (connection.blocks, connection.moves) == ([], [])
    assert connection.closed is None
    assert not connection.queue.is_congested
    assert connection.budget.bytes == 0


def test_more_than_a_batch():
    """More than fits a batch goes in several, in order."""
    connection = Connection(messages=1)
    many = [b"%d" % i for i in range(3 * BATCH + 1)]
    connection.publish(*many)
    assert connection.drain() == many
    connection.publish(*many)
    assert connection.flush(BATCH + 1) == many[: BATCH + 1]
    assert connection.drain() == many[BATCH + 1 : BATCH + 2]  # the limit is one message
    assert connection.lost[0] == 2 * BATCH - 1


def test_on_sent():
    """A watcher gets exactly the packets that were sent, replies included."""
    connection = Connection()
    seen: list[bytes] = []
    connection.queue.on_sent = seen.extend
    connection.publish(A, B, C)
    connection.queue.write(b"reply")
    for room in (1, 0, 2, 5):
        connection.flush(room)
        assert seen == connection.delivered
    assert len(seen) == 4
