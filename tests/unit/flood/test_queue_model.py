"""A queue beside a plain model: random messages, replies, choices and limits."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sbus.errors import CloseReason
from sbus.flood import (
    UNLIMITED,
    Loss,
    MemoryAccount,
    QueueLimits,
    SendQueue,
    SharedBudget,
    State,
    UserShare,
)
from sbus.flood.backlogs import PRICE, RANKED, REPLY
from sbus.protocol.notices import LossReason
from tests.support.examples import examples
from tests.unit.flood.connection import (
    BATCH,
    HARD,
    ORDER,
    SOFT,
    Connection,
    fair_share,
    share_of,
)


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
