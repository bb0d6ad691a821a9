"""The interfaces of everything that can be replaced, and of what a replacement works with.

A component is found through Twisted's plugin system: a module in ``twisted/plugins`` with an
object that provides `twisted.plugin.IPlugin` and one of these interfaces. It is chosen by name, or
by the control message that names it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zope.interface import Attribute, Interface

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sbus.errors import CloseReason, Violation
    from sbus.flood import SendQueue, Verdict
    from sbus.protocol.bundles import BundleCache
    from sbus.protocol.keys import PeerCredentials, SecretKey

__all__ = [
    "ICredentials",
    "ICredentialsPolicy",
    "IHardStrategy",
    "IObserver",
    "IPacketQueue",
    "IPacketReceiver",
    "IPacketTransport",
    "IQueueOrder",
    "ISoftStrategy",
]


class ICredentials(Interface):
    """Who may do what on one bus. All methods are called for each event, so they must be quick."""

    restrictsPublishing: bool = Attribute(
        "Whether `mayPublish` is to be asked. It costs time for every message, so say False if it allows everything."
    )

    def mayConnect(peer: PeerCredentials) -> bool:
        """Whether this peer may use the bus."""

    def checkSubscription(peer: PeerCredentials, pattern: bytes, secret: SecretKey | None) -> None:
        """Whether this peer may subscribe; `secret` is the pattern's parts where it is a secret one.

        :raises sbus.errors.Violation: if not.
        """

    def mayPublish(peer: PeerCredentials, key: bytes) -> bool:
        """Whether this peer may publish with this key (asked only if `restrictsPublishing`)."""

    def mayBlock(receiver: PeerCredentials, publisher: PeerCredentials) -> bool:
        """Whether a receiver that chose to block may hold this publisher back."""


class ICredentialsPolicy(Interface):
    """A kind of `ICredentials` that can be chosen with ``--credentials=NAME``."""

    name: str = Attribute("What ``--credentials`` calls it.")
    description: str = Attribute("One line for ``--help``.")

    def make(settings: Any) -> ICredentials:
        """Make the component for one bus from the `sbus.server.credentials.AccessSettings` in force."""


class ISoftStrategy(Interface):
    """What happens to a message whose receiver's socket is full."""

    selector: bytes = Attribute("The control message that selects it, as ``b'blocking/soft/queue'``.")
    always: Verdict | None = Attribute("The verdict if it is always the same one, which is quick; else None.")

    def decide(queue: SendQueue, packet: bytes) -> Verdict:
        """The verdict on this packet, which waits for this queue's receiver (asked only if `always` is None)."""


class IHardStrategy(Interface):
    """What happens to a message whose receiver's queue is at its limit."""

    selector: bytes = Attribute("The control message that selects it, as ``b'blocking/hard/discard'``.")
    always: Verdict | None = Attribute("The verdict if it is always the same one, which is quick; else None.")

    def decide(queue: SendQueue, packet: bytes) -> Verdict:
        """The verdict on this packet, for which there is no room (asked only if `always` is None)."""


class IQueueOrder(Interface):
    """In which order a queue is sent."""

    selector: bytes = Attribute("The control message that selects it, as ``b'order/queue'``.")
    newestFirst: bool | None = Attribute("What `rank` is told from now on; None leaves what was chosen before.")
    arrival: bool = Attribute("Whether this is the order of arrival, replies included; then `rank` is not asked.")

    def rank(arrival: int, size: int, newest_first: bool) -> Any:
        """A sort key for a packet of `size` bytes that arrived as number `arrival`: the lowest is sent first."""


class IObserver(Interface):
    """Somebody who is told what happens on a bus: a log, metrics, a dashboard.

    Derive from `sbus.server.observers.Observer` and override what you need: an event that no
    observer overrides costs nothing. `client` is what stands for a connection throughout; its
    ``peer`` is a `PeerCredentials` and its ``number`` counts up from 1. A secret key is cut after
    ``<pid>``, and its payload is withheld.
    """

    def connected(client: Any) -> None:
        """A client is connected."""

    def subscribed(client: Any, pattern: bytes) -> None:
        """A client has subscribed."""

    def unsubscribed(client: Any, pattern: bytes) -> None:
        """A client has dropped a subscription."""

    def published(client: Any, key: bytes, payload: bytes | None) -> None:
        """A client has published a message; the payload is None if the key is secret."""

    def delivered(client: Any, packets: int, size: int) -> None:
        """So many packets, of so many bytes together, were handed to the kernel for a client."""

    def dropped(client: Any, packets: int, size: int) -> None:
        """So many packets, of so many bytes together, were dropped that a client should have got."""

    def violated(client: Any, violation: Violation, key: bytes) -> None:
        """A client broke the protocol (with this key or pattern, as far as there is one)."""

    def refused(peer: PeerCredentials, reason: CloseReason) -> None:
        """A connection was accepted only to be closed."""

    def closed(client: Any, reason: CloseReason) -> None:
        """A client is gone."""


class IPacketQueue(Interface):
    """What a packet transport sends from. `sbus.flood.SendQueue` is one."""

    def __len__() -> int:
        """How many packets wait."""

    def write(packet: bytes) -> None:
        """Add a packet that must be sent."""

    def take(count: int) -> list[bytes]:
        """The next packets to send, at most `count`; they are out of the queue until `ack`."""

    def ack(taken: list[bytes], sent: int) -> None:
        """Of what was taken, so many packets (from the front) were sent; the others are to be kept."""

    def reject_oversized(packet: bytes) -> bool:
        """The kernel will never take this packet, as it is too long for the socket's buffer.

        If the connection goes on, the packet is reported to `ack` as if it were sent, to be out of the way.

        :returns: whether the connection may go on without it.
        """

    def discard_all(taken: Sequence[bytes] = ()) -> None:
        """Nothing can be sent any more, neither what waits nor what was taken and not reported to `ack`."""


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
