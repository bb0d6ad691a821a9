"""The packets of the protocol: parse what a peer sent, build what a peer is sent.

A packet is one message. Keys, patterns and payloads are bytes; the protocol's page says which
bytes they may hold.
"""

from __future__ import annotations

from typing import NamedTuple

from sbus.errors import Violation, ViolationReason
from sbus.protocol.bundles import MAGIC

__all__ = ["CMSG", "DEFAULT_MAX_PACKET", "MSG", "SUB", "UNSUB", "Packet", "build", "parse"]

MSG = b"MSG"
SUB = b"SUB"
UNSUB = b"UNSUB"
CMSG = b"CMSG"

DEFAULT_MAX_PACKET = 409_600
"""Bytes in the longest packet; what clients of the original server allocate for one."""


class Packet(NamedTuple):
    """One message: its verb, its key (or pattern), and what follows the key's NUL (empty without one)."""

    verb: bytes
    key: bytes
    payload: bytes = b""


def parse(packet: bytes) -> Packet:
    """Take a packet apart.

    :raises Violation: on an unknown verb, on a bundle, on ``MSG`` without a NUL, and on the empty packet, which
        stands for one that was too long to be received whole (no peer can send an empty packet:
        it reads as end-of-file).
    """
    verb, space, _ = packet[:6].partition(b" ")
    if not space or verb not in (MSG, SUB, UNSUB, CMSG):
        if packet.startswith(MAGIC):  # a good one from who has asked is taken apart before
            raise Violation(ViolationReason.BAD_BUNDLE)
        raise Violation(ViolationReason.UNKNOWN_VERB if packet else ViolationReason.PACKET_TOO_LONG)
    key, nul, payload = packet[len(verb) + 1 :].partition(b"\0")
    if verb == MSG and not nul:
        raise Violation(ViolationReason.KEY_NOT_ENDED)
    return Packet(verb, key, payload)


def build(verb: bytes, key: bytes, payload: bytes | None = None) -> bytes:
    """Put a packet together; without a payload there is no NUL (``MSG`` and replies always have one)."""
    if payload is None:
        return b"%b %b" % (verb, key)
    return b"%b %b\0%b" % (verb, key, payload)
