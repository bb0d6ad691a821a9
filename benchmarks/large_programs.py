"""Two ends that exchange large messages, and the least that can stand between them.

``python large_programs.py ROLE ADDRESS SIZE SECONDS`` is one process. ``publish`` and ``receive`` use sbus, as its
documentation recommends for large messages: the receiver holds its publisher back. ``send`` and ``take`` use a plain
socket, and ``relay`` stands between them: one receive and one send for each packet, through one buffer. A publisher
ends with a message of one byte. Each end prints a line of JSON; a receiver prints ``ready`` before.

It imports sbus from the installation of its interpreter, so that several can be compared.
"""

from __future__ import annotations

import json
import mmap
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator

KEY = "bench/large"
OVER = b"."
_BATCH = 16
"""Messages between two readings of the clock."""
_BUFFER = 1 << 19
"""Bytes of a send buffer: the kernel doubles it, so a socket holds as much as one of a client of sbus."""


def publish(address: str, size: int, seconds: float) -> None:
    import sbus

    with sbus.connect(address) as bus:
        bus.fence()
        _publish(lambda payload: bus.publish(KEY, payload), size, seconds)
        bus.fence()


def receive(address: str, size: int, seconds: float) -> None:
    import sbus

    with sbus.connect(address) as bus:
        bus.flood_control(soft="block", hard="block")
        bus.subscribe(KEY)
        bus.fence()
        _receive(len(message.payload) for messages in iter(bus.get_many, []) for message in messages)


def send(address: str, size: int, seconds: float) -> None:
    with _connected(address) as sock:
        _publish(sock.send, size, seconds)


def take(address: str, size: int, seconds: float) -> None:
    buffer = _buffer(size)
    with _connected(address) as sock:
        _receive(iter(lambda: sock.recv_into(buffer), 0))


def relay(address: str, size: int, seconds: float) -> None:
    buffer = _buffer(size)
    view = memoryview(buffer)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(address)
        listening.listen()
        taker, sender = listening.accept()[0], listening.accept()[0]
    with taker, sender:
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        while length := sender.recv_into(buffer):
            taker.send(view[:length])
        signal.pause()  # the benchmark ends its servers itself


def _connected(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    sock.connect(address)
    return sock


def _buffer(size: int) -> mmap.mmap:
    """Return memory that begins with a page; a Zen 3 can copy to a bytearray's memory five times slower."""
    return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _publish(one: Callable[[bytes], object], size: int, seconds: float) -> None:
    payload = bytes(size)
    published, cpu = 0, time.process_time()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(_BATCH):
            one(payload)
        published += _BATCH
    one(OVER)
    print(json.dumps({"published": published, "cpu": time.process_time() - cpu}), flush=True)


def _receive(lengths: Iterator[int]) -> None:
    print("ready", flush=True)
    next(lengths)
    received, begun, cpu = 1, time.monotonic(), time.process_time()
    for length in lengths:
        if length == len(OVER):
            break
        received += 1
    cpu = time.process_time() - cpu
    print(json.dumps({"received": received, "seconds": time.monotonic() - begun, "cpu": cpu}), flush=True)


if __name__ == "__main__":
    role = {each.__name__: each for each in (publish, receive, send, take, relay)}[sys.argv[1]]
    role(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
