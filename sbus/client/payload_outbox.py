"""Sending messages in sealed memory, which not every server takes, from an outbox.

While the client is not connected, such messages wait as all others do. The next server may be another one, or the same
with other options, and whether it takes them shows only behind the first replies. So on each connection the outbox
keeps them back, and what follows them, until `PayloadOutbox.settle`. If the server does not take them, their bytes are
sent instead, as far as they fit a packet.
"""

from __future__ import annotations

import socket

from sbus.client.outbox import Outbox, send_some
from sbus.client.payloads import Outgoing
from sbus.protocol.bundles import pack
from sbus.routing.runs import find_type
from sbus.syscalls.memfd import Memfd
from sbus.syscalls.sockets import send_with

__all__ = ["PayloadOutbox", "send_any"]


class PayloadOutbox(Outbox):
    """An outbox for a client with payloads."""

    __slots__ = ("_is_settled",)

    def __init__(self) -> None:
        super().__init__()
        self._is_settled = False

    def take(self, count: int) -> list[bytes]:
        """Return the next packets, up to the first that is kept back."""
        taken = super().take(count)
        at = -1 if self._is_settled else find_type(taken, Outgoing, 0)
        return taken if at < 0 else taken[:at]

    def restart(self, resync: list[bytes]) -> None:
        """Prepare for a new connection; see `Outbox.restart`."""
        self._is_settled = False
        super().restart(resync)

    def settle(self, longest: int | None) -> int:
        """Keep nothing back any more.

        :param longest: bytes in the longest packet, for a server that does not take messages in memory; else None.
        :returns: the messages that were too long for it, which are dropped.
        """
        self._is_settled = True
        if longest is None:
            return 0
        dropped = 0
        for at, packet in enumerate(self._packets):
            if not isinstance(packet, Outgoing):
                continue
            if packet.size <= longest:
                self._packets[at] = packet.plain()
            else:
                self._make_hole(at)
                dropped += 1
        self._measured = (-1, -1)
        self._tidy()
        return dropped

    def _measure(self, packets: list[bytes]) -> int:
        return sum(packet.size if isinstance(packet, Outgoing) else len(packet) for packet in packets)


def send_any(sock: socket.socket, packets: list[bytes], bundle_limit: int) -> int:
    """Send what the socket takes, as `send_some` does; messages in memory may be among the packets.

    :raises OSError: as `send_some`; ETOOMANYREFS if this user has too many descriptors under way.
    """
    at = find_type(packets, Outgoing, 0)
    if at:
        return send_some(sock, packets if at < 0 else packets[:at], bundle_limit)
    memory = _memory_of(packets[0])
    assert memory is not None
    end = 1
    if bundle_limit:
        while end < len(packets) and _memory_of(packets[end]) is memory:
            end += 1
    bundles, counts = pack([bytes(packet) for packet in packets[:end]], bundle_limit, 1)
    return counts[0] if send_with(sock, bundles[0], memory.fileno()) else 0


def _memory_of(packet: bytes) -> Memfd | None:
    return packet.memory if isinstance(packet, Outgoing) else None
