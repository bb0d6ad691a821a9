"""Sealed memory: a memfd (memfd_create(2)) that nobody can change, shared by its descriptor.

A memfd is *sealed* if it has the seals SEAL, SHRINK, GROW and WRITE, so that no process can ever change it or its
length. The seal FUTURE_WRITE is no substitute: a mapping older than the seal stays writable.

Sealed memory can still have *holes*, pages that were never written. A memfd of 1 TiB of holes costs its maker nothing,
but each page that a reader touches costs memory. So memory with holes is refused.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from time import monotonic
from typing import Any, Self

from sbus.protocol.bundles import pack, unbundle
from sbus.protocol.packets import FMSG, build_range
from sbus.syscalls.elsewhere import NOBODY, Closing

__all__ = ["SEALS", "Attached", "InMemory", "Memfd", "adopt", "join", "receive_from"]

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
"""The seals that together make memory unchangeable."""
_NOEXEC_SEAL = 8
"""MFD_NOEXEC_SEAL: the memory can never be executed. Since Linux 6.3, the kernel warns of a memfd without it."""
_FMSG = FMSG + b" "
_ATTEMPTS = 5
"""Attempts to seal memory. The kernel refuses a seal while it holds a page itself, which it does to move pages together
(compaction). It looks five times in 150 ms; in one run of benchmarks/payloads, that was not enough."""
_BLOCK = 512
"""Bytes in a block of stat(2)."""
_MOST_BEYOND = 2 << 20
"""Bytes that memory may have beyond its end: a huge page. The check frees them, and 1 GiB takes 50 ms."""
_MOST_JOINED = 1024
"""Messages looked at for one bundle: about as many as fit one."""
_MOST = 2
"""Descriptors that a packet keeps: one too many has to be noticed, and a peer that is paused has many packets."""
_AT_ONCE = 16 << 20
"""Bytes of the largest memory that the caller frees itself: the kernel takes 0.7 ms (1 GiB: 45 ms)."""
_FREED_PER_SECOND = 2 << 30
"""Bytes that the caller frees itself: a twelfth of what the kernel can. A camera has 187 MB/s."""
_ALLOWANCE = 0.01
"""Seconds' worth of these that the caller may free in one go: 21 MB, in 0.9 ms."""


class Memfd:
    """An open memfd; the last reference to this object closes the descriptor.

    :param fd: the descriptor, which this object then owns.
    """

    __slots__ = ("_fault", "_fd", "_size")

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._size = -1
        self._fault: str | None = None

    @classmethod
    def create(cls, name: str = "sbus") -> Memfd:
        """Return a new memfd, empty and without seals.

        :raises OSError: as memfd_create(2).
        """
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        try:
            return cls(os.memfd_create(name, flags | _NOEXEC_SEAL))
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
            return cls(os.memfd_create(name, flags))

    def fileno(self) -> int:
        """Return the descriptor; -1 when it is closed."""
        return self._fd

    @property
    def size(self) -> int:
        """The bytes of sealed memory; see `fault`."""
        return self._size

    def seal(self) -> None:
        """Seal the memory.

        :raises OSError: as fcntl(2); EBUSY while a writable mapping exists.
        """
        for _ in range(_ATTEMPTS):
            try:
                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
                return
            except OSError as e:
                if e.errno != errno.EBUSY:
                    raise
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)

    def fault(self) -> str | None:
        """Return in words why this is no sealed memory without holes; None if it is. Only the first call checks."""
        if self._size < 0:
            self._size = 0
            self._fault = self._look()
        return self._fault

    def _look(self) -> str | None:
        try:
            seals = fcntl.fcntl(self._fd, fcntl.F_GET_SEALS)
        except OSError:
            return "the descriptor is no memfd"
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode) or seals & SEALS != SEALS:
            return "the memory lacks a seal: SEAL, SHRINK, GROW and WRITE are needed"
        if status.st_blocks * _BLOCK > status.st_size + _MOST_BEYOND:
            return "the memory has pages beyond its end"
        try:  # these would make up for holes (fallocate(2), KEEP_SIZE); the seals forbid new ones
            os.ftruncate(self._fd, status.st_size)
        except OSError:
            return "the descriptor is open for reading only"
        if os.fstat(self._fd).st_blocks * _BLOCK < status.st_size:
            return "the memory has holes"
        self._size = status.st_size
        return None

    def read(self, offset: int, length: int) -> bytes:
        """Return a copy of a range of the memory.

        :raises OSError: as pread(2); also if it reads less, as it does if there is no memory for a page in the swap.
        """
        data = os.pread(self._fd, length, offset)
        if len(data) < length:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return data

    def map(self) -> mmap.mmap:
        """Map the whole memory, privately and read-only.

        Older kernels refuse a shared mapping of memory with the seal WRITE, even a read-only one. Up to Python 3.12,
        the map has its own descriptor.

        :raises OSError: as mmap(2).
        """
        if sys.version_info >= (3, 13):
            mapped = mmap.mmap(self._fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ, trackfd=False)
        else:
            mapped = mmap.mmap(self._fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        # Else the kernel notes for each page that it was used, as it unmaps them: 44 µs a MiB in place of 14.
        mapped.madvise(mmap.MADV_SEQUENTIAL)
        return mapped

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd >= 0:
            try:
                self._close()
            except OSError:
                pass
            self._fd = -1

    def _close(self) -> None:
        os.close(self._fd)

    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Memfd {self._fd}>"


_allowed_from = 0.0
_closing = NOBODY


def receive_from(closing: Closing) -> None:
    """Let the descriptors that arrive from now on wait here if they take long to close."""
    global _closing  # as they are closed wherever a packet ends, also by the reader itself
    _closing = closing


def _may_free(size: int, closing: Closing) -> bool:
    """Return whether the caller frees memory itself, which is cheaper than leaving it to another thread."""
    global _allowed_from
    now = monotonic()
    if size > _AT_ONCE or now < _allowed_from:
        return closing is NOBODY and closing.is_behind()  # else nothing more is read from a user for whom much waits
    _allowed_from = max(_allowed_from, now - _ALLOWANCE) + size / _FREED_PER_SECOND
    return True


class _Received(Memfd):
    """A descriptor that a peer has passed; it is closed elsewhere if that may take long."""

    __slots__ = ("_closing",)

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._closing = _closing

    def _close(self) -> None:
        if self.fault() is not None:
            self._closing.close(partial(os.close, self._fd))
        elif _may_free(self._size, self._closing):
            os.close(self._fd)
        else:
            self._closing.free(partial(os.close, self._fd))


def adopt(descriptors: Iterable[int]) -> tuple[Memfd, ...]:
    """Have descriptors that a peer has passed closed with the last reference to them.

    A reader does so before it makes the packets, for which there may be no memory.
    """
    return tuple(map(_Received, descriptors))


class Attached(bytes):
    """A packet that came with descriptors.

    :ivar files: the descriptors.
    :ivar is_cut: whether descriptors are missing: there were more than two, this process has no more, or a security
        module removed them.
    :ivar is_batch: whether this is a packet out of a bundle.
    :ivar memory: an object that the packet's handler makes of the files; the packets of a bundle share it.
    """

    files: tuple[Memfd, ...]
    is_cut: bool
    is_batch: bool = False
    memory: Any = None

    @classmethod
    def of(cls, packet: bytes, files: tuple[Memfd, ...], is_cut: bool) -> Self:
        """Return a packet that came with these descriptors; it keeps two."""
        attached = cls(packet)
        attached.files = files[:_MOST]
        attached.is_cut = is_cut or len(files) > _MOST
        return attached

    def parts(self) -> list[bytes]:
        """Take apart a bundle that came with one descriptor, or lost it; each ``FMSG`` in it refers to that one.

        :returns: the packets of the bundle; only the packet itself if it is no bundle, has bad framing, came with
            several descriptors, or has no ``FMSG``.
        """
        is_good = not self.files if self.is_cut else len(self.files) == 1
        parts = unbundle([bytes(self)]) if is_good else []
        if not any(part.startswith(_FMSG) for part in parts):
            return [self]
        self.is_batch = True
        return [self._with_same(part) if part.startswith(_FMSG) else part for part in parts]

    def _with_same(self, packet: bytes) -> Self:
        part = type(self)(packet)
        part.__dict__ = self.__dict__  # so all of them share what the handler makes of the memory
        return part


class InMemory(bytes):
    """A message whose payload is in sealed memory, as an end sends it: these bytes are its packet up to the payload.

    So its key is found where it always is. Its length is that of the message with its payload, so queues and limits
    need not know its kind.

    :ivar memfd: the memory.
    :ivar offset: the first byte of the payload in it.
    :ivar length: the bytes of the payload.
    :ivar packet: the ``FMSG`` that goes with the descriptor.
    """

    __slots__ = ()  # two subclasses of bytes with attributes have no common subclass, so only those of this one have

    memfd: Memfd
    offset: int
    length: int
    packet: bytes

    @classmethod
    def of(cls, key: bytes, memfd: Memfd, offset: int, length: int) -> Self:
        """Return a message."""
        message = cls(b"MSG %b\0" % key)
        packet = build_range(key, offset, length)
        message.__dict__.update(memfd=memfd, offset=offset, length=length, packet=packet)
        return message

    def __len__(self) -> int:
        return bytes.__len__(self) + self.length

    def plain(self) -> bytes:
        """Return the message with a copy of its payload.

        :raises OSError: as `Memfd.read`.
        """
        return b"%b%b" % (bytes(self), self.memfd.read(self.offset, self.length))


def join(messages: Sequence[bytes], at: int, limit: int) -> tuple[bytes, int]:
    """Return the packet that sends the message in memory at an index, and those after it in the same memory.

    :param limit: bytes in a bundle; 0 if a packet has one message.
    :returns: the packet, and the number of messages in it.
    """
    first = messages[at]
    assert isinstance(first, InMemory)
    same = []
    for message in islice(messages, at, at + _MOST_JOINED if limit else at + 1):
        if not isinstance(message, InMemory) or message.memfd is not first.memfd:
            break
        same.append(message.packet)
    (packet, *_), (count, *_) = pack(same, limit, 1)
    return packet, count
