"""The recorder's client of the bus: messages go into columns, and no object is made for each."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from twisted.internet import defer

from sbus.client.denials import Denial, error_of
from sbus.client.options import ConnectOptions
from sbus.client.tx import Bus
from sbus.client.tx.protocol import BusProtocol
from sbus.errors import ConnectionLost
from sbus.protocol.controls import PAYLOAD_ON, SENDER_ON
from sbus.protocol.packets import CMSG, MSG, SUB, UNSUB, build
from sbus.recorder.payloads import UnusablePayload
from sbus.seqpacket.transport import PacketTransport

__all__ = ["RecorderBus", "Take"]

Take = Callable[[list[bytes], Callable[[bytes], None]], object]
"""Takes received packets and bundles; hands each packet that is no message to the function, in its place."""


class RecorderBus(Bus):
    """A connection whose messages are taken as packets; the rest of the protocol is that of every client.

    :param take: takes what arrives.
    """

    def __init__(self, reactor: Any, address: str | None, options: ConnectOptions, take: Take) -> None:
        super().__init__(reactor, address, options)
        self._take = take
        self._fence_packet: bytes | None = None
        self._fence_returned: defer.Deferred[None] = defer.Deferred()

    def open(self) -> defer.Deferred[None]:
        """Connect; fail as `sbus.client.tx.connect` does."""
        return defer.Deferred.fromCoroutine(self._open_initially())

    def ask_senders(self) -> None:
        """Ask the bus to name the publishers of all later messages, if it can."""
        self.send([build(CMSG, SENDER_ON)])

    def ask_payloads(self) -> None:
        """Ask the bus for large payloads in sealed memory, if it has them."""
        if self.transport.pass_payloads(True):
            self.send([build(CMSG, PAYLOAD_ON)])

    def subscribe_all(self, patterns: Sequence[bytes]) -> None:
        """Subscribe to patterns; a message that several of them match arrives once."""
        self.send([build(SUB, pattern) for pattern in patterns])

    def confirm(self, timeout: float) -> defer.Deferred[None]:
        """Fire once the bus has handled everything sent so far, between the packets before and after its answer."""
        if self.core.dialect.control:
            return self.fence(timeout)
        # Without control messages, a message of its own to itself is the only question that the bus answers.
        key = b"fence.%b" % os.urandom(12).hex().encode()
        self._fence_packet = build(MSG, key, b"")
        self.send([build(SUB, key), self._fence_packet, build(UNSUB, key)])
        return self._fence_returned.addTimeout(timeout, self._reactor)

    def pause(self) -> None:
        """Stop reading."""
        self._set_reading(False)

    def resume(self) -> None:
        """Read again."""
        self._set_reading(True)

    def connection_made(self, protocol: BusProtocol, transport: PacketTransport) -> None:
        """See `sbus.client.tx.protocol.Session`."""
        transport.keeps_bundles = True
        super().connection_made(protocol, transport)

    def packets_received(self, packets: list[bytes]) -> None:
        """See `sbus.client.tx.protocol.Session`."""
        if self._fence_packet in packets:
            place = packets.index(self._fence_packet)
            self._fence_packet = None
            self._take_all(packets[:place])
            self._fence_returned.callback(None)
            packets = packets[place + 1 :]
        self._take_all(packets)

    def _take_all(self, packets: list[bytes]) -> None:
        try:
            self._take(packets, self._handle)
        except UnusablePayload as error:
            self._end(ConnectionLost(str(error)))

    def _denied(self, denial: Denial) -> None:
        """End the connection: a recorder that lacks a pattern must not look as if it recorded everything."""
        self._end(ConnectionLost(str(error_of(denial))))

    def _handle(self, packet: bytes) -> None:
        super().packets_received([packet])
