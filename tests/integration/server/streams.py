"""Streams of packets for transports on any reactor."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from tests.support.reactors import received


def numbered(count: int, start: int = 0, size: int = 4) -> list[bytes]:
    """Packets that differ."""
    return [b"%0*d" % (size, i) for i in range(start, start + count)]


def forever(sink: socket.socket) -> Iterator[bytes]:
    """Packets for a peer that reads what it has before it gets more."""
    while True:
        received(sink)
        yield b"more"
