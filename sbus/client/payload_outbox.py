"""Sending messages in sealed memory, which not every server takes.

While the client is not connected, such messages wait as all others do. The next server may be another one, or the same
with other options, and whether it takes them shows only behind the first replies. So on each connection the outbox
keeps them back, and what follows them, until it is settled. If the server does not take them, `PayloadSender`
sends their bytes instead, as far as they fit a packet.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from sbus.client.agreement import Agreement
from sbus.client.core import ClientCore
from sbus.client.outbox import Outbox, send_some
from sbus.client.payloads import Outgoing
from sbus.errors import PacketTooLong
from sbus.routing.runs import find_type
from sbus.syscalls.memfd import join
from sbus.syscalls.sockets import send_with

__all__ = ["PayloadOutbox", "PayloadSender"]


class PayloadOutbox(Outbox):
    """An outbox for a client with payloads.

    :param agreement: what is agreed about them.
    """

    __slots__ = ("_agreement",)

    def __init__(self, agreement: Agreement) -> None:
        super().__init__()
        self._agreement = agreement

    def take(self, count: int) -> list[bytes]:
        """Return the next packets, up to the first that is held back."""
        taken = super().take(count)
        at = -1 if self._agreement.is_settled else find_type(taken, Outgoing, 0)
        return taken if at < 0 else taken[:at]


class PayloadSender:
    """Sends packets, with large messages in the form that the server takes.

    :param core: the agreement with the server.
    :param drop: called with the error for a large message that has waited, if the server takes none and it does not fit
        a packet.
    """

    def __init__(self, core: ClientCore, drop: Callable[[PacketTooLong], object]) -> None:
        self._core = core
        self._drop = drop

    def send(self, sock: socket.socket, packets: list[bytes], bundle_limit: int) -> int:
        """Send what the socket takes, with one system call; see `sbus.client.outbox.send_some`.

        :returns: the number of packets, from the front, that were sent or dropped; 0 if the first one is a large
            message and the server has not answered yet whether it takes it.
        :raises OSError: as `send_some`; ETOOMANYREFS if too many descriptors of this user are on their way.
        """
        at = find_type(packets, Outgoing, 0)
        if at:
            return send_some(sock, packets if at < 0 else packets[:at], bundle_limit)
        if not self._core.payloads.is_settled:
            return 0
        first = packets[0]
        assert isinstance(first, Outgoing)
        if self._core.payloads.least is not None:
            packet, count = join(packets, 0, bundle_limit)
            return count if send_with(sock, packet, first.memfd.fileno()) else 0
        try:
            return send_some(sock, [self._core.plain(first)], 0)
        except PacketTooLong as error:
            self._drop(error)
            return 1

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
