"""Packets that a client has yet to send, and who waits until they are handed to the kernel."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from zope.interface import implementer

from sbus.client.core import Waiter
from sbus.interfaces import IPacketQueue

__all__ = ["Outbox"]


@implementer(IPacketQueue)
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
        self._waiting.append((self._added, waiter))

    def take(self, count: int) -> list[bytes]:
        """The next packets to send, at most `count`."""
        packets = self._packets
        if len(packets) <= count:
            return list(packets)
        return [packets[i] for i in range(count)]

    def done(self, taken: list[bytes], sent: int) -> None:
        """Of what was taken so many were sent."""
        pop = self._packets.popleft
        for _ in range(sent):
            pop()
        self._sent += sent
        while self._waiting and self._waiting[0][0] <= self._sent:
            self._waiting.popleft()[1].succeed(b"")

    def restart(self, greeting: list[bytes]) -> None:
        """There is a new connection: send the greeting first, then those that wait and are messages.

        Other packets (subscriptions, settings, questions) were meant for the old connection; the
        greeting says what is still true of them.
        """
        waiting, self._waiting = self._waiting, deque()
        packets, self._packets = self._packets, deque(greeting)
        position, self._sent, self._added = self._sent, 0, len(greeting)
        while waiting or packets:
            while waiting and waiting[0][0] <= position:
                self.wait(waiting.popleft()[1])
            if packets:
                packet = packets.popleft()
                position += 1
                if packet.startswith(b"MSG "):
                    self.write(packet)

    def refused(self, packet: bytes) -> bool:
        """The socket will not take a packet; ours are measured before they get here, so end it."""
        return False

    def abandon(self, taken: Sequence[bytes] = ()) -> None:
        """The connection is gone; what waits is kept for the next one."""

    def fail(self, error: Exception) -> None:
        """There will be no next connection: forget what waits, and tell who waits."""
        self._packets.clear()
        self._sent = self._added
        waiting, self._waiting = self._waiting, deque()
        for _, waiter in waiting:
            waiter.fail(error)
