"""The backlog in order of arrival, beside a plain list."""

from __future__ import annotations

import gc

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sbus.flood.backlogs import FifoBacklog, Reply
from sbus.flood.latest import KeyIndex
from sbus.flood.naming import PROGRAM, Signature, Signed, sign
from sbus.flood.receipts import Receipt
from sbus.protocol.keys import PeerCredentials
from sbus.protocol.notices import LossReason
from sbus.routing import runs
from tests.support.examples import examples

KEYS = (b"MSG a\0", b"MSG b\0", b"MSG c\0")


class Backlogs(RuleBasedStateMachine):
    """Packets, replies and receipts come and go; some lists go to both backlogs, which must not change them."""

    def __init__(self):
        super().__init__()
        self.backlogs = FifoBacklog(iter(())), FifoBacklog(iter(()))
        self.index = KeyIndex(self.backlogs[0])
        self.models: tuple[list, list] = [], []
        self.pushed: list[tuple[list, list]] = []
        self.number = 0

    def packet(self, key=b"MSG a\0"):
        self.number += 1
        return key + b"%d" % self.number

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=6), both=st.booleans())
    def push(self, keys, both):
        packets = [self.packet(key) for key in keys]
        self.pushed.append((packets, packets.copy()))
        for backlog, model in list(zip(self.backlogs, self.models, strict=True))[: 1 + both]:
            backlog.push(packets)
            model += packets

    @rule()
    def reply(self):
        reply = Reply(self.packet())
        self.backlogs[0].push([reply])
        self.models[0].append(reply)

    @rule()
    def receipt(self):
        receipt = Receipt(1, 1, LossReason.DISCARD)
        self.backlogs[0].mark(receipt)
        self.models[0].append(receipt)

    @rule(which=st.sampled_from((0, 1)), count=st.integers(1, 12), sent=st.integers(0, 12))
    def send(self, which, count, sent):
        backlog, model = self.backlogs[which], self.models[which]
        marks = [at for at, packet in enumerate(model[:count]) if type(packet) is Receipt]
        assert [at for at, _ in backlog.marks_within(count)] == marks
        taken = backlog.take(count)
        assert taken == model[:count]
        sent = min(sent, len(taken))
        backlog.ack(sent)
        del model[:sent]

    @rule(which=st.sampled_from((0, 1)))
    def pop(self, which):
        model = self.models[which]
        messages = [packet for packet in model if type(packet) is bytes]
        assert self.backlogs[which].pop_message() == (messages[0] if messages else None)
        if messages:
            model.remove(messages[0])

    @rule()
    def collect(self):
        model = self.models[0]
        assert self.backlogs[0].remove_marks() == [packet for packet in model if type(packet) is Receipt]
        model[:] = [packet for packet in model if type(packet) is not Receipt]
        self.index = KeyIndex(self.backlogs[0])

    @precondition(lambda self: not any(type(packet) is not bytes for packet in self.models[0]))
    @rule(key=st.sampled_from(KEYS))
    def replace(self, key):
        model, packet = self.models[0], self.packet(key)
        places = [at for at, waiting in enumerate(model) if waiting.startswith(key)]
        left, _ = self.index.replace([packet], lambda size: True)
        assert left == ([] if places else [packet])
        if places:
            model[places[-1]] = packet

    @invariant()
    def holds(self):
        for backlog, model in zip(self.backlogs, self.models, strict=True):
            assert len(backlog) == len(model)
            assert backlog.end - backlog.start == len(model)

    @invariant()
    def leaves_the_lists(self):
        assert all(packets == before for packets, before in self.pushed)

    def teardown(self):
        for backlog, model in zip(self.backlogs, self.models, strict=True):
            assert list(backlog) == model


TestBacklogs = Backlogs.TestCase
TestBacklogs.settings = settings(stateful_step_count=30, max_examples=examples(400))


OTHER = Signature(1, PeerCredentials(2, 3, 4))


def test_the_name_of_a_dropped_message_goes_to_the_next_one_without():
    """Replies and receipts between them keep their places, and a message with a name of its own keeps that."""
    lost = Receipt(1, 5, LossReason.DISCARD)
    backlog = FifoBacklog(iter([sign(b"MSG a\0", PROGRAM.mark)]))
    backlog.mark(lost)
    backlog.push([Reply(b"CMSG x\0"), b"MSG b\0", sign(b"MSG c\0", OTHER.mark), Reply(b"CMSG y\0")])
    for key, signature in ((b"a", PROGRAM), (b"b", PROGRAM)):
        assert backlog.pop_message() == b"MSG %b\0" % key
        named = next(packet for packet in backlog if type(packet) is Signed)
        assert named.notice == (signature if key == b"a" else OTHER).notice
    assert backlog.pop_message() == b"MSG c\0"
    assert list(backlog) == [lost, b"CMSG x\0", b"CMSG y\0"]
    assert backlog.pop_message() is None


def test_latest_does_not_replace_a_reply():
    """A strategy that drops the next message moves the replies before it into places that an index still knows."""
    backlog = FifoBacklog(iter([Reply(b"CMSG x\0"), b"MSG a\x001"]))
    index = KeyIndex(backlog)
    assert backlog.pop_message() == b"MSG a\x001"
    left, _ = index.replace([b"MSG a\x002"], lambda size: True)
    assert left == [b"MSG a\x002"]
    assert list(backlog) == [b"CMSG x\0"]


def test_latest_reads_the_end_of_a_long_backlog():
    """A client that chooses it late does not have the whole backlog read: of what waited before, the end counts."""
    waiting = [b"MSG %d\0" % at for at in range(5000)]
    backlog = FifoBacklog(iter(waiting))
    index = KeyIndex(backlog)
    news = [packet + b"new" for packet in waiting]
    left, _ = index.replace(news, lambda size: True)
    assert left == news[: 5000 - 4096]
    backlog.push(left)
    assert index.replace(left, lambda size: True) == ([], 0)
    assert list(backlog) == waiting[: 5000 - 4096] + news[5000 - 4096 :] + left


def test_latest_forgets_what_is_no_longer_the_newest():
    """Of messages that came under another strategy, more than are read at once, none is overtaken by a newer one."""
    backlog = FifoBacklog(iter([b"MSG a\x001"]))
    index = KeyIndex(backlog)
    assert index.replace([b"MSG a\x002"], lambda size: True) == ([], 0)
    others = [b"MSG %d\0" % at for at in range(5000)]
    backlog.push([b"MSG a\x003"])
    backlog.push(others)
    assert index.replace([b"MSG a\x004"], lambda size: True) == ([b"MSG a\x004"], 0)
    assert list(backlog) == [b"MSG a\x002", b"MSG a\x003", *others]


@pytest.mark.skipif(runs.untracked is runs._untracked, reason="plain Python cannot do it")
def test_the_garbage_collector_does_not_see_what_waits():
    """A collection does not visit the packets of a backlog one by one, also after its receipts were taken out."""
    packets = [b"packet %d" % at for at in range(10)]
    backlog = FifoBacklog(iter(packets))
    backlog.push([b"more"])
    backlog.mark(Receipt(1, 1, LossReason.DISCARD))
    for _ in range(2):
        lists = [one for one in gc.get_objects() if type(one) is list and one is not packets]
        assert not [one for one in lists if any(each is packets[9] for each in one)]
        backlog.remove_marks()
    assert backlog.take(20) == [*packets, b"more"]
