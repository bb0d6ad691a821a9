"""A Unix stream socket that accepts connections: the admin socket, and ``sbus web --unix``.

Twisted's own ports set the mode of a path after they have bound it, even that of a socket that listens already, and
that mode is 0666 unless they have made the socket. So the connections are accepted here, and the path keeps its mode.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from twisted.internet.interfaces import IDelayedCall, IReadDescriptor
from twisted.logger import Logger
from zope.interface import implementer

from sbus.syscalls.listening import ListeningSocket

__all__ = ["StreamPort"]

_MAX_ACCEPTS = 4
"""Connections accepted in one turn of the reactor."""
_REST = 1.0
"""Seconds without accepting after the kernel had no descriptors or memory left."""


@implementer(IReadDescriptor)
class StreamPort:
    """Accepts connections on a socket that listens already.

    :param reactor: watches the socket.
    :param bound: a stream socket; the port closes it and removes its path.
    :param name: what the log calls it, such as ``the admin socket``.
    :param log: the log of its service.
    :param accepted: called with each connection, which is closed afterwards: the reactor's `adoptStreamConnection`
        duplicates it.
    """

    def __init__(
        self,
        reactor: Any,
        bound: ListeningSocket,
        name: str,
        log: Logger,
        accepted: Callable[[socket.socket], object],
    ) -> None:
        bound.sock.setblocking(False)
        self._reactor = reactor
        self._bound = bound
        self._name = name
        self._log = log
        self._accepted = accepted
        self._rest: IDelayedCall | None = None

    def open(self) -> None:
        """Accept from now on."""
        self._reactor.addReader(self)

    def close(self) -> None:
        """Stop listening, and remove the path."""
        self._reactor.removeReader(self)
        if self._rest is not None and self._rest.active():
            self._rest.cancel()
        self._bound.close()

    # IReadDescriptor
    def fileno(self) -> int:
        return self._bound.sock.fileno()

    def logPrefix(self) -> str:
        return self._name

    def connectionLost(self, reason: object) -> None:
        self._log.error("{name} was lost: {reason}", name=self._name, reason=reason)

    def doRead(self) -> None:
        """Accept some connections."""
        for _ in range(_MAX_ACCEPTS):
            try:
                sock, _address = self._bound.sock.accept()
                with sock:
                    self._accepted(sock)  # this takes one more descriptor
            except BlockingIOError:
                return
            except OSError as e:
                # Without free descriptors the socket stays readable: look again later.
                self._log.error("{name} cannot accept: {why}: raise ulimit -n", name=self._name, why=e.strerror)
                self._reactor.removeReader(self)
                self._rest = self._reactor.callLater(_REST, self._reactor.addReader, self)
                return
