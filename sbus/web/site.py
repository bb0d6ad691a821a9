"""HTTP of the page: its files, its stream of events, and the few requests that it makes.

Every answer has the headers of `HEADERS`, and every request passes the `sbus.web.guard.Guard` first. No answer has a
CORS header, so no other origin can read one.

Every local user can connect, and read the files. A connection without the token gets one answer, so nobody makes this
process hold more than one file for each; and of these connections `MOST_STRANGERS` are open: the oldest gives its place
to the next. A query is parsed once the token is there.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from twisted.internet import defer, error
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.web import http
from twisted.web.server import Request, Site

from sbus.admin.answers import refuse
from sbus.admin.pages import Asked, Problem, split_target
from sbus.web.files import File
from sbus.web.guard import Guard, Headers

__all__ = ["HEADERS", "MOST_BODY", "MOST_STRANGERS", "PageRequest", "PageSite"]

MOST_BODY = 2 * 1024 * 1024
"""Bytes in the body of a request: a message of the longest packet, as JSON."""
MOST_STRANGERS = 128
"""Connections at one time that have not shown the token."""
_IDLE = 60.0
"""Seconds after which an idle connection is closed."""

HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "cache-control": "no-store",
}

Handler = Callable[["PageRequest"], Awaitable[Any]]
"""Returns the JSON of the answer, or None if it answers itself."""


class PageRequest(Request):
    """One request.

    :ivar query: the query of the URL, not parsed yet.
    """

    query = b""
    _is_refused = False

    def gotLength(self, length: int | None) -> None:
        """See `twisted.web.http.Request`: a body is read only if it is short and comes with the token."""
        Request.gotLength(self, 0)
        channel: Any = self.channel
        status = b"413 Content Too Large" if length is None or length > MOST_BODY else b""
        if length and not status and not channel.site.may_send(self.requestHeaders):
            status = b"401 Unauthorized"
        if status:
            self._is_refused = True
            channel.transport.write(b"HTTP/1.1 %b\r\nConnection: close\r\nContent-Length: 0\r\n\r\n" % status)
            channel.transport.loseConnection()

    def requestReceived(self, command: bytes, path: bytes, version: bytes) -> None:
        """See `twisted.web.http.Request`; the query is parsed later, and a body is JSON or nothing."""
        if self._is_refused:
            return
        channel, content = cast(Any, self.channel), cast(Any, self.content)
        content.seek(0)
        self.method, self.uri, self.clientproto = command, path, version
        self.path, self.query = split_target(path, self.getHeader(b"host"))
        self.site = channel.site
        channel.site.answer(self)

    def set_headers(self, headers: Mapping[str, str]) -> None:
        """Set headers of the answer."""
        for name, value in headers.items():
            self.responseHeaders.setRawHeaders(name, [value])

    def send(self, status: int, kind: str, data: bytes) -> None:
        """Send a whole answer."""
        this: Any = self  # Twisted's methods are not annotated
        this.setResponseCode(status)
        self.set_headers({"content-type": kind, "content-length": str(len(data))})
        if self.method != b"HEAD":
            this.write(data)
        this.finish()

    def asked(self) -> Asked:
        """Return the parameters of the URL.

        :raises Problem: if there are too many.
        """
        return Asked.with_query(self.query)

    def body(self) -> dict[str, Any]:
        """Return the JSON object of the body.

        :raises Problem: if there is none.
        """
        kind = (self.getHeader("content-type") or "").partition(";")[0].strip()
        if kind != "application/json":
            raise Problem(415, f"the body is {kind[:40] or 'of no type'}: send application/json")
        try:
            content: Any = self.content
            value = json.load(content)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise Problem(400, "the body is not a JSON object: send one")
        return value


class _Channel(http.HTTPChannel):
    """A connection."""

    site: PageSite

    def connectionMade(self) -> None:
        http.HTTPChannel.connectionMade(self)
        self.site.opened(self)

    def connectionLost(self, reason: Any = error.ConnectionDone) -> None:
        self.site.is_known(self)
        http.HTTPChannel.connectionLost(self, reason)


class PageSite(Site):
    """Answers the requests of the page.

    :param handlers: for each method and path, what answers; these need the token.
    """

    _log = Logger(namespace="sbus.web")

    def __init__(
        self,
        reactor: IReactorTime,
        guard: Guard,
        files: dict[str, File],
        handlers: dict[tuple[str, str], Handler],
    ) -> None:
        Site.__init__(self, None, requestFactory=PageRequest, timeout=_IDLE, reactor=reactor)
        self.noisy = False
        self._guard = guard
        self._files = files
        self._handlers = handlers
        self._clock = reactor
        self._strangers: dict[Any, None] = {}

    def buildProtocol(self, address: object) -> Any:
        """Return the protocol of a new connection."""
        make: Any = _Channel
        channel = make()
        channel.requestFactory, channel.site, channel.factory = self.requestFactory, self, self
        channel.timeOut, channel.callLater = _IDLE, self._clock.callLater
        return channel

    def opened(self, channel: Any) -> None:
        """Count a connection that has not shown the token; if there are too many, the oldest ends."""
        self._strangers[channel] = None
        if len(self._strangers) > MOST_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abortConnection()

    def is_known(self, channel: Any) -> None:
        """Count a connection no more: it has shown the token, or has ended."""
        self._strangers.pop(channel, None)

    def log(self, request: object) -> None:
        """Write no access log."""

    def may_send(self, headers: Headers) -> bool:
        """Return whether a request with these headers may have a body."""
        try:
            self._guard.check_source(headers)
            self._guard.check_token(headers)
        except Problem:
            return False
        return True

    def answer(self, request: PageRequest) -> None:
        """Answer a request, or begin to."""
        request.responseHeaders.removeHeader(b"server")
        request.set_headers(HEADERS)
        method, path = request.method.decode("latin-1"), request.path.decode("latin-1")
        try:
            self._guard.check_source(request.requestHeaders)
            file = self._files.get(path)
            if file is not None:
                self._close_after(request)
                if method not in ("GET", "HEAD"):
                    raise Problem(405, f"{path} cannot be asked with {method}: use GET")
                request.send(200, file.kind, file.data)
                return
            self._guard.check_token(request.requestHeaders)
            self.is_known(request.channel)
            handler = self._handlers.get((method, path))
            if handler is None:
                if any(known == path for _, known in self._handlers):
                    raise Problem(405, f"{path} cannot be asked with {method}: use another method")
                raise Problem(404, f"there is no {path}")
        except Problem as problem:
            self._close_after(request)
            refuse(request, problem)
            return
        answering = defer.ensureDeferred(_run(handler, request))
        finished = request.notifyFinish()
        finished.addErrback(lambda _: answering.cancel())
        answering.addCallbacks(self._answered, self._failed, callbackArgs=(request,), errbackArgs=(request,))

    def _close_after(self, request: PageRequest) -> None:
        """Have the connection end with this answer: what is pipelined after it would be answered unread."""
        channel: Any = request.channel
        channel.persistent = False
        request.responseHeaders.setRawHeaders(b"connection", [b"close"])

    def _answered(self, value: Any, request: PageRequest) -> None:
        if value is not None and not request.finished and not request._disconnected:
            request.send(200, "application/json", json.dumps(value).encode("utf-8", "replace"))

    def _failed(self, failure: Any, request: PageRequest) -> None:
        if request.finished or request._disconnected or failure.check(defer.CancelledError):
            return
        if failure.check(Problem):
            refuse(request, failure.value)
            return
        self._log.failure("A request of the page failed", failure=failure)
        refuse(request, Problem(500, "an error in sbus web: what it prints has the details"))


async def _run(handler: Handler, request: PageRequest) -> Any:
    return await handler(request)
