"""The admin socket as the user who runs ``sbus web`` may ask it: HTTP over a Unix stream socket.

Theory of operation
-------------------

This process asks with the rights of its user, and the bus's kernel says who that is. A refusal (403) is an `AdminError`
like every other failure: the page shows its text in the panels that need the admin socket, and the others continue.

Every answer is bounded (`MOST_ANSWER` bytes, `TIMEOUT` seconds). The stream of events is read as it comes;
an event longer than `MOST_EVENT` ends it.

A bus that is stopped or overloaded accepts no connections, and its backlog fills up. Twisted's endpoint takes that for
a missing socket, as the kernel never reports such a socket as connecting; `_Endpoint` tries again until the time is
over, as the clients of the bus do.
"""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlencode

from twisted.internet import defer, error, protocol
from twisted.internet.interfaces import IProtocol, IProtocolFactory, IReactorTime, IStreamClientEndpoint
from twisted.internet.task import deferLater
from twisted.web import client, http
from twisted.web.iweb import IAgentEndpointFactory, IResponse
from zope.interface import implementer

from sbus.errors import AddressError, SbusError
from sbus.syscalls import addresses

__all__ = ["MOST_ANSWER", "MOST_EVENT", "TIMEOUT", "Admin", "AdminError", "EventParser"]

TIMEOUT = 5.0
"""Seconds to wait for an answer."""
MOST_ANSWER = 8 * 1024 * 1024
"""Bytes in an answer."""
MOST_EVENT = 8 * 1024 * 1024
"""Bytes in one event of a stream."""
_CONNECT_RETRY = 0.02
"""Seconds between two attempts to connect to a socket whose backlog is full."""

T = TypeVar("T")
Event = Callable[[str, Any], object]


class AdminError(SbusError):
    """The admin socket has not answered, or has refused.

    :ivar status: the HTTP status; 0 if there was no answer.
    """

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


@implementer(IAgentEndpointFactory, IStreamClientEndpoint)
class _Endpoint:
    """Connects to a Unix stream socket, whatever the URI, and waits while its backlog is full."""

    def __init__(self, reactor: Any, path: str) -> None:
        self._reactor = reactor
        self._path = path

    def endpointForURI(self, uri: object) -> _Endpoint:
        return self

    def connect(self, protocolFactory: IProtocolFactory) -> defer.Deferred[IProtocol]:
        """Connect; fails with OSError or `AddressError`, and is cancelled when there is no time left."""
        return defer.Deferred.fromCoroutine(self._connect(protocolFactory))

    async def _connect(self, factory: IProtocolFactory) -> IProtocol:
        address = addresses.parse(self._path)
        while True:
            try:
                sock = addresses.connect(address, stream=True)
                break
            except BlockingIOError:
                await deferLater(IReactorTime(self._reactor), _CONNECT_RETRY)
        with sock:
            adopted = _Adopted(factory)
            self._reactor.adoptStreamConnection(sock.fileno(), socket.AF_UNIX, adopted)
        return adopted.protocol


class _Adopted:
    """Builds a protocol by another factory, and remembers it."""

    protocol: IProtocol

    def __init__(self, factory: IProtocolFactory) -> None:
        self._factory = factory

    def buildProtocol(self, address: Any) -> IProtocol | None:
        built = self._factory.buildProtocol(address)
        if built is not None:
            self.protocol = built
        return built


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
        self._agent = client.Agent.usingEndpointFactory(reactor, _Endpoint(reactor, path or ""))

    async def ask(self, path: str, parameters: Mapping[str, str] | None = None) -> Any:
        """Return the JSON of an answer.

        :raises AdminError: if the socket refuses, is not there, or does not answer in time.
        """
        response = await self._request(path, parameters or {})
        body = _Body(MOST_ANSWER)
        response.deliverBody(body)
        return self._parse(response.code, await self._in_time(body.done))

    async def follow(self, path: str, parameters: Mapping[str, str], on_event: Event) -> None:
        """Call `on_event` with the name and the value of each event, until the stream ends.

        :raises AdminError: likewise; cancelling ends the stream.
        """
        response = await self._request(path, parameters)
        if response.code != 200:
            body = _Body(MOST_ANSWER)
            response.deliverBody(body)
            self._parse(response.code, await self._in_time(body.done))
            return
        body = _Body(0, EventParser(on_event))
        response.deliverBody(body)
        await body.done

    async def _request(self, path: str, parameters: Mapping[str, str]) -> IResponse:
        if self.path is None:
            raise AdminError(0, "no admin socket is known: start the bus with --admin=PATH, and give sbus web the same")
        query = f"?{urlencode(parameters, errors='surrogateescape')}" if parameters else ""
        request: defer.Deferred[IResponse] = self._agent.request(b"GET", f"http://bus{path}{query}".encode("ascii"))
        try:
            return await self._in_time(request)
        except AddressError as problem:
            raise AdminError(0, str(problem)) from None
        except OSError as problem:
            raise AdminError(0, _no_socket(self.path, problem.errno)) from None
        except (client.ResponseFailed, error.ConnectionClosed):
            raise AdminError(
                0,
                "the admin socket closed the connection: it may have too many; try again later",
            ) from None

    async def _in_time(self, waiting: defer.Deferred[T]) -> T:
        """Wait for at most `TIMEOUT`; Twisted reports what it cancels then by various exceptions.

        :raises AdminError: if the time is over.
        """
        is_late = False

        def end() -> None:
            nonlocal is_late
            is_late = True
            waiting.cancel()

        call = IReactorTime(self._reactor).callLater(TIMEOUT, end)
        try:
            return await waiting
        except Exception:
            if is_late:
                raise AdminError(
                    0, f"the admin socket has not answered within {TIMEOUT:g} seconds: the bus is stopped or overloaded"
                ) from None
            raise
        finally:
            if call.active():
                call.cancel()

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
