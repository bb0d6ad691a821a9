"""How much is read in one go: alone, under contention, packet by packet and in bundles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.seqpacket.pacing import (
    ACCEPT_SHARE,
    ACCEPTS_PER_PASS,
    BUNDLES_PER_READ,
    CONTENTION_TTL,
    IN_TURN,
    LONE_RUN,
    LONGEST_ACCEPT,
    MAX_BUFFER,
    READS_PER_PASS,
    SHORTEST_ACCEPT,
    AcceptPacer,
    ReadPacer,
    batch_size,
)
from sbus.syscalls.batch import BATCH


def first(
    pacer: ReadPacer,
    read_limit: int = BATCH,
    exclusive: bool = True,
    contended: bool = False,
    pass_number: int = 0,
    bundle_limit: int = 0,
) -> int:
    """The first limit of a pass, by default on a socket that alone is ready."""
    return pacer.first_limit(read_limit, exclusive, contended, pass_number, bundle_limit)


def test_a_batch_at_first() -> None:
    """A new connection is read for a whole batch."""
    assert first(ReadPacer()) == BATCH


def test_an_unknown_peer() -> None:
    """The first packet is read alone, in any pass, if that is asked for; then come batches."""
    pacer = ReadPacer()
    pacer.begin_alone()
    assert first(pacer) == 1
    assert [first(pacer, pass_number=1) for _ in range(2)] == [1, BATCH]


def test_reads_again_until_a_batch_is_complete() -> None:
    """A socket that alone is ready is read again, for what is missing from a batch."""
    pacer = ReadPacer()
    assert first(pacer) == BATCH
    assert pacer.next_limit(20) == BATCH - 20
    assert pacer.next_limit(30) == BATCH - 50
    assert pacer.next_limit(BATCH - 50) == 0


def test_reads_only_so_often() -> None:
    """Reads that find little end after a number of them."""
    pacer = ReadPacer()
    first(pacer)
    limits = [pacer.next_limit(2) for _ in range(READS_PER_PASS)]
    assert all(limits[:-1])
    assert limits[-1] == 0


def test_one_read_when_others_are_ready() -> None:
    """A socket that is not alone is read once in a pass."""
    pacer = ReadPacer()
    assert first(pacer, exclusive=False) == BATCH
    assert pacer.next_limit(20) == 0


def test_a_lone_packet() -> None:
    """After a packet that came alone one is asked for, and no second read follows; a later pass asks for a batch."""
    pacer = ReadPacer()
    first(pacer)
    assert pacer.next_limit(1) == 0
    assert first(pacer) == 1
    assert first(pacer, pass_number=1) == BATCH
    assert pacer.next_limit(5) > 0
    assert first(pacer) == BATCH


def later_reads(pacer: ReadPacer, found: int) -> int:
    """Read in later passes up to the next batch, in which this many packets are found; return the reads before it."""
    reads = 0
    while first(pacer, pass_number=1) == 1:
        reads += 1
    pacer.next_limit(found)
    return reads


def test_ping_pong() -> None:
    """The longer packets come alone, the more of them are read alone in later passes too, up to a limit."""
    pacer = ReadPacer()
    assert [later_reads(pacer, 1) for _ in range(9)] == [0, 0, 1, 3, 7, *[LONE_RUN] * 4]
    assert first(pacer, pass_number=IN_TURN) == BATCH
    assert later_reads(pacer, 2) == LONE_RUN
    assert [later_reads(pacer, 1) for _ in range(4)] == [0, 0, 1, 3]


def test_contention_is_remembered() -> None:
    """The protocol's limit counts under contention, and for some reads after it."""
    pacer = ReadPacer()
    assert first(pacer, read_limit=6) == BATCH
    assert first(pacer, read_limit=6, contended=True, exclusive=False) == 6
    assert [first(pacer, read_limit=6) for _ in range(CONTENTION_TTL)] == [6] * (CONTENTION_TTL - 1) + [BATCH]


def test_bundles() -> None:
    """From a peer that sends bundles a few are read, once in a pass; contention is remembered meanwhile."""
    pacer = ReadPacer()
    assert first(pacer, bundle_limit=1000, contended=True) == BUNDLES_PER_READ
    assert pacer.next_limit(BUNDLES_PER_READ) == 0
    assert first(pacer, read_limit=6) == 6


@pytest.mark.parametrize(("max_packet", "packets"), [(1, BATCH), (MAX_BUFFER // BATCH, BATCH), (MAX_BUFFER + 1, 1)])
def test_batch_size(max_packet: int, packets: int) -> None:
    """Buffers stay within bounds, however long a packet may be; there is always room for one."""
    assert batch_size(max_packet) == packets


@given(
    st.lists(st.tuples(st.integers(1, BATCH), st.booleans(), st.booleans(), st.sampled_from((0, 1000))), max_size=50),
    st.data(),
)
def test_bounds(passes: list[tuple[int, bool, bool, int]], data: st.DataObject) -> None:
    """Whatever is found, a pass reads at most a batch in a few reads, and never asks for nothing."""
    pacer = ReadPacer()
    for read_limit, exclusive, contended, bundle_limit in passes:
        limit = first(pacer, read_limit=read_limit, exclusive=exclusive, contended=contended, bundle_limit=bundle_limit)
        assert limit > 0
        total = reads = 0
        while limit:
            assert limit <= BATCH - total
            found = data.draw(st.integers(1, limit))
            total += found
            reads += 1
            limit = pacer.next_limit(found)
        assert reads <= (READS_PER_PASS if exclusive and not bundle_limit else 1)


class Accepting:
    """A port, whose connections and whose other work take the CPU time that a test says."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pacer = AcceptPacer(lambda: self.now)

    def work(self, seconds: float) -> None:
        self.now += seconds

    def accept(self, cost: float) -> int:
        """Make a pass with connections of that cost, without end; return how many are accepted."""
        accepted = 1
        self.pacer.begin()
        self.now += cost
        while self.pacer.may_go_on():
            self.now += cost
            accepted += 1
        self.pacer.end()
        return accepted


def test_accepting_without_other_work() -> None:
    """Between two passes without other work accepting has the time that it may take in any case, and one connection."""
    port = Accepting()
    assert [port.accept(SHORTEST_ACCEPT * 0.4) for _ in range(3)] == [3] * 3
    assert [port.accept(1.0) for _ in range(3)] == [1] * 3


@given(st.lists(st.tuples(st.floats(0, 0.01), st.floats(1e-6, 1e-3)), max_size=30))
def test_accepting_has_its_share(passes: list[tuple[float, float]]) -> None:
    """Accepting ends with the connection that goes beyond its share of the CPU time."""
    port = Accepting()
    for work, cost in passes:
        port.work(work)
        began = port.now
        assert 1 <= port.accept(cost) <= ACCEPTS_PER_PASS
        part = max(SHORTEST_ACCEPT, min(work * ACCEPT_SHARE, LONGEST_ACCEPT))
        assert port.now - began <= part + cost + 1e-9


def test_accepting_after_much_work() -> None:
    """However long others have worked, a pass accepts 64 connections at most, and for 2 ms at most."""
    port = Accepting()
    port.work(3600)
    assert port.accept(1e-6) == ACCEPTS_PER_PASS
    port.work(3600)
    assert port.accept(LONGEST_ACCEPT / 4) in (4, 5)
