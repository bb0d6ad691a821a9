"""Packets and memory as another program would make them, without the code that reads them."""

from __future__ import annotations

import os
import struct

from sbus.syscalls.memfd import Memfd

__all__ = ["bundle", "message", "sealed"]


def bundle(*packets: bytes) -> bytes:
    """Return a bundle of packets."""
    return b"BNDL" + b"".join(struct.pack("<I", len(packet)) + packet for packet in packets)


def message(key: str, payload: bytes = b"x") -> bytes:
    """Return a message as a packet."""
    return b"MSG %b\0%b" % (key.encode(), payload)


def sealed(data: bytes) -> Memfd:
    """Return sealed memory with these bytes."""
    memory = Memfd.create()
    os.write(memory.fileno(), data)
    memory.seal()
    return memory
