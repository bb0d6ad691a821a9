"""The Twisted client's protocol: one connection, which tells its `sbus.client.tx.Bus` what happens to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.internet import error
from twisted.internet.interfaces import IHalfCloseableProtocol, IProtocol
from twisted.internet.protocol import Factory
from twisted.python.failure import Failure
from zope.interface import classImplements, implementer

from sbus.client.connecting import CLOSED
from sbus.client.core import Waiter
from sbus.client.outbox import Outbox
from sbus.flood.interfaces import IPacketQueue
from sbus.seqpacket.interfaces import IPacketReceiver
from sbus.seqpacket.transport import PacketTransport

if TYPE_CHECKING:
    from sbus.client.tx import Bus

__all__ = ["BusFactory", "BusProtocol"]

classImplements(Outbox, IPacketQueue)  # not in its own module, as only here zope.interface is to be imported


@implementer(IProtocol, IPacketReceiver, IHalfCloseableProtocol)
class BusProtocol:
    """One connection of a `Bus`.

    :ivar waiting: who waits until it is gone.
    :ivar is_ending: the server takes no more, so what it has sent is read to the end, wanted just now or not.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.transport: PacketTransport | None = None
        self.waiting: list[Waiter] = []
        self.is_ending = False

    def makeConnection(self, transport: PacketTransport) -> None:  # type: ignore[override]
        """It is there (`IProtocol`)."""
        if not isinstance(transport, PacketTransport):
            transport.loseConnection()  # `Bus._open` says why
            return
        self.transport = transport
        transport.queue = self._bus.outbox
        self._bus._connected(self, transport)

    def connectionMade(self) -> None:
        """Nothing more to do (`IProtocol`)."""

    def dataReceived(self, data: bytes) -> None:
        """A packet has arrived (`IProtocol`)."""
        self.packetsReceived([data])

    def packetsReceived(self, packets: list[bytes]) -> int:
        """A batch has arrived (`IPacketReceiver`); what is not read is kept by the subscriptions."""
        self._bus._received(packets)
        return len(packets)

    def readConnectionLost(self) -> None:
        """The server closed; all it has sent is read (`IHalfCloseableProtocol`)."""
        self._bus._connection_lost(self, CLOSED)

    def writeConnectionLost(self) -> None:
        """The server is gone, and the end of what it has sent will tell (`IHalfCloseableProtocol`)."""
        self.is_ending = True
        if self.transport is not None:
            self.transport.resumeProducing()

    def connectionLost(self, reason: Failure) -> None:
        """It is gone (`IProtocol`)."""
        self.transport = None
        done = reason.check(error.ConnectionDone)
        self._bus._connection_lost(self, CLOSED if done else f"the connection broke: {reason.getErrorMessage()}")
        for waiter in self.waiting:
            waiter.set_result(b"")


class BusFactory(Factory):
    """Makes the connections of one `Bus`, one after the other."""

    noisy = False

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def buildProtocol(self, addr: Any) -> Any:
        return BusProtocol(self._bus)
