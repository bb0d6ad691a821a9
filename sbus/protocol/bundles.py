"""Bundles: many packets in one, between two ends that have both asked for it; how one is taken apart and put together.

A bundle is ``BNDL``, then for each of its packets the length (4 bytes, unsigned, little-endian) and
the packet. It means what its packets mean sent one after another.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from sbus.speedups import is_wanted

__all__ = ["LARGEST", "MAGIC", "SMALLEST_LIMIT", "BundleCache", "pack", "unbundle"]

MAGIC = b"BNDL"
"""What a bundle begins with, and no other packet."""

LARGEST = 65_536
"""Bytes in the largest bundle that we send, and say that we take (we take any that fits a packet)."""

SMALLEST_LIMIT = 65_536
"""What the other end may count on; where packets may not be so long there are no bundles."""

BundleCache = dict[int, tuple[list[bytes], list[int]]]
"""What `pack` made of the same packets, by the limit."""

_LENGTH = struct.Struct("<I")
_END = b"CMSG bundle/off"


def _unbundle(packets: list[bytes]) -> list[bytes]:
    """Put each bundle's packets in its place.

    A bundle whose framing is wrong (a length that does not fit, an empty packet, another bundle
    within, nothing in it) stays as it is: as a packet it is none of the protocol's, so that whoever
    handles it finds the violation in its place. So does a bundle behind the control message that ends them.
    """
    if not any(packet[:4] == MAGIC for packet in packets):
        return packets
    plain: list[bytes] = []
    for at, packet in enumerate(packets):
        parts = (packet[:4] == MAGIC and _split(packet)) or [packet]
        plain += parts
        if _END in packet and any(map(_is_end, parts)):
            return plain + packets[at + 1 :]
    return plain


def _is_end(packet: bytes) -> bool:
    return packet.startswith(_END) and packet[len(_END) : len(_END) + 1] in (b"", b"\0")


def _split(bundle: bytes) -> list[bytes]:
    """The packets of a bundle; none if its framing is wrong."""
    packets: list[bytes] = []
    at, size = 4, len(bundle)
    while at < size:
        if size - at < 4:
            return []
        (length,) = _LENGTH.unpack_from(bundle, at)
        at += 4
        packet = bundle[at : at + length]
        at += length
        if not length or at > size or packet[:4] == MAGIC:
            return []
        packets.append(packet)
    return packets


def _pack(packets: list[bytes], limit: int, most: int) -> tuple[list[bytes], list[int]]:
    """Put packets, in order, into as few bundles of at most `limit` bytes as that takes.

    A packet that would be alone in its bundle stays plain, also one too long for any bundle.

    :param most: how many bundles (and plain packets) to make at most; what does not fit is left out.
    :returns: what to send, and how many of the packets each of these is.
    """
    bundles: list[bytes] = []
    counts: list[int] = []
    at = 0
    while at < len(packets) and len(bundles) < most:
        size, end = 4, at
        while end < len(packets) and size + 4 + len(packets[end]) <= limit:
            size += 4 + len(packets[end])
            end += 1
        if end - at < 2:
            bundles.append(packets[at])
            counts.append(1)
            at += 1
            continue
        parts = [MAGIC]
        for packet in packets[at:end]:
            parts += (_LENGTH.pack(len(packet)), packet)
        bundles.append(b"".join(parts))
        counts.append(end - at)
        at = end
    return bundles, counts


if TYPE_CHECKING or not is_wanted():
    pack, unbundle = _pack, _unbundle
else:
    try:
        from sbus.protocol._bundles import pack, unbundle
    except ImportError:
        pack, unbundle = _pack, _unbundle
