"""The send buffer of a server's socket, which begins small and grows as its peer reads.

Theory of operation
-------------------

Packets that the kernel holds for a peer that does not read are memory that flood control cannot drop. A buffer for two
of the longest packets, as a fast receiver should have it, holds 0.8 MB; 16,384 silent clients would take 12.8 GB. So a
buffer starts at `START` bytes, and a silent client keeps no more than that (and one packet, which the kernel takes as
long as the buffer is not full).

It grows in two cases, if `may_grow` permits:

* *The peer has read.* The kernel reports a full socket as writable when three quarters of its buffer have been read.
  The buffer then has its full size at once, or double its size if `may_grow` grants no more: each congestion
  costs a round of the reactor and a passage through flood control.
* *A packet needs it*: the kernel refuses a packet that is longer than the buffer (less `OVERHEAD`). The buffer then
  grows to that length alone.

Buffers do not shrink: a smaller limit frees nothing that the kernel holds.

The full size is about twice the longest packet, since the kernel doubles the value of SO_SNDBUF (socket(7)). The kernel
counts its own structures: a message of 100 bytes takes 768 there, so `START` holds 86 of them and the full size 1067.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from sbus.syscalls.sockets import LARGEST_SEND_BUFFER, OVERHEAD, set_send_buffer

__all__ = ["START", "SendBuffer"]

START = 64 << 10
"""Bytes in a new send buffer."""


class SendBuffer:
    """The send buffer of one socket.

    :param max_packet: bytes in the longest packet to send.
    :ivar size: bytes, as the kernel counts them.
    :ivar full_size: bytes that the buffer can grow to.
    :ivar first_sendable: bytes in the longest packet that the buffer took when it was new.
    """

    __slots__ = ("_sock", "first_sendable", "full_size", "size")

    def __init__(self, sock: socket.socket, max_packet: int) -> None:
        self._sock = sock
        self.full_size = min(2 * (max_packet + OVERHEAD), LARGEST_SEND_BUFFER)
        self.size = set_send_buffer(sock, min(START, self.full_size))
        self.first_sendable = self.size - OVERHEAD

    def grow(self, may_grow: Callable[[int], bool] | None) -> bool:
        """Make the buffer large, as the peer has read; return whether it is larger now.

        :param may_grow: asked with the bytes to be added; None if it needs not be asked.
        """
        double = min(2 * self.size, self.full_size)
        return self._resize(self.full_size, may_grow) or self._resize(double, may_grow)

    def fit(self, packet: int, may_grow: Callable[[int], bool] | None) -> bool:
        """Grow for one packet of `packet` bytes; return whether it fits now and did not fit before."""
        return packet + OVERHEAD <= self.full_size and self._resize(packet + OVERHEAD, may_grow)

    def _resize(self, size: int, may_grow: Callable[[int], bool] | None) -> bool:
        if size <= self.size or (may_grow is not None and not may_grow(size - self.size)):
            return False
        before = self.size
        with contextlib.suppress(OSError):
            self.size = set_send_buffer(self._sock, size)
        if self.size < size:
            self.full_size = self.size  # the kernel grants no more
        return self.size > before
