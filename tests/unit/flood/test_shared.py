"""The backlog that users share: each user's messages in order, users in turn, and room for the next user."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sbus.flood import Signature, Signed
from sbus.flood.backlogs import Reply
from sbus.flood.naming import sign
from sbus.flood.shared import TURN, SharedBacklog
from sbus.protocol.keys import PeerCredentials
from tests.support.examples import examples

USERS = {uid: Signature(uid, PeerCredentials(uid, uid, 1)) for uid in range(4)}


def of(uid: int, *sizes: int, first: int = 0, is_run: bool = True) -> list[bytes]:
    packets = [b"MSG %d " % (first + at) + b"." * size for at, size in enumerate(sizes)]
    return [sign(packet, USERS[uid].mark) if not (at and is_run) else packet for at, packet in enumerate(packets)]


class Shared(RuleBasedStateMachine):
    """Messages and replies come and go; of each user they leave in their order with its name, and none is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.backlog = SharedBacklog(iter(()))
        self.replies: list[bytes] = []
        self.lines: dict[Any, list[bytes]] = defaultdict(list)
        self.number = 0

    @rule(
        uid=st.sampled_from(range(4)),
        sizes=st.lists(st.sampled_from((1, 5_000, TURN)), min_size=1, max_size=5),
        is_run=st.booleans(),
    )
    def push(self, uid, sizes, is_run):
        packets = of(uid, *sizes, first=self.number, is_run=is_run)
        self.number += len(packets)
        self.backlog.push(packets)
        self.lines[uid] += packets

    @rule(uids=st.lists(st.sampled_from(range(4)), min_size=1, max_size=4))
    def push_of_many(self, uids):
        packets = []
        for uid in uids:
            packets += of(uid, 1, 1, first=self.number)
            self.lines[uid] += packets[-2:]
            self.number += 2
        self.backlog.push(packets)

    @rule()
    def reply(self):
        self.number += 1
        reply = Reply(b"CMSG %d" % self.number)
        self.backlog.push([reply])
        self.replies.append(reply)

    @rule(count=st.integers(1, 12), part=st.integers(0, 12))
    def send(self, count, part):
        waiting = len(self.replies) + sum(map(len, self.lines.values()))
        taken = self.backlog.take(count)
        assert len(taken) == min(count, waiting)
        sent = min(part, len(taken))
        self.backlog.ack(sent)
        user = None
        for packet in taken[:sent]:
            if isinstance(packet, Signed):
                user = packet.user
            line = self.replies if isinstance(packet, Reply) else self.lines[user]
            assert line.pop(0) == packet

    @rule()
    def pop(self):
        packet = self.backlog.pop_message()
        lines = [line for line in self.lines.values() if line]
        assert (packet is None) is not bool(lines)
        if packet is not None:
            (line,) = [line for line in lines if line[0] == packet]
            line.pop(0)

    @rule()
    def again(self):
        self.backlog = SharedBacklog(iter(self.backlog))

    @invariant()
    def all_there(self):
        assert len(self.backlog) == len(self.replies) + sum(map(len, self.lines.values()))
        assert sorted(self.backlog) == sorted([*self.replies, *(p for line in self.lines.values() for p in line)])


TestShared = Shared.TestCase
TestShared.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


def test_message_waits_for_a_turn_of_each_other_user():
    """However much a user has there, another one's message leaves after one turn of it."""
    backlog = SharedBacklog(iter(()))
    backlog.push(of(1, *[1_000] * 500))
    backlog.push(of(2, 10))
    at = [len(packet) > 1_000 for packet in backlog.take(500)].index(False)
    assert at * 1_000 <= TURN + 1_000


def test_socket_that_takes_less_than_a_turn_serves_everybody():
    """A user whose turn the socket has cut short goes to the end, so nobody waits for ever."""
    backlog = SharedBacklog(iter(()))
    backlog.push(of(1, *[10] * 500))
    backlog.push(of(2, *[10] * 3))
    sent = []
    for _ in range(6):
        (first, *_) = backlog.take(64)
        assert isinstance(first, Signed)
        sent.append(first.user)
        backlog.ack(1)
    assert sent == [1, 2, 1, 2, 1, 2]


@pytest.mark.parametrize("kind", ["messages", "bytes"])
def test_room(kind):
    """Of 12, one user may have 6, the next one a third of the rest, and so on; an empty line takes any run."""
    limit, size = (12, 1_000) if kind == "messages" else (1_000, 12)
    backlog = SharedBacklog(iter(()))
    had: list[int] = []
    for uid in range(3):
        count = 0
        while True:
            total = sum(had) + count
            rest = limit - total, size - total
            if not backlog.has_room(uid, 1, 1, *rest):
                break
            backlog.push([sign(b"M", USERS[uid].mark)])
            count += 1
        had.append(count)
    assert had == [6, 2, 1]
    assert backlog.has_room(3, 100, 100, 0, 0)


def test_messages_without_a_name_are_one_users():
    """What came before the link asked who publishes has a line, too."""
    backlog = SharedBacklog(iter([b"MSG a\0", b"MSG b\0"]))
    backlog.push(of(1, 5))
    assert backlog.has_room(None, 1, 1, 1, 1) is False
    assert len(backlog.take(10)) == 3


def test_user_of_a_client_of_another_bus():
    """Such a user is known by the chain and the UID: the GID and the PID are the client's own choice."""
    chain = b"!/cred/0/0/7/!/cred/%d/%d/%d"
    users = [
        Signature.vouched(number, chain % ids).user for number, ids in enumerate([(1, 5, 9), (2, 5, 8), (1, 6, 9)])
    ]
    assert users[0] == users[1] != users[2]
    other = Signature.vouched(3, b"!/cred/0/0/8/!/cred/1/5/9")
    assert other.user not in users
    assert Signature(4, PeerCredentials(9, 5, 1)).user == 5


def test_a_strategy_can_drop_the_next_message():
    """It is the first one of the user whose turn it is, and each drop ends a turn."""
    backlog = SharedBacklog(iter([]))
    assert backlog.pop_message() is None
    for uid in range(2):
        backlog.push(of(uid, 1, 1, first=10 * uid))
    dropped = [backlog.pop_message() for _ in range(4)]
    assert dropped == [b"MSG 0 .", b"MSG 10 .", b"MSG 1 .", b"MSG 11 ."]
    assert not len(backlog)


def test_a_socket_may_end_a_batch_within_a_turn():
    """What it has not taken stays, of that user and of those behind."""
    backlog = SharedBacklog(iter([]))
    for uid in range(3):
        backlog.push(of(uid, 1, 1, first=10 * uid))
    assert len(backlog.take(6)) == 6
    backlog.ack(1)
    assert len(backlog) == 5
