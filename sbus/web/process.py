"""The process of ``sbus web``: listens, prints the link, and runs until a signal."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from twisted.internet import defer, error
from twisted.logger import Logger, globalLogBeginner

from sbus.daemon.log_budget import LogBudget
from sbus.daemon.log_file import OutputFiles
from sbus.daemon.log_text import text_log
from sbus.daemon.logs import limited, rotate_at_signal
from sbus.daemon.stream_port import StreamPort
from sbus.errors import ListenError
from sbus.syscalls.addresses import parse
from sbus.syscalls.descriptors import fill_standard
from sbus.syscalls.listening import listen
from sbus.web.admin import Admin
from sbus.web.files import load
from sbus.web.service import WebService, new_token
from sbus.web.taps import BusAddress

__all__ = ["Settings", "run"]

_log = Logger(namespace="sbus.web")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The page to serve, and its address.

    :ivar address: the bus.
    :ivar dialect: the dialect's name.
    :ivar max_packet: bytes in the longest packet.
    :ivar admin: path of the admin socket, or None.
    :ivar port: port of 127.0.0.1; 0: one that is free.
    :ivar unix: path of a Unix socket to listen on instead, or None.
    """

    address: str
    dialect: str
    max_packet: int
    admin: str | None
    port: int = 0
    unix: str | None = None


def run(settings: Settings, echo: Callable[[str], object]) -> None:
    """Serve the page until SIGINT or SIGTERM.

    :param echo: prints a line.
    :raises sbus.errors.SbusError: if there is no page, no bus, or nothing to listen on.
    """
    fill_standard()
    from twisted.internet import reactor

    files = load()
    _log_to_standard_error()
    token = new_token()
    service = WebService(
        reactor,
        BusAddress(settings.address, settings.dialect, settings.max_packet),
        Admin(reactor, settings.admin),
        files,
        token,
        os.geteuid(),
    )
    failed: list[BaseException] = []
    ports: list[StreamPort] = []
    loop: Any = reactor
    site: Any = service.site

    async def begin() -> None:
        await service.connect()
        if settings.unix is not None:
            ports.append(_listen_on_path(loop, settings.unix, service))
            echo(f"On this machine or another one:  ssh -L 8080:{os.path.abspath(settings.unix)} HOST")
            echo(f"Then open  http://localhost:8080/#{quote(token)}")
        else:
            port = _listen_on_port(loop, settings.port, service)
            echo(f"Open  http://127.0.0.1:{port}/#{quote(token)}")
        service.startService()
        echo(f"Anyone who has this link sees {settings.address}. Ctrl-C stops it.")

    def close_ports() -> None:
        for port in ports:
            port.close()
            site.doStop()

    def give_up(failure: Any) -> None:
        failed.append(failure.value)
        if loop.running:
            loop.stop()

    loop.callWhenRunning(lambda: defer.Deferred.fromCoroutine(begin()).addErrback(give_up))
    loop.addSystemEventTrigger("before", "shutdown", service.stopService)
    loop.addSystemEventTrigger("before", "shutdown", close_ports)
    loop.run()
    if failed:
        raise failed[0]
    number = getattr(loop, "_exitSignal", None)
    if number == signal.SIGINT:
        raise KeyboardInterrupt


def _listen_on_port(reactor: Any, port: int, service: WebService) -> int:
    try:
        listening = reactor.listenTCP(port, service.site, interface="127.0.0.1")
    except error.CannotListenError as problem:
        raise ListenError(
            f"cannot listen on port {port} of 127.0.0.1: {problem.socketError}: choose another --port"
        ) from None
    number: int = listening.getHost().port
    return number


def _listen_on_path(reactor: Any, path: str, service: WebService) -> StreamPort:
    def adopt(sock: socket.socket) -> None:
        sock.setblocking(False)
        reactor.adoptStreamConnection(sock.fileno(), socket.AF_UNIX, service.site)

    try:
        bound = listen(parse(os.path.abspath(path)), mode=0o600, reuse=True, stream=True)
    except ListenError as problem:  # its remedy names the server's option
        raise ListenError(str(problem).replace("--socket", "--unix")) from None
    port = StreamPort(reactor, bound, "the page's socket", _log, adopt)
    site: Any = service.site
    site.doStart()
    port.open()
    return port


def _log_to_standard_error() -> None:
    rotate_at_signal(OutputFiles())
    observer = limited(text_log(sys.stderr), LogBudget(level="warn"))
    globalLogBeginner.beginLoggingTo([observer], redirectStandardIO=False, discardBuffer=True)
