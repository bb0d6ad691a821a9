"""Losses keep their place among the messages: through lists, bundles and reconnects, for every reader."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sbus.client.core import Message
from sbus.client.losses import LossMark, Lost, MessageQueue, parse_lost
from sbus.client.subscription import HIGH_WATER, LOW_WATER
from tests.support.examples import examples
from tests.support.packets import bundle
from tests.unit.client.sessions import Exact, FakeSession, Sub, lose

GAP = Lost(None, None, None, "reconnect")


class Losses(RuleBasedStateMachine):
    """A server that sends numbered messages and receipts, and up to three readers of different kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int | Lost] = []  # in the order of the server
        self.reported: list[Lost] = []
        self.read_at: list[dict[Any, int]] = []  # messages that each reader had when a loss was reported
        self.read: dict[Any, list[int]] = {}
        self.session = FakeSession(reconnect=Exact(), on_lost=self.on_lost)
        self.subs = [self.session.subscribe("k") for _ in range(2)]
        self.read = {sub: [] for sub in self.subs}
        self.number = self.losses = 0
        self.is_connected = True

    def on_lost(self, lost: Lost) -> None:
        self.reported.append(lost)
        self.read_at.append({reader: len(numbers) for reader, numbers in self.read.items()})

    @precondition(lambda self: self.is_connected)
    @rule(kinds=st.lists(st.booleans(), min_size=1, max_size=8), bundled=st.booleans())
    def send(self, kinds: list[bool], bundled: bool) -> None:
        """Send messages (True) and receipts (False), perhaps as one bundle."""
        packets: list[bytes] = []
        for is_message in kinds:
            if is_message:
                packets.append(b"MSG k\0%d" % self.number)
                self.sent.append(self.number)
                self.number += 1
            else:
                self.losses += 1
                packets.append(b"CMSG lost\x001 2 %d discard" % self.losses)
                self.sent.append(Lost(1, 2, self.losses, "discard"))
        self.session.arrive(*([bundle(*packets)] if bundled else packets))

    @precondition(lambda self: self.is_connected)
    @rule()
    def lose(self) -> None:
        """Lose the connection."""
        lose(self.session)
        self.is_connected = False

    @precondition(lambda self: not self.is_connected)
    @rule()
    def reconnect(self) -> None:
        """Make the connection again; its first packet is the reply to the fence."""
        self.session.wake()
        self.sent.append(GAP)
        self.session.reply()
        self.is_connected = True

    @rule(which=st.integers(0, 1), single=st.booleans())
    def take(self, which: int, single: bool) -> None:
        """Read one message, or all that are ready."""
        sub = self.subs[which]
        message = sub._next() if single else None
        messages = ([message] if message else []) if single else sub.get_ready()
        self.read[sub] += [int(message.payload) for message in messages]

    @invariant()
    def losses_come_in_order_and_once(self) -> None:
        """The reported losses are the first of those that the server has sent."""
        assert self.reported == [item for item in self.sent if isinstance(item, Lost)][: len(self.reported)]

    @invariant()
    def messages_come_in_order_and_once(self) -> None:
        """Each reader has the first of the messages."""
        for numbers in self.read.values():
            assert numbers == list(range(len(numbers)))

    @invariant()
    def losses_stand_in_their_place(self) -> None:
        """No reader has a message from behind a loss that is not reported; one had all from before it at the report."""
        before = 0  # messages in front of the loss
        losses = 0
        for item in self.sent:
            if not isinstance(item, Lost):
                before += 1
            elif losses < len(self.reported):
                assert max(self.read_at[losses].values()) == before
                losses += 1
            else:
                assert all(len(numbers) <= before for numbers in self.read.values())

    @invariant()
    def number_is_known_at_once(self) -> None:
        """The number of lost messages counts receipts as they come."""
        assert self.session.lost == self.losses

    def teardown(self) -> None:
        """Whoever reads everything has seen everything."""
        for sub in self.subs:
            while messages := sub.get_ready():
                self.read[sub] += [int(message.payload) for message in messages]
            assert len(self.read[sub]) == self.number
        assert len(self.reported) == sum(isinstance(item, Lost) for item in self.sent)


TestLosses = Losses.TestCase
TestLosses.settings = settings(max_examples=examples(100), stateful_step_count=30)


def test_callbacks_get_losses_in_order() -> None:
    """A subscription with a callback has got everything that came before, so that losses are reported at once."""
    story: list[Any] = []
    session = FakeSession(on_lost=story.append)
    session.subscribe("k", lambda message: story.append(message.payload))
    unread = session.subscribe("k")
    lost = Lost(1, 2, 1, "discard")
    session.arrive(b"MSG k\x001", b"MSG k\x002", b"CMSG lost\x001 2 1 discard", b"MSG k\x003")
    assert story == [b"1", b"2", lost, b"3"]
    assert [message.payload for message in unread.get_ready()] == [b"1", b"2", b"3"]


def test_reading_resumes_behind_marks() -> None:
    """Marks count toward the high-water mark, and reading resumes when they are passed."""
    session = FakeSession(on_lost=lambda lost: None)
    sub = session.subscribe("k")
    session.arrive(b"MSG k\0", *[b"CMSG lost\x001 2 3 discard"] * (HIGH_WATER - 1))
    assert not session.reading
    assert isinstance(sub, Sub)
    assert sub._next() is not None
    assert sub._next() is None
    assert session.reading
    session.arrive(*[b"MSG k\0"] * LOW_WATER, b"CMSG lost\x001 2 3 discard", *[b"MSG k\0"] * HIGH_WATER)
    assert len(sub.get_ready()) == LOW_WATER
    assert not session.reading
    assert len(sub.get_ready()) == HIGH_WATER
    assert session.reading


@pytest.mark.parametrize(
    ("payload", "lost"),
    [
        (b"1 22 333 queue-full", Lost(1, 22, 333, "queue-full")),
        (b"? ? ? restart", Lost(None, None, None, "restart")),
        (b"1 ? 3 \xff", Lost(1, None, 3, "\\xff")),
        (b"1 2 3", None),
        (b"1 2 3 a b", None),
        (b"-1 2 3 x", None),
        (b"1 2 " + b"9" * 19 + b" x", None),
        (b"", None),
    ],
)
def test_receipts_are_parsed(payload: bytes, lost: Lost | None) -> None:
    """A receipt has three numbers, each perhaps unknown, and a word; anything else is no receipt."""
    assert parse_lost(payload) == lost


def test_queue_keeps_one_mark_in_a_place() -> None:
    """Several subscriptions that share a queue put the same mark into it once."""
    queue, mark = MessageQueue([Message(b"k", b"")]), LossMark.of(GAP)
    queue.keep(mark)
    queue.keep(mark)
    assert (len(queue), queue.marks) == (2, 1)
    queue.refill([mark, Message(b"k", b"")])
    assert (len(queue), queue.marks) == (2, 1)
    got: list[Lost] = []
    queue.settle(got.append)
    queue.settle(got.append)
    assert (got, len(queue), queue.marks) == ([GAP], 1, 0)
