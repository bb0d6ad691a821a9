"""Notices of senders: before each message that leaves, the last one names its publisher, whatever the queue does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbus.flood import (
    DEFAULT_SETTINGS,
    HARD_STRATEGIES,
    ORDERS,
    PROGRAM,
    SIGNED,
    SOFT_STRATEGIES,
    ClientSettings,
    Loss,
    NamedRun,
    Naming,
    QueueLimits,
    Run,
    SendQueue,
    SharedBudget,
    Signature,
    Strategy,
    UserShare,
    Verdict,
    sign_from,
)
from sbus.protocol.bundles import BundleCache
from sbus.protocol.keys import PeerCredentials
from tests.support.examples import examples

PUBLISHERS = [
    PROGRAM,
    Signature(1, PeerCredentials(11, 12, 13)),
    Signature(2, PeerCredentials(11, 12, 13), b"!/cred/0/0/9"),
    Signature.vouched(2, b"!/cred/0/0/9/!/cred/13/12/11"),  # the same as before, named by a link
    Signature.vouched(2, b"!/cred/0/0/9/!/cred/13/12/14"),
]
NOTICES = [
    b"CMSG sender\x000 -",
    b"CMSG sender\x001 !/cred/13/12/11",
    b"CMSG sender\x002 !/cred/0/0/9/!/cred/13/12/11",
    b"CMSG sender\x002 !/cred/0/0/9/!/cred/13/12/11",
    b"CMSG sender\x002 !/cred/0/0/9/!/cred/13/12/14",
]


class Receiver:
    """A queue with names, and a socket that takes as much as a test says.

    :ivar named: what came last of notices.
    :ivar got: the messages that came.
    """

    def __init__(
        self,
        chosen: ClientSettings = DEFAULT_SETTINGS,
        longest: int = 1 << 20,
        messages: int = 1000,
        size: int = 1 << 20,
    ) -> None:
        self.queue = SendQueue(self, QueueLimits(messages, size), UserShare(SharedBudget()))
        self.queue.configure(chosen)
        self.naming = Naming(self.queue)
        self.longest = longest
        self.room = 1 << 30
        self.named = b""
        self.got: list[bytes] = []
        self.receipts = 0

    def on_drained(self, has_room: bool, is_empty: bool) -> None:
        pass

    def on_lost(self, losses: tuple[Loss, ...]) -> None:
        pass

    def try_send(self, packets: list[bytes], cache: BundleCache | None = None) -> int:
        sent = 0
        for packet in packets:
            if not self.room or len(packet) > self.longest:
                break
            self._come(packet)
            sent += 1
        return sent

    def flush(self, count: int) -> None:
        while taken := self.naming.take(count):
            assert len(taken) <= count
            sent = 0
            while sent < len(taken) and self.room:
                packet = taken[sent]
                if len(packet) > self.longest:
                    assert self.naming.reject_oversized(taken, sent)
                    if taken[sent] is not packet:
                        continue
                else:
                    self._come(packet)
                sent += 1
            self.naming.ack(taken, sent)
            if sent < len(taken) and (self.queue.is_congested or not self.queue.pending):
                if self.queue.pending:
                    self.queue.settle(False)
                return

    def publish(self, packets: list[bytes], signature: Signature, count: int, at_once: bool) -> None:
        if self.queue.is_congested:
            named = NamedRun(sign_from(packets, 0, signature))
            self.queue.admit(Run(named.leading) if self.queue.keeps(named) else named, False)
            return
        sent = self.naming.send(packets, signature, self, {}) if at_once else 0
        if sent < len(packets):
            self.queue.pending += sign_from(packets, sent, signature)
        self.flush(count)

    def _come(self, packet: bytes) -> None:
        self.room -= 1
        if packet.startswith(b"CMSG sender\0"):
            assert packet != self.named, "the same publisher was named twice in a row"
            self.named = packet
        elif packet.startswith(b"CMSG lost\0"):
            self.receipts += int(packet[10:].split()[0])
        elif packet.startswith(b"MSG "):
            assert NOTICES[packet[-1] - ord("0")] == self.named, "its publisher is not the one named last"
            self.got.append(packet)


class _DropOldest(Strategy):
    """Makes room by dropping what would be sent next; what to do then is drawn."""

    def __init__(self, then: Verdict) -> None:
        super().__init__(b"blocking/hard/drop-oldest", then)
        self.always = None
        self._then = then

    def decide(self, queue: Any, packet: bytes) -> Verdict:
        queue.drop_next()
        return self._then


STEPS = st.one_of(
    st.tuples(
        st.just("publish"),
        st.integers(0, len(PUBLISHERS) - 1),
        st.integers(1, 9),
        st.sampled_from((3, 4, 64)),
        st.booleans(),
    ),
    st.tuples(st.just("room"), st.integers(0, 12), st.sampled_from((3, 4, 64))),
    st.tuples(st.just("reply")),
)


@pytest.mark.parametrize("soft", range(len(SOFT_STRATEGIES)))
@pytest.mark.parametrize("order", range(len(ORDERS)))
@settings(max_examples=examples(60), deadline=None)
@given(
    steps=st.lists(STEPS, max_size=40),
    has_receipts=st.booleans(),
    messages=st.sampled_from((3, 1000)),
    hard=st.sampled_from((HARD_STRATEGIES[0], _DropOldest(Verdict.KEEP), _DropOldest(Verdict.DROP))),
)
def test_the_last_notice_names_the_publisher(
    soft: int, order: int, steps: list[Any], has_receipts: bool, messages: int, hard: Strategy
) -> None:
    """It holds under every strategy and order, with losses and packets that are too long for the socket."""
    chosen = replace(DEFAULT_SETTINGS, soft=SOFT_STRATEGIES[soft], hard=hard, receipts=has_receipts, sender=True)
    receiver = Receiver(chosen.with_order(ORDERS[order]), longest=100, messages=messages)
    published = replies = 0
    for name, *values in steps:
        if name == "publish":
            who, count, at_most, at_once = values
            size = 90 if published % 7 == 3 else published % 5
            receiver.publish(
                [b"MSG k%d\0%d %s%d" % (each % 3, published + each, b"x" * size, who) for each in range(count)],
                PUBLISHERS[who],
                at_most,
                at_once,
            )
            published += count
        elif name == "room":
            receiver.room, at_most = values
            receiver.flush(at_most)
        else:
            receiver.naming.write(b"CMSG a reply\0")
            replies += 1
    receiver.room = 1 << 30
    receiver.flush(64)
    assert len(set(receiver.got)) == len(receiver.got)
    assert len(receiver.got) + receiver.queue.lost + receiver.queue.conflated == published
    if has_receipts and chosen.soft.selector != b"blocking/soft/error":
        assert receiver.receipts == receiver.queue.lost
    if not receiver.queue.is_congested:
        assert receiver.queue.memory == 0


def test_a_run_shares_its_notice():
    """Messages of one publisher have one notice in front of the first."""
    receiver = Receiver()
    receiver.publish([b"MSG k\x001", b"MSG k\x001"], PUBLISHERS[1], 64, True)
    receiver.publish([b"MSG k\x001"], PUBLISHERS[1], 64, False)
    assert receiver.room == (1 << 30) - 4


def test_no_batch_is_longer_than_asked():
    """Notices count: what has no place in a batch beside them stays pending, and is no congestion."""
    receiver = Receiver()
    for who in range(3):
        receiver.queue.pending += sign_from([b"MSG k\0%d" % who], 0, PUBLISHERS[who])
    assert receiver.naming.take(3) == [NOTICES[0], b"MSG k\x000", NOTICES[1]]
    receiver.naming.ack([], 3)
    assert not receiver.queue.is_congested
    assert receiver.naming.take(3) == [b"MSG k\x001", NOTICES[2], b"MSG k\x002"]


def test_what_was_not_sent_is_named_again():
    """A notice that was not sent comes again; one that was sent does not."""
    receiver = Receiver()
    receiver.queue.pending += sign_from([b"MSG k\x001"], 0, PUBLISHERS[1])
    taken = receiver.naming.take(64)
    receiver.naming.ack(taken, 0)
    receiver.queue.settle(False)
    taken = receiver.naming.take(64)
    assert taken == [NOTICES[1], b"MSG k\x001"]
    receiver.naming.ack(taken, 1)
    assert receiver.naming.take(64) == [b"MSG k\x001"]


def test_names_that_wait_are_charged():
    """A message that waits for a receiver that asks weighs what its name may weigh, too."""
    weights = []
    for price in (0, SIGNED):
        receiver = Receiver()
        receiver.queue.price += price
        receiver.room = 0
        receiver.publish([b"MSG k\x001"] * 10, PUBLISHERS[1], 64, True)
        weights.append(receiver.queue.memory)
    assert weights[1] - weights[0] == 10 * SIGNED


class _Failing(Strategy):
    """Fails at the first message, and drops all others."""

    def __init__(self) -> None:
        super().__init__(b"blocking/hard/failing", Verdict.DROP)
        self.always = None
        self._has_failed = False

    def decide(self, queue: Any, packet: bytes) -> Verdict:
        if not self._has_failed:
            self._has_failed = True
            raise LookupError
        return Verdict.DROP


def test_behind_what_a_strategy_has_not_judged():
    """A run that would be kept alone is not kept as a whole behind messages that an exception has left."""
    receiver = Receiver(replace(DEFAULT_SETTINGS, hard=_Failing(), sender=True), size=200)
    receiver.room = 0
    receiver.publish([b"MSG k\0" + b"x" * 80 + b"0"], PUBLISHERS[0], 64, False)
    receiver.publish([b"MSG k\0" + b"x" * 80 + b"1"], PUBLISHERS[1], 64, False)
    with pytest.raises(LookupError):
        receiver.publish([b"MSG k\0" + b"x" * 80 + b"2"], PUBLISHERS[2], 64, False)
    receiver.naming.ack(receiver.naming.take(64), 2)
    receiver.named = NOTICES[0]
    receiver.publish([b"MSG k\0" + b"x" * 80 + b"4", b"MSG k\x004"], PUBLISHERS[4], 64, False)
    receiver.room = 100
    receiver.flush(64)
    assert receiver.got[-1] == b"MSG k\x004"
    assert receiver.queue.lost == 1


def test_a_notice_that_can_never_be_sent_ends_no_connection():
    """It is dealt with as if it had been sent: nobody is to blame for it."""
    receiver = Receiver(replace(DEFAULT_SETTINGS, sender=True))
    receiver.room = 0
    receiver.publish([b"MSG k\0"], PUBLISHERS[1], 64, False)
    taken = receiver.naming.take(64)
    assert taken == [NOTICES[1], b"MSG k\0"]
    assert receiver.naming.reject_oversized(taken, 0)
    receiver.naming.ack(taken, 2)
    assert len(receiver.queue) == 0
    assert receiver.queue.lost == 0
