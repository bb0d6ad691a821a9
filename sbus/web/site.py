"""HTTP of the page: its files, its stream of events, and the few requests that it makes.

Every answer has the headers of `HEADERS`, and every request passes the `sbus.web.guard.Guard` first. No answer has a
CORS header, so no other origin can read one.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from twisted.internet import defer
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.web.server import Request, Site

from sbus.admin.answers import refuse
from sbus.admin.pages import Asked, Problem
from sbus.web.files import File
from sbus.web.guard import Guard, Headers

__all__ = ["HEADERS", "MOST_BODY", "PageRequest", "PageSite"]

MOST_BODY = 2 * 1024 * 1024
"""Bytes in the body of a request: a message of the longest packet, as JSON."""
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
    """One request."""

    def gotLength(self, length: int | None) -> None:
        """See `twisted.web.http.Request`: a body is read only if it is short and comes with the token."""
        Request.gotLength(self, 0)
        channel: Any = self.channel
        status = b"413 Content Too Large" if length is None or length > MOST_BODY else b""
        if length and not status and not channel.site.may_send(self.requestHeaders):
            status = b"401 Unauthorized"
        if status:
            channel.transport.write(b"HTTP/1.1 %b\r\nConnection: close\r\nContent-Length: 0\r\n\r\n" % status)
            channel.transport.loseConnection()

    def process(self) -> None:
        channel: Any = self.channel
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
        """Return the parameters of the URL."""
        return Asked.with_query(self.args)

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
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise Problem(400, "the body is not a JSON object: send one")
        return value


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
                if method not in ("GET", "HEAD"):
                    raise Problem(405, f"{path} cannot be asked with {method}: use GET")
                request.send(200, file.kind, file.data)
                return
            self._guard.check_token(request.requestHeaders)
            handler = self._handlers.get((method, path))
            if handler is None:
                if any(known == path for _, known in self._handlers):
                    raise Problem(405, f"{path} cannot be asked with {method}: use another method")
                raise Problem(404, f"there is no {path}")
        except Problem as problem:
            refuse(request, problem)
            return
        answering = defer.ensureDeferred(_run(handler, request))
        finished = request.notifyFinish()
        finished.addErrback(lambda _: answering.cancel())
        answering.addCallbacks(self._answered, self._failed, callbackArgs=(request,), errbackArgs=(request,))

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
