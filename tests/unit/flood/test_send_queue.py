"""Flood control: nothing is lost that is not counted, nothing is out of its promised order, and each limit is exact."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import groupby, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from zope.interface import implementer
from zope.interface.verify import verifyObject

from sbus.errors import CloseReason
from sbus.flood import (
    HARD_STRATEGIES,
    ORDERS,
    SOFT_STRATEGIES,
    UNLIMITED,
    Loss,
    MemoryAccount,
    Outcome,
    QueueLimits,
    Run,
    SendQueue,
    SharedBudget,
    State,
    Until,
    UserShare,
    Verdict,
)
from sbus.flood.backlogs import PRICE, RANKED, REPLY, FifoBacklog, Reply
from sbus.flood.budget import MINIMUM
from sbus.interfaces import IHardStrategy, IPacketQueue, IQueueOrder, ISoftStrategy
from sbus.protocol.notices import LossReason
from tests.support.costs import calls
from tests.support.examples import examples

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


# --- what the interfaces promise ---------------------------------------------------------------------------------


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
    """The control messages of the protocol, the defaults first."""
    assert [s.selector for s in SOFT_STRATEGIES] == [
        b"blocking/soft/queue",
        b"blocking/soft/discard",
        b"blocking/soft/block",
        b"blocking/soft/error",
        b"blocking/soft/latest",
    ]
    assert [s.selector for s in HARD_STRATEGIES] == [
        b"blocking/hard/discard",
        b"blocking/hard/block",
        b"blocking/hard/error",
    ]
    assert [o.selector for o in ORDERS] == [b"order/queue", b"order/stack", b"order/random"]


# --- a receiver that takes everything ----------------------------------------------------------------------------


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


# --- the soft strategies -----------------------------------------------------------------------------------------


def test_soft_queue():
    """queue, the default, keeps what the socket does not take."""
    connection = Connection()
    connection.publish(A, B, C)
    assert connection.flush(1) == [A]
    assert connection.queue.is_congested
    assert (connection.queue.messages, connection.queue.size) == (2, 5)
    connection.publish(D)
    assert connection.drain() == [B, C, D]
    assert not connection.queue.is_congested
    assert connection.lost == [0, 0]


def test_soft_discard():
    """discard drops what the socket does not take, and the next batch gets its chance."""
    connection = Connection(soft="discard")
    connection.publish(A, B, C)
    assert connection.flush(1) == [A]
    assert connection.lost == [2, 5]
    assert not connection.queue.is_congested
    assert len(connection.queue) == 0
    connection.publish(D)
    assert connection.drain() == [D]


def test_soft_error():
    """error disconnects the receiver when its socket is full; what waits for it is dropped and counted."""
    connection = Connection(soft="error")
    connection.publish(A, B, C)
    assert connection.flush(1) == [A]
    assert connection.closed is CloseReason.SOCKET_FULL
    assert connection.lost == [2, 5]
    assert len(connection.queue) == 0


@pytest.mark.parametrize("choice", [{"soft": "error"}, {"hard": "error", "messages": 1}])
def test_a_queue_that_disconnects_its_receiver_is_shut(choice):
    """Until the receiver is disconnected, later messages are lost for it, whatever it chooses, and no publisher waits.
    No reply leaves that could come after one that was dropped."""
    connection = Connection(**choice)
    connection.publish(A, B, C)
    connection.queue.write(D)
    connection.flush(0)
    assert connection.closed is not None
    assert connection.queue.state is State.HELD
    connection.queue.write(E)
    connection.set_strategies(soft=SOFT["queue"])
    assert connection.drain() == []
    for packet, singly in ((D, False), (E, True)):
        connection.closed = None
        connection.publish(packet, singly=singly)
    assert connection.lost == [5, 15]
    assert connection.blocks == []
    connection.queue.deafen()
    connection.queue.discard_all()
    assert connection.lost == [5, 15]
    assert connection.budget.queues == connection.budget.memory.held == 0


def test_soft_block():
    """block keeps all, past any limit, and blocks the publisher until the queue is empty."""
    connection = Connection(soft="block", messages=1, size=1, budget=SharedBudget(1))
    connection.publish(A, B, C)
    connection.flush(1)
    assert connection.blocks == [True]
    assert connection.queue.messages == 2
    connection.publish(D)
    assert connection.blocks == [True, True]
    assert connection.flush(2) == [B, C]
    assert connection.drain() == [D]
    assert connection.moves == [(False, False), (True, True)]
    assert connection.lost == [0, 0]


@pytest.mark.parametrize("hard", HARD)
def test_soft_block_toward_others(hard):
    """Toward publishers that it may not block, block acts as queue with hard/discard, whatever hard is."""
    connection = Connection(soft="block", hard=hard, messages=2)
    connection.may_block = False
    connection.publish(A, B, C, D)
    assert connection.flush(1) == [A]
    assert connection.blocks == []
    assert connection.closed is None
    assert connection.lost == [1, 4]
    assert connection.drain() == [B, C]
    connection.stall(D)
    connection.may_block = True
    connection.publish(E, C, B)
    assert connection.blocks == [True]
    assert connection.drain() == [D, E, C, B]


# --- the hard strategies -----------------------------------------------------------------------------------------


def test_hard_discard():
    """discard, the default, drops the new message, and later ones again find room."""
    connection = Connection(messages=2)
    connection.stall(A, B, C)
    assert connection.lost == [1, 3]
    connection.publish(D)
    assert connection.lost == [2, 7]
    assert connection.flush(1) == [A]
    connection.publish(E)
    assert connection.drain() == [B, E]


def test_a_smaller_message_may_fit():
    """A message is dropped if it does not fit, not because one before it did not."""
    connection = Connection(size=5)
    connection.stall(C, D, B, A)
    assert connection.lost == [2, 5]
    assert connection.drain() == [C, B]


@given(
    st.lists(st.integers(12, 60), max_size=80),
    st.integers(1, 40),
    st.integers(1, 900),
    st.sampled_from([name for name in SOFT if name != "error"]),
    st.booleans(),
    st.booleans(),
)
def test_a_run_is_decided_about_as_one_by_one(sizes, messages, size, soft, receipts, are_left):
    """Of messages that come together, the same are kept as if they had come one by one, at once or after a flush."""
    together, single = (Connection(messages=messages, size=size, soft=soft) for _ in range(2))
    run = [b"MSG %d\0" % (each % 3) + bytes(each) for each in sizes]
    for connection in (together, single):
        connection.queue.configure(replace(connection.queue.settings, receipts=receipts))
        connection.may_block = False
        if not are_left:
            connection.stall(b"MSG 9\0")
    together.stall(*run)
    for packet in run:
        single.stall(packet)
    published = len(run) + (not are_left)
    assert together.queue.messages + together.lost[0] + together.queue.conflated == published
    if soft != "latest":
        assert together.queue.describe() == single.queue.describe()
        assert together.lost == single.lost


def test_a_full_queue_drops_a_run_in_one_step():
    """A run for which a queue has no room at all is not judged message by message."""
    short, long = Connection(messages=1), Connection(messages=1)
    for connection in (short, long):
        connection.stall(A)
    assert calls(short.queue.admit, Run([A] * 2), True) == calls(long.queue.admit, Run([A] * 1_024), True)
    assert (short.queue.lost, long.queue.lost) == (2, 1_024)


@pytest.mark.parametrize("receipts", [False, True])
def test_queues_of_different_fill_decide_about_one_run(receipts):
    """However many sizes have no room in one queue or another, each keeps what it would have kept one by one."""
    run = Run([bytes(1 + at * 37 % 61) for at in range(300)] + [bytes(size) for size in range(60, 0, -1)])
    before = run.packets.copy()
    for room in (*range(1, 70), 500, 3_000, 9_000):
        together, single = Connection(messages=2_000, size=room), Connection(messages=2_000, size=room)
        for connection in (together, single):
            connection.queue.configure(replace(connection.queue.settings, receipts=receipts))
            connection.may_block = False
            connection.stall(b"x")
        together.act(together.queue.admit(run, False))
        for packet in run.packets:
            single.publish(packet)
        assert together.queue.describe() == single.queue.describe()
        assert together.lost == single.lost
    assert run.packets == before


@pytest.mark.parametrize("receipts", [False, True])
def test_short_messages_among_long_ones_are_found_in_few_steps(receipts):
    """Where only short messages have room any more, each long one takes a comparison, and no look at the limits."""
    long, short = bytes(50), bytes(5)
    run = [short if at % 100 == 99 else long for at in range(1_024)]
    connection = Connection(messages=2_000, size=1_009)
    connection.queue.configure(replace(connection.queue.settings, receipts=receipts))
    connection.stall(A)
    assert calls(connection.publish, *run) < 4 * len(run)
    assert [packet for packet in connection.drain() if not packet.startswith(b"CMSG lost")] == [A, *[long] * 20, short]


def test_messages_that_come_together_are_lost_each_for_its_cause():
    """A long message may be beyond the queue's own limit, a shorter one behind it beyond the user's share."""
    connection = Connection(size=100)
    connection.stall(bytes(60))
    connection.budget.unreserved, connection.budget.limit = 70, 80
    outcome = connection.queue.admit(Run([bytes(50), bytes(20), bytes(5)]), False)
    assert outcome is not None
    assert {loss.why: loss.messages for loss in outcome.losses} == {LossReason.QUEUE_FULL: 1, LossReason.SHARE: 1}
    assert connection.queue.messages == 2


def test_hard_error():
    """error disconnects the receiver at its limit; what waits is dropped and counted, as is the new message."""
    connection = Connection(hard="error", messages=2)
    connection.stall(A, B)
    assert connection.closed is None
    connection.publish(C, D)
    assert connection.closed is CloseReason.QUEUE_FULL
    assert connection.lost == [4, 10]
    assert connection.budget.bytes == connection.queue.size == connection.queue.messages == 0


def test_hard_block():
    """block keeps the message all the same, and blocks its publisher until the low-water mark."""
    connection = Connection(hard="block", messages=2)
    connection.stall(A, B)
    assert connection.blocks == []
    connection.publish(C)
    assert connection.blocks == [False]
    assert connection.drain() == [A, B, C]
    assert connection.lost == [0, 0]


def test_hard_block_toward_others():
    """Toward publishers that it may not block, hard/block acts as hard/discard."""
    connection = Connection(hard="block", messages=2)
    connection.may_block = False
    connection.stall(A, B, C)
    assert connection.blocks == []
    assert connection.lost == [1, 3]


@pytest.mark.parametrize("hard", ["block", "error"])
@pytest.mark.parametrize("soft", ["discard", "error"])
def test_soft_comes_first(soft, hard):
    """Where the soft strategy keeps nothing, the hard one is never asked."""
    connection = Connection(soft=soft, hard=hard, messages=1)
    connection.stall(A, B, C)
    assert connection.blocks == []
    assert connection.lost[0] == 3
    assert connection.closed is (CloseReason.SOCKET_FULL if soft == "error" else None)


def test_choices_hold_for_what_comes():
    """The newest choice wins for new messages; what waits stays, and each kind is chosen apart."""
    connection = Connection(soft="queue", messages=3)
    connection.stall(A, B)
    connection.set_strategies(soft=SOFT["discard"])
    connection.publish(C)
    assert connection.lost == [1, 3]
    connection.set_strategies(hard=HARD["error"])
    connection.publish(C)
    assert connection.lost == [2, 6]
    connection.set_strategies(soft=SOFT["queue"])
    connection.publish(C)
    assert connection.queue.messages == 3
    connection.publish(D)
    assert connection.closed is CloseReason.QUEUE_FULL


@pytest.mark.parametrize(("soft", "hard"), list(product(SOFT, HARD)))
def test_may_hold_back(soft, hard):
    """A queue says whether its strategies can block a publisher."""
    assert Connection(soft=soft, hard=hard).queue.settings.can_block() == ("block" in (soft, hard))


# --- the limits, to the message and the byte ---------------------------------------------------------------------


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("limit", "lost"), [(4, 0), (3, 1)])
def test_limit_of_messages(limit, lost, together):
    """The queue keeps as many messages as its limit, and not one more, whether they come together or one by one."""
    connection = Connection(messages=limit)
    if together:
        connection.stall(A, B, C, D)
    else:
        for packet in (A, B, C, D):
            connection.stall(packet)
    assert connection.lost[0] == lost
    assert connection.drain() == [A, B, C, D][:limit]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("limit", "lost"), [(10, 0), (9, 1)])
def test_limit_of_bytes(limit, lost, together):
    """The queue keeps as many bytes as its limit, and not one more."""
    connection = Connection(size=limit)
    if together:
        connection.stall(A, B, C, D)
    else:
        for packet in (A, B, C, D):
            connection.stall(packet)
    assert connection.lost == [lost, 4 * lost]
    assert connection.queue.size == 10 - 4 * lost


@pytest.mark.parametrize("hard", ["block", "error"])
def test_limit_with_other_strategies(hard):
    """At the limit nothing happens yet; one more message, or byte, is what counts."""
    for connection in (Connection(hard=hard, messages=4), Connection(hard=hard, size=10)):
        connection.stall(A, B, C, D)
        assert connection.blocks == []
        assert connection.closed is None
        connection.publish(A)
        assert connection.blocks == [False] * (hard == "block")
        assert (connection.closed is CloseReason.QUEUE_FULL) == (hard == "error")


def test_what_was_sent_makes_room():
    """What the socket took no longer counts."""
    connection = Connection(messages=2, size=5)
    for _ in range(10):
        connection.stall(B, C)
        assert connection.drain() == [B, C]
    connection.stall(B, C)
    for _ in range(10):
        assert len(connection.flush(1)) == 1
        connection.publish(connection.delivered[-1])
    assert connection.lost == [0, 0]


@pytest.mark.parametrize(
    ("messages", "size", "sent", "room"),
    [
        # 8 messages of 4 bytes wait; the mark is a quarter of each limit.
        (8, 1000, 5, False),
        (8, 1000, 6, True),
        (1000, 32, 5, False),
        (1000, 32, 6, True),
        (8, 36, 5, False),
        (8, 32, 6, True),
        (11, 32, 5, False),
        (12, 47, 5, False),
        (12, 1000, 4, False),
        (1000, 48, 4, False),
        (12, 48, 5, True),
        (1000, 1000, 1, True),
    ],
)
def test_low_water_mark(messages, size, sent, room):
    """A queue has room again when a quarter of its limits, in messages and in bytes, is left in it or less."""
    connection = Connection(messages=messages, size=size)
    connection.stall(*[b"abcd"] * 8)
    assert connection.lost == [0, 0]
    assert connection.moves == []
    connection.flush(sent)
    assert connection.moves == [(room, False)]


def test_moves():
    """A queue tells of each flush that took something from what waited, and when it is empty; not of others."""
    connection = Connection()
    connection.publish(A, B, C)
    connection.flush(1)  # what was sent had not waited
    connection.flush(0)
    assert connection.moves == []
    connection.flush(1)
    connection.drain()
    assert connection.moves == [(True, False), (True, True)]


# --- all queues together -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "lost"), [(11, 0), (10, 1)])
def test_total_limit_of_one(limit, lost):
    """One client alone may have seven eighths of the total limit, rounded up, and not a byte more."""
    connection = Connection(budget=SharedBudget(limit))
    connection.stall(A, B, C, D)
    assert connection.lost == [lost, 4 * lost]


def test_fair_share():
    """Past seven eighths a queue above its fair share loses messages; one below it keeps them, up to that share."""
    budget = SharedBudget(114)  # an eighth, 14, is kept for users without a queue
    greedy, modest = (Connection(budget=budget, user=user) for user in "gm")
    greedy.stall(*[b"x" * 10] * 12)
    assert greedy.lost == [2, 20]
    assert budget.bytes == 100
    for _ in range(6):
        modest.stall(b"y" * 10)
    assert modest.queue.size == 50  # seven eighths by two users
    assert modest.lost == [1, 10]
    greedy.publish(b"z")
    assert greedy.lost == [3, 21]
    # Below the limit shares do not count.
    assert greedy.flush(6)
    assert budget.bytes == 90
    modest.publish(b"y" * 10)
    assert (modest.queue.size, budget.bytes) == (60, 100)
    greedy.publish(b"z" * 10)  # 50 bytes with it: its share
    assert (greedy.queue.size, budget.bytes) == (50, 110)
    greedy.publish(b"z")
    assert greedy.lost == [4, 22]


def test_fair_share_to_the_byte():
    """At the total limit a queue may reach its share exactly."""
    for size, kept in ((50, True), (51, False)):
        budget = SharedBudget(114)
        greedy, modest = (Connection(budget=budget, user=user) for user in "gm")
        greedy.stall(b"x" * 100)
        modest.stall(b"y" * size)
        assert (modest.queue.size == size) is kept


def test_shares_go_by_users_then_clients():
    """A user with many clients gets no more than one with few; clients without a queue do not count."""
    budget = SharedBudget(137)  # of which 120 are shared
    assert fair_share(budget, "a") == 120
    several = [Connection(budget=budget, user="a") for _ in range(3)]
    single = Connection(budget=budget, user="b")
    idle = Connection(budget=budget, user="c")
    idle.publish(A)
    idle.drain()
    for connection in (*several, single):
        connection.stall(b"x")
    assert fair_share(budget, "a") == 20
    assert fair_share(budget, "b") == 60
    assert fair_share(budget, "c") == 60  # before it has a queue, and with it a third of the limit
    several[0].drain()
    assert fair_share(budget, "a") == 30
    for connection in several:
        connection.drain()
    assert fair_share(budget, "b") == 120
    single.queue.discard_all()
    assert fair_share(budget, "b") == fair_share(budget, "a") == 120
    assert budget.bytes == 0


def test_the_reserve_is_for_users_without_a_queue():
    """A user alone stops at seven eighths; another one may fill the rest, and then has its minimum."""
    budget = SharedBudget(80)
    first = Connection(budget=budget, user="first")
    first.stall(*[b"x"] * 100)
    assert first.queue.size == 70
    second = Connection(budget=budget, user="second")
    second.stall(*[b"y"] * 100)
    assert (second.queue.size, budget.bytes) == (35, 105)  # not punished for the first


def test_past_the_total_limit_a_user_keeps_a_minimum():
    """Past a large limit a user may have 4 MiB, divided by the user's queues, and not the fair share."""
    budget = SharedBudget(64 << 20)
    first, second = (Connection(budget=budget, user=user, size=1 << 30) for user in "fs")
    first.stall(*[bytes(1 << 20)] * 60)
    assert first.queue.size == 56 << 20
    second.stall(*[bytes(1 << 20)] * 20)
    assert second.queue.size == 8 << 20  # the eighth, and the minimum is in it
    first.drain()
    third = Connection(budget=budget, user="t", size=1 << 30)
    third.stall(*[bytes(1 << 20)] * 60)
    assert third.queue.size == 48 << 20
    fourth = Connection(budget=budget, user="4", size=1 << 30)
    fourth.stall(*[bytes(1 << 20)] * 20)
    assert fourth.queue.size == 8 << 20
    fifth = Connection(budget=budget, user="5", size=1 << 30)
    fifth.stall(*[bytes(1 << 20)] * 20)
    assert fifth.queue.size == MINIMUM


@pytest.mark.parametrize(("order", "ranks"), [("queue", 0), ("stack", 0), ("random", 2 * RANKED)])
def test_a_message_is_charged_by_its_backlog(order, ranks):
    """A message that waits, and a reply, cost their bytes and a place; a message with a rank costs more."""
    budget = SharedBudget()
    connection = Connection(order=order, budget=budget)
    connection.publish(A, B)
    assert budget.memory.held == 0  # not yet in a backlog
    connection.flush(0)
    assert budget.memory.held == connection.queue.memory == len(A + B) + 2 * PRICE
    connection.queue.write(b"reply")
    assert budget.memory.held == len(A + B) + 5 + 3 * PRICE + REPLY
    connection.flush(0)
    assert budget.memory.held == len(A + B) + 5 + 3 * PRICE + REPLY + ranks
    connection.flush(1)  # the reply, under an order of its own
    connection.set_order(ORDER["stack" if order == "queue" else "queue"])
    connection.flush(0)
    left = len(B) + 5 + 2 * PRICE + REPLY if order == "queue" else len(A + B) + 2 * PRICE
    assert budget.memory.held == left
    connection.drain()
    assert budget.memory.held == connection.queue.memory == 0


def test_messages_are_ranked_when_the_first_of_them_is_sent():
    """What a receiver does not read costs no ranking; its user pays for the ranks when it reads."""
    ranked: list[int] = []

    @implementer(IQueueOrder)
    class Longest:
        selector = b"order/longest"
        newestFirst = None
        arrival = False

        def rank(self, arrival: int, size: int, newest_first: bool) -> Any:
            ranked.append(size)
            return -size

    connection = Connection()
    connection.set_order(Longest())
    connection.stall(*packets(*range(10, 110)))
    assert ranked == []
    assert [*map(len, connection.flush(1))] == [109]
    assert len(ranked) == 100
    connection.publish(*packets(1_000))
    assert [*map(len, connection.flush(2))] == [1_000, 108]
    assert len(ranked) == 101


def test_messages_can_be_ranked_some_at_a_time():
    """To put many messages in order is work that can be done in steps, before they are sent."""
    connection = Connection(order="random", size=1 << 30, messages=10_000)
    assert connection.queue.put_in_order(1)
    connection.stall(*map(bytes, range(1, 101)))
    assert not connection.queue.put_in_order(60)
    assert connection.queue.memory == 100 * PRICE + sum(range(101)) + 60 * RANKED
    assert connection.queue.put_in_order(60)
    assert [*map(len, connection.drain())] == [*range(100, 0, -1)]
    connection.set_order(ORDER["queue"])
    connection.stall(*packets(3, 2, 1))
    assert connection.queue.put_in_order(1)
    assert connection.budget.memory.held == 3 * PRICE + 6


def test_ranks_take_no_memory_that_the_user_has_not():
    """A user at its limit of memory gets its messages in an order of the oldest ones, and replies first."""
    account = MemoryAccount(user_limit=100_000)
    connection = Connection(messages=10_000, order="random", budget=SharedBudget(memory=account))
    connection.stall(*(b"%d" % number for number in range(2_000)))
    waiting = connection.queue.messages
    assert waiting < 2_000
    connection.queue.write(b"reply")
    got = connection.flush(1)
    assert got == [b"reply"]
    assert account.held <= 100_000 + BATCH * RANKED
    connection.set_order(ORDER["queue"])
    connection.set_order(ORDER["random"])
    got = connection.drain()
    assert sorted(map(int, got)) == [*range(waiting)]
    assert account.held == 0


def test_replies_keep_their_place_when_the_order_changes():
    """Under ``order/random`` replies are sent first; in the order of arrival again, each is where it came."""
    connection = Connection(order="random")
    connection.stall(A, B)
    connection.queue.write(b"one")
    connection.publish(C)
    assert connection.flush(0) == []
    connection.queue.write(b"two")
    connection.publish(D)
    connection.set_order(ORDER["queue"])
    connection.flush(0)
    connection.set_order(ORDER["random"])
    connection.flush(0)
    connection.set_order(ORDER["queue"])
    assert connection.drain() == [A, B, b"one", C, b"two", D]


def test_a_receiver_that_takes_little_has_little_sorted():
    """What was taken in vain is not sorted again: not even when a message comes that goes before it."""

    class Rank(int):
        def __lt__(self, other: object) -> bool:
            compared.append(1)
            return int.__lt__(self, other)  # type: ignore[operator]

    @implementer(IQueueOrder)
    class Counted:
        selector = b"order/counted"
        newestFirst = None
        arrival = False

        def rank(self, arrival: int, size: int, newest_first: bool) -> Any:
            return Rank(-size)

    compared: list[int] = []
    connection = Connection(messages=10_000, size=1 << 30)
    connection.set_order(Counted())
    connection.stall(*map(bytes, range(1_000, 3_000)))
    assert len(connection.queue.take(2_000)[0]) == 2_999
    connection.queue.ack([], 0)
    compared.clear()
    for n in range(20):
        taken = connection.queue.take(2_000)
        connection.ack(taken, 1)
        assert len(taken[0]) == 2_999 - n
    connection.publish(bytes(5_000))
    taken = connection.queue.take(2_000)
    connection.ack(taken, 1)
    assert len(taken[0]) == 5_000
    assert len(compared) < 20
    assert [*map(len, connection.drain())] == [*range(2_979, 999, -1)]


@pytest.mark.parametrize("order", ["queue", "stack", "random"])
def test_what_comes_while_packets_are_on_their_way_stays(order):
    """A message that is published because another one was dropped, in the middle of a flush, is sent once."""
    connection = Connection(order=order)
    connection.stall(A, B, C)
    taken = connection.queue.take(2)
    connection.publish(b"new!")
    connection.queue.write(b"reply")
    connection.ack(taken, 2)
    left = {A, B, C, b"new!", b"reply"}.difference(taken)
    assert set(connection.drain()) == left
    assert connection.budget.memory.held == 0


def test_memory_of_a_user_to_the_byte():
    """At its user's limit of memory a queue counts as full; another queue of the user can have taken it."""
    for limit, lost in ((3 * 64 + 6, 0), (3 * 64 + 5, 1)):
        budget = SharedBudget(memory=MemoryAccount(user_limit=limit))
        one, two = (Connection(budget=budget, user="u") for _ in range(2))
        one.stall(A)
        two.stall(B, C)
        assert (one.lost[0], two.lost[0]) == (0, lost)
        other = Connection(budget=budget, user="other", hard="error")
        other.stall(A)
        assert other.closed is None


def test_memory_of_all():
    """At the limit for all, the account says so, and a user may go on up to the minimum."""
    account = MemoryAccount(limit=1000)
    account.users = 4
    calls = []
    account.on_full = lambda: calls.append(account.held)
    budget = SharedBudget(memory=account)
    greedy, modest = (Connection(budget=budget, user=user) for user in "gm")
    greedy.stall(*[b"x" * 36] * 10)
    assert (account.held, greedy.lost[0], calls) == (1000, 0, [])
    greedy.publish(b"x" * 36)
    assert (account.held, greedy.lost[0], set(calls)) == (1000, 1, {1000})
    modest.stall(*[b"y" * 36] * 3)
    assert (account.held, modest.lost[0], modest.queue.memory) == (1200, 1, 200)


@pytest.mark.parametrize(
    ("hard", "blocks", "closed"), [("block", [False], None), ("error", [], CloseReason.QUEUE_FULL)]
)
def test_total_limit_is_a_hard_limit(hard, blocks, closed):
    """Past its share at the total limit a client is treated as at its own hard limit."""
    connection = Connection(hard=hard, budget=SharedBudget(3))
    connection.stall(A, B)
    assert connection.blocks == []
    connection.publish(A)
    assert connection.blocks == blocks
    assert connection.closed is closed


# --- orders ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("orders", "delivered"),
    [
        ("queue", "pqrst"),
        ("stack", "tsrqp"),
        ("random", "tqspr"),
        ("stack random", "tsqrp"),
        ("stack queue random", "tqspr"),
        ("random stack", "tsrqp"),
        ("random queue", "pqrst"),
        ("stack random queue", "pqrst"),
        ("stack random queue stack random", "tsqrp"),
    ],
)
@pytest.mark.parametrize("when", ["before", "while", "together"])
def test_orders(orders, delivered, when):
    """The newest order counts, for what waits too; equal sizes keep the queue or stack order last chosen."""
    connection = Connection()
    if when == "before":
        for order in orders.split():
            connection.set_order(ORDER[order])
    connection.stall(b"p", b"qq", b"r", b"ss", b"ttt")
    if when == "while":
        for order in orders.split():
            connection.set_order(ORDER[order])
            connection.flush(0)
    if when == "together":
        connection.set_order(ORDER["random"])
        connection.flush(0)
        for order in orders.split():
            connection.set_order(ORDER[order])
    assert "".join(chr(packet[0]) for packet in connection.drain()) == delivered


def test_order_counts_for_what_waits_only():
    """What can be sent at once goes in the order of arrival; only what a flush left behind is arranged."""
    connection = Connection(order="stack")
    connection.publish(A, B, C, D)
    assert connection.flush(2) == [A, B]
    assert connection.drain() == [D, C]


@pytest.mark.parametrize(("order", "delivered"), [("stack", [C, E, D, B, A]), ("random", [E, D, C, B, A])])
def test_new_messages_take_their_place(order, delivered):
    """A message that comes while others wait is sent where its order puts it."""
    connection = Connection(order=order)
    connection.stall(A, B, D)
    connection.publish(E, C)
    assert connection.drain() == delivered


@pytest.mark.parametrize("order", ORDER)
def test_what_could_not_be_sent_keeps_its_place(order):
    """Whatever the socket takes of a batch, what is left comes in the order in which it would have come."""
    at_once, in_bits = Connection(order=order), Connection(order=order)
    for connection in (at_once, in_bits):
        connection.stall(B, A, C, A, B)
        connection.queue.write(b"one")
        connection.publish(D, B)
        connection.queue.write(b"two")
    at_once.drain()
    for room in (1, 0, 2, 0, 1, 3, 2):
        in_bits.flush(room)
    assert in_bits.delivered == at_once.delivered
    assert len(in_bits.delivered) == 9


def test_a_change_of_order_costs_nothing_until_something_is_sent():
    """Changes of the order alone do not make the server arrange what waits, however much that is."""
    few, many = Connection(), Connection()
    few.stall(A)
    many.stall(*[A] * 1000)

    def change(connection):
        for order in ("stack", "random", "queue", "queue", "random"):
            connection.set_order(ORDER[order])

    assert calls(change, many) == calls(change, few)
    many.flush(1)
    assert calls(many.flush, 1) < 500  # once arranged is enough


def test_offers_cost_no_more_after_replies():
    """Messages for a slow receiver are let in all at once where there is room, whatever replies it had before."""
    plain, asked = Connection(), Connection()
    asked.queue.write(b"reply")
    asked.drain()
    asked.queue.write(b"reply")
    for connection in (plain, asked):
        connection.stall(A)
        assert connection.queue.is_congested
    many = [B] * 100
    assert calls(plain.queue.admit, Run(many), True) == calls(asked.queue.admit, Run(many), True) < 200


@pytest.mark.parametrize("soft", ["queue", "block"])
def test_what_is_kept_costs_by_the_batch(soft):
    """To keep many messages for a slow receiver takes as many calls as to keep a few."""
    few, some, many, most = (Connection(soft=soft) for _ in range(4))
    for connection in (few, some, many, most):
        connection.stall(A)
    assert calls(few.queue.admit, Run([B] * 2), True) == calls(some.queue.admit, Run([B] * 60), True)
    assert calls(many.queue.admit, Run([B] * 200), True) == calls(most.queue.admit, Run([B] * 900), True)


def test_what_is_sent_costs_by_the_batch():
    """To send a whole batch of messages that have waited takes as many calls as to send two of them."""
    few, many = Connection(), Connection()
    few.stall(*[A] * 200)
    many.stall(*[A] * 200)
    assert calls(few.flush, 2) == calls(many.flush, BATCH - 1)


@given(st.lists(st.tuples(st.sampled_from(["push", "send", "pop"]), st.integers(0, 6)), max_size=60))
def test_arrivals(steps):
    """Packets in order of arrival are that, however they come and go; a message dropped leaves the replies."""
    arrivals, expected, number = FifoBacklog(iter(())), [], 0
    for step, count in steps:
        if step == "push":
            packets = [b"%d" % n if n % 3 else Reply(b"%d" % n) for n in range(number, number + count)]
            number += count
            arrivals.push(packets)
            expected += packets
        elif step == "send":
            taken = arrivals.take(count + 1)
            assert taken == expected[: count + 1]
            sent = min(count, len(taken))
            arrivals.ack(sent)
            del expected[:sent]
        else:
            message = next((packet for packet in expected if type(packet) is not Reply), None)
            assert arrivals.pop_message() == message
            if message is not None:
                expected.remove(message)
        assert len(arrivals) == len(expected)
        assert list(arrivals) == expected


def test_what_is_sent_is_let_go_of():
    """A queue that is never empty keeps nothing of what was sent, so that its limit is one of memory too."""
    arrivals = FifoBacklog(iter(()))
    packets = [bytes(1000 + n) for n in range(10)]
    arrivals.push(packets)
    arrivals.ack(4)
    references = [sys.getrefcount(packet) for packet in packets]
    assert references == [references[0]] * 4 + [references[0] + 1] * 6


# --- replies -----------------------------------------------------------------------------------------------------


def test_replies_in_order_of_arrival():
    """Under order/queue a reply follows everything that was queued before it."""
    connection = Connection()
    connection.stall(A)
    connection.queue.write(b"one")
    connection.publish(B)
    connection.queue.write(b"two")
    assert connection.drain() == [A, b"one", B, b"two"]


@pytest.mark.parametrize("order", ["stack", "random"])
def test_replies_go_back_to_their_place(order):
    """After a return to order/queue, replies and messages go in order of arrival, older ones included."""
    connection = Connection()
    connection.stall(D)
    connection.queue.write(b"one")
    connection.set_order(ORDER[order])
    connection.flush(0)
    connection.publish(C)
    connection.queue.write(b"two")
    connection.publish(A)
    connection.set_order(ORDER["queue"])
    assert connection.drain() == [D, b"one", C, b"two", A]


@pytest.mark.parametrize("order", ["stack", "random"])
def test_replies_first(order):
    """Under the other orders replies go first, in the order asked."""
    connection = Connection(order=order)
    connection.stall(E, D)
    connection.queue.write(b"one")
    connection.publish(C)
    connection.queue.write(b"a longer one")
    connection.queue.write(b"three")
    assert connection.flush(1) == [b"one"]
    assert connection.flush(1) == [b"a longer one"]
    connection.queue.write(b"four")
    assert connection.drain()[:2] == [b"three", b"four"]


@pytest.mark.parametrize("order", ORDER)
def test_a_reply_before_the_leftovers_are_settled(order):
    """A reply that comes between a first flush and its settling takes its place behind the leftovers."""
    connection = Connection(order=order, soft="discard" if order == "random" else "queue")
    connection.publish(A, B)
    connection.queue.ack(connection.queue.take(BATCH), 0)
    connection.queue.write(b"reply")
    assert len(connection.queue) == 3
    connection.act(connection.queue.settle(True))
    assert connection.drain() == {"queue": [A, B, b"reply"], "stack": [b"reply", B, A], "random": [b"reply"]}[order]
    assert connection.queue.replies == 0


def test_leftovers_that_were_not_settled():
    """Messages that come before the leftovers of a flush were settled go behind them; a lost connection counts all."""
    connection, gone = Connection(), Connection()
    for each in (connection, gone):
        each.publish(A, B)
        each.queue.ack(each.queue.take(BATCH), 1)
    connection.publish(C)
    assert connection.drain() == [B, C]
    gone.queue.discard_all()
    assert (gone.lost, gone.budget.bytes, len(gone.queue)) == ([1, 2], 0, 0)
    assert not gone.queue.is_congested


def summed_up(outcome: Outcome | None) -> tuple[object, ...]:
    """The outcome without the causes of its losses."""
    assert outcome is not None
    return outcome[:4]


def test_an_outcome_sums_up_a_batch():
    """One outcome sums up a batch: the losses, older messages included, and until when to block."""
    connection = Connection()
    connection.stall(A, B)
    connection.set_strategies(soft=Asked(Verdict.KEEP, Verdict.BLOCK, Verdict.DROP))
    assert summed_up(connection.queue.admit(Run([C, D, E]), True)) == (1, 5, None, Until.EMPTY)
    connection.set_strategies(soft=SOFT["queue"], hard=DropOldest(12, Verdict.KEEP))
    assert connection.queue.admit(Run([A]), True) is None
    full = Connection(messages=1)
    full.stall(C)
    full.set_strategies(hard=DropOldest(0, Verdict.BLOCK))
    assert summed_up(full.queue.admit(Run([D]), True)) == (1, 3, None, Until.ROOM)
    full.set_strategies(hard=HARD["error"])
    assert summed_up(full.queue.admit(Run([A, B]), True)) == (3, 7, CloseReason.QUEUE_FULL, None)


def test_nothing_left_to_wait_for_blocks_nobody():
    """If a message blocks its publisher and is then dropped by the next one's verdict, no publisher is blocked."""

    class Fickle(DropOldest):
        def decide(self, queue: SendQueue, packet: bytes) -> Verdict:
            super().decide(queue, packet)
            return Verdict.BLOCK if packet == B else Verdict.DROP

    connection = Connection()
    connection.stall(A)
    connection.set_strategies(soft=Fickle(0))
    assert summed_up(connection.queue.admit(Run([B, C]), True)) == (3, 6, None, None)
    assert connection.moves == [(True, True)]


@pytest.mark.parametrize("soft", ["queue", "discard", "block"])
@pytest.mark.parametrize("hard", HARD)
@pytest.mark.parametrize("order", ORDER)
def test_replies_are_never_lost(soft, hard, order):
    """No strategy and no limit drops a reply, counts it or holds anybody back for it."""
    connection = Connection(soft=soft, hard=hard, order=order, messages=1, size=1, budget=SharedBudget(1))
    replies = [b"reply %d" % i for i in range(10)]
    for reply in replies:
        connection.queue.write(reply)
        connection.flush(0)
    assert connection.queue.replies == 10
    assert (connection.queue.messages, connection.queue.size, connection.budget.bytes) == (0, 0, 0)
    connection.stall(A)
    assert connection.closed is None
    assert [packet for packet in connection.drain() if packet != A] == replies
    assert connection.queue.replies == 0
    assert not connection.queue.is_congested


def test_replies_of_a_first_batch():
    """A reply among messages that were dropped is sent all the same, and in its place."""
    connection = Connection(soft="discard")
    connection.publish(A)
    connection.queue.write(b"one")
    connection.publish(B)
    connection.stall()
    assert connection.lost == [2, 3]
    assert (len(connection.queue), connection.queue.replies) == (1, 1)
    assert connection.drain() == [b"one"]


def test_a_queue_of_replies_is_not_at_its_limit():
    """Messages that come behind many replies find all of the room."""
    connection = Connection(messages=2)
    for i in range(10):
        connection.queue.write(b"%d" % i)
    connection.stall(A, B, C)
    assert connection.lost == [1, 3]
    assert connection.queue.replies == 10


# --- packets that cannot be sent ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_congested", [True, False])
def test_refused(is_congested):
    """A message that the kernel will never take is dropped and counted, a reply is not; the connection goes on.

    A watcher gets neither of them.
    """
    connection = Connection()
    seen: list[bytes] = []
    connection.queue.on_sent = seen.extend
    connection.publish(A, E)
    connection.queue.write(b"reply")
    connection.publish(B, C)
    if is_congested:
        connection.flush(0)
    taken = connection.queue.take(BATCH)
    assert taken == [A, E, b"reply", B, C]
    assert connection.queue.reject_oversized(taken, 1)
    assert connection.queue.reject_oversized(taken, 2)
    connection.ack(taken, 4)
    assert connection.lost == [1, 5]
    assert seen == [A, B]
    taken = connection.queue.take(BATCH)
    connection.ack(taken, 0)
    assert (connection.queue.messages, connection.queue.size, connection.queue.replies) == (1, 3, 0)
    assert connection.budget.bytes == 3
    assert connection.drain() == [C]
    assert seen == [A, B, C]
    connection.publish(E)
    taken = connection.queue.take(1)
    connection.queue.reject_oversized(taken, 0)
    connection.queue.on_sent = lambda packets: pytest.fail(f"unexpected {packets}")
    connection.queue.ack(taken, 1)
    assert connection.lost == [2, 10]


@pytest.mark.parametrize("is_congested", [True, False])
def test_refused_then_lost(is_congested):
    """A message that was refused before the connection broke is counted once."""
    connection = Connection()
    connection.publish(A, E)
    connection.queue.write(b"reply")
    connection.publish(B, C)
    if is_congested:
        connection.flush(0)
    taken = connection.queue.take(4)
    connection.queue.reject_oversized(taken, 1)
    connection.queue.reject_oversized(taken, 2)
    connection.queue.discard_all(taken)
    assert connection.lost == [4, 11]
    assert connection.budget.bytes == connection.queue.messages == len(connection.queue) == 0
    connection.publish(A)
    connection.queue.discard_all()
    assert connection.lost == [5, 12]


@pytest.mark.parametrize("order", ORDER)
def test_abandon(order):
    """The queue of a lost receiver is dropped and counted, replies aside; the shared limit gets its bytes back."""
    budget = SharedBudget()
    connection = Connection(order=order, budget=budget)
    connection.stall(A, B)
    connection.queue.write(b"reply")
    connection.queue.discard_all()
    assert connection.lost == [2, 3]
    assert (connection.queue.messages, connection.queue.size, connection.queue.replies) == (0, 0, 0)
    assert budget.bytes == 0
    assert not connection.queue.is_congested
    connection.publish(C, D)
    connection.queue.write(b"reply")
    connection.queue.discard_all()
    connection.queue.discard_all()
    assert connection.lost == [4, 10]
    assert len(connection.queue) == 0
    assert connection.drain() == []


@pytest.mark.parametrize("order", ORDER)
@pytest.mark.parametrize("is_congested", [True, False])
def test_abandon_what_was_taken(order, is_congested):
    """What was taken and could not be sent is dropped and counted once, with what waits behind it."""
    connection = Connection(order=order)
    connection.publish(A, B, C)
    if is_congested:
        connection.flush(0)
    taken = connection.queue.take(2)
    assert len(taken) == 2
    connection.queue.discard_all(taken)
    assert connection.lost == [3, 6]
    assert len(connection.queue) == 0
    assert connection.budget.bytes == 0


# --- strategies and orders of others -----------------------------------------------------------------------------


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


# --- everything at once, against a simple model ------------------------------------------------------------------


class Model:
    """What one queue must do, in the plainest way: a list, searched from end to end for whatever is next."""

    def __init__(self, connection: Connection, user: str, messages: int, size: int) -> None:
        self.connection = connection
        self.user = user
        self.limit_messages = messages
        self.limit_size = size
        self.published: list[bytes] = []
        self.pending: list[bytes] = []
        self.waiting: list[bytes] | None = None
        self.soft, self.hard, self.order, self.newest_first = "queue", "discard", "queue", False
        self.delivered: list[bytes] = []
        self.lost: list[bytes] = []
        self.blocks: list[bool] = []
        self.moves: list[tuple[bool, bool]] = []
        self.closed = False
        self.ranked = 0

    @property
    def messages(self) -> list[bytes]:
        return [packet for packet in self.waiting or () if not packet.startswith(b"R")]

    @property
    def size(self) -> int:
        return sum(map(len, self.messages))

    @property
    def memory(self) -> int:
        """What is charged for the packets that wait."""
        if self.waiting is None:
            return 0
        prices = [len(packet) + PRICE + REPLY * packet.startswith(b"R") for packet in self.waiting]
        return sum(prices) + self.ranked * RANKED

    def next(self) -> bytes:
        """What is sent first of what waits."""
        assert self.waiting is not None
        if self.order == "queue":
            return self.waiting[0]
        replies = [packet for packet in self.waiting if packet.startswith(b"R")]
        if replies:
            return replies[0]
        largest = max(map(len, self.waiting)) if self.order == "random" else 0
        candidates = [packet for packet in self.waiting if len(packet) >= largest]
        return candidates[-1 if self.newest_first else 0]


class FloodMachine(RuleBasedStateMachine):
    """Several receivers of two users, and all that can happen to them (test_receipts.py has ``latest``).

    Published is what was delivered, what was counted as dropped and what waits, always; and all of
    it is exactly what the model says, in its order.
    """

    @initialize(
        total=st.sampled_from((20, 60, 10_000)),
        messages=st.integers(1, 6),
        size=st.sampled_from((8, 30, 10_000)),
        memory=st.sampled_from((300, 800, UNLIMITED)),
        user_memory=st.sampled_from((200, 600, UNLIMITED)),
    )
    def start(self, total, messages, size, memory, user_memory):
        self.budget = SharedBudget(total, MemoryAccount(memory, user_memory))
        self.budget.memory.users = 2
        self.number = 0
        self.limits = messages, size
        self.models = [self.connect(user) for user in "aab"]

    def connect(self, user):
        messages, size = self.limits
        connection = Connection(messages=messages, size=size, budget=self.budget, user=user)
        return Model(connection, user, messages, size)

    # --- the model ---

    def lacks_room(self, model, packet):
        waiting = [m for m in self.models if m.waiting is not None]
        total = sum(m.size for m in waiting)
        users = len({m.user for m in waiting})
        clients = sum(m.user == model.user for m in waiting)
        share = self.budget.unreserved // users // clients
        return (
            len(model.messages) >= model.limit_messages
            or model.size + len(packet) > model.limit_size
            or (total + len(packet) > self.budget.unreserved and model.size + len(packet) > share)
            or self.lacks_memory(model, len(packet) + PRICE)
        )

    def lacks_memory(self, model, size):
        account = self.budget.memory
        user = sum(m.memory for m in self.models if m.user == model.user) + size
        if user > account.user_limit:
            return True
        return sum(m.memory for m in self.models) + size > account.limit and user > account.limit // 2

    def admit(self, model, packet, may):
        if model.closed:
            model.lost.append(packet)
        elif packet.startswith(b"R"):
            model.waiting.append(packet)
        elif model.soft == "discard":
            model.lost.append(packet)
        elif model.soft == "error":
            self.close(model, packet)
        elif model.soft == "block" and may:
            model.waiting.append(packet)
            model.blocks.append(True)
        elif not self.lacks_room(model, packet):
            model.waiting.append(packet)
        elif model.soft == "queue" and model.hard == "error":
            self.close(model, packet)
        elif model.soft == "queue" and model.hard == "block" and may:
            model.waiting.append(packet)
            model.blocks.append(False)
        else:
            model.lost.append(packet)

    def close(self, model, packet):
        model.closed = True
        model.lost += [*model.messages, packet]
        model.waiting = None

    def flush_model(self, model, room, may):
        if model.waiting is None:
            sent, left = model.pending[:room], model.pending[room:]
            model.pending = []
            model.delivered += sent
            if left:
                model.waiting, model.ranked = [], 0
                for packet in left:
                    if not (model.closed and packet.startswith(b"R")):
                        self.admit(model, packet, may)
                if not model.closed and not model.waiting:
                    model.waiting = None
                    model.moves.append((True, True))
            return
        sent = 0
        # Messages are ranked when any are taken, which takes place with room for none, too.
        model.ranked = len(model.messages) if model.order == "random" else 0
        while room and model.waiting:
            packet = model.next()
            model.waiting.remove(packet)
            model.delivered.append(packet)
            model.ranked -= model.order == "random" and not packet.startswith(b"R")
            room -= 1
            sent += 1
        if sent:
            room_again = len(model.messages) <= model.limit_messages // 4 and model.size <= model.limit_size // 4
            model.moves.append((room_again, not model.waiting))
            if not model.waiting:
                model.waiting = None

    # --- what happens ---

    def packet(self, prefix, size):
        self.number += 1
        # A number that falls, so that no order by content can pass for the order of arrival.
        return (b"%b%05d" % (prefix, 99_999 - self.number)).ljust(size, b".")

    @rule(
        who=st.integers(0, 2),
        sizes=st.lists(st.integers(6, 9), min_size=1, max_size=5),
        may=st.booleans(),
        singly=st.booleans(),
    )
    def publish(self, who, sizes, may, singly):
        model = self.models[who]
        packets = [self.packet(b"M", size) for size in sizes]
        model.published += packets
        model.connection.may_block = may
        model.connection.publish(*packets, singly=singly)
        if model.waiting is None:
            model.pending += packets
        else:
            for packet in packets:
                self.admit(model, packet, may)
        self.replace_closed(who)

    @rule(who=st.integers(0, 2))
    def reply(self, who):
        model = self.models[who]
        packet = self.packet(b"R", 0)
        model.published.append(packet)
        model.connection.queue.write(packet)
        (model.pending if model.waiting is None else model.waiting).append(packet)

    @rule(who=st.integers(0, 2), room=st.sampled_from((0, 0, 1, 2, 3, 50)), may=st.booleans())
    def flush(self, who, room, may):
        model = self.models[who]
        model.connection.may_block = may
        model.connection.flush(room)
        self.flush_model(model, room, may)
        self.replace_closed(who)

    @rule(who=st.integers(0, 2), soft=st.sampled_from([name for name in SOFT if name != "latest"]))
    def choose_soft(self, who, soft):
        self.models[who].soft = soft
        self.models[who].connection.set_strategies(soft=SOFT[soft])

    @rule(who=st.integers(0, 2), hard=st.sampled_from(list(HARD)))
    def choose_hard(self, who, hard):
        self.models[who].hard = hard
        self.models[who].connection.set_strategies(hard=HARD[hard])

    @rule(who=st.integers(0, 2), order=st.sampled_from(list(ORDER)))
    def set_order(self, who, order):
        model = self.models[who]
        model.order = order
        if order != "random":
            model.newest_first = order == "stack"
        model.connection.set_order(ORDER[order])

    @rule(who=st.integers(0, 2))
    def vanish(self, who):
        model = self.models[who]
        model.connection.queue.discard_all()
        model.lost += [packet for packet in model.pending + (model.waiting or []) if not packet.startswith(b"R")]
        model.pending, model.waiting = [], None
        self.check(model)
        self.models[who] = self.connect(model.user)

    def replace_closed(self, who):
        model = self.models[who]
        assert (model.connection.closed is not None) == model.closed
        if model.closed:
            assert model.connection.closed in (CloseReason.SOCKET_FULL, CloseReason.QUEUE_FULL)
            self.check(model)
            model.connection.queue.deafen()
            model.connection.queue.discard_all()
            self.models[who] = self.connect(model.user)

    # --- what must hold ---

    def check(self, model):
        connection, queue = model.connection, model.connection.queue
        assert connection.delivered == model.delivered
        assert connection.lost == [len(model.lost), sum(map(len, model.lost))]
        if model.closed:
            assert (queue.state, queue.messages, queue.size) == (State.HELD, 0, 0)
            return
        assert queue.is_congested == (model.waiting is not None)
        assert queue.state is (State.CONGESTED if queue.is_congested else State.OPEN)
        assert len(queue) == len(model.pending) + len(model.waiting or ())
        assert (queue.messages, queue.size) == (len(model.messages), model.size)
        assert queue.replies == len(model.waiting or ()) - len(model.messages)
        assert queue.memory == model.memory
        # Once for a batch is as good as once for each of its messages.
        assert [held for held, _ in groupby(connection.blocks)] == [held for held, _ in groupby(model.blocks)]
        assert connection.moves == model.moves
        messages = [p for p in model.published if p.startswith(b"M")]
        delivered = [p for p in connection.delivered if p.startswith(b"M")]
        waiting = len([p for p in model.pending if p.startswith(b"M")]) + queue.messages
        assert len(messages) == len(delivered) + connection.lost[0] + waiting

    @invariant()
    def as_the_model_says(self):
        for model in self.models:
            self.check(model)
        assert self.budget.bytes == sum(model.size for model in self.models)
        assert self.budget.memory.held == sum(model.memory for model in self.models)
        for user in "ab":
            charged = sum(model.memory for model in self.models if model.user == user)
            assert share_of(self.budget, user).memory == charged

    def teardown(self):
        for model in getattr(self, "models", ()):
            model.connection.drain()
            self.flush_model(model, 1 << 30, True)
            self.check(model)
            replies = [p for p in model.published if p.startswith(b"R")]
            assert [p for p in model.delivered if p.startswith(b"R")] == replies
            assert not model.connection.queue.is_congested
        if hasattr(self, "models"):
            assert self.budget.bytes == 0
            assert self.budget.memory.held == 0
            assert fair_share(self.budget, "a") == self.budget.unreserved


TestFlood = FloodMachine.TestCase
TestFlood.settings = settings(max_examples=examples(500), stateful_step_count=40)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_cause_of_the_last_loss(count: int) -> None:
    """Of messages that come together, one that is too large for the user's memory is not lost to a full queue."""
    account = MemoryAccount(limit=1 << 20)
    budget = SharedBudget(memory=account)
    queue = SendQueue(Connection(), QueueLimits(1_000, 1 << 30), UserShare(budget))
    queue.pending = [b"x"] * count + [bytes(1 << 20)]
    queue.ack(queue.take(BATCH), 0)
    outcome = queue.settle(False)
    assert outcome is not None
    assert outcome.losses == (Loss(LossReason.SHARE, 1, 1 << 20),)
    assert queue.messages == count


def test_a_loss_while_its_receipt_is_on_the_way_is_told_by_the_next_one():
    """The receipt that has left says what it said; the rest goes first."""
    receiver = Connection(messages=1)
    receiver.queue.configure(replace(receiver.queue.settings, receipts=True))
    queue = receiver.queue
    queue.pending += [b"MSG a\0"]
    queue.ack(queue.take(BATCH), 0)
    receiver.act(queue.settle(True))
    receiver.publish(b"MSG b\0")
    taken = queue.take(BATCH)
    assert taken == [b"MSG a\0", b"CMSG lost\x001 6 1 queue-full"]
    receiver.act(queue.lose(2, 12, LossReason.QUEUE_FULL))
    queue.ack(taken, 2)
    assert queue.take(BATCH) == [b"CMSG lost\x002 12 3 queue-full"]


def test_an_oversized_message_of_a_socket_that_ends_is_counted_once():
    """The end comes before the transport has reported what became of the batch."""
    receiver = Connection()
    queue = receiver.queue
    queue.pending += [b"MSG a\0" + b"x" * 100, b"MSG b\0"]
    taken = queue.take(BATCH)
    assert queue.reject_oversized(taken, 0)
    queue.discard_all(taken)
    assert receiver.lost == [2, 112]
