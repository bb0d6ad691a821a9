"""Bundles: many packets in one, between two ends that have both asked for them.

A bundle is the four bytes ``BNDL``, then for each of its packets the length (4 bytes, unsigned, little-endian) and the
packet. It means what its packets mean when they are sent one after another. Protocol: the page "Bundles".

Theory of operation
-------------------

The kernel charges for every packet on a ``SOCK_SEQPACKET`` socket: about 1 µs on its way into the server, and another
for each receiver. A bundle spreads that charge over its packets.

Only the two ends of a socket know about bundles. The transport unbundles packets that it has read before the protocol
sees them, and bundles packets from a queue before it sends them. Routing, flood control, limits and counters therefore
work on messages only. The client libraries use the same two functions, `pack` and `unbundle`.

Invariants:

* A bundle contains at least one packet, no empty packet and no bundle. A packet that would be alone stays plain, and
  so does one that does not fit a bundle.
* No packet is ever delayed to fill a bundle. A bundle consists of packets that wait when the queue is sent.
* `unbundle` checks the whole framing before it takes anything out.

=====================================  =================================================================================
what stays in the list as it is        why
=====================================  =================================================================================
a bundle with bad framing              The parser refuses it (``BAD_BUNDLE``): everything before it still counts.
a bundle with a descriptor             Its packets belong to the descriptor (`sbus.syscalls.memfd.Attached.parts`).
a bundle after ``CMSG bundle/off``     Even if one batch has both: otherwise the timing of a read would decide whether
                                       it is a violation.
=====================================  =================================================================================

The compiled twin copies each byte once. A bundle for many receivers is packed once: the transports of a batch share a
`BundleCache`.
"""

from __future__ import annotations

import struct
import sys
from typing import TYPE_CHECKING

from sbus.speedups import choose

__all__ = ["LARGE", "MAGIC", "MAX_BUNDLE", "MIN_BUNDLE_LIMIT", "BundleCache", "pack", "unbundle"]

MAGIC = b"BNDL"
"""The first bytes of every bundle, and of no other packet."""

MAX_BUNDLE = 65_536
"""Size in bytes of the largest bundle that this end sends and announces (it accepts any that fits a packet)."""

LARGE = 16_384
"""Bytes of a packet that stays plain: copying it into a bundle and out of it costs more than the kernel charges for it,
by 15 % at 16 KiB and by 30 % at 30 kB, from client to client. At 4 KiB it costs as much."""

MIN_BUNDLE_LIMIT = 65_536
"""Bytes that every end with bundles accepts; an end with a smaller packet limit offers no bundles."""

BundleCache = dict[int, tuple[list[bytes], list[int]]]
"""Results of `pack` for one list of packets, by bundle size limit in bytes."""

_LENGTH = struct.Struct("<I")
_END = b"CMSG bundle/off"


def _unbundle(packets: list[bytes], enough: int = sys.maxsize) -> list[bytes]:
    """Replace each bundle in a list of packets by its packets.

    :param enough: the length of the result from which on bundles stay in it as they are.
    :returns: a new list, or `packets` itself if it contains no bundle. A bundle with bad framing, and every bundle
        after the control message ``bundle/off``, stays in the list as it is.
    """
    if not any(packet[:4] == MAGIC and type(packet) is bytes for packet in packets):
        return packets
    plain: list[bytes] = []
    for at, packet in enumerate(packets):
        if len(plain) >= enough:
            return plain + packets[at:]
        parts = _split(packet) if packet[:4] == MAGIC and type(packet) is bytes else []
        plain += parts or [packet]
        if _is_end(packet) or (parts and _END in packet and any(map(_is_end, parts))):
            return plain + packets[at + 1 :]
    return plain


def _is_end(packet: bytes) -> bool:
    return packet.startswith(_END) and packet[len(_END) : len(_END) + 1] in (b"", b"\0")


def _split(bundle: bytes) -> list[bytes]:
    """Return the packets of a bundle, or an empty list if the framing is bad."""
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


def _may_join(packet: bytes, room: int) -> bool:
    """Return whether a packet goes into a bundle: it is not large, and it is its bytes (one with a payload elsewhere
    is longer than these)."""
    size = len(packet)
    return size < LARGE and 4 + size <= room and (type(packet) is bytes or bytes.__len__(packet) == size)


def _pack(packets: list[bytes], limit: int, most: int) -> tuple[list[bytes], list[int]]:
    """Put packets, in order, into as few bundles as possible; a `LARGE` one stays plain.

    :param limit: the size limit of a bundle, in bytes.
    :param most: the maximum number of items to return. Packets that need more are left out.
    :returns: the bundles and plain packets to send, and for each of them the number of packets in it.
    """
    bundles: list[bytes] = []
    counts: list[int] = []
    at = 0
    while at < len(packets) and len(bundles) < most:
        size, end = 4, at
        while end < len(packets) and _may_join(packets[end], limit - size):
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


pack, unbundle = _pack, _unbundle
if not TYPE_CHECKING:
    pack, unbundle = choose("sbus.protocol._bundles", pack=_pack, unbundle=_unbundle)
