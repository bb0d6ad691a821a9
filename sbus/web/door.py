"""A Unix socket to listen on that keeps the mode it was made with.

Twisted's own ports give every path its mode after the fact, also one of a socket that listens already, and that mode is
0666 unless they have made the socket. So the connections are accepted here.
"""

from __future__ import annotations

import socket
from typing import Any

from twisted.internet.interfaces import IReadDescriptor
from twisted.logger import Logger
from zope.interface import implementer

from sbus.syscalls.listening import ListeningSocket

__all__ = ["Door"]

_AT_ONCE = 16
_REST = 1.0
"""Seconds without accepting after the kernel had no descriptors or memory left."""


@implementer(IReadDescriptor)
class Door:
    """Accepts connections for a factory.

    :param bound: a stream socket that listens.
    :param factory: builds the protocol of each connection.
    """

    _log = Logger(namespace="sbus.web")

    def __init__(self, reactor: Any, bound: ListeningSocket, factory: Any) -> None:
        bound.sock.setblocking(False)
        self._reactor = reactor
        self._bound = bound
        self._factory = factory
        self._is_open = False

    def open(self) -> None:
        """Accept from now on."""
        self._is_open = True
        self._factory.doStart()
        self._reactor.addReader(self)

    def close(self) -> None:
        """Stop listening, and remove the path; a second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        self._reactor.removeReader(self)
        self._bound.close()
        self._factory.doStop()

    def fileno(self) -> int:
        return self._bound.sock.fileno()

    def logPrefix(self) -> str:
        return "web"

    def connectionLost(self, reason: object) -> None:
        self._log.error("the socket of the page was lost: {reason}", reason=reason)

    def doRead(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, _address = self._bound.sock.accept()
            except BlockingIOError:
                return
            except OSError as e:
                # Without free descriptors the socket stays readable: look again later.
                self._log.error("the page's socket cannot accept: {why}: raise ulimit -n", why=e.strerror)
                self._reactor.removeReader(self)
                self._reactor.callLater(_REST, self._look_again)
                return
            with sock:
                sock.setblocking(False)
                self._reactor.adoptStreamConnection(sock.fileno(), socket.AF_UNIX, self._factory)

    def _look_again(self) -> None:
        if self._is_open:
            self._reactor.addReader(self)
