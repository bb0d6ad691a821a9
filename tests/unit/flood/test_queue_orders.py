"""The orders of a queue: each message in its place, and the cost of each step."""

from __future__ import annotations

import sys
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.flood import (
    Run,
)
from sbus.flood.backlogs import FifoBacklog, PriorityBacklog, Reply
from tests.support.costs import calls
from tests.unit.flood.connection import (
    BATCH,
    ORDER,
    A,
    B,
    C,
    Connection,
    D,
    E,
)


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


def test_the_next_order_does_not_sort_what_waits():
    """Returning ranked messages in the order of arrival is one step, and takes a fraction of the time of ranking."""
    ranks, steps = [], []
    for _ in range(3):
        backlog = PriorityBacklog(iter([bytes(at * 7919 % 97) for at in range(30_000)]), ORDER["random"], False)
        began = time.thread_time()
        backlog.rank(30_000)
        ranked = time.thread_time()
        packets = list(backlog)
        steps.append(time.thread_time() - ranked)
        ranks.append(ranked - began)
        assert [len(packet) for packet in packets] == [at * 7919 % 97 for at in range(30_000)]
    assert min(steps) < min(ranks) / 5


def test_ranked_messages_that_were_sent_take_no_memory():
    """A client that reads all but a few of many messages does not keep the room of the others: it pays for the few."""
    tracemalloc.start()
    try:
        backlog = PriorityBacklog(iter([bytes(100)] * 30_000), ORDER["random"], False)
        before, _ = tracemalloc.get_traced_memory()
        backlog.rank(30_000)
        ranked, _ = tracemalloc.get_traced_memory()
        while len(backlog) > 10:
            backlog.ack(len(backlog.take(64)))
        left, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert left - before < (ranked - before) / 100


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
