#!/usr/bin/env python3
"""Measure what receipts cost: the server's CPU time for each message at a flood, with and without them.

    python benchmarks/receipts.py [--rounds 9] [--messages 400000]

A publisher sends twice as many messages as its reader reads, so every second one is dropped: in runs, where the queue
is at its limit of messages, or one by one, where every second message is too long for the limit of bytes. A third case
loses nothing. Rounds are interleaved, each with a fresh server; the ratios of one round are taken, then their median.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.attacks.kernel import cpu
from sbus.protocol.bundles import pack, unbundle
from sbus.protocol.packets import CMSG, SUB, build
from sbus.syscalls.polling import is_readable
from sbus.testing import running_bus

WHOAMI = build(CMSG, b"!/cred/whoami")
CHUNK = 8192
CASES: dict[str, tuple[dict[str, Any], int, int, float]] = {
    "nothing lost": ({}, 100, 100, 1.0),
    "lost in runs": ({"queue_messages": 4096}, 100, 100, 0.5),
    "lost one by one": ({"queue_bytes": 1_500_000}, 100, 3000, 0.5),
}
"""Options of the server, bytes of even and of odd messages, and the part of the messages that is read."""


def connect(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(address)
    sock.settimeout(20)
    return sock


def receive(sock: socket.socket) -> list[bytes]:
    packet = sock.recv(1 << 20)
    if not packet:
        raise SystemExit("the server has closed the connection")
    return unbundle([packet])


def ask(sock: socket.socket, key: bytes) -> None:
    """Send a control message that is answered, and wait for the reply."""
    sock.send(build(CMSG, key))
    while not any(packet.startswith(build(CMSG, key) + b"\0") for packet in receive(sock)):
        pass


def measure(case: str, *, bundled: bool, receipts: bool, messages: int) -> tuple[float, float]:
    """Return the server's CPU time for each message, in µs, and the part of the messages that was lost."""
    options, even, odd, part = CASES[case]
    with running_bus(**options) as bus, connect(bus.address) as reader, connect(bus.address) as publisher:
        if receipts:
            ask(reader, b"receipts/on")
            ask(reader, b"bye/on")
        for sock in (reader, publisher):
            if bundled:
                ask(sock, b"bundle/on")
        reader.send(build(SUB, b"k"))
        ask(reader, b"!/cred/whoami")
        chunk = [b"MSG k\0".ljust(odd if i % 2 else even, b".") for i in range(CHUNK)]
        packets = pack(chunk, 65_536, len(chunk))[0] if bundled else chunk
        got = sent = 0
        before = cpu(bus.pid)
        while sent < messages:
            for at in range(0, len(packets), 64):
                for packet in packets[at : at + 64]:
                    publisher.send(packet)
                    sent += 1 if not bundled else 0
                while part == 1.0 and not bundled and got < sent:
                    got += sum(part.startswith(b"MSG") for part in receive(reader))
            sent += CHUNK if bundled else 0
            ask(publisher, b"!/cred/whoami")
            while got < sent * part - 2 * CHUNK * (part < 1.0) and is_readable(reader, 0.1):
                got += sum(packet.startswith(b"MSG ") for packet in receive(reader))
        return (cpu(bus.pid) - before) / sent * 1e6, 1 - got / sent


def main() -> None:
    """Measure every case, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--messages", type=int, default=400_000)
    options = parser.parse_args()
    print("case, packets: without → with receipts, µs a message; ratio; part lost")
    for case in CASES:
        for bundled in (False, True):
            count = options.messages * (4 if bundled else 1)
            pairs = []
            for i in range(options.rounds):
                both = {}
                for receipts in (False, True) if i % 2 else (True, False):
                    both[receipts], lost = measure(case, bundled=bundled, receipts=receipts, messages=count)
                pairs.append(both)
            ratio = statistics.median(both[True] / both[False] for both in pairs)
            without, having = (statistics.median(both[on] for both in pairs) for on in (False, True))
            kind = "bundled" if bundled else "plain"
            print(f"{case}, {kind}: {without:.2f} → {having:.2f}; {ratio:.3f}; {lost:.0%}", flush=True)


if __name__ == "__main__":
    main()
