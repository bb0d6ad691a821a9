"""Payloads in sealed memory, at a client: the memory, the packets that go with it, and sending and receiving them.

Theory of operation
-------------------

A message in sealed memory is an ``FMSG`` packet, which names a range, and a descriptor of the memory
(`sbus.syscalls.memfd`). Between ends that have agreed on bundles, the consecutive messages of one memory travel as one
bundle with one descriptor. Protocol: "Large messages".

*Out.* An `Arena` is filled and then sealed as a whole. write(2) fills it in less than half of the time of a mapping,
whose pages are faulted in one by one; so a payload is mapped only for a publisher that makes it in place. An
`Outgoing` keeps its memory alive, so a queue that drops it has nothing to give back.

*In.* The memory of a packet is checked before it is mapped: memory that somebody could still shorten would kill this
process (SIGBUS). All messages of a packet share one private map, which their views keep.

====================================  ========================================================================
what arrives                          what the application gets
====================================  ========================================================================
``FMSG`` with sealed memory           a message with a read-only view (`Arrived`)
``FMSG`` without memory, or with      a loss in its place, as for a packet that was longer than the buffer
memory that may not be mapped         (`Missing`): a security module removes descriptors without a word
a packet of another kind              that packet; the descriptor is closed
====================================  ========================================================================
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Protocol, Self

from sbus.errors import Violation
from sbus.protocol.bundles import unbundle
from sbus.protocol.packets import FMSG, MSG, Truncated, build, build_range, parse_range
from sbus.routing.runs import find_type
from sbus.syscalls.memfd import Attached, Memfd

__all__ = ["Arena", "Arrived", "Buffer", "Missing", "Outgoing", "flat", "open_attached"]

_ALIGNMENT = 64
"""Bytes to which each payload is aligned: a line of the CPU's caches, which is what Arrow asks of its buffers."""
_IN_MEMORY = FMSG + b" "


class Buffer(Protocol):
    """The bytes of a payload: any object with the buffer interface."""

    def __buffer__(self, flags: int, /) -> memoryview:
        """Return a view of the bytes."""


def flat(payload: object) -> memoryview:
    """Return the bytes of a buffer as a view; a copy, if they are not contiguous or not of a simple type.

    :raises TypeError: if it is no buffer.
    """
    view = memoryview(payload)  # type: ignore[arg-type]
    try:
        return view.cast("B")
    except (TypeError, ValueError):
        return memoryview(view.tobytes())


# --- memory to fill ---------------------------------------------------------------------------


class _Segment:
    """One memfd of an arena.

    :ivar used: the bytes in use.
    :ivar capacity: the bytes that may be used.
    """

    def __init__(self, capacity: int) -> None:
        self.memory = Memfd.create()
        self.capacity = capacity
        self.used = 0
        self._map: mmap.mmap | None = None
        self._address = 0

    def reserve(self, size: int) -> int:
        """Return the offset of `size` more bytes, or -1 if they do not fit."""
        offset = -self.used // _ALIGNMENT * -_ALIGNMENT
        if offset + size > self.capacity:
            return -1
        self.used = offset + size
        return offset

    def write(self, offset: int, payload: memoryview) -> None:
        while payload:
            written = os.pwrite(self.memory.fileno(), payload, offset)
            offset += written
            payload = payload[written:]

    def view(self, offset: int, size: int) -> memoryview:
        if self._map is None:
            os.ftruncate(self.memory.fileno(), self.capacity)  # untouched pages cost nothing
            self._map = mmap.mmap(self.memory.fileno(), self.capacity)
        return memoryview(self._map)[offset : offset + size]

    def find(self, view: memoryview) -> int:
        """Return the offset of a buffer that lies in this memory, or -1."""
        if self._map is None or view.readonly:
            return -1
        import ctypes  # nothing else says where a buffer lies, and few programs ask

        byte = ctypes.c_char
        if not self._address:
            self._address = ctypes.addressof(byte.from_buffer(self._map))
        offset = ctypes.addressof(byte.from_buffer(view)) - self._address
        return offset if offset >= 0 and offset + view.nbytes <= self.used else -1

    def seal(self) -> None:
        """Seal the memory.

        :raises BufferError: if somebody still has a view of it.
        """
        if self._map is not None:
            self._map.close()
            self._map = None
            os.ftruncate(self.memory.fileno(), self.used)
        if os.fstat(self.memory.fileno()).st_blocks * 512 < self.used:  # pages that nobody has touched are holes
            os.posix_fallocate(self.memory.fileno(), 0, self.used)
        self.memory.seal()


class Arena:
    """Memory for several payloads, which is filled and then sealed.

    :param most: bytes in one memfd, unless one payload alone is longer.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._segments: list[_Segment] = []

    def _reserve(self, size: int) -> tuple[_Segment, int]:
        if self._segments and (offset := self._segments[-1].reserve(size)) >= 0:
            return self._segments[-1], offset
        self._segments.append(_Segment(max(size, self._most)))
        return self._segments[-1], self._segments[-1].reserve(size)

    def write(self, payload: memoryview) -> tuple[Memfd, int]:
        """Copy a payload; return the memory that it is in and its offset there."""
        segment, offset = self._reserve(payload.nbytes)
        segment.write(offset, payload)
        return segment.memory, offset

    def allocate(self, size: int) -> memoryview:
        """Return a writable view of `size` bytes, at an address that is a multiple of 64."""
        segment, offset = self._reserve(size)
        return segment.view(offset, size)

    def find(self, view: memoryview) -> tuple[Memfd, int] | None:
        """Return the memory that a buffer lies in and its offset there; None for a buffer that lies elsewhere."""
        for segment in self._segments:
            if (offset := segment.find(view)) >= 0:
                return segment.memory, offset
        return None

    def seal(self) -> None:
        """Seal all of it.

        :raises BufferError: if somebody still has a view of it.
        """
        for segment in self._segments:
            segment.seal()


# --- packets to send --------------------------------------------------------------------------


class Outgoing(bytes):
    """An ``FMSG`` to send.

    :ivar memory: the memory that its payload is in.
    :ivar size: the bytes of the same message as one packet.
    """

    memory: Memfd
    size: int
    _key: bytes
    _range: tuple[int, int]

    @classmethod
    def of(cls, key: bytes, memory: Memfd, offset: int, length: int) -> Self:
        """Return the packet of a message."""
        packet = cls(build_range(key, offset, length))
        packet.memory, packet.size = memory, 5 + len(key) + length
        packet._key, packet._range = key, (offset, length)
        return packet

    def plain(self) -> bytes:
        """Return the same message with its bytes in the packet."""
        return build(MSG, self._key, self.memory.read(*self._range))


# --- packets that arrive ----------------------------------------------------------------------


class Arrived(bytes):
    """An ``FMSG`` that came with its memory.

    :ivar payload: a read-only view of its payload.
    """

    payload: memoryview


class Missing(Truncated):
    """The place of a message whose memory did not come, or may not be mapped."""

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
    """Return received packets with the messages in memory as `Arrived`; a bundle with memory is taken apart.

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
    """Return the memory that came with a packet; None if it may not be mapped, or the kernel has no room for a map."""
    if packet.is_cut or len(packet.files) != 1 or packet.files[0].fault() is not None:
        return None
    try:
        return memoryview(packet.files[0].map())
    except (OSError, ValueError):
        return None


def _with_payload(part: bytes, whole: memoryview) -> bytes:
    if not part.startswith(_IN_MEMORY):
        return part
    try:
        offset, length = parse_range(part.partition(b"\0")[2])
    except Violation:
        return part
    if offset + length > len(whole):
        return part
    arrived = Arrived(part)
    arrived.payload = whole[offset : offset + length]
    return arrived
