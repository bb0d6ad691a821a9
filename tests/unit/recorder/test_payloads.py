"""Payloads in sealed memory, as a recorder writes them: whole, or as a digest."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from twisted.internet.task import Clock

from sbus.journal import disk
from sbus.protocol.bundles import MAGIC
from sbus.protocol.notices import sender
from sbus.protocol.packets import build_range
from sbus.recorder.payloads import MAX_HELD, Payload, UnusablePayload
from sbus.syscalls.batch import PacketReader
from sbus.syscalls.memfd import Attached, Memfd
from sbus.syscalls.sockets import send_with
from tests.support.journals import rows
from tests.unit.recorder import parts
from tests.unit.recorder.parts import TIMEOUT, Disk, Recorder, numbered

ALICE = sender(7, b"!/cred/100/1000/42")


def sealed(content: bytes) -> Memfd:
    memory = Memfd.create()
    os.write(memory.fileno(), content)
    memory.seal()
    return memory


@pytest.fixture
def arrive() -> Iterator[Callable[[bytes, Memfd], Attached]]:
    """Return a function that sends a packet with memory through a socket, and returns it as it arrives."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reader = PacketReader(1 << 20, descriptors=True)

    def send(packet: bytes, memory: Memfd) -> Attached:
        assert send_with(ours, packet, memory.fileno())
        ((attached,), _) = reader.read(theirs)
        assert isinstance(attached, Attached)
        return attached

    with ours, theirs:
        yield send


Arrive = Callable[[bytes, Memfd], Attached]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def shown(found: list[dict[str, Any]]) -> list[tuple[str, bytes, object]]:
    """Return kind, key and content of the rows that are no gaps."""
    return [
        (row["kind"], row["key"], row["payload"] if row["kind"] == "message" else json.loads(row["payload"]))
        for row in found
        if row["kind"] in ("message", "digest")
    ]


def test_kept_and_digested(record: Callable[..., Recorder], arrive: Arrive) -> None:
    """Payloads up to the limit are messages like all others, longer ones digests; order and publishers stay."""
    recorder = record(max_payload=100_000)
    content = random.Random(1).randbytes(300_000)
    memory = sealed(content)
    recorder.recording.add([*numbered(0, 1), ALICE, arrive(build_range(b"a", 5, 100_000), memory)])
    recorder.recording.add([*numbered(1, 2), arrive(build_range(b"b", 7, 100_001), memory), *numbered(2, 3)])
    found = recorder.stop()
    digest = {"length": 100_001, "sha256": hashlib.sha256(content[7:100_008]).hexdigest()}
    assert shown(found) == [
        ("message", b"key", b"0"),
        ("message", b"a", content[5:100_005]),
        ("message", b"key", b"1"),
        ("digest", b"b", digest),
        ("message", b"key", b"2"),
    ]
    assert [row["sender_pid"] for row in found] == [None, None, 42, 42, 42, 42, None]
    assert recorder.recording.counters.rows == 5
    assert recorder.recording.counters.bytes == 3 * 4 + 100_001 + 100_002


def test_bundle(record: Callable[..., Recorder], arrive: Arrive) -> None:
    """The payloads of a bundle are all in the memory that came with it; other messages may stand between them."""
    recorder = record()
    parts = [build_range(b"a", 0, 3), *numbered(0, 1), build_range(b"b", 3, 4), build_range(b"c", 0, 7)]
    packet = MAGIC + b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    recorder.recording.add([arrive(packet, sealed(b"onefour")), *numbered(1, 2)])
    assert shown(recorder.stop()) == [
        ("message", b"a", b"one"),
        ("message", b"key", b"0"),
        ("message", b"b", b"four"),
        ("message", b"c", b"onefour"),
        ("message", b"key", b"1"),
    ]


def test_no_descriptor_stays(record: Callable[..., Recorder], arrive: Arrive) -> None:
    """When payloads are written, their descriptors are closed, and their memory is no longer mapped."""
    recorder = record(max_payload=1000, sync=0.0)
    memory = sealed(bytes(2000))
    before = open_files()
    for length in (1000, 2000) * 20:
        recorder.recording.add([arrive(build_range(b"k", 0, length), memory)])
    recorder.appended(40)
    recorder.loop.until(lambda: len(shown(rows(recorder.directory))) == 40)
    assert open_files() <= before + 2  # those of the segment
    recorder.stop()


def test_length_counts(record: Callable[..., Recorder], arrive: Arrive, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for the disk is bounded by the length of the payloads, whether they are kept or not."""
    gate, real = threading.Event(), disk.write

    def write(*args: Any) -> None:
        assert gate.wait(TIMEOUT)
        real(*args)

    recorder = record(batch_bytes=10_000, buffer_bytes=1_000_000, max_payload=1000)
    monkeypatch.setattr(disk, "write", write)
    memory = sealed(bytes(100_000))
    for _ in range(9):
        recorder.recording.add([arrive(build_range(b"k", 0, 100_000), memory)])
        assert recorder.recording.has_capacity()
    recorder.recording.add([arrive(build_range(b"k", 0, 100_000), memory)])
    assert not recorder.recording.has_capacity()
    gate.set()
    recorder.loop.until(lambda: recorder.connection.resumed)
    recorder.stop()


def test_descriptors_count(record: Callable[..., Recorder], arrive: Arrive, monkeypatch: pytest.MonkeyPatch) -> None:
    """However short the payloads are, a limited number of descriptors waits for the disk."""
    gate, real = threading.Event(), disk.write

    def write(*args: Any) -> None:
        assert gate.wait(TIMEOUT)
        real(*args)

    recorder = record()
    monkeypatch.setattr(disk, "write", write)
    memory, count = sealed(b"x"), 0
    while recorder.recording.has_capacity():
        recorder.recording.add([arrive(build_range(b"k", 0, 1), memory)])
        count += 1
    assert count == MAX_HELD
    gate.set()
    assert len(shown(recorder.stop())) == MAX_HELD


def test_full_disk(record: Callable[..., Recorder], arrive: Arrive, monkeypatch: pytest.MonkeyPatch) -> None:
    """A payload that the disk refuses is written when the disk works again."""
    faulty = Disk(monkeypatch)
    recorder = record(max_payload=3)
    faulty.errors["write"] = errno.ENOSPC
    recorder.recording.add([arrive(build_range(b"a", 0, 3), sealed(b"one"))])
    recorder.recording.add([arrive(build_range(b"b", 0, 4), sealed(b"four"))])
    recorder.loop.until(lambda: recorder.recording._disk_failure)
    del faulty.errors["write"]
    recorder.appended(2)
    [kept, digest] = shown(recorder.stop())
    assert kept == ("message", b"a", b"one")
    assert digest == ("digest", b"b", {"length": 4, "sha256": hashlib.sha256(b"four").hexdigest()})


def make(packet: bytes, memory: Memfd) -> Payload:
    memory.fault()
    return Payload(packet, memory, 0, b"", max_payload=10, least=0)


@pytest.mark.parametrize(
    "packet",
    [b"FMSG k", b"FMSG k\0", b"FMSG k\0" + b"0 0", b"FMSG k\0-1 2", b"FMSG k\0" + b"0 4", b"FMSG k\0" + b"3 1"],
)
def test_bad_ranges(packet: bytes) -> None:
    """A range that is malformed, empty or beyond its memory is refused when it arrives."""
    with pytest.raises(UnusablePayload):
        make(packet, sealed(b"abc"))
    assert make(build_range(b"k", 1, 2), sealed(b"abc")).size == 3


def test_bad_memory(arrive: Arrive) -> None:
    """Memory that is not sealed, is missing, or did not arrive whole is refused, and what came before is kept."""
    sent: list[Any] = []
    buffer = parts.make(Clock(), sent)
    unsealed = Memfd.create()
    os.write(unsealed.fileno(), b"abc")
    packet = build_range(b"k", 0, 3)
    for bad in (packet, arrive(packet, unsealed), Attached.of(packet, (), True), Attached.of(packet, (), False)):
        with pytest.raises(UnusablePayload):
            buffer.add([*numbered(0, 1), bad])
    assert [batch.rows for batch in sent] == [1, 1, 1, 1]
