"""The recorder as a process, and payloads in sealed memory; a socket of the test stands for the bus."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sbus.protocol.bundles import unbundle
from sbus.protocol.notices import sender
from sbus.protocol.packets import build_range
from sbus.syscalls.memfd import Memfd
from sbus.syscalls.sockets import send_with
from tests.integration.recorder.conftest import QUICK, Recorder
from tests.integration.recorder.test_recorder import kinds, wait_rows
from tests.support.harness import TIMEOUT
from tests.support.waiting import wait_until

WHOAMI = b"CMSG !/cred/whoami"


class Bus:
    """Accepts one recorder after the other."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(TIMEOUT)
        self.sock = self._listener

    def accept(self) -> None:
        """Accept a recorder, and answer until it records: it asks a question once it has subscribed."""
        before = self.sock
        self.sock, _ = self._listener.accept()
        if before is not self._listener:
            before.close()
        self.sock.settimeout(TIMEOUT)
        asked: list[bytes] = []
        while b"SUB " not in asked:
            asked += unbundle([self.sock.recv(1 << 16)])
        assert b"CMSG payload/on" in asked
        self.sock.send(b"CMSG payload/on\0" + b"65536 67108864")
        while WHOAMI not in asked[asked.index(b"SUB ") :]:
            asked += unbundle([self.sock.recv(1 << 16)])
        for _ in range(asked.count(WHOAMI)):
            self.sock.send(WHOAMI + b"\0!/cred/1/1/1")

    def close(self) -> None:
        self.sock.close()
        self._listener.close()


@pytest.fixture
def bus(directory: Path) -> Iterator[Bus]:
    bus = Bus(directory / "bus")
    yield bus
    bus.close()


def send(bus: Bus, packet: bytes, content: bytes, *, is_sealed: bool = True) -> None:
    memory = Memfd.create()
    os.write(memory.fileno(), content)
    if is_sealed:
        memory.seal()
    assert send_with(bus.sock, packet, memory.fileno())


def memory_of(recorder: Recorder) -> list[str]:
    """Return the memory that a recorder holds; no event announces that it has closed some."""
    folder = f"/proc/{recorder.pid}/fd"
    found = []
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"{folder}/{name}"))
    return [path for path in found if "memfd" in path]


def test_payloads(bus: Bus, spawn: Callable[..., Any], directory: Path) -> None:
    """Payloads up to --max-payload are messages, longer ones digests; what is not sealed ends the connection."""
    journal = directory / "journal"
    recorder: Recorder = spawn(Recorder, directory, directory / "bus", journal, *QUICK, "--max-payload=1M")
    bus.accept()
    recorder.wait_recording()
    short, long = os.urandom(1 << 20), os.urandom((1 << 20) + 1)
    bus.sock.send(sender(7, b"!/cred/100/1000/42"))
    send(bus, build_range(b"camera", 0, len(short)), short)
    send(bus, build_range(b"camera", 0, len(long)), long)
    bus.sock.send(b"MSG other\0" + b"1")
    send(bus, build_range(b"camera", 0, 4), b"evil", is_sealed=False)
    bus.accept()
    recorder.wait_recording(2)
    send(bus, build_range(b"camera", 1, 3), b"more")
    found = wait_rows(journal, lambda found: found and found[-1]["payload"] == b"ore")
    assert kinds(found) == ["start", "message", "digest", "message", "reconnect", "message"]
    assert found[1]["payload"] == short
    assert json.loads(found[2]["payload"]) == {"length": len(long), "sha256": hashlib.sha256(long).hexdigest()}
    assert [row["sender_pid"] for row in found] == [None, 42, 42, 42, None, None]
    assert "not safe to read: the memory lacks a seal" in json.loads(found[4]["payload"])["reason"]
    wait_until(lambda: memory_of(recorder), lambda held: not held)
