"""Packets that a client has yet to send, and the system calls that send them."""

from __future__ import annotations

import errno
import socket
from collections import deque
from collections.abc import Sequence
from itertools import islice

from sbus.client.dispatch import Waiter
from sbus.protocol.bundles import pack
from sbus.protocol.packets import MSG
from sbus.syscalls.batch import BATCH, send_packets

__all__ = ["Outbox", "send_limit", "send_some"]

_MAX_BUNDLES = 8
"""Bundles sent with one system call."""
_MAX_BUNDLED = 2048
"""Packets offered at once to fill these bundles."""
_MESSAGE = MSG + b" "


class Outbox:
    """A queue of packets that survives a lost connection (an `IPacketQueue`).

    Waiters are completed when the packets added before them have been handed to the kernel. Positions count packets
    since the connection was made, so a waiter is due once `_sent` reaches its position.
    """

    __slots__ = ("_added", "_packets", "_sent", "_waiters")

    def __init__(self) -> None:
        self._packets: deque[bytes] = deque()
        self._added = 0
        self._sent = 0
        self._waiters: deque[tuple[int, Waiter]] = deque()

    def __len__(self) -> int:
        return len(self._packets)

    def write(self, packet: bytes) -> None:
        """Add a packet."""
        self._packets.append(packet)
        self._added += 1

    def extend(self, packets: list[bytes]) -> None:
        """Add packets."""
        self._packets.extend(packets)
        self._added += len(packets)

    def wait(self, waiter: Waiter) -> None:
        """Complete `waiter` once every packet added so far has been handed to the kernel."""
        if self._packets:
            self._waiters.append((self._added, waiter))
        else:
            waiter.set_result(b"")

    def take(self, count: int) -> list[bytes]:
        """Return the next packets, at most `count`; they stay here until `ack`."""
        packets = self._packets
        return list(packets if len(packets) <= count else islice(packets, count))

    def ack(self, taken: list[bytes], sent: int) -> None:
        """Remove the first `sent` packets, which the kernel has accepted."""
        if sent == len(self._packets):
            self._packets.clear()
        else:
            pop = self._packets.popleft
            for _ in range(sent):
                pop()
        self._sent += sent
        self._complete_waiters()

    def restart(self, resync: list[bytes]) -> None:
        """Prepare for a new connection: `resync` first, then the unsent messages.

        Other packets (subscriptions, settings, questions) were meant for the lost connection; `resync` contains what
        is still in force of them.
        """
        packets, waiters = self._packets, self._waiters
        position, self._sent = self._sent, 0
        self._packets, self._waiters = deque(resync), deque()
        for packet in packets:
            while waiters and waiters[0][0] <= position:
                self._waiters.append((len(self._packets), waiters.popleft()[1]))
            position += 1
            if packet.startswith(_MESSAGE):
                self._packets.append(packet)
        self._added = len(self._packets)
        self._waiters.extend((self._added, waiter) for _, waiter in waiters)
        self._complete_waiters()

    def _complete_waiters(self) -> None:
        """Complete the waiters that are due, which may add packets and wait again."""
        while self._waiters and self._waiters[0][0] <= self._sent:
            self._waiters.popleft()[1].set_result(b"")

    def reject_oversized(self, taken: list[bytes], at: int) -> bool:
        """Let the transport close: the core has checked sizes, so this is a bug."""
        return False

    def discard_all(self, taken: Sequence[bytes] = ()) -> None:
        """Keep the packets: the connection is gone, and they wait for the next one."""

    def set_exception(self, error: Exception) -> None:
        """Discard the packets and fail the waiters: there will be no further connection."""
        self._packets.clear()
        self._sent = self._added
        waiters, self._waiters = self._waiters, deque()
        for _, waiter in waiters:
            waiter.set_exception(error)


def send_limit(bundle_limit: int) -> int:
    """Return how many packets to offer to `send_some` at once.

    :param bundle_limit: bytes in the longest bundle; 0 if the server takes none.
    """
    return _MAX_BUNDLED if bundle_limit else BATCH


def send_some(sock: socket.socket, packets: list[bytes], bundle_limit: int) -> int:
    """Send what the socket takes, with one system call and without waiting.

    :param bundle_limit: bytes in the longest bundle; 0 if the server takes none.
    :returns: how many of the packets, from the front, were sent.
    :raises OSError: from sendmsg(2) if the first packet cannot be sent, except EAGAIN.
    """
    if not bundle_limit or len(packets) < 2:
        return send_packets(sock, packets)
    bundles, counts = pack(packets, bundle_limit, _MAX_BUNDLES)
    try:
        return sum(counts[: send_packets(sock, bundles)])
    except OSError as e:
        if e.errno != errno.EMSGSIZE or counts[0] == 1:
            raise
        return send_packets(sock, packets)  # the application has shrunk the send buffer below one bundle
