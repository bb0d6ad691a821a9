"""A listening port: gives each connection a transport and a protocol.

Theory of operation
-------------------

The port is a handler in the multiplexer, as a connection is. When its socket is readable it accepts connections for as
long as its share of the pass lasts (`sbus.seqpacket.pacing.AcceptPacer`), 64 at most, then other sockets have their
turn.

A factory that is an `IPeerGate` decides about each connection by the credentials of its peer, and one that it refuses
is closed before anything is made for it. Accepting and closing takes a tenth of the time of serving. That matters
because the kernel shows the user of a connection only then: a user who connects in a loop must be accepted, in line
with everybody else.

Invariants:

* *One peer's trouble does not end the port.* A connection that cannot be set up (its peer may have left already) is
  logged and closed.
* *The port does not spin.* Without free descriptors accept(2) fails with ``EMFILE`` and leaves the connection in the
  backlog, so the socket stays readable forever. The port therefore keeps a spare descriptor open: it closes the
  spare, accepts one connection, closes it, and opens the spare again. That peer learns at once that it cannot be
  served. Then the port rests for 1 s, because the next accept fails even with an empty backlog: the kernel takes a
  descriptor before it looks for a connection.
* *A start that fails leaves nothing*, in the reactor or in the factory.
"""

from __future__ import annotations

import contextlib
import errno
import os

from twisted.internet import defer
from twisted.internet.interfaces import IDelayedCall, IListeningPort, IProtocolFactory
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from sbus.protocol.packets import DEFAULT_MAX_PACKET
from sbus.seqpacket.address import PacketAddress
from sbus.seqpacket.interfaces import IPeerGate, Reactor
from sbus.seqpacket.multiplexer import READ, Multiplexer
from sbus.seqpacket.send_buffer import SendBuffer
from sbus.seqpacket.transport import PacketTransport
from sbus.syscalls.listening import ListeningSocket
from sbus.syscalls.sockets import peer_credentials

__all__ = ["PacketPort"]

_REST = 1.0
"""Seconds without accepting when the kernel has no descriptors or memory left, and between two log lines about it."""
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_NO_RESOURCES = (errno.ENOBUFS, errno.ENOMEM, *_NO_DESCRIPTORS)


@implementer(IListeningPort)
class PacketPort:
    """A listening socket (`IListeningPort`).

    :param bound: the listening socket; `stopListening` closes it and removes its path.
    :param max_packet: bytes in the longest packet.
    :param transport: the transport of each connection, which goes with the type of the socket.
    """

    _log = Logger(namespace="sbus.seqpacket")

    def __init__(
        self,
        reactor: Reactor,
        bound: ListeningSocket,
        factory: IProtocolFactory,
        max_packet: int = DEFAULT_MAX_PACKET,
        transport: type[PacketTransport] = PacketTransport,
    ) -> None:
        self.reactor = reactor
        self.factory = factory
        self.max_packet = max_packet
        self._gate = IPeerGate(factory, None)
        self._bound = bound
        self._transport = transport
        self._multiplexer = Multiplexer.of(reactor)
        self._spare = -1
        self._listening = False
        self._rest: IDelayedCall | None = None
        self._last_logged = self._last_failure = float("-inf")
        self._unlogged = 0

    def startListening(self) -> None:
        """Begin to accept.

        :raises OSError: if the kernel has no descriptors or memory left; then nothing has changed.
        """
        self.factory.doStart()
        try:
            self._multiplexer.add(self._bound.sock.fileno(), self, READ)
        except BaseException:
            self.factory.doStop()
            raise
        self._listening = True
        self._reserve()

    def stopListening(self) -> defer.Deferred[None]:
        """Stop accepting; connections that were accepted stay open."""
        if self._listening:
            self._listening = False
            if self._rest is not None:
                self._rest.cancel()
                self._rest = None
            self._multiplexer.remove(self._bound.sock.fileno())
            self._release()
            try:
                self._bound.close()
            except OSError as e:  # the descriptor is gone anyway (close(2))
                self._log.error("{port} was closed with an error: {why}", port=self, why=str(e))
            self.factory.doStop()
        return defer.succeed(None)

    def getHost(self) -> PacketAddress:
        """The address of the port (`IListeningPort`)."""
        return PacketAddress(self._bound.address.name)

    def ready(self, events: int, exclusive: bool) -> None:
        """See `sbus.seqpacket.multiplexer.Handler`."""
        pacer = self._multiplexer.accepting
        pacer.begin()
        try:
            while self._accept() and pacer.may_go_on():
                pass
        finally:
            pacer.end()

    def _accept(self) -> bool:
        """Accept a connection; return whether there may be more to accept now."""
        if not self._listening or self._rest is not None:
            return False
        try:
            sock, _peer = self._bound.sock.accept()
        except BlockingIOError:
            return False
        except OSError as e:
            if e.errno in (errno.ECONNABORTED, errno.EINTR, errno.EPROTO):
                return True
            if e.errno not in _NO_RESOURCES:
                raise
            self._exhausted(e)
            return False
        if self._spare < 0:
            self._reserve()
        try:
            if self._gate is not None and not self._gate.admits(peer_credentials(sock)):
                sock.close()
                return True
            sock.setblocking(False)
            send_buffer = SendBuffer(sock, self.max_packet)
            protocol = self.factory.buildProtocol(PacketAddress(None))
            if protocol is None:
                sock.close()
                return True
            transport = self._transport(self.reactor, sock, self.max_packet, send_buffer)
            transport.begin_alone()
            transport.start(protocol)
        except BaseException:
            self._log_failure()
            sock.close()
        return True

    def failed(self, failure: Failure) -> None:
        """See `sbus.seqpacket.multiplexer.Handler`; tries again later."""
        self._start_rest()

    def lost(self, reason: Failure) -> None:
        """See `sbus.seqpacket.multiplexer.Handler`."""
        self.stopListening()

    def _exhausted(self, e: OSError) -> None:
        """Turn one connection away with the spare descriptor, and rest."""
        now = self.reactor.seconds()
        if now - self._last_logged >= _REST:
            self._last_logged = now
            self._log.error(
                "Cannot accept: {why}: raise the limit of open files (ulimit -n, LimitNOFILE=) or lower --max-clients",
                why=e.strerror,
            )
        if e.errno in _NO_DESCRIPTORS and self._spare >= 0:
            self._release()
            with contextlib.suppress(OSError):
                self._bound.sock.accept()[0].close()
            self._reserve()
        self._start_rest()

    def _log_failure(self) -> None:
        """Log the exception in hand, once in `_REST` seconds at most, with the number of those left out."""
        now = self.reactor.seconds()
        if now - self._last_failure < _REST:
            self._unlogged += 1
            return
        self._log.failure("A connection could not be set up ({unlogged} more since the last)", unlogged=self._unlogged)
        self._last_failure, self._unlogged = now, 0

    def _start_rest(self) -> None:
        if self._rest is None and self._listening:
            self._multiplexer.modify(self._bound.sock.fileno(), 0)
            self._rest = self.reactor.callLater(_REST, self._accept_again)

    def _accept_again(self) -> None:
        self._rest = None
        self._multiplexer.modify(self._bound.sock.fileno(), READ)

    def _reserve(self) -> None:
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _release(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def __repr__(self) -> str:
        return f"<PacketPort on {self._bound.address.text}>"
