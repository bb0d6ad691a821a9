"""HTTP on the admin socket: connections, the authority of each peer, and the pages.

Theory of operation
-------------------

The kernel says who the peer of a connection is (`sbus.admin.access`), once, when it is accepted. A request only joins
the answers on their way (`sbus.admin.answers`), which are made in slices between the turns of the bus.

Everything a peer can make the server hold is bounded: connections (`MOST_CONNECTIONS`, and `MOST_OTHERS` of users who
may not ask everything, of which one user has at most `MOST_OF_USER`), the time of an idle one, the head of a request,
and its body. Some places are kept for root and the server's user, and some for readers of the metrics, so nobody with
less authority locks them out. A query is parsed only for a peer that may ask. Connections of others are closed after
one answer, and after `_OTHERS_TIME` whether they have one or not: a peer that sends its request byte by byte, or does
not read, gives its place back.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from twisted.internet import defer, error
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.web import http
from twisted.web.server import Request, Site

from sbus.admin.access import METRICS, Access, Authority
from sbus.admin.answers import Answers
from sbus.admin.pages import EVENTS, Asked, Page, Pieces, Problem, split_target
from sbus.daemon.service import Service
from sbus.daemon.stream_port import StreamPort
from sbus.syscalls.listening import ListeningSocket

__all__ = ["MOST_BODY", "MOST_CONNECTIONS", "MOST_OF_USER", "MOST_OTHERS", "MOST_STREAMS", "AdminService"]

MOST_CONNECTIONS = 64
"""Connections at one time."""
MOST_OTHERS = 16
"""Connections at one time of users who may not ask everything."""
MOST_OF_USER = 8
"""Connections at one time of one such user."""
_KEPT = 8
"""Connections, and streams of events, that are kept for root and the server's user."""
_MOST_STRANGERS = 8
"""Connections at one time of users who may ask nothing, and of one such user: each gets a refusal (403)."""
_MOST_OF_STRANGER = 2
MOST_STREAMS = 16
"""Streams of events at one time."""
MOST_BODY = 4096
"""Bytes in the body of a request."""
_MOST_HEAD = 8192
_MOST_HEADERS = 64
_OTHERS_TIME = 30.0
"""Seconds after which a connection of such a user is closed."""
_IDLE = 10.0


class _Request(Request):
    """One request, answered by the pages of the service.

    The query is parsed when the answer is made, by then for a peer that may ask; a body is not read at all.
    """

    _is_refused = False

    def gotLength(self, length: int | None) -> None:
        Request.gotLength(self, 0)
        channel: Any = self.channel
        if length is None or length > (MOST_BODY if channel.authority.is_admin else 0):
            self._is_refused = True
            transport = channel.transport
            transport.write(b"HTTP/1.1 413 Content Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            transport.loseConnection()

    def requestReceived(self, command: bytes, path: bytes, version: bytes) -> None:
        """Have the request answered, as soon as all of it is here."""
        if self._is_refused:
            return
        channel: Any = self.channel
        self.method, self.uri, self.clientproto = command, path, version
        self.path, self.query = split_target(path, self.getHeader(b"host"))
        channel.service.answer(self)


class AdminService(Service):
    """Answers on a socket that listens already.

    :param bound: the socket; the service closes it and removes its path.
    :param pages: for each method and path, the page and its content type.
    :ivar answers: the answers on their way.
    """

    _log = Logger(namespace="sbus.admin")

    def __init__(
        self,
        reactor: Any,
        bound: ListeningSocket,
        access: Access,
        pages: Mapping[tuple[str, str], tuple[Page, str]],
    ) -> None:
        self._reactor = reactor
        self._port = StreamPort(reactor, bound, "the admin socket", self._log, self._accepted)
        self._access = access
        self._pages = pages
        self.answers = Answers(reactor, self._log)
        self._open: dict[Any, Authority] = {}
        self._streams = 0
        site: Any = Site(None, requestFactory=_Request, timeout=_IDLE, reactor=IReactorTime(reactor))
        self.site = site
        self.site.noisy = False
        self.site.log = lambda request: None

    def startService(self) -> None:
        """Accept connections."""
        super().startService()
        self.site.doStart()
        self._port.open()

    def stopService(self) -> defer.Deferred[None] | None:
        """Close the socket and all connections."""
        super().stopService()
        self._port.close()
        self.answers.stop()
        for protocol in tuple(self._open):
            protocol.abortConnection()
        self.site.doStop()
        return None

    def _accepted(self, sock: socket.socket) -> None:
        authority = self._access.authority(sock)
        if self._has_room(authority):
            sock.setblocking(False)
            self._reactor.adoptStreamConnection(sock.fileno(), socket.AF_UNIX, _Factory(self, authority))

    def _has_room(self, authority: Authority) -> bool:
        """Return whether one more connection of such a peer has room."""
        if len(self._open) >= MOST_CONNECTIONS - (0 if authority.is_owner else _KEPT):
            return False
        if authority.is_admin:
            return True
        others = [each for each in self._open.values() if not each.is_admin]
        if len(others) >= MOST_OTHERS:
            return False
        most = MOST_OF_USER
        if not authority.may_read:
            most = _MOST_OF_STRANGER
            if sum(not each.may_read for each in others) >= _MOST_STRANGERS:
                return False
        return sum(each.peer.uid == authority.peer.uid for each in others) < most

    def opened(self, transport: Any, authority: Authority) -> IDelayedCall | None:
        """Count a connection; return what closes it in time, if anything does."""
        self._open[transport] = authority
        if authority.is_admin:
            return None
        closing: IDelayedCall = self._reactor.callLater(_OTHERS_TIME, transport.abortConnection)
        return closing

    def closed(self, transport: Any) -> None:
        """Count a connection less."""
        self._open.pop(transport, None)

    def answer(self, request: Any) -> None:
        """Have a request answered."""
        channel = request.channel
        if not channel.authority.is_admin:
            request.setHeader(b"connection", b"close")
            channel.persistent = False
        self.answers.start(request, lambda: self._begin(request, channel.authority))

    def _begin(self, request: Any, authority: Authority) -> tuple[Pieces, str]:
        """Return the pieces of an answer, and its content type.

        :raises Problem: if there is no answer.
        """
        path = request.path.decode("latin-1")
        method = request.method.decode("latin-1")
        if not (authority.is_admin or (authority.may_read and (method, path) == ("GET", METRICS))):
            raise Problem(
                403, "your user may not ask this: ask as root, the server's user or a member of --admin-group"
            )
        found = self._pages.get((method, path))
        if found is None:
            if any(p == path for _, p in self._pages):
                raise Problem(405, f"{path} cannot be asked with {method}: use another method")
            known = sorted(p for m, p in self._pages if m == method)
            raise Problem(404, f"there is no {path[:100]}: ask for one of {', '.join(known)}")
        page, kind = found
        asked = Asked.with_query(request.query, authority.is_owner)
        if kind == EVENTS:
            if self._streams >= MOST_STREAMS - (0 if authority.is_owner else _KEPT):
                raise Problem(503, f"{self._streams} programs watch events already: stop one of them")
            pieces = page(asked)
            self._streams += 1
            request.notifyFinish().addBoth(self._stream_ended)
            return pieces, kind
        return page(asked), kind

    def _stream_ended(self, _: object) -> None:
        self._streams -= 1


class _Factory:
    """Builds the protocol of one connection, whose peer is known."""

    def __init__(self, service: AdminService, authority: Authority) -> None:
        self._service = service
        self._authority = authority

    def buildProtocol(self, address: object) -> Any:
        channel: Any = _Channel
        protocol = channel()
        protocol.requestFactory = self._service.site.requestFactory
        protocol.site = self._service.site
        protocol.factory = self._service.site
        protocol.timeOut = _IDLE
        protocol.callLater = self._service.site.reactor.callLater
        protocol.service = self._service
        protocol.authority = self._authority
        return protocol


class _Channel(http.HTTPChannel):
    """A connection of HTTP/1.1, with the authority of its peer."""

    service: AdminService
    authority: Authority
    persistent = True
    totalHeadersSize = _MOST_HEAD
    maxHeaders = _MOST_HEADERS
    _closing: IDelayedCall | None = None

    def connectionMade(self) -> None:
        http.HTTPChannel.connectionMade(self)
        self._closing = self.service.opened(self.transport, self.authority)

    def checkPersistence(self, request: Any, version: bytes) -> bool:
        return self.authority.is_admin and bool(http.HTTPChannel.checkPersistence(self, request, version))

    def connectionLost(self, reason: Any = error.ConnectionDone) -> None:
        if self._closing is not None and self._closing.active():
            self._closing.cancel()
        self.service.closed(self.transport)
        http.HTTPChannel.connectionLost(self, reason)
