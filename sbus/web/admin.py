"""The admin socket as the user who runs ``sbus web`` may ask it: HTTP over a Unix stream socket.

Theory of operation
-------------------

This process asks with the rights of its user, and the bus's kernel says who that is. A refusal (403) is an `AdminError`
like every other failure: the page shows its text in the panels that need the admin socket, and the others go on.

Every answer is bounded (`MOST_ANSWER` bytes, `TIMEOUT` seconds). The stream of events is read as it comes;
an event longer than `MOST_EVENT` ends it.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlencode

from twisted.internet import defer, error, protocol
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.interfaces import IReactorTime
from twisted.web import client, http
from twisted.web.iweb import IAgentEndpointFactory, IResponse
from zope.interface import implementer

from sbus.errors import SbusError

__all__ = ["MOST_ANSWER", "MOST_EVENT", "TIMEOUT", "Admin", "AdminError", "EventParser"]

TIMEOUT = 5.0
"""Seconds to wait for an answer."""
MOST_ANSWER = 8 * 1024 * 1024
"""Bytes in an answer."""
MOST_EVENT = 8 * 1024 * 1024
"""Bytes in one event of a stream."""

Event = Callable[[str, Any], object]


class AdminError(SbusError):
    """The admin socket has not answered, or has refused.

    :ivar status: the HTTP status; 0 if there was no answer.
    """

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


@implementer(IAgentEndpointFactory)
class _Endpoints:
    def __init__(self, reactor: Any, path: str) -> None:
        self._reactor = reactor
        self._path = path

    def endpointForURI(self, uri: object) -> UNIXClientEndpoint:
        return UNIXClientEndpoint(self._reactor, self._path, timeout=TIMEOUT)


class EventParser:
    """Takes a stream of Server-Sent Events apart (HTML standard, section 9.2).

    :param on_event: called with the name and the JSON value of each event.
    """

    def __init__(self, on_event: Event) -> None:
        self._on_event = on_event
        self._rest = b""
        self._name = "message"
        self._data: list[str] = []

    def feed(self, data: bytes) -> None:
        """Take the next bytes.

        :raises AdminError: for an event that is too long or no JSON.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line.rstrip(b"\r").decode("utf-8", "replace"))
        if len(self._rest) + sum(map(len, self._data)) > MOST_EVENT:
            raise AdminError(0, f"an event of the admin socket is longer than {MOST_EVENT:,} bytes: it was not read")

    def _line(self, line: str) -> None:
        if not line:
            name, data = self._name, self._data
            self._name, self._data = "message", []
            if data:
                try:
                    value = json.loads("\n".join(data))
                except ValueError:
                    raise AdminError(0, f"an event of the admin socket is not JSON: {name[:40]}") from None
                self._on_event(name, value)
            return
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            self._name = value
        elif field == "data":
            self._data.append(value)


class _Body(protocol.Protocol):
    """Reads a body, whole or as events; `done` fires at its end, with the body or an error."""

    def __init__(self, most: int, parser: EventParser | None = None) -> None:
        self._most = most
        self._parser = parser
        self._size = 0
        self._pieces: list[bytes] = []
        self._problem: AdminError | None = None
        self.done: defer.Deferred[bytes] = defer.Deferred(lambda _: self._abort())

    def _abort(self) -> None:
        transport: Any = self.transport
        if transport is not None:
            transport.loseConnection()

    def dataReceived(self, data: bytes) -> None:
        if self._problem is not None:
            return
        try:
            if self._parser is not None:
                self._parser.feed(data)
                return
            self._size += len(data)
            if self._size > self._most:
                raise AdminError(0, f"the answer is longer than {self._most:,} bytes: ask for less")
            self._pieces.append(data)
        except AdminError as problem:
            self._problem = problem
            self._abort()

    def connectionLost(self, reason: Any = protocol.connectionDone) -> None:
        if self.done.called:
            return
        if self._problem is not None:
            self.done.errback(self._problem)
        elif reason.check(client.ResponseDone, http.PotentialDataLoss):
            self.done.callback(b"".join(self._pieces))
        else:
            self.done.errback(AdminError(0, "the admin socket closed the connection in the middle of an answer"))


class Admin:
    """Asks the admin socket at a path.

    :param path: the path; None if the bus has none that this program knows.
    """

    def __init__(self, reactor: Any, path: str | None) -> None:
        self._reactor = reactor
        self.path = path
        self._agent = client.Agent.usingEndpointFactory(reactor, _Endpoints(reactor, path or ""))

    async def ask(self, path: str, parameters: Mapping[str, str] | None = None, method: str = "GET") -> Any:
        """Return the JSON of an answer.

        :raises AdminError: if the socket refuses, is not there, or does not answer in time.
        """
        response = await self._request(method, path, parameters or {})
        body = _Body(MOST_ANSWER)
        response.deliverBody(body)
        try:
            data = await body.done.addTimeout(TIMEOUT, self._clock)
        except (defer.TimeoutError, defer.CancelledError):
            raise AdminError(0, f"the admin socket has not answered within {TIMEOUT:g} seconds") from None
        return self._parse(response.code, data)

    async def follow(self, path: str, parameters: Mapping[str, str], on_event: Event) -> None:
        """Call `on_event` with the name and the value of each event, until the stream ends.

        :raises AdminError: likewise; cancelling ends the stream.
        """
        response = await self._request("GET", path, parameters)
        if response.code != 200:
            body = _Body(MOST_ANSWER)
            response.deliverBody(body)
            self._parse(response.code, await body.done.addTimeout(TIMEOUT, self._clock))
            return
        body = _Body(0, EventParser(on_event))
        response.deliverBody(body)
        await body.done

    async def _request(self, method: str, path: str, parameters: Mapping[str, str]) -> IResponse:
        if self.path is None:
            raise AdminError(0, "no admin socket is known: start the bus with --admin=PATH, and give sbus web the same")
        query = f"?{urlencode(parameters, errors='surrogateescape')}" if parameters else ""
        request: defer.Deferred[IResponse] = self._agent.request(
            method.encode(), f"http://bus{path}{query}".encode("ascii")
        )
        try:
            return await request.addTimeout(TIMEOUT, self._clock)
        except (defer.TimeoutError, defer.CancelledError, error.ConnectingCancelledError):
            raise AdminError(0, f"the admin socket has not answered within {TIMEOUT:g} seconds") from None
        except (error.ConnectError, OSError) as problem:
            why = getattr(problem, "osError", None)
            raise AdminError(0, _no_socket(self.path, why)) from None
        except (client.ResponseFailed, error.ConnectionClosed):
            raise AdminError(
                0,
                "the admin socket closed the connection: it may have too many; try again later",
            ) from None

    @property
    def _clock(self) -> IReactorTime:
        return IReactorTime(self._reactor)

    def _parse(self, status: int, data: bytes) -> Any:
        try:
            value = json.loads(data)
        except ValueError:
            raise AdminError(status, f"the admin socket's answer is not JSON (status {status})") from None
        if status != 200:
            detail = value.get("detail") if isinstance(value, dict) else None
            raise AdminError(status, detail if isinstance(detail, str) else f"the admin socket answered {status}")
        return value


def _no_socket(path: str, number: object) -> str:
    if number == errno.EACCES:
        return f"your user may not open {path}: run sbus web as root, the server's user or a member of --admin-group"
    return f"there is no admin socket at {path}: start the bus with --admin={path}"
