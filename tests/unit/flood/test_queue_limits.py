"""The limits of a queue, and of all queues together, to the message and the byte."""

from __future__ import annotations

from typing import Any

import pytest
from zope.interface import implementer

from sbus.errors import CloseReason
from sbus.flood import (
    MemoryAccount,
    SharedBudget,
)
from sbus.flood.backlogs import PRICE, RANKED, REPLY
from sbus.flood.budget import MINIMUM
from sbus.interfaces import IQueueOrder
from tests.unit.flood.connection import (
    BATCH,
    ORDER,
    A,
    B,
    C,
    Connection,
    D,
    fair_share,
    packets,
)

# --- the limits, to the message and the byte ------------------------------------------------------


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


# --- all queues together --------------------------------------------------------------------------


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
