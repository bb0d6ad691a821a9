"""Who published what a recorder records: names of runs, over batches, losses and connections."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.task import Clock

from sbus.client.losses import Lost
from sbus.protocol.notices import NOBODY, sender
from sbus.recorder.buffer import Batch
from tests.unit.recorder.parts import Recorder, make, numbered

ALICE, BOB, PROGRAM = sender(7, b"!/cred/100/1000/42"), sender(8, b"!/cred/100/1001/43"), sender(0, NOBODY)


def published(batches: list[Batch]) -> list[tuple[bytes, bytes]]:
    """Return the payload of each message and the name of its publisher."""
    found = []
    for batch in batches:
        start = 0
        for name, end in zip(batch.senders.names.to_pylist(), batch.senders.ends.to_pylist(), strict=True):
            found += [(payload, name) for payload in batch.payloads[start:end].to_pylist()]
            assert end > start
            start = end
        assert start == batch.rows
    return found


def name_of(notice: bytes) -> bytes:
    return notice.partition(b"\0")[2]


steps = st.lists(
    st.lists(st.one_of(st.just(None), st.sampled_from([ALICE, BOB, PROGRAM])), min_size=1, max_size=8), max_size=8
)


@given(steps, st.integers(1, 5))
def test_each_message_has_the_last_name_before_it(reads: list[list[bytes | None]], rows: int) -> None:
    """For any reads of messages and notices and any size of a batch: a name holds until the next one."""
    sent: list[Batch] = []
    buffer = make(Clock(), sent, rows=rows)
    expected, name, count = [], b"", 0
    for read in reads:
        packets = []
        for step in read:
            if step is None:
                packets += numbered(count, count + 1)
                expected.append((b"%d" % count, name))
                count += 1
            else:
                packets.append(step)
                name = name_of(step)
        buffer.add(packets)
    buffer.flush()
    assert published(sent) == expected


def test_names_take_memory() -> None:
    """Many names are counted in the memory of the buffer and of the batch."""
    sent: list[Batch] = []
    buffer = make(Clock(), sent, rows=1000, size=1 << 20)
    buffer.add(numbered(0, 1))
    few = buffer.memory
    buffer.add([sender(n, b"!/cred/1/1/1") for n in range(100)])
    assert buffer.memory > few + 1500
    buffer.add([packet for n in range(100) for packet in (sender(n, b"!/cred/1/1/1"), *numbered(n, n + 1))])
    buffer.flush()
    assert sent[0].memory > few + 1500


def test_rows(record: Callable[..., Recorder]) -> None:
    """Publishers reach the journal; a loss in between has none, and changes none; a new connection names them anew."""
    recorder = record(batch_rows=2)
    recorder.recording.add([*numbered(0, 1), ALICE, *numbered(1, 4), BOB, *numbered(4, 5)])
    recorder.recording.add_lost(Lost(3, 300, 3, "queue-full"))
    recorder.recording.add([*numbered(5, 6), PROGRAM, *numbered(6, 7)])
    recorder.recording.connected()
    recorder.recording.add([*numbered(7, 8), ALICE, *numbered(8, 9)])
    recorder.recording.recording_started({"since": 5, "reason": "the server closed the connection"})
    assert [
        (row["payload"].decode() if row["kind"] == "message" else row["kind"], row["sender_pid"], row["sender_number"])
        for row in recorder.stop()
    ] == [
        ("start", None, None),
        ("0", None, None),
        *((str(n), 42, 7) for n in (1, 2, 3)),
        ("4", 43, 8),
        ("lost", None, None),
        ("5", 43, 8),
        ("6", None, 0),
        ("reconnect", None, None),
        ("7", None, None),
        ("8", 42, 7),
        ("stop", None, None),
    ]


def test_names_without_messages_do_not_fill_the_memory() -> None:
    """A bus that sends names alone fills no memory, and the recorder goes on: the last one still counts."""
    sent: list[Batch] = []
    buffer = make(Clock(), sent, rows=1000, size=1 << 14)
    for _ in range(100):
        buffer.add([ALICE, BOB] * 100)
        assert buffer.memory < 1 << 16
    buffer.add(numbered(0, 1))
    for _ in range(100):
        buffer.add([BOB, ALICE] * 100)
        assert buffer.memory < 1 << 16
    buffer.add(numbered(1, 2))
    buffer.flush()
    assert published(sent) == [(b"0", name_of(BOB)), (b"1", name_of(ALICE))]
