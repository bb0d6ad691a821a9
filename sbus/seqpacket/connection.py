"""What both directions of a connected SEQPACKET socket share: its place in the multiplexer, its end, and who is there.

Callbacks never run in the middle of somebody else's: closing and resuming wait until the multiplexer has
dealt with the events in hand.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from twisted.internet import error
from twisted.internet.interfaces import IHalfCloseableProtocol, IProtocol
from twisted.logger import Logger
from twisted.python.failure import Failure

from sbus.seqpacket.address import PacketAddress
from sbus.seqpacket.interfaces import IPacketReceiver
from sbus.seqpacket.multiplexer import Multiplexer
from sbus.syscalls.sockets import peer_credentials

__all__ = ["Connection"]


class Connection:
    """A connected socket in a multiplexer, and the protocol that it belongs to.

    :param sock: connected and non-blocking; it is closed with the connection.
    :ivar credentials: who is at the other end.
    :ivar connected: whether it is not lost.
    :ivar disconnecting: it is to be closed when what waits is sent.
    """

    _log = Logger(namespace="sbus.seqpacket")

    __slots__ = (
        "_aborting",
        "_bundles",
        "_closed",
        "_events",
        "_half",
        "_multiplexer",
        "_read_told",
        "_receiver",
        "_sock",
        "_undelivered",
        "_watched",
        "_write_lost",
        "connected",
        "credentials",
        "disconnecting",
        "protocol",
    )

    def __init__(self, reactor: Any, sock: socket.socket) -> None:
        self._multiplexer = Multiplexer.of(reactor)
        self._sock = sock
        self.credentials = peer_credentials(sock)
        self.protocol: IProtocol | None = None
        self._receiver: IPacketReceiver | None = None
        self._half: IHalfCloseableProtocol | None = None
        self.connected = False
        self.disconnecting = False
        self._events = 0
        self._undelivered: list[bytes] | None = None
        self._watched = False
        self._read_told = False
        self._write_lost = False
        self._bundles = 0
        self._aborting = False
        self._closed = False

    # --- the multiplexer -----------------------------------------------------------------------------

    def failed(self, failure: Failure) -> None:
        """See `sbus.seqpacket.multiplexer.Handler`."""
        self._abort(failure)

    def lost(self, reason: Failure) -> None:
        """See `sbus.seqpacket.multiplexer.Handler`."""
        self._close(reason)

    def _soon(self, call: Callable[..., object], *args: Any) -> None:
        """Call when the events in hand are dealt with."""
        self._multiplexer.call_soon(self._guarded, call, *args)

    def _guarded(self, call: Callable[..., object], *args: Any) -> None:
        """Call; an exception, which is most likely the protocol's, costs this connection and no other."""
        try:
            call(*args)
        except Exception:
            failure = Failure()
            self._log.failure("Error in {transport}", failure=failure, transport=self)
            self._abort(failure)

    def _watch(self, events: int) -> None:
        if events != self._events:
            self._events = events
            if self._watched:
                self._multiplexer.modify(self._sock.fileno(), events)

    def _unwatch(self) -> None:
        if self._watched:
            self._watched = False
            self._multiplexer.remove(self._sock.fileno())

    # --- closing -----------------------------------------------------------------------------

    def abortConnection(self) -> None:
        """Close, and forget what waits."""
        self._abort(Failure(error.ConnectionAborted()))

    def _abort(self, reason: Failure) -> None:
        if self._aborting or self._closed:
            return
        self._aborting = True
        self._undelivered = None
        self._watch(0)
        self._close_soon(reason)

    def _close_soon(self, reason: Failure) -> None:
        self._soon(self._close, reason)

    def _close(self, reason: Failure) -> None:
        if self._closed:
            return
        self._unwatch()
        self._closed = True
        self.connected = False
        self._write_lost = True
        self._stop_writing()
        self._sock.close()
        protocol, self.protocol, self._receiver, self._half = self.protocol, None, None, None
        if protocol is not None:
            protocol.connectionLost(reason)

    def _stop_writing(self) -> None:
        """Forget what was to be sent: a connection that is only read from has nothing to forget."""

    # --- who and where -----------------------------------------------------------------------

    def getHost(self) -> PacketAddress:
        """Our own address (`ITransport`); an empty one when the connection is lost."""
        return PacketAddress(None if self._closed else self._sock.getsockname())

    def getPeer(self) -> PacketAddress:
        """The peer's address (`ITransport`), which for a client is mostly empty, as for a lost connection."""
        return PacketAddress(None if self._closed else self._sock.getpeername())

    def getHandle(self) -> socket.socket:
        """The socket, for its options."""
        return self._sock

    def fileno(self) -> int:
        return self._sock.fileno()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} fd {self._sock.fileno()} {self.credentials}>"
