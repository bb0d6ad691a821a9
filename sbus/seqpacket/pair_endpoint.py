"""An endpoint that connects two factories of one process, without a socket (`sbus.seqpacket.pair`)."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet import defer, error
from twisted.internet.interfaces import IProtocol, IProtocolFactory, IStreamClientEndpoint
from zope.interface import implementer

from sbus.protocol.keys import PeerCredentials
from sbus.seqpacket.address import PacketAddress
from sbus.seqpacket.interfaces import IPeerGate, Reactor
from sbus.seqpacket.pair import connect_pair

__all__ = ["PairEndpoint"]


@implementer(IStreamClientEndpoint)
class PairEndpoint:
    """Connects to a factory of the same process.

    :param factory: makes the protocol at the other end; it can refuse the connection (`IPeerGate`).
    :param credentials: returns this process's own credentials, which both ends see.
    :ivar held: see `PairedTransport.held`, of the other end.
    :ivar held_limit: see `PairedTransport.held_limit`.
    """

    def __init__(self, reactor: Reactor, factory: IProtocolFactory, credentials: Callable[[], PeerCredentials]) -> None:
        self._reactor = reactor
        self._factory = factory
        self._gate = IPeerGate(factory, None)
        self._credentials = credentials
        self.held: Callable[[], int] = lambda: 0
        self.held_limit = 0

    def connect(self, protocolFactory: IProtocolFactory) -> defer.Deferred[IProtocol]:
        """Connect (`IStreamClientEndpoint`).

        The Deferred fails with a `twisted.internet.error.ConnectError` if the factory does not want the connection.
        """
        return defer.execute(self._connect, protocolFactory)

    def _connect(self, factory: IProtocolFactory) -> IProtocol:
        credentials = self._credentials()
        if self._gate is not None and not self._gate.admits(credentials):
            raise error.ConnectError(string="it admits no connection now: its log says why")
        there = self._factory.buildProtocol(PacketAddress(None))
        here = factory.buildProtocol(PacketAddress(None))
        if there is None or here is None:
            raise error.ConnectError(string="a factory built no protocol")
        ours, theirs = connect_pair(self._reactor, credentials, credentials)
        theirs.held, theirs.held_limit = self.held, self.held_limit
        theirs.start(there)
        ours.start(here)
        return here
