"""Publishers that cost next to nothing: plain sockets, and packets of which only a number changes.

A client library would take more CPU time for a message than the recorder does, on a machine that has to run both. The
first 8 bytes of each payload are its number (little-endian), so a journal can be read back number by number.
"""

from __future__ import annotations

import random
import socket
import struct
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

from sbus.protocol.bundles import MAGIC, MAX_BUNDLE, unbundle
from sbus.protocol.packets import CMSG, MSG, build

__all__ = ["KEYS", "Frame", "Template", "bundles", "plain", "pour", "publish", "samples"]

_PATIENCE = 60.0
_SAMPLES = 96_000
_WHOAMI = build(CMSG, b"!/cred/whoami")

KEYS = [
    b"plant/%b/line%d/machine%02d/%b" % (site, line, machine, metric)
    for site in (b"berlin", b"lyon", b"paris", b"gdansk", b"porto")
    for line in range(8)
    for machine in range(20)
    for metric in (b"temperature", b"pressure", b"power", b"speed", b"state")
]
"""4,000 keys."""

Frame = tuple[bytes, bytes]
"""The bytes of a packet before the number, and those behind it."""


def samples(count: int = _SAMPLES) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys, and payloads of 8 to 60 bytes without their number; always the same ones."""
    chance = random.Random(1)
    keys = KEYS * -(-count // len(KEYS))
    for start in range(0, len(keys), len(KEYS)):
        part = keys[start : start + len(KEYS)]
        chance.shuffle(part)
        keys[start : start + len(KEYS)] = part
    for key in islice(keys, count):
        yield key, (b"%052d" % chance.randrange(10**52))[: chance.randrange(53)]


class Template:
    """Packets, one behind the other, that differ from round to round in their numbers.

    :param head: the bytes before the first.
    """

    def __init__(self, frames: Sequence[Frame], head: bytes = b"") -> None:
        self.frames, self.head = frames, head
        befores = [before for before, _ in frames]
        afters = [head, *(after for _, after in frames)]
        fixed = [after + before for after, before in zip(afters, [*befores, b""], strict=True)]
        self._parts = list(chain.from_iterable((part, b"") for part in fixed))[:-1]

    def first(self, count: int) -> Template:
        """Return the first packets alone."""
        return Template(self.frames[:count], self.head)

    def fill(self, first: int) -> bytes:
        """Return the bytes with numbers from `first` on."""
        numbers = array("q", range(first, first + len(self.frames))).tobytes()
        self._parts[1::2] = [numbers[at : at + 8] for at in range(0, len(numbers), 8)]
        return b"".join(self._parts)


def _packet(key: bytes, rest: bytes) -> Frame:
    return build(MSG, key, b""), rest


def bundles() -> list[Template]:
    """Return full bundles of the samples."""
    found: list[Template] = []
    frames: list[Frame] = []
    size = len(MAGIC)
    for key, rest in samples():
        before, after = _packet(key, rest)
        length = len(before) + 8 + len(after)
        if size + 4 + length > MAX_BUNDLE:
            found.append(Template(frames, MAGIC))
            frames, size = [], len(MAGIC)
        frames.append((struct.pack("<I", length) + before, after))
        size += 4 + length
    return found


def plain() -> list[Template]:
    """Return the samples as packets."""
    return [Template([_packet(*sample)]) for sample in samples()]


def publish(address: str, total: int, *, bundled: bool) -> tuple[float, float]:
    """Publish numbered messages as fast as the bus takes them.

    :returns: when the first was sent, and when the bus had handled the last, on the monotonic clock.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(address)
        sock.settimeout(_PATIENCE)
        if bundled:
            sock.send(build(CMSG, b"bundle/on"))
            if not sock.recv(1 << 16).startswith(b"CMSG bundle/on"):
                raise SystemExit("the bus does not bundle")
        templates = bundles() if bundled else plain()
        start = time.monotonic()
        pour(sock.send, templates, total)
        sock.send(_WHOAMI)
        while not any(b"whoami" in packet for packet in unbundle([sock.recv(1 << 20)])):
            pass
        return start, time.monotonic()


def pour(
    send: Callable[[bytes], object],
    templates: Sequence[Template],
    total: int,
    sent: Callable[[int], object] | None = None,
) -> None:
    """Send `total` messages, template by template.

    :param sent: called with the number of messages so far, after each call of `send`.
    """
    number = at = 0
    while number < total:
        template = templates[at]
        at = (at + 1) % len(templates)
        if number + len(template.frames) > total:
            template = template.first(total - number)
        send(template.fill(number))
        number += len(template.frames)
        if sent is not None:
            sent(number)
