"""The listening side: accepts SEQPACKET connections and gives each a transport and a protocol."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Any

from twisted.internet import defer
from twisted.internet.interfaces import IListeningPort, IProtocolFactory
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from sbus.protocol.packets import DEFAULT_MAX_PACKET
from sbus.seqpacket.address import PacketAddress
from sbus.seqpacket.multiplexer import READ, Multiplexer
from sbus.seqpacket.transport import PacketTransport
from sbus.syscalls.listening import ListeningSocket
from sbus.syscalls.sockets import grow_send_buffer

__all__ = ["PacketPort"]

_ACCEPTS = 64
"""Connections accepted in one turn at most."""
_PAUSE = 1.0
"""Seconds without accepting when the kernel has no descriptors or memory left, and between two log lines of it."""
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_NO_RESOURCES = (errno.ENOBUFS, errno.ENOMEM, *_NO_DESCRIPTORS)


@implementer(IListeningPort)
class PacketPort:
    """A listening SEQPACKET socket (`IListeningPort`).

    When the process has no descriptors left, the port gives up a spare one to accept and close the
    connection: the peer learns at once that it cannot be served, and the reactor does not spin on a
    connection that it cannot take.

    :param bound: the listening socket; closed, and its path removed, by `stopListening`.
    :param max_packet: bytes in the longest packet.
    """

    _log = Logger(namespace="sbus.seqpacket")

    def __init__(
        self, reactor: Any, bound: ListeningSocket, factory: IProtocolFactory, max_packet: int = DEFAULT_MAX_PACKET
    ) -> None:
        self.reactor = reactor
        self.factory = factory
        self.max_packet = max_packet
        self._bound = bound
        self._multiplexer = Multiplexer.of(reactor)
        self._spare = -1
        self._listening = False
        self._pause: Any = None
        self._last_complaint = float("-inf")

    def startListening(self) -> None:
        """Begin to accept.

        :raises OSError: if the kernel has no descriptors or memory left; then all is as it was.
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
        """Accept no more; connections that were accepted go on."""
        if self._listening:
            self._listening = False
            if self._pause is not None:
                self._pause.cancel()
                self._pause = None
            self._multiplexer.remove(self._bound.sock.fileno())
            self._release()
            self._bound.close()
            self.factory.doStop()
        return defer.succeed(None)

    def getHost(self) -> PacketAddress:
        """Where we listen (`IListeningPort`)."""
        return PacketAddress(self._bound.address.name)

    def ready(self, events: int, exclusive: bool) -> None:
        """See `sbus.seqpacket.multiplexer.Handler`."""
        for _ in range(_ACCEPTS):
            if not self._listening or self._pause is not None:
                return
            try:
                sock, _peer = self._bound.sock.accept()
            except BlockingIOError:
                return
            except OSError as e:
                if e.errno in (errno.ECONNABORTED, errno.EINTR, errno.EPROTO):
                    continue
                if e.errno not in _NO_RESOURCES:
                    raise
                self._exhausted(e)
                continue
            if self._spare < 0:
                self._reserve()
            sock.setblocking(False)
            try:
                grow_send_buffer(sock, self.max_packet)
                protocol = self.factory.buildProtocol(PacketAddress(None))
                if protocol is None:
                    sock.close()
                    continue
                transport = PacketTransport(self.reactor, sock, self.max_packet)
                transport.start(protocol)
            except Exception:
                # One peer's trouble (it may be gone already) must not end the others' port.
                self._log.failure("A connection could not be taken up")
                sock.close()

    def failed(self, failure: Failure) -> None:
        """See `sbus.seqpacket.multiplexer.Handler`: rather than spin, try again later."""
        self._wait()

    def lost(self, reason: Failure) -> None:
        """See `sbus.seqpacket.multiplexer.Handler`."""
        self.stopListening()

    def _exhausted(self, e: OSError) -> None:
        """No descriptor (or memory) for a connection: turn it away with the spare one."""
        now = self.reactor.seconds()
        if now - self._last_complaint >= _PAUSE:
            self._last_complaint = now
            self._log.error(
                "Cannot accept: {why}: raise the limit of open files (ulimit -n, LimitNOFILE=) or lower --max-clients",
                why=e.strerror,
            )
        if e.errno not in _NO_DESCRIPTORS or self._spare < 0:
            self._wait()
            return
        self._release()
        with contextlib.suppress(OSError):
            self._bound.sock.accept()[0].close()
        self._reserve()
        # The next accept fails again even if nobody waits, as it takes a descriptor before it looks.
        self._wait()

    def _wait(self) -> None:
        if self._pause is None and self._listening:
            self._multiplexer.modify(self._bound.sock.fileno(), 0)
            self._pause = self.reactor.callLater(_PAUSE, self._accept_again)

    def _accept_again(self) -> None:
        self._pause = None
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
