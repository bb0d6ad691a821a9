"""A Twisted application with a client in it: the newest telemetry as a web page.

DASHBOARD=tcp:8080:interface=127.0.0.1 SBUS_SOCKET=/run/sbus.sock twistd -n --pidfile= -y dashboard.py
"""

from __future__ import annotations

import os
from typing import Any

from twisted.application.internet import StreamServerEndpointService
from twisted.application.service import Application, MultiService
from twisted.internet import reactor
from twisted.internet.endpoints import serverFromString
from twisted.web.resource import Resource
from twisted.web.server import Request, Site

from sbus import Message
from sbus.client.tx import Bus, BusClientService


class Page(Resource):
    isLeaf = True

    def __init__(self, values: dict[bytes, bytes]) -> None:
        super().__init__()
        self.values = values

    def text(self) -> bytes:
        return b"".join(b"%b: %b\n" % item for item in sorted(self.values.items()))

    def render_GET(self, request: Request) -> bytes:
        request.setHeader(b"Content-Type", b"text/plain; charset=utf-8")
        return self.text()


class Dashboard(MultiService):
    """The connection to the bus, which reconnects by itself, and the web server."""

    def __init__(self, reactor: Any, bus_address: str | None, web: str) -> None:
        super().__init__()
        self.values: dict[bytes, bytes] = {}
        self.bus = BusClientService(reactor, bus_address, setup=self.subscribe, on_gap=self.forget)
        self.bus.setServiceParent(self)
        StreamServerEndpointService(serverFromString(reactor, web), Site(Page(self.values))).setServiceParent(self)

    def subscribe(self, bus: Bus) -> None:
        bus.subscribe("telemetry/", self.received)

    def received(self, message: Message) -> None:
        self.values[message.key] = message.payload

    def forget(self, why: Exception) -> None:
        """Forget the values: messages may have been missed."""
        self.values.clear()


application = Application("dashboard")
web = os.environ.get("DASHBOARD", "tcp:8080:interface=127.0.0.1")
Dashboard(reactor, os.environ.get("SBUS_SOCKET"), web).setServiceParent(application)
