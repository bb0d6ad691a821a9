"""``sbus web`` as a service: the site, the connection to the bus for publishing, and the open pages."""

from __future__ import annotations

import secrets
from typing import Any, cast

from twisted.internet import defer
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from sbus.admin.pages import CLIENT_SORTS, Asked, Problem
from sbus.client.denials import Denial, error_of
from sbus.client.tx import Bus
from sbus.daemon.service import Service
from sbus.errors import Disconnected, InvalidKey, NotAllowed, PacketTooLong, SbusError, UsageError
from sbus.protocol.notices import LONGEST_DENIED
from sbus.version import __version__
from sbus.web.admin import Admin, AdminError
from sbus.web.files import File
from sbus.web.guard import Guard
from sbus.web.names import user_name
from sbus.web.overview import ClientsView, Overview, View
from sbus.web.payloads import decode
from sbus.web.queues import ask_queues
from sbus.web.site import PageRequest, PageSite
from sbus.web.stream import PageStream
from sbus.web.taps import BusAddress, Tap

__all__ = ["MOST_PAGES", "WebService", "new_token"]

MOST_PAGES = 16
"""Pages that may be open at one time."""
_TIMEOUT = 5.0
"""Seconds to wait for the bus."""


def new_token() -> str:
    """Return a secret for one run of ``sbus web``: 32 random bytes as text for a URL."""
    return secrets.token_urlsafe(32)


class WebService(Service):
    """Serves the page.

    :param address: the bus.
    :param admin: the admin socket, as this user may ask it.
    :param files: the files of the page.
    :param token: the secret of the links to it.
    :param uid: the user who runs it.
    :ivar site: the factory for the sockets that it listens on.
    """

    def __init__(
        self, reactor: Any, address: BusAddress, admin: Admin, files: dict[str, File], token: str, uid: int
    ) -> None:
        self._reactor = reactor
        self._address = address
        self._admin = admin
        self._uid = uid
        self._overview = Overview(IReactorTime(reactor), admin, self._ask_queues)
        self._streams: set[PageStream] = set()
        self._bus: Bus | None = None
        self._refused: dict[bytes, NotAllowed] = {}  # what the bus has refused to publish, until its page is told
        self.site = PageSite(
            IReactorTime(reactor),
            Guard(token),
            files,
            {
                ("GET", "/api/events"): self._events,
                ("GET", "/api/explain"): self._explain,
                ("POST", "/api/publish"): self._publish,
            },
        )

    def startService(self) -> None:
        """Start to look at the bus."""
        super().startService()
        self._overview.start()

    def stopService(self) -> defer.Deferred[None] | None:
        """End all streams and connections."""
        super().stopService()
        self._overview.stop()
        for stream in tuple(self._streams):
            stream.close()
        bus, self._bus = self._bus, None
        if bus is not None:
            bus.close_now()
        return None

    async def connect(self) -> None:
        """Make the connection for publishing, which is made again whenever it is lost.

        :raises sbus.errors.ConnectError: if there is no bus.
        """
        self._bus = await self._address.connect(cast(IReactorTime, self._reactor), on_denied=self._denied)

    async def _ask_queues(self) -> list[dict[str, Any]]:
        return [] if self._bus is None else await ask_queues(self._reactor, self._bus)

    def _denied(self, denial: Denial) -> None:
        self._refused[denial.key] = error_of(denial)

    # --- the requests of the page --------------------------------------------------------------

    async def _events(self, request: PageRequest) -> None:
        """Begin the stream: ``tail``, ``keys`` (patterns), ``clients`` (sort), ``limit``, ``depth``."""
        if len(self._streams) >= MOST_PAGES:
            raise Problem(503, f"{MOST_PAGES} pages are open: close one")
        asked = request.asked()
        tail, keys = (_pattern(asked, name) for name in ("tail", "keys"))
        sort = asked.parameters.get("clients", "")
        if sort and sort not in CLIENT_SORTS:
            raise Problem(400, f"clients={sort[:20]}: use one of {', '.join(CLIENT_SORTS)}")
        view = View(
            clients=ClientsView(sort, asked.number("limit", 100, 1, 1000)) if sort else None,
            depth=asked.number("depth", 0, 0, 8) or None,
        )
        tap = Tap(self._reactor, self._address, tail, keys)
        stream = PageStream(self._reactor, request, tap, self._overview, view, self._streams.discard)
        self._streams.add(stream)
        request.set_headers({"content-type": "text/event-stream; charset=utf-8"})
        stream.start(
            {
                "version": __version__,
                "bus": self._address.address,
                "admin": self._admin.path,
                "user": user_name(self._uid),
            }
        )

    async def _publish(self, request: PageRequest) -> Any:
        """Publish a message: ``key``, ``payload``, ``encoding``."""
        body = request.body()
        key, payload, encoding = (body.get(name, default) for name, default in _MESSAGE)
        if not (isinstance(key, str) and isinstance(payload, str) and isinstance(encoding, str)):
            raise Problem(400, "key, payload and encoding are strings: send them so")
        try:
            data = decode(payload, encoding)
        except ValueError as error:
            raise Problem(400, f"the payload is not what {encoding[:20]!r} says: {error}") from None
        bus = self._bus
        if bus is None or bus.state != "connected":
            raise Problem(502, "the bus is not connected at present: try again when it is")
        try:
            raw = key.encode("utf-8", "surrogateescape")
            named = raw[:LONGEST_DENIED]
            self._refused.pop(named, None)
            failures: list[Failure] = []
            bus.publish(raw, data).addErrback(failures.append)
            await bus.fence(_TIMEOUT)
            for failure in failures:
                failure.raiseException()
            if (refusal := self._refused.pop(named, None)) is not None:
                raise Problem(403, str(refusal))
            return {"published": True, "has_subscribers": await _has_subscribers(bus, raw)}
        except (InvalidKey, PacketTooLong, UsageError, UnicodeEncodeError) as error:
            raise Problem(400, str(error)) from None
        except Disconnected as error:
            raise Problem(502, str(error)) from None
        except SbusError as error:
            raise Problem(504, str(error)) from None

    async def _explain(self, request: PageRequest) -> Any:
        """Say who would receive a message of this ``key``."""
        key = request.asked().need("key")
        try:
            return await self._admin.ask("/v1/explain", {"key": key, "limit": "20"})
        except AdminError as problem:
            raise Problem(problem.status if 400 <= problem.status < 500 else 502, problem.detail) from None


_MESSAGE = (("key", None), ("payload", ""), ("encoding", "text"))


async def _has_subscribers(bus: Bus, key: bytes) -> bool | None:
    """Return whether anybody gets messages of this key; None if the server does not say."""
    try:
        return await bus.has_subscribers(key, _TIMEOUT)
    except UsageError:
        return None


def _pattern(asked: Asked, name: str) -> bytes | None:
    text = asked.parameters.get(name)
    return None if text is None else text.encode("utf-8", "surrogateescape")
