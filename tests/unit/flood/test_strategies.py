"""The strategies of flood control, soft and hard, to the message."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.errors import CloseReason
from sbus.flood import (
    Run,
    SharedBudget,
    State,
)
from sbus.protocol.notices import LossReason
from tests.support.costs import calls
from tests.unit.flood.connection import (
    HARD,
    SOFT,
    A,
    B,
    C,
    Connection,
    D,
    E,
)

# --- the soft strategies --------------------------------------------------------------------------


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


# --- the hard strategies --------------------------------------------------------------------------


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
