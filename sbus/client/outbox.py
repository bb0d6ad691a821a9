"""Packets that a client has yet to send, and who waits until they are handed to the kernel."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from sbus.client.core import Waiter

__all__ = ["Outbox"]


class Outbox:
    """Packets in order (`sbus.interfaces.IPacketQueue`), which survive a lost connection."""

    __slots__ = ("_added", "_packets", "_sent", "_waiting")

    def __init__(self) -> None:
        self._packets: deque[bytes] = deque()
        self._added = 0
        self._sent = 0
        self._waiting: deque[tuple[int, Waiter]] = deque()

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
        """Tell the waiter when everything that was added so far has been handed to the kernel."""
        if self._packets:
            self._waiting.append((self._added, waiter))
        else:
            waiter.set_result(b"")

    def take(self, count: int) -> list[bytes]:
        """The next packets to send, at most `count`."""
        packets = self._packets
        return list(packets if len(packets) <= count else islice(packets, count))

    def ack(self, taken: list[bytes], sent: int) -> None:
        """Of what was taken so many were sent."""
        if sent == len(self._packets):
            self._packets.clear()
        else:
            pop = self._packets.popleft
            for _ in range(sent):
                pop()
        self._sent += sent
        self._tell()

    def restart(self, greeting: list[bytes]) -> None:
        """The connection is lost: for the next one keep the messages, and put the greeting before them.

        Other packets (subscriptions, settings, questions) were meant for the lost connection; the
        greeting says what is still true of them. What is added from now on follows in its order.
        """
        packets, waiting = self._packets, self._waiting
        position, self._sent = self._sent, 0
        self._packets, self._waiting = deque(greeting), deque()
        for packet in packets:
            while waiting and waiting[0][0] <= position:
                self._waiting.append((len(self._packets), waiting.popleft()[1]))
            position += 1
            if packet.startswith(b"MSG "):
                self._packets.append(packet)
        self._added = len(self._packets)
        self._waiting.extend((self._added, waiter) for _, waiter in waiting)
        self._tell()

    def _tell(self) -> None:
        """Wake those who have waited for what is sent; they may add packets, and wait again."""
        while self._waiting and self._waiting[0][0] <= self._sent:
            self._waiting.popleft()[1].set_result(b"")

    def reject_oversized(self, packet: bytes) -> bool:
        """The socket will not take a packet; ours are measured before they get here, so end it."""
        return False

    def discard_all(self, taken: Sequence[bytes] = ()) -> None:
        """The connection is gone; what waits is kept for the next one."""

    def set_exception(self, error: Exception) -> None:
        """There will be no next connection: forget what waits, and tell who waits."""
        self._packets.clear()
        self._sent = self._added
        waiting, self._waiting = self._waiting, deque()
        for _, waiter in waiting:
            waiter.set_exception(error)
