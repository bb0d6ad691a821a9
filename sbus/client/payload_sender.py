"""Sending messages in sealed memory, which not every server takes.

While the client is not connected, such messages wait as all others do. The next server may be another one, or the same
with other options, and shows only after the first replies whether it takes them. So on each connection the outbox keeps
them back, and what follows them, until it is settled (`sbus.client.core.ClientCore.certain`), and refuses then what the
server does not take. If it takes none in memory, `PayloadSender` sends their bytes instead.
"""

from __future__ import annotations

import socket

from sbus.client.core import ClientCore
from sbus.client.outbox import send_some
from sbus.client.payloads import Outgoing
from sbus.routing.runs import find_type
from sbus.syscalls.memfd import join
from sbus.syscalls.sockets import send_with

__all__ = ["PayloadSender"]


class PayloadSender:
    """Sends packets, with large messages in the form that the server takes.

    :param core: the agreement with the server.
    """

    def __init__(self, core: ClientCore) -> None:
        self._core = core

    def send(self, sock: socket.socket, packets: list[bytes], bundle_limit: int) -> int:
        """Send what the socket takes, with one system call; see `sbus.client.outbox.send_some`.

        :returns: the number of packets, from the front, that were sent; 0 if the first one is a large message and the
            server has not answered yet whether it takes it.
        :raises OSError: as `send_some`; ETOOMANYREFS if too many descriptors of this user are on their way.
        :raises sbus.errors.PacketTooLong: if the first one is a large message, the server takes none, and it does not
            fit a packet.
        """
        at = find_type(packets, Outgoing, 0)
        if at:
            return send_some(sock, packets if at < 0 else packets[:at], bundle_limit)
        if not self._core.payloads.is_settled:
            return 0
        first = packets[0]
        assert isinstance(first, Outgoing)
        if self._core.payloads.least is None:
            return send_some(sock, [self._core.plain(first)], 0)
        packet, count = join(packets, 0, bundle_limit)
        return count if send_with(sock, packet, first.memfd.fileno()) else 0

    def send_all(self, sock: socket.socket, packets: list[bytes]) -> int:
        """Send what the socket takes, with as many system calls as that needs; see `send`."""
        sent = 0
        while sent < len(packets):
            try:
                count = self.send(sock, packets[sent:] if sent else packets, self._core.bundle_limit)
            except OSError:
                if sent:
                    break  # the next call raises it
                raise
            if not count:
                break
            sent += count
        return sent
