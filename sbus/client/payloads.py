"""Large messages in a client: the memory to fill, the packets to send, and those that arrive.

Theory of operation
-------------------

A message in sealed memory is an ``FMSG`` packet, which names a range, and a descriptor of the memory
(`sbus.syscalls.memfd`). Between ends that have agreed on bundles, the consecutive messages of one memory travel as one
bundle with one descriptor. Protocol: "Large messages".

*Out.* An `Arena` is filled and then sealed as a whole. An `Outgoing` keeps its memory alive, so a queue that drops it
has nothing to give back. Rejected: to have the publisher make its payload in a mapping of the memory. write(2) from
memory of its own takes half of the time (64 KiB: 20 µs in place of 47), as a mapping is faulted in page by page, and a
view of it that is still alive forbids the seal.

*In.* The memory of a packet is checked before it is mapped: memory that somebody could still shorten would kill this
process (SIGBUS). All messages of a packet share one private map, which their views keep.

====================================  ========================================================================
what arrives                          what the application gets
====================================  ========================================================================
``FMSG`` with sealed memory           the ``MSG``, its payload a read-only view (`Split`)
``FMSG`` without memory, or with      a loss in its place (`Missing`): a security module of the kernel
memory that is not safe to map        removes descriptors silently
a packet of another kind              that packet; the descriptor is closed
====================================  ========================================================================
"""

from __future__ import annotations

import contextlib
import os
from typing import Protocol, Self

from sbus.errors import Violation
from sbus.protocol.bundles import unbundle
from sbus.protocol.packets import FMSG, Split, Truncated, parse_range
from sbus.routing.runs import find_type
from sbus.syscalls.memfd import Attached, InMemory, Memfd

__all__ = ["Arena", "Buffer", "Missing", "Outgoing", "flat", "open_attached"]

_ALIGNMENT = 64
"""Bytes to which each payload is aligned: a line of the CPU's caches, which is what Arrow asks of its buffers."""
_IN_MEMORY = FMSG + b" "


class Buffer(Protocol):
    """The bytes of a payload: any object with the buffer interface."""

    def __buffer__(self, flags: int, /) -> memoryview:
        """Return a view of the bytes."""


def flat(payload: object) -> memoryview:
    """Return the bytes of a buffer as a view; a copy, if they are not contiguous or not of a simple type.

    :raises TypeError: if it has no buffer interface.
    """
    view = memoryview(payload)  # type: ignore[arg-type]
    try:
        return view.cast("B")
    except (TypeError, ValueError):
        return memoryview(view.tobytes())


# --- memory to fill ---------------------------------------------------------------------------


class Arena:
    """Memory to fill with several payloads, and then to seal.

    :param most: bytes in one memfd, unless a single payload is longer.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._memories: list[Memfd] = []
        self._used = 0  # bytes in the last one

    def write(self, payload: memoryview) -> tuple[Memfd, int]:
        """Copy a payload; return the memory that it is in and its offset there.

        :raises OSError: as memfd_create(2) and pwrite(2).
        """
        offset = -self._used // _ALIGNMENT * -_ALIGNMENT  # in the page that the last payload ends in: no hole
        if not self._memories or offset + payload.nbytes > self._most:
            self._memories.append(Memfd.create())
            offset = 0
        memory = self._memories[-1]
        self._used = offset + payload.nbytes
        at = offset
        while payload:
            written = os.pwrite(memory.fileno(), payload, at)
            at += written
            payload = payload[written:]
        return memory, offset

    def seal(self) -> None:
        """Seal all memory.

        :raises OSError: as fcntl(2).
        """
        for memory in self._memories:
            memory.seal()


class Outgoing(InMemory):
    """A message in sealed memory that this client sends."""


# --- packets that arrive ----------------------------------------------------------------------


class Missing(Truncated):
    """The place of a message whose memory did not arrive, or is not safe to map."""

    @classmethod
    def in_place_of(cls, packet: bytes) -> Self:
        """Return the stand-in for an ``FMSG``."""
        key, _, text = packet[len(_IN_MEMORY) :].partition(b"\0")
        length = 0
        with contextlib.suppress(Violation):
            length = parse_range(text)[1]
        missing = cls()
        missing.size, missing.is_message = 5 + len(key) + length, True
        return missing


def open_attached(packets: list[bytes]) -> list[bytes]:
    """Return received packets with the messages in memory as `Split`; a bundle with memory is taken apart.

    An ``FMSG`` that stays as it is has no memory.
    """
    at = find_type(packets, Attached, 0)
    if at < 0:
        return packets
    opened = packets[:at]
    for packet in packets[at:]:
        if isinstance(packet, Attached):
            opened += _open(packet)
        else:
            opened.append(packet)
    return opened


def _open(packet: Attached) -> list[bytes]:
    parts = unbundle([bytes(packet)])
    whole = _map(packet) if any(part.startswith(_IN_MEMORY) for part in parts) else None
    return parts if whole is None else [_with_payload(part, whole) for part in parts]


def _map(packet: Attached) -> memoryview | None:
    """Return the memory that came with a packet; None if it is not safe to map, or the kernel refuses to map it."""
    if packet.is_cut or len(packet.files) != 1 or packet.files[0].fault() is not None:
        return None
    try:
        return memoryview(packet.files[0].map())
    except (OSError, ValueError):
        return None


def _with_payload(part: bytes, whole: memoryview) -> bytes:
    if not part.startswith(_IN_MEMORY):
        return part
    key, _, text = part[len(_IN_MEMORY) :].partition(b"\0")
    try:
        offset, length = parse_range(text)
    except Violation:
        return part
    if offset + length > len(whole):
        return part
    return Split.of(b"MSG %b\0" % key, whole[offset : offset + length])
