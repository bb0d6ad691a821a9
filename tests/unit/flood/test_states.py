"""The four states of a queue: each transition of the table in `sbus.flood.send_queue`, and losses of the server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from sbus.flood import Loss, Outcome, State
from sbus.protocol.notices import LossReason
from tests.unit.flood.connection import BATCH, SOFT, A, B, C, Connection, DropOldest

OPEN, CONGESTED, HELD, DEAF = State.OPEN, State.CONGESTED, State.HELD, State.DEAF


def an_open() -> Connection:
    return Connection()


def a_congested() -> Connection:
    receiver = Connection()
    receiver.stall(A)
    return receiver


def a_held() -> Connection:
    receiver = Connection()
    receiver.queue.hold(Connection().queue)
    return receiver


def a_deaf() -> Connection:
    receiver = Connection()
    receiver.stall(A)
    receiver.queue.deafen()
    return receiver


EACH: dict[State, Callable[[], Connection]] = {OPEN: an_open, CONGESTED: a_congested, HELD: a_held, DEAF: a_deaf}


def release(receiver: Connection) -> object:
    return receiver.queue.release(Connection().queue)  # type: ignore[func-returns-value]


def drop_all(receiver: Connection) -> None:
    receiver.set_strategies(soft=DropOldest(0))
    while receiver.queue.drop_next():
        pass
    receiver.set_strategies(soft=SOFT["discard"])
    receiver.publish(C)


@pytest.mark.parametrize(
    ("before", "act", "after"),
    [
        (OPEN, lambda receiver: receiver.publish(B), OPEN),
        (OPEN, lambda receiver: receiver.queue.write(b"reply"), OPEN),
        (OPEN, lambda receiver: (receiver.publish(B), receiver.drain()), OPEN),
        (OPEN, lambda receiver: receiver.stall(B), CONGESTED),
        (OPEN, lambda receiver: (receiver.queue.write(b"reply"), receiver.flush(0)), CONGESTED),
        (OPEN, lambda receiver: (receiver.set_strategies(soft=SOFT["discard"]), receiver.stall(B)), OPEN),
        (OPEN, lambda receiver: (receiver.set_strategies(soft=SOFT["error"]), receiver.stall(B)), HELD),
        (OPEN, lambda receiver: (receiver.publish(B), receiver.queue.discard_all()), OPEN),
        (OPEN, lambda receiver: receiver.queue.deafen(), DEAF),
        (OPEN, lambda receiver: (receiver.publish(B), receiver.queue.deafen()), DEAF),
        (CONGESTED, lambda receiver: receiver.publish(B), CONGESTED),
        (CONGESTED, lambda receiver: (receiver.publish(B), receiver.flush(1)), CONGESTED),
        (CONGESTED, lambda receiver: receiver.drain(), OPEN),
        (CONGESTED, lambda receiver: receiver.queue.discard_all(), OPEN),
        (CONGESTED, drop_all, OPEN),
        (CONGESTED, lambda receiver: receiver.queue.deafen(), DEAF),
        (CONGESTED, lambda receiver: (receiver.set_strategies(soft=SOFT["error"]), receiver.publish(B)), HELD),
        (HELD, lambda receiver: receiver.publish(B), HELD),
        (HELD, lambda receiver: receiver.queue.write(b"reply"), HELD),
        (HELD, lambda receiver: receiver.queue.discard_all(), HELD),
        (HELD, lambda receiver: (receiver.set_strategies(soft=SOFT["discard"]), receiver.publish(B)), HELD),
        (HELD, release, OPEN),
        (HELD, lambda receiver: (receiver.publish(B), release(receiver)), CONGESTED),
        (HELD, lambda receiver: (receiver.queue.write(b"reply"), release(receiver)), CONGESTED),
        (HELD, lambda receiver: receiver.queue.deafen(), DEAF),
        (HELD, lambda receiver: (receiver.queue.deafen(), release(receiver)), DEAF),
        (HELD, lambda receiver: (receiver.publish(B), receiver.queue.deafen(), release(receiver)), DEAF),
        (DEAF, lambda receiver: receiver.publish(B), DEAF),
        (DEAF, lambda receiver: receiver.drain(), DEAF),
        (DEAF, lambda receiver: (receiver.queue.write(b"reply"), receiver.flush(0)), DEAF),
        (DEAF, lambda receiver: (receiver.drain(), receiver.queue.write(b"reply"), receiver.flush(0)), DEAF),
        (DEAF, lambda receiver: receiver.queue.discard_all(), DEAF),
        (DEAF, lambda receiver: receiver.queue.deafen(), DEAF),
    ],
)
def test_transitions(before, act, after):
    """Each event leads from a state to the one that the table names; afterwards every charge is given back."""
    receiver = EACH[before]()
    assert receiver.queue.state is before
    assert receiver.queue.is_congested is (before is not OPEN)
    act(receiver)
    assert receiver.queue.state is after
    if receiver.closed is not None:
        receiver.queue.deafen()
        receiver.queue.discard_all()
    elif before is HELD:
        release(receiver)
    receiver.drain()
    assert receiver.queue.state is (DEAF if DEAF in (after, receiver.queue.state) else OPEN)
    assert len(receiver.queue) == 0
    budget = receiver.budget
    assert (budget.bytes, budget.messages, budget.queues, budget.users, budget.memory.held) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("state", State)
def test_a_reply_is_sent_in_every_state(state):
    """Whatever becomes of messages, a reply is sent, after what waited before it."""
    receiver = EACH[state]()
    receiver.queue.write(b"reply")
    if state is HELD:
        release(receiver)
    assert receiver.drain()[-1] == b"reply"


@pytest.mark.parametrize("state", State)
def test_a_queue_counts_as_one_of_its_user_while_something_waits(state):
    """A queue is one of those that share the limit exactly while it has a backlog."""
    receiver = EACH[state]()
    assert receiver.budget.queues == receiver.budget.users == (state is not OPEN)


def test_leftovers_of_a_deaf_queue():
    """What a flush leaves of a deaf queue is sent by the next one, and no strategy decides about it."""
    receiver = Connection(soft="error", messages=1)
    receiver.publish(A, B, C)
    taken = receiver.queue.take(BATCH)
    receiver.queue.deafen()
    receiver.ack(taken, 1)
    assert (receiver.queue.messages, receiver.lost, receiver.closed) == (0, [0, 0], None)


@pytest.mark.parametrize("state", State)
def test_what_the_server_has_lost(state):
    """Messages for which the server had no room come behind what waits: their receipt does, too; a deaf one gets none.

    They neither congest a queue nor change its state, and their cause is the server's.
    """
    receiver = EACH[state]()
    receiver.queue.configure(replace(receiver.queue.settings, receipts=True))
    waiting = [A] * receiver.queue.messages
    outcome = receiver.queue.lose(3, 30, LossReason.SHARE)
    receiver.act(outcome)
    assert receiver.queue.state is state
    if state is DEAF:
        assert outcome is None
        assert receiver.drain() == waiting
        return
    assert outcome == Outcome(3, 30, None, None, (Loss(LossReason.SHARE, 3, 30),))
    assert receiver.queue.lost == 3
    assert len(receiver.queue) == len(waiting) + 1
    if state is HELD:
        release(receiver)
    receiver.act(receiver.queue.lose(1, 5, LossReason.QUEUE_FULL))
    receiver.publish(B)
    assert receiver.drain() == [*waiting, b"CMSG lost\0004 35 4 several", B]
    assert receiver.lost == [4, 35]


def test_what_the_server_has_lost_without_receipts():
    """A receiver without receipts has the loss counted, and nothing to send."""
    receiver = Connection()
    receiver.act(receiver.queue.lose(3, 30, LossReason.SHARE))
    assert (receiver.lost, receiver.queue.lost, len(receiver.queue)) == ([3, 30], 3, 0)


@pytest.mark.parametrize("soft", SOFT)
def test_a_loss_of_the_server_asks_no_strategy(soft):
    """What is lost already blocks nobody and disconnects nobody."""
    receiver = Connection(soft=soft, hard="error", messages=1)
    receiver.queue.configure(replace(receiver.queue.settings, receipts=True))
    outcome = receiver.queue.lose(1, 5, LossReason.SHARE)
    assert outcome is not None
    assert (outcome.close, outcome.block) == (None, None)
    assert receiver.drain() == [b"CMSG lost\0001 5 1 share"]


@pytest.mark.parametrize("waiting", [63, 64])
def test_the_place_of_what_the_server_has_lost(waiting):
    """Losses of the server join a receipt with fewer than 64 messages behind it, as other losses do."""
    receiver = Connection()
    receiver.queue.configure(replace(receiver.queue.settings, receipts=True))
    receiver.stall(b"first")
    receiver.act(receiver.queue.lose(1, 5, LossReason.SHARE))
    receiver.publish(*[B] * waiting)
    receiver.act(receiver.queue.lose(2, 6, LossReason.SHARE))
    receipts = [at for at, packet in enumerate(receiver.drain()) if packet.startswith(b"CMSG lost")]
    assert receipts == ([1] if waiting < 64 else [1, 66])


def test_losses_continue_the_counts_of_the_queue_in_front():
    """A queue behind a snapshot goes on counting where the one in front was when it began."""
    front, live = Connection(soft="discard"), Connection()
    for each in (front, live):
        each.queue.configure(replace(each.queue.settings, receipts=True))
    front.act(front.queue.lose(2, 10, LossReason.SHARE))
    assert front.drain() == [b"CMSG lost\0002 10 2 share"]
    live.queue.hold(front.queue)
    live.act(live.queue.lose(1, 5, LossReason.SHARE))
    live.queue.release(front.queue)
    assert live.drain() == [b"CMSG lost\0001 5 3 share"]
