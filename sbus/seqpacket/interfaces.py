"""The interfaces between a packet transport and the protocol on it."""

from __future__ import annotations

from typing import Any

from zope.interface import Attribute, Interface

from sbus.protocol.bundles import BundleCache
from sbus.protocol.keys import PeerCredentials

__all__ = [
    "IPacketReceiver",
    "IPacketTransport",
]


class IPacketReceiver(Interface):
    """A protocol that takes packets by the batch."""

    def packetsReceived(packets: list[bytes]) -> int:
        """Packets have arrived, in this order; an empty one stands for one that was too long.

        :returns: how many were handled. If not all, the protocol has paused the transport, which
            keeps the others and gives them again when it is resumed.
        """


class IPacketTransport(Interface):
    """A connection that keeps packet edges: one `write` is one packet, and so is one ``dataReceived``."""

    queue: Any = Attribute("The `IPacketQueue` that is sent from; a protocol may put its own in its place.")
    credentials: PeerCredentials = Attribute("Who is at the other end.")
    read_limit: int = Attribute("Packets to be read in one go (1 to 64) while others want to be read too.")

    def write(packet: bytes) -> None:
        """Send one packet, soon."""

    def flush() -> None:
        """Send now what the socket takes of what waits."""

    def try_send(packets: list[bytes], packed: BundleCache | None = None) -> int:
        """Send packets now, past the queue, which must be empty.

        :param packed: what transports have made of these packets, from one to the next of those that get them.
        :returns: how many, from the front, the socket took. It may well be none although a `flush` could
            send them: whoever calls writes the others to the queue, and `flush` finds out what is the matter.
        """

    def start_bundling(limit: int) -> int:
        """Take bundles from now on, and send them, of at most `limit` bytes, once the packets that wait now are sent.

        :returns: the limit in force.
        """

    def stop_bundling() -> None:
        """Neither take nor send bundles from now on."""

    def pauseProducing() -> None:
        """Read no more."""

    def resumeProducing() -> None:
        """Read again; what was kept back is delivered first."""

    def loseConnection() -> None:
        """Send what waits, then close."""

    def abortConnection() -> None:
        """Close, and forget what waits."""
