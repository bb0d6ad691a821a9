"""Backlogs that are not in order of arrival do what a plain list would do."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sbus.flood.backlogs import ORDERS, PriorityBacklog, Reply, new_backlog
from tests.support.examples import examples


class Backlogs(RuleBasedStateMachine):
    """Messages and replies come and go; some lists of messages go to both backlogs, which must not change them."""

    @initialize(kind=st.sampled_from(ORDERS[1:]), newest_first=st.booleans())
    def begin(self, kind, newest_first):
        self.kind, self.newest_first = kind, newest_first
        self.backlogs = [new_backlog(iter(()), kind, newest_first) for _ in range(2)]
        self.models: tuple[list, list] = [], []
        self.pushed: list[tuple[list, list]] = []
        self.number = 0

    def packet(self, size=0):
        self.number += 1
        return b"MSG %06d" % self.number + b"." * size

    def in_order(self, model):
        """Return the packets as they are to be sent."""
        messages = [packet for packet in model if type(packet) is bytes]
        if self.kind is ORDERS[1]:
            messages.reverse()
        else:
            if self.newest_first:
                messages.reverse()
            messages.sort(key=len, reverse=True)
        return [packet for packet in model if type(packet) is Reply] + messages

    def add(self, which, packets):
        self.backlogs[which].push(packets)
        self.models[which].extend(packets)

    @rule(sizes=st.lists(st.integers(0, 3), min_size=1, max_size=6), both=st.booleans())
    def push(self, sizes, both):
        packets = [self.packet(size) for size in sizes]
        self.pushed.append((packets, packets.copy()))
        for which in range(1 + both):
            self.add(which, packets)

    @rule(which=st.sampled_from((0, 1)))
    def reply(self, which):
        self.add(which, [Reply(self.packet())])

    @rule(which=st.sampled_from((0, 1)), most=st.integers(1, 6))
    def rank_some(self, which, most):
        self.backlogs[which].rank(most)

    @rule(
        which=st.sampled_from((0, 1)),
        count=st.integers(1, 12),
        sent=st.integers(0, 12),
        sizes=st.lists(st.integers(0, 3), max_size=6),
    )
    def send(self, which, count, sent, sizes):
        """Send some; messages may come before it is known how many were sent."""
        backlog, model = self.backlogs[which], self.models[which]
        backlog.rank(len(backlog))
        taken = backlog.take(count)
        assert taken == self.in_order(model)[:count]
        if sizes:
            self.add(which, [self.packet(size) for size in sizes])
        sent = min(sent, len(taken))
        backlog.ack(sent)
        for packet in taken[:sent]:
            model.remove(packet)

    @rule(which=st.sampled_from((0, 1)))
    def pop(self, which):
        backlog, model = self.backlogs[which], self.models[which]
        backlog.rank(len(backlog))
        messages = [packet for packet in self.in_order(model) if type(packet) is bytes]
        assert backlog.pop_message() == (messages[0] if messages else None)
        if messages:
            model.remove(messages[0])

    @invariant()
    def holds(self):
        for backlog, model in zip(getattr(self, "backlogs", ()), getattr(self, "models", ()), strict=True):
            assert len(backlog) == len(model)
            if isinstance(backlog, PriorityBacklog):
                assert backlog.ranked + backlog.unranked == sum(type(packet) is bytes for packet in model)

    @invariant()
    def leaves_the_lists(self):
        assert all(packets == before for packets, before in getattr(self, "pushed", ()))

    def teardown(self):
        for backlog, model in zip(getattr(self, "backlogs", ()), getattr(self, "models", ()), strict=True):
            packets = list(backlog)
            for kind in (bytes, Reply):
                assert [each for each in packets if type(each) is kind] == [
                    each for each in model if type(each) is kind
                ]


TestBacklogs = Backlogs.TestCase
TestBacklogs.settings = settings(stateful_step_count=30, max_examples=examples(400))


def test_an_order_that_fails_loses_nothing():
    """Messages whose rank fails wait for the next attempt, which may fail again."""

    class Failing:
        selector, newestFirst, arrival = b"order/fails", None, False
        fails = True

        def rank(self, arrival, size, newest_first):
            if self.fails and arrival == 2:
                raise RuntimeError("broken")
            return arrival

    order: Any = Failing()
    backlog = PriorityBacklog(iter(()), order, False)
    backlog.push([b"one", b"two", b"three"])
    for _ in range(2):
        with pytest.raises(RuntimeError):
            backlog.rank(3)
    assert backlog.unranked == 3
    order.fails = False
    backlog.rank(3)
    assert backlog.take(9) == [b"one", b"two", b"three"]
