"""Large messages: noted in the event loop, read by the journal's thread.

The payload of a large message does not pass through the event loop. The loop makes a `Payload`, a batch of one row, of
the packet and the descriptor of the memory. The thread maps the memory and writes the payload as an ordinary message;
if it is longer than ``max_payload``, the thread writes the length and the SHA-256. Hashing and writing release the
interpreter's lock, so the loop continues to receive.
"""

from __future__ import annotations

import hashlib
import struct
from functools import cached_property

import pyarrow as pa

from sbus.errors import Violation
from sbus.journal.digests import Digest
from sbus.journal.senders import Senders
from sbus.journal.writer import JournalWriter
from sbus.protocol.packets import FMSG, parse_range
from sbus.syscalls.memfd import Attached, Memfd

__all__ = ["MAX_HELD", "Payload", "UnusablePayload", "find_memory", "is_payload"]

MAX_HELD = 256
"""Most descriptors that wait for the disk; a process may open 1,024 files by default (RLIMIT_NOFILE)."""
_OFFSETS = struct.Struct("=ii")
_PREFIX = FMSG + b" "


class UnusablePayload(Exception):
    """The bus sent a large message that cannot be recorded."""


def is_payload(packet: bytes) -> bool:
    """Return whether a packet is a large message."""
    return packet.startswith(_PREFIX)


def find_memory(packet: bytes) -> Memfd:
    """Return the sealed memory that came with a packet or a bundle.

    :raises UnusablePayload: if it is missing, or not sealed.
    """
    if not isinstance(packet, Attached) or packet.is_cut or len(packet.files) != 1:
        raise UnusablePayload(
            "the bus sent a payload without its memory: raise the recorder's limit of open files (ulimit -n)"
        )
    (memory,) = packet.files
    if (fault := memory.fault()) is not None:
        raise UnusablePayload(f"the bus sent a payload that is not safe to read: {fault}")
    return memory


class Payload:
    """A large message as a batch of one row; see `sbus.recorder.buffer.Batch`.

    :param packet: the ``FMSG``.
    :param memory: the memory that came with it.
    :param time: when it arrived, in µs since the epoch.
    :param sender: its publisher, in the bus's text form; empty if it is not known.
    :param max_payload: bytes in the longest payload to keep.
    :param least: the fewest bytes that it counts as.
    :raises UnusablePayload: if the packet is malformed.
    """

    rows = 1

    def __init__(self, packet: bytes, memory: Memfd, time: int, sender: bytes, *, max_payload: int, least: int) -> None:
        self._key, _, place = packet[len(_PREFIX) :].partition(b"\0")
        try:
            self._offset, self._length = parse_range(place)
        except Violation as error:
            raise UnusablePayload(f"the bus sent a payload that cannot be found: {error}") from None
        if self._offset + self._length > memory.size:
            raise UnusablePayload("the bus sent a payload that reaches beyond its memory")
        self.times = [time]
        self.size = len(self._key) + self._length
        self.memory = max(self.size, least)
        self._sealed = memory
        self._senders = Senders(pa.array([sender], pa.binary()), pa.array([1], pa.int32()))
        self._is_kept = self._length <= max_payload

    def append(self, journal: JournalWriter) -> None:
        """Append the row.

        :raises OSError: if it cannot be written, or the memory cannot be mapped; the journal is then as it was.
        """
        (time,) = self.times
        if not self._is_kept:
            journal.append_digest(self._key, self._digest, time, self._senders)
            return
        offsets = pa.py_buffer(_OFFSETS.pack(0, self._length))
        payloads = pa.Array.from_buffers(pa.binary(), 1, [None, offsets, pa.py_buffer(self._view())])
        journal.append_columns(pa.array([self._key], pa.binary()), payloads, self.times, [1], self._senders)

    @cached_property
    def _digest(self) -> Digest:
        return Digest(self._length, hashlib.sha256(self._view()).hexdigest())

    def _view(self) -> memoryview:
        return memoryview(self._sealed.map())[self._offset : self._offset + self._length]
