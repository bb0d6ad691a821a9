"""The interfaces between a reactor, a packet transport and the protocol on it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import NamedTuple, Protocol

from twisted.internet.interfaces import IDelayedCall, IReadDescriptor
from zope.interface import Attribute, Interface

from sbus.flood import PayloadShare
from sbus.flood.interfaces import IPacketQueue
from sbus.protocol.bundles import BundleCache
from sbus.protocol.keys import PeerCredentials

__all__ = [
    "IPacketReceiver",
    "IPacketTransport",
    "IPeerGate",
    "Outlet",
    "Reactor",
]


class Reactor(Protocol):
    """The parts of a reactor that this package needs.

    These are `IReactorTime` and the readers of `IReactorFDSet`.
    """

    def seconds(self) -> float: ...
    def callLater(self, delay: float, callable: Callable[..., object], *args: object) -> IDelayedCall: ...
    def addReader(self, reader: IReadDescriptor) -> None: ...
    def removeReader(self, reader: IReadDescriptor) -> None: ...


class Outlet(NamedTuple):
    """The destination of large packets that begin alike, to which they are sent unseen.

    :ivar sock: the socket of their only receiver.
    :ivar on_sent: called with the number of packets that were sent there, and their bytes.
    """

    sock: socket.socket
    on_sent: Callable[[int, int], None]


class IPacketReceiver(Interface):
    """A protocol that takes packets in batches."""

    def packetsReceived(packets: list[bytes]) -> int:
        """Handle packets in order of arrival.

        An empty packet stands for one that was too long. Where bundles were agreed on, those after many messages are
        bundles still (`IPacketTransport.start_bundling`).

        :returns: the number of packets handled. If it is less than all, the protocol has paused the transport, which
            keeps the others and delivers them again when the protocol resumes it.
        """


class IPeerGate(Interface):
    """A protocol factory that looks at each peer before a port makes anything for the connection."""

    def admits(peer: PeerCredentials) -> bool:
        """Return whether to serve a connection that was just accepted.

        If not, the port closes it at once, unread.
        """


class IPacketTransport(Interface):
    """A connection that preserves packet boundaries.

    One `write` is one packet, and so is one ``dataReceived``.
    """

    queue: IPacketQueue = Attribute("The queue that is sent from; a protocol can replace it.")
    credentials: PeerCredentials = Attribute("The peer's process, user and group.")
    read_limit: int = Attribute("Packets to read in one go (1 to 64) while other sockets have packets to be read.")
    plain_socket: socket.socket | None = Attribute(
        "The socket, as long as `try_send` sends to it just the packets it is given, without bundles and frames; else "
        "None. Look it up for each run."
    )
    may_grow: Callable[[int], bool] | None = Attribute(
        "Asked whether the send buffer may grow by a number of bytes, just before it does; None if it need not be."
    )
    on_writable: Callable[[bool], bool] | None = Attribute(
        "Called when the socket takes packets again, with whether no other socket is ready; it may call `send_on`, and "
        "returns whether it has. If not, the transport waits for the call. None to have it called at once."
    )
    before_read: Callable[[], None] | None = Attribute(
        "If it is not None, called before a read of a stream socket (the read may complete no packet), of a peer that "
        "sends bundles, and of any socket while others can be read as well; see also `read_on`. It may pause the "
        "transport, which then does not read."
    )
    find_outlet: Callable[[bytes], Outlet | None] | None = Attribute(
        "Called with the beginning of a large packet (verb, key and NUL) when nobody else waits. It returns the outlet "
        "of packets that begin so, or None if the protocol has to see them. None if it sees all packets."
    )
    has_hung_up: bool = Attribute("Whether the peer has closed its socket.")

    def peer_executable() -> str | None:
        """Return the path of the program that the peer runs, or None if that cannot be known."""

    def peer_groups() -> frozenset[int]:
        """Return the supplementary groups of the peer (`sbus.syscalls.sockets.peer_groups`)."""

    def write(packet: bytes) -> None:
        """Send one packet, soon.

        :raises ValueError: if it is empty.
        """

    def flush() -> None:
        """Send as much of the queue as the socket takes now."""

    def send_on(exclusive: bool) -> None:
        """Send the packets that waited for the socket: one batch, or more if no other socket is ready.

        It raises nothing: an exception, as of a plugged-in order, ends this connection.
        """

    def try_send(packets: list[bytes], cache: BundleCache | None = None) -> int:
        """Send packets now, past the queue, which must be empty.

        :param cache: bundles made of these packets, by limit; the transports that send the same packets share it.
        :returns: the number of packets, from the front, that the socket took. It can be 0 although a `flush` could
            send them: the caller adds the others to the queue, and `flush` finds the reason.
        """

    def open_socket() -> socket.socket | None:
        """Return the socket if it takes packets as they are, one by one, past the queue, which must be empty."""

    def unread_bytes() -> int:
        """Return the memory, in bytes, of sent packets that the peer has not read; 0 if the kernel does not say.

        It changes whenever the peer reads, long before the socket becomes writable.
        """

    def partial_bytes() -> int:
        """Return the bytes of this process's memory that hold input which the protocol has not been offered.

        That is a packet that has arrived in part. It is 0 where packets arrive whole.
        """

    def partial_limit() -> int:
        """Return about the largest number of bytes that `partial_bytes` returns."""

    def start_bundling(limit: int) -> int:
        """Accept bundles from now on, and send them after the packets that are queued now.

        :param limit: bytes in the largest bundle to send.
        :returns: the limit in force, bytes.
        """

    def stop_bundling() -> None:
        """Accept and send no more bundles."""

    def pass_payloads(wanted: bool, share: PayloadShare | None = None) -> bool:
        """Accept descriptors from now on, and send payloads with theirs (`sbus.flood.PayloadMessage`), or no more.

        A payload that waits when this ends is sent as a plain message, if it fits.

        :param share: the part of all descriptors that the peer's user has. Its connections share a limit of those that
            they have not read, even after their end: then the socket is kept until they are read, or the peer has hung
            up. By default, nobody shares the limit with this peer, and no socket is kept.
        :returns: whether the transport does so. It does not over a stream, or if too many sockets of the user are kept.
        """

    def pauseProducing() -> None:
        """Stop reading."""

    def resumeProducing() -> None:
        """Read again, soon; packets that were kept are delivered first."""

    def read_on() -> None:
        """Deliver the packets that were kept, and read once, now; a transport that is paused is resumed.

        If any were kept, or the peer has hung up, `before_read` is asked before the socket is read.
        """

    def loseConnection() -> None:
        """Send the queue, then close."""

    def abortConnection() -> None:
        """Close soon, and discard the queue."""

    def close_gracefully(farewell: Callable[[], list[bytes]], patience: float, input_limit: int) -> None:
        """Close soon, so that the peer can still read all that the kernel holds for it.

        The socket is shut down both ways, and packets from the peer are discarded, before it is closed: closing a
        socket with unread packets resets the connection, and the peer may lose packets that were delivered to it.

        :param farewell: called when the events in hand are dealt with; returns the last packets for the peer, which go
            past the queue. It should discard the queue.
        :param patience: seconds to try for if they do not fit the socket; 0 to try once.
        :param input_limit: packets of the peer to discard at most.
        """
