"""Large messages: send one in parts, each a message of the bus, and put them together again.

python3 parts.py receive ADDRESS KEY FILE       waits for one large message, and writes it to a file
python3 parts.py send ADDRESS KEY FILE
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import sbus

PART = 256 * 1024
"""Bytes in a part; with its key and its header it fits a packet of the default limit."""
MOST_BYTES = 256 * 1024 * 1024
"""Bytes of unfinished messages that a receiver keeps; beyond that it drops the oldest of them."""
MOST_MESSAGES = 64
"""Unfinished messages that a receiver keeps."""
HEADER = struct.Struct("!16sII")
"""In front of each part: a random name of the message, the part's number, and the number of parts."""


def send_parts(bus: sbus.Bus, key: str, payload: bytes) -> None:
    """Publish a payload of any length under one key, in parts."""
    name, count = os.urandom(16), max(1, -(-len(payload) // PART))
    for number in range(count):
        part = payload[number * PART : (number + 1) * PART]
        bus.publish(key, HEADER.pack(name, number, count) + part)


class Parts:
    """Puts the parts of several senders together."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self.broken = 0  # messages of which a part was missing, or that were dropped
        self._unfinished: dict[bytes, list[bytes]] = {}  # the oldest first
        self._bytes = 0

    def add(self, part: bytes) -> bytes | None:
        """Take the payload of a message; return the whole when this was the last part, else None."""
        if len(part) < HEADER.size:
            return None  # any client may publish anything under the key
        name, number, count = HEADER.unpack_from(part)
        if number == 0 and count > 0 and name not in self._unfinished:
            self._unfinished[name] = []
        parts = self._unfinished.get(name)
        if parts is None:
            return None  # of a message that is broken, or that began before we subscribed
        if number != len(parts):
            self._drop(name)  # the parts of one sender arrive in order, so one is missing
            return None
        parts.append(part)
        self._bytes += len(part)
        if number + 1 == count:
            self._forget(name)
            return b"".join(one[HEADER.size :] for one in parts)
        while self._bytes > self.most_bytes or len(self._unfinished) > MOST_MESSAGES:
            self._drop(next(iter(self._unfinished)))
        return None

    def _drop(self, name: bytes) -> None:
        self._forget(name)
        self.broken += 1

    def _forget(self, name: bytes) -> None:
        self._bytes -= sum(map(len, self._unfinished.pop(name)))


def receive(address: str, key: str, path: str) -> None:
    def report(lost: sbus.Lost) -> None:
        print("parts were lost:", lost.why, file=sys.stderr, flush=True)

    parts = Parts()
    with sbus.connect(address, on_lost=report) as bus:
        bus.flood_control(soft="queue", hard="block")  # a missing part would make the whole message worthless
        bus.subscribe(key)
        bus.fence()
        print("waiting", flush=True)
        for message in bus:
            whole = parts.add(message.payload)
            if whole is not None:
                Path(path).write_bytes(whole)
                print(len(whole), "bytes", flush=True)
                return


def send(address: str, key: str, path: str) -> None:
    with sbus.connect(address) as bus:
        send_parts(bus, key, Path(path).read_bytes())


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {"send": send, "receive": receive}
    commands[sys.argv[1]](*sys.argv[2:])
