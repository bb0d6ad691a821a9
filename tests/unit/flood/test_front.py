"""A snapshot between two queues: the order on the wire, and packets that the socket can never take."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

import pytest
from zope.interface.verify import verifyObject

from sbus.flood import QueueLimits, Run, SendQueue, SharedBudget, UserShare
from sbus.flood.front import Front
from sbus.interfaces import IPacketQueue
from sbus.protocol.notices import LossReason
from tests.unit.flood.connection import SOFT, Connection

LONGEST = 60
"""Bytes that the socket takes at most."""
LARGE = b"x" * (LONGEST + 1)


def packets(*some: bytes | None) -> Generator[bytes | None, None, None]:
    """The packets of a snapshot; None is a pause."""
    yield from some


class Reader:
    """A receiver that has asked for a snapshot while some packets waited for it.

    :ivar wire: what its socket has taken.
    """

    def __init__(self, *waiting: bytes, snapshot: Generator[bytes | None, None, None]) -> None:
        self.connection = Connection()
        self.connection.queue.pending += waiting
        self.live = SendQueue(self.connection, QueueLimits(1000, 1 << 20), UserShare(SharedBudget()))
        self.is_over = False
        self.wire: list[bytes] = []
        self.queue = Front(self.connection.queue, snapshot, self.live, self.connection, self._over)

    def _over(self) -> None:
        self.is_over = True

    def flush(self, times: int = 1, count: int = 64) -> int:
        """Send as a transport does that is asked to flush some times; return how many packets it took last."""
        taken: list[bytes] = []
        for _ in range(times):
            taken = self.queue.take(count)
            if not taken:
                break
            at = 0
            while at < len(taken):
                packet = taken[at]
                if len(packet) > LONGEST:
                    assert self.queue.reject_oversized(taken, at)
                    if taken[at] is not packet:
                        continue
                else:
                    self.wire.append(packet)
                at += 1
            self.queue.ack(taken, at)
        return len(taken)


def test_front_snapshot_live() -> None:
    """What waited comes first, then the snapshot, and then what has come since; a pause lets nothing past."""
    reader = Reader(b"front", snapshot=packets(b"one", None, b"two"))
    assert verifyObject(IPacketQueue, reader.queue)
    reader.connection.act(reader.live.admit(Run([b"live"]), True))
    reader.flush()
    assert reader.wire == [b"front", b"one"]
    assert not reader.is_over
    reader.flush(times=2)
    reader.queue.write(b"reply")
    reader.flush()
    assert reader.wire == [b"front", b"one", b"two", b"live", b"reply"]
    assert reader.is_over
    assert len(reader.queue) == 0


@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("before", range(5))
@pytest.mark.parametrize("values", range(1, 10))
def test_the_end_of_a_snapshot_is_found_wherever_it_falls(values: int, before: int, count: int) -> None:
    """The packet that fills a batch may be the snapshot's last: a transport that gets nothing then sends no more."""
    sent = [b"front"] * before + [b"value"] * values
    reader = Reader(*sent[:before], snapshot=packets(*sent[before:]))
    while reader.flush(count=count):
        pass
    assert reader.wire == sent
    assert reader.is_over


def test_packets_that_no_socket_takes() -> None:
    """A packet that is too large is left out and counted, before, in and behind the snapshot; the others keep order."""
    reader = Reader(b"front", LARGE, snapshot=packets(b"one", LARGE, b"two"))
    reader.connection.act(reader.live.admit(Run([b"live", LARGE, b"last"]), True))
    reader.flush(times=4)
    assert reader.wire == [b"front", b"one", b"two", b"live", b"last"]
    assert reader.connection.lost == [3, 3 * len(LARGE)]


def too_large(total: int) -> bytes:
    """Return the receipt of a packet that no socket takes."""
    return b"CMSG lost\0001 %d %d too-large" % (len(LARGE), total)


def test_receipts_around_a_snapshot() -> None:
    """With receipts, each packet that is too large for the socket has one in its place, with the sum of all so far."""
    reader = Reader(b"front", LARGE, snapshot=packets(b"one", LARGE, LARGE, b"two"))
    for queue in reader.connection.queue, reader.live:
        queue.configure(replace(queue.settings, receipts=True))
    reader.connection.act(reader.live.admit(Run([LARGE, b"last"]), True))
    reader.connection.act(reader.live.lose(5, 50, LossReason.SHARE))
    reader.flush(times=4)
    values = [b"one", too_large(2), too_large(3), b"two"]
    assert reader.wire == [b"front", too_large(1), *values, too_large(4), b"last", b"CMSG lost\0005 50 9 share"]
    assert reader.live.lost == reader.connection.lost[0] == 9


def test_losses_before_a_snapshot_count_in_receipts_behind_it() -> None:
    """A receipt behind a snapshot has the sum of all losses, also of those that came after the snapshot had begun."""
    reader = Reader(b"a", b"b", b"c", snapshot=packets(b"one"))
    for queue in reader.connection.queue, reader.live:
        queue.configure(replace(queue.settings, receipts=True))
    reader.connection.queue.configure(replace(reader.connection.queue.settings, soft=SOFT["discard"]))
    reader.connection.act(reader.live.lose(5, 50, LossReason.SHARE))
    reader.queue.ack(reader.queue.take(2), 1)
    reader.flush(times=4)
    assert reader.wire == [b"CMSG lost\0002 2 2 discard", b"one", b"CMSG lost\0005 50 7 share"]


def test_the_end_among_receipts() -> None:
    """The connection ends while a receipt is on its way: it may do so at any place around the snapshot."""
    reader = Reader(b"front", snapshot=packets(b"one"))
    for queue in reader.connection.queue, reader.live:
        queue.configure(replace(queue.settings, receipts=True))
    reader.connection.act(reader.live.lose(5, 50, LossReason.SHARE))
    taken = reader.queue.take(64)
    assert taken == [b"front", b"one", b"CMSG lost\0005 50 5 share"]
    reader.queue.discard_all(taken)
    assert reader.live.last_receipt() == b"CMSG lost\0006 55 6 disconnect"


def test_the_end_of_the_connection() -> None:
    """All three are dropped; messages are counted, packets of the snapshot are not."""
    closed = []

    def unread() -> Generator[bytes | None, None, None]:
        try:
            while True:
                yield b"value"
        finally:
            closed.append(True)

    reader = Reader(b"front", snapshot=unread())
    reader.connection.act(reader.live.admit(Run([b"live"]), True))
    taken = reader.queue.take(2)
    assert taken == [b"front", b"value"]
    reader.queue.discard_all(taken)
    assert closed == [True]
    assert reader.is_over
    assert reader.connection.lost == [2, len(b"frontlive")]
    assert len(reader.queue) == 0


def test_a_socket_with_little_room() -> None:
    """A transport that takes fewer packets than wait, and sends fewer than it took, gets the rest in order."""
    seen: list[bytes] = []
    reader = Reader(b"a", b"b", b"c", snapshot=packets(b"one", b"two"))
    reader.live.on_sent = seen.extend
    taken = reader.queue.take(2)
    assert taken == [b"a", b"b"]
    reader.queue.ack(taken, 1)
    reader.flush(times=4)
    assert reader.wire == [b"b", b"c", b"one", b"two"]
    assert seen == [b"one", b"two"]
    assert reader.is_over
    reader.queue.close()
    reader.queue.close()


def test_what_is_dropped_before_a_snapshot_is_reported() -> None:
    """If the socket gets full before the snapshot, the strategy decides about what waits, and the owner learns it."""
    reader = Reader(b"a", b"b", b"c", snapshot=packets(b"one"))
    reader.connection.set_strategies(soft=SOFT["discard"])
    taken = reader.queue.take(2)
    reader.queue.ack(taken, 1)
    assert reader.connection.lost == [2, 2]
    reader.flush(times=2)
    assert reader.wire == [b"one"]
