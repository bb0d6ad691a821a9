"""Packets: parse the packets that a client sent, and build those that it receives.

Theory of operation
-------------------

A packet is a verb (``MSG``, ``SUB``, ``UNSUB``, ``CMSG``, ``FMSG``), one space, a key or pattern, and, after a NUL, a
payload. The kernel keeps packets apart, so there is no framing and no partial input: `parse` either returns a `Packet`
or raises `Violation`. Protocol: "Packets".

Invariants:

* `parse` accepts every byte string that the protocol allows, and nothing else. Keys and payloads are bytes and stay
  bytes; this module decodes nothing. Whether a *key* is allowed is another question (`sbus.protocol.keys`).
* The server never rebuilds a message. It delivers the bytes that it received, so a message arrives byte for byte;
  `build` is for replies and for clients.
* The empty packet means "too long". No peer can send an empty packet (it reads as end-of-file), so the reader uses
  it for a packet that the kernel had to truncate; a truncated packet is never parsed and never forwarded.

On the hot path the server does not parse messages at all: `sbus.routing.runs` recognises them in place, and only
packets that it does not recognise come here.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from sbus.errors import Violation, ViolationReason
from sbus.protocol.bundles import MAGIC

__all__ = [
    "CMSG",
    "DEFAULT_MAX_PACKET",
    "DRIPPING",
    "FMSG",
    "LEAST_PAYLOAD",
    "MSG",
    "SUB",
    "UNSUB",
    "Packet",
    "Truncated",
    "build",
    "build_range",
    "parse",
    "parse_range",
]

MSG = b"MSG"
SUB = b"SUB"
UNSUB = b"UNSUB"
CMSG = b"CMSG"
FMSG = b"FMSG"
"""The verb of a message whose payload is in sealed memory, between ends that have agreed on it (``payload/on``)."""

LEAST_PAYLOAD = 256 << 10
"""Bytes of a payload below which a plain message is cheaper, as the server announces it. At 256 KiB, a bus carries as
many sealed ones to one receiver, and 1.3 times as many to eight; at 384 KiB, 1.6 times as many to each (cases
``256k-1`` to ``384k-8`` of benchmarks/payloads); at 128 KiB, half as many to one."""

DEFAULT_MAX_PACKET = 409_600
"""Default limit for a packet, in bytes: the buffer size of clients of the original server."""
DRIPPING = b"\0drip"
"""No packet: it stands for a byte stream whose peer sends packets in tiny pieces (`sbus.seqpacket.framing`)."""


_RANGE = re.compile(rb"(0|[1-9][0-9]{0,17}) ([1-9][0-9]{0,17})")
"""Decimal numbers below 10^18, without leading zeros."""


class Truncated(bytes):
    """The empty packet in the place of one that was longer than the buffer for it; no peer can send an empty packet.

    :ivar size: the bytes that the packet had.
    :ivar is_message: whether it was a message, and not a bundle or a control message.
    """

    size: int
    is_message: bool

    @classmethod
    def of(cls, size: int, head: bytes) -> Truncated:
        """Return the stand-in for a packet.

        :param head: its first four bytes.
        """
        packet = cls()
        packet.size, packet.is_message = size, head == b"MSG "
        return packet


class Split(bytes):
    """A long message that was received in two parts: these bytes are its packet up to the payload.

    So the payload is where its owner keeps it, and is not copied out of a packet. The length is the packet's.

    :ivar payload: the rest of the packet; or a view of it, if it came in sealed memory.
    """

    payload: bytes | memoryview

    @classmethod
    def of(cls, head: bytes, payload: bytes | memoryview) -> Split:
        """Return a packet in two parts; the first one ends with the NUL after the key."""
        packet = cls(head)
        packet.payload = payload
        return packet

    def __len__(self) -> int:
        return super().__len__() + (len(self.payload) if isinstance(self.payload, bytes) else 0)

    def whole(self) -> bytes:
        """Return the packet in one part."""
        return self + self.payload


class Packet(NamedTuple):
    """A parsed packet: verb, key or pattern, and the bytes after the key's NUL.

    Without a NUL these are empty.
    """

    verb: bytes
    key: bytes
    payload: bytes = b""


def parse(packet: bytes) -> Packet:
    """Take a packet apart.

    :raises Violation: for an unknown verb, a bundle, ``MSG`` without a NUL, and for the empty packet, which stands for
        a packet over the size limit.
    """
    verb, space, _ = packet[:6].partition(b" ")
    if not space or verb not in (MSG, SUB, UNSUB, CMSG, FMSG):
        if packet.startswith(MAGIC):  # a good bundle from a client that asked for them was unbundled before
            raise Violation(ViolationReason.BAD_BUNDLE)
        if packet == DRIPPING:
            raise Violation(ViolationReason.DRIPPING)
        raise Violation(ViolationReason.UNKNOWN_VERB if packet else ViolationReason.PACKET_TOO_LONG)
    key, nul, payload = packet[len(verb) + 1 :].partition(b"\0")
    if verb == MSG and not nul:
        raise Violation(ViolationReason.KEY_NOT_ENDED)
    return Packet(verb, key, payload)


def build_range(key: bytes, offset: int, length: int) -> bytes:
    """Build an ``FMSG``: a message whose payload is a range of the memory that goes with the packet.

    :param offset: the first byte of the payload in that memory.
    :param length: the bytes of the payload, at least 1.
    """
    return b"FMSG %b\0%d %d" % (key, offset, length)


def parse_range(payload: bytes) -> tuple[int, int]:
    """Return the offset and the length that follow the key of an ``FMSG``, in bytes.

    :raises Violation: if these are not two decimal numbers, or the length is 0.
    """
    found = _RANGE.fullmatch(payload)
    if found is None:
        raise Violation(ViolationReason.BAD_RANGE)
    return int(found[1]), int(found[2])


def build(verb: bytes, key: bytes, payload: bytes | None = None) -> bytes:
    """Build a packet.

    Without a payload it has no NUL; ``MSG`` and replies always have a payload.
    """
    if payload is None:
        return b"%b %b" % (verb, key)
    return b"%b %b\0%b" % (verb, key, payload)
