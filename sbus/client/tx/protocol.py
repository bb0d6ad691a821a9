"""The Twisted client's protocol: one connection, and the events on it."""

from __future__ import annotations

from typing import Protocol

from twisted.internet import error
from twisted.internet.interfaces import IAddress, IHalfCloseableProtocol, IProtocol, ITransport
from twisted.internet.protocol import Factory
from twisted.python.failure import Failure
from zope.interface import classImplements, implementer

from sbus.client.connecting import SERVER_CLOSED
from sbus.client.core import Waiter
from sbus.client.outbox import Outbox
from sbus.client.payloads import open_attached
from sbus.flood.interfaces import IPacketQueue
from sbus.seqpacket.interfaces import IPacketReceiver
from sbus.seqpacket.transport import PacketTransport

__all__ = ["BusFactory", "BusProtocol"]

classImplements(Outbox, IPacketQueue)  # here, because the other clients must not import zope.interface


class Session(Protocol):
    """The methods of `sbus.client.tx.Bus` that a connection uses.

    :ivar outbox: the packets to send.
    """

    outbox: Outbox

    def connection_made(self, protocol: BusProtocol, transport: PacketTransport) -> None:
        """Take over a new connection."""

    def packets_received(self, packets: list[bytes]) -> None:
        """Process received packets."""

    def connection_lost(self, protocol: BusProtocol, why: str) -> None:
        """Note the end of a connection; called once or twice."""


@implementer(IProtocol, IPacketReceiver, IHalfCloseableProtocol)
class BusProtocol:
    """One connection of a `sbus.client.tx.Bus`.

    :ivar transport: the transport, until the connection is lost.
    :ivar end_waiters: completed when the connection is lost.
    :ivar is_ending: whether the server has stopped reading. What it sent before is then read to the end, even while
        a subscription is above its high-water mark.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.transport: PacketTransport | None = None
        self.end_waiters: list[Waiter] = []
        self.is_ending = False

    def makeConnection(self, transport: ITransport) -> None:
        """Take over a transport, if it keeps packets apart (`IProtocol`)."""
        if not isinstance(transport, PacketTransport):
            transport.loseConnection()  # `sbus.client.tx.Bus` then raises the error
            return
        self.transport = transport
        transport.queue = self._session.outbox
        self._session.connection_made(self, transport)

    def connectionMade(self) -> None:
        """Do nothing more (`IProtocol`)."""

    def dataReceived(self, data: bytes) -> None:
        """Receive one packet (`IProtocol`)."""
        self.packetsReceived([data])

    def packetsReceived(self, packets: list[bytes]) -> int:
        """Receive a whole batch; subscriptions keep unread ones (`IPacketReceiver`)."""
        self._session.packets_received(packets)
        return len(packets)

    def readConnectionLost(self) -> None:
        """Note that the server has closed (`IHalfCloseableProtocol`).

        Everything that it sent has been read.
        """
        self._session.connection_lost(self, SERVER_CLOSED)

    def writeConnectionLost(self) -> None:
        """Read to the end: the server takes no more packets (`IHalfCloseableProtocol`)."""
        self.is_ending = True
        if self.transport is not None:
            self.transport.resumeProducing()

    def connectionLost(self, reason: Failure) -> None:
        """Note the end of the connection (`IProtocol`)."""
        self.transport = None
        clean = reason.check(error.ConnectionDone)
        why = SERVER_CLOSED if clean else f"the connection broke: {reason.getErrorMessage()}"
        self._session.connection_lost(self, why)
        for waiter in self.end_waiters:
            waiter.set_result(b"")


class PayloadProtocol(BusProtocol):
    """One connection of a `sbus.client.tx.Bus` that takes messages in sealed memory."""

    def packetsReceived(self, packets: list[bytes]) -> int:
        """See `BusProtocol.packetsReceived`."""
        super().packetsReceived(open_attached(packets))
        return len(packets)


class BusFactory(Factory):
    """Makes the connections of one `sbus.client.tx.Bus`, one after the other."""

    noisy = False

    def __init__(self, session: Session, *, payloads: bool) -> None:
        self._session = session
        self._kind = PayloadProtocol if payloads else BusProtocol

    def buildProtocol(self, addr: IAddress | None) -> BusProtocol:  # type: ignore[override]  # not a `Protocol`
        """Return a protocol for a new connection (`IProtocolFactory`)."""
        return self._kind(self._session)
