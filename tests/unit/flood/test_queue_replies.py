"""Replies among the messages of a queue, and packets that cannot be sent."""

from __future__ import annotations

import pytest

from sbus.errors import CloseReason
from sbus.flood import (
    Outcome,
    Run,
    SendQueue,
    SharedBudget,
    Until,
    Verdict,
)
from tests.unit.flood.connection import (
    BATCH,
    HARD,
    ORDER,
    SOFT,
    A,
    Asked,
    B,
    C,
    Connection,
    D,
    DropOldest,
    E,
)

# --- replies --------------------------------------------------------------------------------------


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


# --- packets that cannot be sent ------------------------------------------------------------------


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
