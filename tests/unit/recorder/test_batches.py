"""Batches of messages: by number, by size and by time."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.task import Clock

from sbus.recorder.buffer import Batch
from tests.unit.recorder.parts import make


def packets(*messages: tuple[bytes, bytes]) -> list[bytes]:
    return [b"MSG %b\0%b" % message for message in messages]


def contents(batch: Batch) -> list[tuple[bytes, bytes]]:
    return list(zip(batch.keys.to_pylist(), batch.payloads.to_pylist(), strict=True))


def test_batch_by_number(sent: list[Batch]) -> None:
    """The maximum number of messages completes a batch; each message has the time of its arrival."""
    clock = Clock()
    batches = make(clock, sent)
    batches.add(packets((b"a", b"1"), (b"b", b"2")))
    clock.advance(0.05)
    batches.add(packets((b"c", b"3")))
    assert sent == []
    assert batches.rows == 3
    batches.add(packets((b"d", b"4"), (b"e", b"5")))
    assert [contents(batch) for batch in sent] == [[(b"a", b"1"), (b"b", b"2"), (b"c", b"3"), (b"d", b"4")]]
    assert (sent[0].times, sent[0].ends, sent[0].size) == ([0, 50_000], [2, 4], 8)
    batches.flush()
    assert contents(sent[1]) == [(b"e", b"5")]
    assert (batches.rows, batches.oldest) == (0, None)
    assert clock.getDelayedCalls() == []


def test_batch_by_size(sent: list[Batch]) -> None:
    """The maximum number of bytes in keys and payloads completes a batch."""
    batches = make(Clock(), sent)
    batches.add(packets((b"k" * 50, b"p" * 49)))
    assert sent == []
    batches.add(packets((b"k", b"")))
    assert [batch.size for batch in sent] == [100]


def test_lone_message(sent: list[Batch]) -> None:
    """A message that no other follows is sent when the time is up; after that no timer runs."""
    clock = Clock()
    batches = make(clock, sent)
    batches.add(packets((b"alone", b"")))
    clock.advance(0.099)
    assert sent == []
    clock.advance(0.001)
    assert [contents(batch) for batch in sent] == [[(b"alone", b"")]]
    clock.advance(10)
    batches.add([])
    batches.flush()
    assert len(sent) == 1
    assert clock.getDelayedCalls() == []


steps = st.lists(
    st.one_of(
        st.integers(0, 6).map(lambda n: ("add", n)),
        st.floats(0, 0.15).map(lambda s: ("wait", s)),
        st.just(("flush", 0)),
    )
)


@given(steps)
def test_batches_keep_everything_in_order(plan: list[tuple[str, Any]]) -> None:
    """For any arrivals: no message is lost, reordered or held too long, and no batch is empty."""
    clock, sent = Clock(), list[Batch]()
    batches = make(clock, sent)
    added: list[tuple[bytes, bytes]] = []
    arrived: list[float] = []
    for what, amount in plan:
        if what == "add":
            messages = [(b"%d" % (len(added) + i), b"") for i in range(amount)]
            added += messages
            arrived += [clock.seconds()] * amount
            batches.add(packets(*messages))
        elif what == "wait":
            clock.advance(amount)
        else:
            batches.flush()
        together = [message for batch in sent for message in contents(batch)]
        assert together == added[: len(together)]
        assert batches.rows == len(added) - len(together)
        assert not batches.rows or clock.seconds() - arrived[len(together)] < 0.1 + 1e-9
    batches.flush()
    assert [message for batch in sent for message in contents(batch)] == added
    assert all(batch.rows == batch.ends[-1] and batch.ends == sorted(set(batch.ends)) for batch in sent)
    assert all(batch.times == sorted(set(batch.times)) for batch in sent)
