"""Helpers for the tests of flood control.

Most of their buses have a small ``--max-packet``, so that the kernel's socket buffer holds few messages, and the
server's queues decide the outcome.
"""

from __future__ import annotations

from tests.support.harness import (
    Bus,
    Client,
    numbered,
)

SMALL = "--max-packet=1024"
FOR_EVER = "--block-timeout=600"


def kernel_holds(bus: Bus, size: int = 0) -> int:
    """How many messages of a size the kernel holds for a client that does not read."""
    with Client(bus.address) as reader, Client(bus.address) as publisher:
        reader.sub(b"probe")
        reader.cmsg(b"blocking/soft/discard")
        reader.sync()
        for packet in numbered(b"probe", 200, size):
            publisher.send(packet)
        publisher.sync()
        count = len(reader.sync())
    assert 0 < count < 100
    bus.wait_log(r"dropped \d+ messages")
    return count


def bystander_turns(bus: Bus, turns: int = 5) -> None:
    """Wait until the server has handled everything that it was sent before."""
    with Client(bus.address) as client:
        for _ in range(turns):
            client.sync()
