"""A bus beside a plain model: the order of what each client gets, and what became of each message.

The model knows patterns, echo and last values, and nothing of queues, turns and users. It notes what the server has
handled, in the order in which the server says so: `packetsReceived` returns how many packets it took. From that it
knows what each client is to get, and compares it with what came, after each step.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from sbus.server.core.limits import Limits
from tests.support.examples import examples
from tests.unit.server.model import CHOICES, CROWD, READERS, Model, Step


def _steps() -> st.SearchStrategy[Step]:
    names = [
        *["publish"] * 8,
        *["stall", "turn", "wait"] * 3,
        *["use_up", "drain", "select", "subscribe", "sender"] * 2,
        "unsubscribe",
        "free",
        "receipts",
        "fence",
        "last",
        "end",
        "echo",
        "inside",
    ]
    return st.tuples(st.sampled_from(names), st.integers(0, READERS + 3), st.integers(0, 3), st.integers(1, 40))


def play(
    queue_messages: int,
    total: int,
    user_memory: int | None,
    across_users: bool,
    has_observer: bool,
    beginnings: list[tuple[int, int, bool]],
    steps: list[Step],
) -> None:
    """Have clients take steps, and check the bus after each.

    :param beginnings: choice, pattern and receipts of the first readers; those of the others are the same again.
    """
    limits = Limits(block_timeout=1e9, queue_messages=queue_messages, total_queue_bytes=total, user_memory=user_memory)
    model = Model(limits, across_users, has_observer)
    for slot, (choice, pattern, has_receipts) in zip(range(READERS), itertools.cycle(beginnings)):
        if has_receipts:
            model.receipts(slot, 0, 0)
        model.select(slot, 0, choice)
        model.subscribe(slot, pattern, 0)
        model.stall(slot, 0, 0)
    for name, who, key, count in steps:
        getattr(model, name)(who, key, count)
        model.check()
    event(f"a publisher had to wait: {model.has_waited}, losses: {model.registry.counters.dropped > 0}")
    model.finish(4 * len(steps) + 16)
    model.check_end(queue_messages > 1_000 and total > 1 << 20, user_memory is None)


BUSES: dict[str, Any] = {
    "queue_messages": st.sampled_from((4, 30, 65_536)),
    "total": st.sampled_from((2_000, 256 << 20)),
    "user_memory": st.sampled_from((None, 512 << 10)),
    "across_users": st.booleans(),
    "beginnings": st.lists(
        st.tuples(st.integers(0, len(CHOICES) - 1), st.integers(0, 3), st.booleans()), min_size=1, max_size=6
    ),
    "steps": st.lists(_steps(), max_size=70) | st.lists(_steps(), min_size=25, max_size=70),  # the second for length
}
SMALL = {"queue_messages": 4, "total": 2_000, "user_memory": None, "across_users": False}
QUEUES = [(0, 0, False)]


@settings(max_examples=examples(200), deadline=None)
@given(**BUSES)
@example(  # a client's own message ends it, and what it has sent after that is ignored
    **{**SMALL, "total": 256 << 20, "user_memory": 512 << 10, "across_users": True},
    beginnings=[(0, 0, True), (16, 2, True), (0, 1, True), (4, 0, False), (0, 2, True), (7, 0, True)],
    steps=[
        *[("unsubscribe", 21, 0, 1), ("wait", 2, 1, 1), ("publish", 15, 0, 1), ("subscribe", 22, 0, 1)],
        *[("publish", 21, 0, 1), ("drain", 6, 0, 1), ("turn", 6, 2, 1), ("publish", 8, 0, 5)],
        *[("unsubscribe", 23, 0, 1), ("turn", 23, 0, 1), ("free", 12, 0, 1), ("drain", 17, 0, 1)],
        *[("wait", 9, 0, 1), ("wait", 4, 3, 1)],
    ],
)
@example(  # a snapshot ends while messages wait for its client, and its strategies hold again
    **SMALL,
    beginnings=[*QUEUES * 2, (3, 0, False), *QUEUES * 3],
    steps=[("last", 5, 0, 1), ("publish", 0, 0, 1), ("free", 5, 0, 1)],
)
@example(  # a client that waits with others is in no route any more
    **SMALL,
    beginnings=[*QUEUES * 5, (1, 0, False)],
    steps=[("publish", 0, 0, 1), ("turn", 0, 0, 1), ("unsubscribe", 5, 0, 1), ("publish", 0, 0, 1)],
)
@example(  # 80 messages stand behind a receipt when the next one is lost
    queue_messages=65_536,
    total=256 << 20,
    user_memory=None,
    across_users=False,
    beginnings=[(1, 0, True)],
    steps=[
        ("publish", 0, 0, 1),
        ("select", READERS, 0, 0),
        ("publish", 0, 0, 40),
        ("publish", 0, 0, 40),
        ("select", READERS, 0, 1),
        ("publish", 0, 0, 1),
        ("select", READERS, 0, 0),
        ("publish", 0, 0, 1),
    ],
)
@example(  # a message that is handled between the end of a client and the loss of its connection was lost for it
    **SMALL,
    beginnings=QUEUES,
    steps=[
        ("last", 23, 0, 0),
        ("use_up", 0, 0, 0),
        ("wait", 0, 0, 0),
        ("drain", 5, 0, 5),
        ("publish", 4, 0, 1),
        ("turn", 0, 0, 0),
        ("wait", 0, 0, 0),
        ("publish", 0, 0, 1),
        ("wait", 0, 0, 0),
        ("end", 22, 1, 0),
    ],
)
def test_each_message_comes_in_order_or_is_lost_and_told(**case: Any) -> None:
    """Whatever clients and sockets do, each client gets everything in the order of handling, or learns what it lost."""
    play(has_observer=False, **case)


def test_a_message_for_a_client_that_has_ended_has_no_copy() -> None:
    """A client that has ended its sending gets nothing more, and no copy is counted for it."""
    model = Model(Limits(), across_users=False, has_observer=False)
    for name, who in (("subscribe", 18), ("publish", 0), ("use_up", 2), ("end", 18), ("publish", 0)):
        getattr(model, name)(who, 0, 4)
        model.check()


@settings(max_examples=examples(100), deadline=None)
@given(**BUSES)
@example(
    **SMALL,
    beginnings=QUEUES,
    steps=[("publish", 0, 0, 1), ("stall", 2, 1, 1), ("echo", 0, 0, 1), ("last", 2, 0, 1)],
)
@example(
    **SMALL,
    beginnings=QUEUES,
    steps=[("publish", 0, 0, 1), ("stall", 2, 1, 1), ("echo", 0, 0, 1), ("last", 2, 0, 1), ("publish", 0, 0, 1)],
)
@example(  # a snapshot is about to be sent
    **SMALL,
    beginnings=[*QUEUES * 5, (0, 0, True)],
    steps=[("publish", 0, 0, 1), ("stall", 5, 2, 1), ("echo", 0, 0, 1), ("last", 5, 0, 1)],
)
@example(  # a snapshot is being sent, and messages come behind it: two of them came twice
    **SMALL,
    beginnings=[*QUEUES * 3, (0, 0, True), (2, 0, True), (0, 0, False)],
    steps=[
        ("publish", 0, 0, 1),
        ("stall", 5, 2, 1),
        ("use_up", 1, 0, 40),
        ("echo", 0, 0, 1),
        ("last", 5, 0, 1),
        ("publish", 5, 0, 1),
        ("publish", 0, 0, 1),
        ("turn", 0, 0, 1),
    ],
)
@example(  # memory stayed charged when everybody had gone
    **SMALL,
    beginnings=[(9, 0, True), (0, 0, True), *QUEUES * 3, (0, 0, True)],
    steps=[
        ("publish", 0, 0, 1),
        ("stall", 5, 1, 1),
        ("use_up", 1, 0, 40),
        ("echo", 0, 0, 1),
        ("last", 5, 0, 1),
        ("drain", 5, 0, 1),
        ("turn", 5, 0, 1),
    ],
)
@example(  # a client that was to be disconnected got a later reply, but not the earlier one
    queue_messages=4,
    total=256 << 20,
    user_memory=None,
    across_users=False,
    beginnings=[(7, 0, True), (0, 0, True), (13, 3, True), (0, 0, False)],
    steps=[
        ("echo", 0, 1, 0),
        ("turn", 0, 0, 0),
        ("free", 2, 0, 0),
        ("publish", 14, 1, 1),
        ("wait", 0, 0, 0),
        ("wait", 0, 0, 0),
        ("fence", 24, 0, 0),
        ("publish", 18, 0, 1),
        ("wait", 0, 0, 0),
        ("publish", 0, 0, 5),
    ],
)
def test_what_an_observer_publishes_comes_in_order_too(**case: Any) -> None:
    """A message that an observer publishes inside an event has one place in the order of all others."""
    play(has_observer=True, **case)


def test_a_bus_that_nobody_refers_to_is_gone() -> None:
    """A bus shares nothing with others: with its last reference all of it is garbage, routes in use or not."""
    model = Model(Limits(), across_users=False, has_observer=False)
    for slot in range(CROWD):
        model.subscribe(slot, 0, 0)
    model.publish(0, 0, 5)
    route = model.registry.route(b"kept/1")
    assert route.groups
    registry = weakref.ref(model.registry)
    del model, route
    gc.collect()
    assert registry() is None
