"""HTTP on the admin socket: accepts, checks the peer, and answers in slices.

Theory of operation
-------------------

The bus has one thread, so an answer must not take it for long. A *page* is a generator of pieces of the body; each
takes a fraction of `SLICE` to make. Pieces are made until a slice is used up; the rest follows in later turns of the
reactor. A peer that disconnects ends its page.

Everything a peer can make the server hold is bounded: connections (`MOST_CONNECTIONS`, and `MOST_OTHERS` of users who
may not ask everything), the time of an idle one, the head of a request (twisted.web), and its body.
Connections of others are closed after one answer.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from twisted.internet import defer, error
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.web import http
from twisted.web.server import Request, Site

from sbus.admin.access import METRICS, Access
from sbus.daemon.service import Service
from sbus.syscalls.listening import ListeningSocket

__all__ = ["MOST_BODY", "MOST_CONNECTIONS", "MOST_OTHERS", "SLICE", "AdminService", "Page", "Problem", "need"]

SLICE = 0.0005
"""Seconds of a turn of the reactor in which pieces of one answer are made; the last one may take it a bit further."""
MOST_CONNECTIONS = 64
"""Connections at one time."""
MOST_OTHERS = 16
"""Connections at one time of users who may not ask everything."""
MOST_BODY = 4096
"""Bytes in the body of a request."""
_IDLE = 10.0
_ACCEPTED = 16

Page = Callable[[Mapping[str, str]], Iterator[str]]
"""Makes the pieces of a body from the parameters of the request; raises `Problem` before the first piece."""


class Problem(Exception):
    """A request that cannot be answered (RFC 9457).

    :param status: the HTTP status.
    :param detail: what happened, why, and what to do.
    """

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


class _Request(Request):
    """One request, answered by the pages of the service."""

    def gotLength(self, length: int | None) -> None:
        Request.gotLength(self, 0)
        if length is None or length > MOST_BODY:
            transport: Any = self.channel.transport
            transport.write(b"HTTP/1.1 413 Content Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            transport.loseConnection()

    def process(self) -> None:
        channel: Any = self.channel
        channel.service.answer(self)


class AdminService(Service):
    """Answers on a socket that listens already.

    :param bound: the socket; the service closes it and removes its path.
    :param pages: for each method and path, the page and its content type.
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
        self._bound = bound
        self._access = access
        self._pages = pages
        self._running: dict[Any, IDelayedCall] = {}
        self._open: dict[Any, bool] = {}
        self.longest_slice = 0.0
        site: Any = Site(None, requestFactory=_Request, timeout=_IDLE, reactor=IReactorTime(reactor))
        self.site = site
        self.site.noisy = False
        self.site.log = lambda request: None

    def startService(self) -> None:
        """Accept connections."""
        super().startService()
        self.site.doStart()
        self._reactor.addReader(self)

    def stopService(self) -> defer.Deferred[None] | None:
        """Close the socket and all connections."""
        super().stopService()
        self._reactor.removeReader(self)
        self._bound.close()
        for protocol in tuple(self._open):
            protocol.abortConnection()
        for call in self._running.values():
            call.cancel()
        self._running.clear()
        self.site.doStop()
        return None

    # IReadDescriptor
    def fileno(self) -> int:
        return self._bound.sock.fileno()

    def logPrefix(self) -> str:
        return "admin"

    def connectionLost(self, reason: object) -> None:
        self._log.error("the admin socket was lost: {reason}", reason=reason)

    def doRead(self) -> None:
        """Accept some connections."""
        for _ in range(_ACCEPTED):
            try:
                sock, _address = self._bound.sock.accept()
            except OSError:
                return
            with sock:
                self._accepted(sock)

    def _accepted(self, sock: socket.socket) -> None:
        _peer, is_admin, may_read = self._access.allowed(sock)
        others = sum(not each for each in self._open.values())
        if len(self._open) >= MOST_CONNECTIONS or (not is_admin and others >= MOST_OTHERS):
            return
        sock.setblocking(False)
        factory = _Factory(self, is_admin, may_read)
        self._reactor.adoptStreamConnection(sock.fileno(), socket.AF_UNIX, factory)

    def opened(self, transport: Any, is_admin: bool) -> None:
        """Count a connection."""
        self._open[transport] = is_admin

    def closed(self, transport: Any) -> None:
        """Count a connection less."""
        self._open.pop(transport, None)

    def answer(self, request: Any) -> None:
        """Answer a request, or begin to."""
        channel = request.channel
        if not channel.is_admin:
            request.setHeader(b"connection", b"close")
            channel.persistent = False
        path = request.path.decode("latin-1")
        method = request.method.decode("latin-1")
        try:
            if not (channel.is_admin or (channel.may_read and (method, path) == ("GET", METRICS))):
                raise Problem(
                    403, "your user may not ask this: ask as root, the server's user or a member of --admin-group"
                )
            found = self._pages.get((method, path))
            if found is None:
                known = sorted(p for m, p in self._pages if m == method)
                if any(p == path for _, p in self._pages):
                    raise Problem(405, f"{path} cannot be asked with {method}: use another method")
                raise Problem(404, f"there is no {path}: ask for one of {', '.join(known)}")
            page, kind = found
            parameters = {
                name.decode("utf-8", "surrogateescape"): values[-1].decode("utf-8", "surrogateescape")
                for name, values in request.args.items()
            }
            pieces = page(parameters)
            first = next(pieces, "")
        except Problem as problem:
            _refuse(request, problem)
            return
        except Exception:
            self._log.failure("An answer of the admin socket failed")
            _refuse(request, Problem(500, "an error in the server: its log has the details"))
            return
        request.setHeader(b"content-type", kind.encode())
        request.setHeader(b"cache-control", b"no-store")
        request.notifyFinish().addBoth(lambda _: self._ended(request))
        self._go_on(request, pieces, [first])

    def _ended(self, request: Any) -> None:
        call = self._running.pop(request, None)
        if call is not None:
            call.cancel()

    def _go_on(self, request: Any, pieces: Iterator[str], made: list[str]) -> None:
        """Make pieces for one slice."""
        self._running.pop(request, None)
        began = time.perf_counter()
        is_over = False
        try:
            while time.perf_counter() - began < SLICE:
                piece = next(pieces, None)
                if piece is None:
                    is_over = True
                    break
                made.append(piece)
        except Exception:
            self._log.failure("An answer of the admin socket failed")
            request.loseConnection()
            return
        if made:
            request.write("".join(made).encode("utf-8", "replace"))
        self.longest_slice = max(self.longest_slice, time.perf_counter() - began)
        if is_over:
            request.finish()
        else:
            self._running[request] = self._reactor.callLater(0, self._go_on, request, pieces, [])


def _refuse(request: Any, problem: Problem) -> None:
    body = {
        "type": "about:blank",
        "title": http.RESPONSES.get(problem.status, b"").decode(),
        "status": problem.status,
        "detail": problem.detail,
    }
    data = json.dumps(body).encode()
    request.setResponseCode(problem.status)
    request.setHeader(b"content-type", b"application/problem+json")
    request.setHeader(b"content-length", b"%d" % len(data))
    request.write(data)
    request.finish()


class _Factory:
    """Builds the protocol of one connection, whose peer is known."""

    def __init__(self, service: AdminService, is_admin: bool, may_read: bool) -> None:
        self._service = service
        self._is_admin = is_admin
        self._may_read = may_read

    def buildProtocol(self, address: object) -> Any:
        channel: Any = _Channel
        protocol = channel()
        protocol.requestFactory = self._service.site.requestFactory
        protocol.site = self._service.site
        protocol.factory = self._service.site
        protocol.timeOut = _IDLE
        protocol.callLater = self._service.site.reactor.callLater
        protocol.service = self._service
        protocol.is_admin = self._is_admin
        protocol.may_read = self._may_read
        return protocol


class _Channel(http.HTTPChannel):
    """A connection of HTTP/1.1, with the authority of its peer."""

    service: AdminService
    is_admin = False
    may_read = False
    persistent = True

    def connectionMade(self) -> None:
        http.HTTPChannel.connectionMade(self)
        self.service.opened(self.transport, self.is_admin)

    def checkPersistence(self, request: Any, version: bytes) -> bool:
        return self.is_admin and bool(http.HTTPChannel.checkPersistence(self, request, version))

    def connectionLost(self, reason: Any = error.ConnectionDone) -> None:
        self.service.closed(self.transport)
        http.HTTPChannel.connectionLost(self, reason)


def need(parameters: Mapping[str, str], name: str) -> str:
    """Return a parameter.

    :raises Problem: if it is missing.
    """
    try:
        return parameters[name]
    except KeyError:
        raise Problem(400, f"the parameter {name}= is missing: add ?{name}=...") from None
