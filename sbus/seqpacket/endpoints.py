"""Endpoints for SEQPACKET sockets, as classes and as endpoint strings.

``seqpacket:/run/sbus.sock:mode=770:group=bus:reuse=1`` listens, ``seqpacket:/run/sbus.sock:timeout=5``
connects. A colon in the address is written ``\\:``; an address with an equals sign is written after
``address=``. The addresses are those of `sbus.syscalls.addresses`.
"""

from __future__ import annotations

import re
import socket
from contextlib import ExitStack
from dataclasses import replace

from twisted.internet import defer, error
from twisted.internet.endpoints import serverFromString
from twisted.internet.interfaces import (
    IListeningPort,
    IProtocol,
    IProtocolFactory,
    IReactorTime,
    IStreamClientEndpoint,
    IStreamClientEndpointStringParserWithReactor,
    IStreamServerEndpoint,
    IStreamServerEndpointStringParser,
)
from twisted.internet.task import deferLater
from twisted.plugin import IPlugin
from twisted.python.failure import Failure
from zope.interface import implementer

from sbus.errors import AddressError, ListenError
from sbus.protocol.packets import DEFAULT_MAX_PACKET
from sbus.seqpacket.interfaces import Reactor
from sbus.seqpacket.port import PacketPort
from sbus.seqpacket.stream import StreamTransport
from sbus.seqpacket.systemd import FIRST_DESCRIPTOR, passed_names
from sbus.seqpacket.transport import PacketTransport
from sbus.syscalls import addresses, listening
from sbus.syscalls.sockets import grow_send_buffer

__all__ = ["ClientParser", "SeqpacketClientEndpoint", "SeqpacketServerEndpoint", "ServerParser"]

_CONNECT_RETRY = 0.01
"""Seconds between two attempts to connect to a server whose backlog is full."""


@implementer(IStreamServerEndpoint)
class SeqpacketServerEndpoint:
    """Listens on a SEQPACKET socket.

    :param address: an address in writing (`sbus.syscalls.addresses.parse`), or a socket that listens already.
    :param mode: permissions of the path, which never has more.
    :param group: name or number of the group that the path is given to.
    :param reuse: replace a socket whose server no longer listens.
    :param max_packet: bytes in the longest packet.
    :param stream: listen on a stream socket, on which each packet has its length in front.
    """

    def __init__(
        self,
        reactor: Reactor,
        address: str | listening.ListeningSocket,
        *,
        mode: int = 0o700,
        group: str | int | None = None,
        reuse: bool = False,
        max_packet: int = DEFAULT_MAX_PACKET,
        stream: bool = False,
    ) -> None:
        self.reactor = reactor
        self.stream = stream
        self._bound = address if isinstance(address, listening.ListeningSocket) else None
        self.address = address.address if isinstance(address, listening.ListeningSocket) else addresses.parse(address)
        self.mode = mode
        self.group = group
        self.reuse = reuse
        self.max_packet = max_packet

    def listen(self, protocolFactory: IProtocolFactory) -> defer.Deferred[IListeningPort]:
        """Listen (`IStreamServerEndpoint`); fails with `sbus.errors.ListenError`."""
        return defer.execute(self.listen_now, protocolFactory)

    def listen_now(self, protocolFactory: IProtocolFactory) -> PacketPort:
        """As `listen`, with the result at once.

        :raises sbus.errors.ListenError: with the reason and the remedy.
        """
        bound, self._bound = self._bound or self.bind(), None
        transport = StreamTransport if self.stream else PacketTransport
        port = PacketPort(self.reactor, bound, protocolFactory, self.max_packet, transport)
        try:
            port.startListening()
        except BaseException as e:
            bound.close()
            if isinstance(e, OSError):
                why = f"cannot listen on {self.address.text}: {e.strerror}: raise the limit of open files (ulimit -n)"
                raise ListenError(why) from e
            raise
        return port

    def bind(self) -> listening.ListeningSocket:
        """Make the listening socket ahead of `listen`, to learn early whether that works.

        :raises sbus.errors.ListenError: with the reason and the remedy.
        """
        self.resolve()
        self._bound = listening.listen(
            self.address, mode=self.mode, group=self.group, reuse=self.reuse, stream=self.stream
        )
        return self._bound

    def resolve(self) -> addresses.Address:
        """Find the socket that systemd or the parent process has passed, and its name; make a path absolute.

        :returns: the address, with the descriptor and the name of such a socket.
        :raises sbus.errors.ListenError: if there is no such socket, or it is of another kind.
        """
        if self.address.systemd is not None:
            self.address = replace(self.address, systemd=None, descriptor=self._from_systemd(self.address.systemd))
        if self.address.descriptor is not None and not self.address.name:
            self.address = replace(self.address, name=listening.inherited_name(self.address, self.stream))
        self.address = addresses.absolute(self.address)
        return self.address

    def _from_systemd(self, name: str) -> int:
        """Return the descriptor that systemd passed, by name or as the only one.

        See sd_listen_fds(3).

        Twisted's endpoint for it serves stream sockets only, so this takes nothing but the number from there.
        """
        by = f"name={name}" if name else "index=0"
        try:
            return int(serverFromString(self.reactor, f"systemd:domain=UNIX:{by}").fileno)
        except (KeyError, IndexError):
            # systemd-socket-activate passes sockets without names. sd_listen_fds(3) takes these, Twisted does not.
            if not name and passed_names()[:1] == ("",):
                return FIRST_DESCRIPTOR
            wanted = f"called {name!r} (FileDescriptorName={name})" if name else "at all"
            setting = listening.unit_setting(self.stream)
            raise ListenError(
                f"systemd passed no socket {wanted}: start through a .socket unit with {setting}, or choose another "
                "--socket"
            ) from None

    def __repr__(self) -> str:
        return f"<SeqpacketServerEndpoint {self.address.text}>"


class _ClientTransport(PacketTransport):
    """A transport that, like Twisted's connectors, stops its factory at the end."""

    __slots__ = ("_factory",)

    def __init__(self, reactor: Reactor, sock: socket.socket, factory: IProtocolFactory, max_packet: int) -> None:
        super().__init__(reactor, sock, max_packet)
        self._factory: IProtocolFactory | None = factory

    def _close(self, reason: Failure) -> None:
        try:
            super()._close(reason)
        finally:
            self.stop_factory()

    def stop_factory(self) -> None:
        """Stop the factory, once."""
        factory, self._factory = self._factory, None
        if factory is not None:
            factory.doStop()


@implementer(IStreamClientEndpoint)
class SeqpacketClientEndpoint:
    """Connects to a SEQPACKET socket.

    :param address: a path or an abstract address, as `sbus.syscalls.addresses.parse` takes it.
    :param timeout: seconds to keep trying while the server's backlog is full.
    :param max_packet: bytes in the longest packet.
    """

    def __init__(
        self, reactor: Reactor, address: str, *, timeout: float = 30.0, max_packet: int = DEFAULT_MAX_PACKET
    ) -> None:
        self.reactor = reactor
        self.address = addresses.parse(address)
        if not self.address.name:
            raise AddressError(f"{address}: for listening only, clients cannot connect: give a path or @name")
        self.timeout = timeout
        self.max_packet = max_packet

    def connect(self, protocolFactory: IProtocolFactory) -> defer.Deferred[IProtocol]:
        """Connect (`IStreamClientEndpoint`).

        The Deferred fails with a `twisted.internet.error.ConnectError`.
        """
        return defer.Deferred.fromCoroutine(self._connect(protocolFactory))

    async def _connect(self, factory: IProtocolFactory) -> IProtocol:
        deadline = self.reactor.seconds() + self.timeout
        while True:
            try:
                sock = addresses.connect(self.address)
                break
            except BlockingIOError:
                if self.reactor.seconds() >= deadline:
                    raise error.TimeoutError() from None
                await deferLater(IReactorTime(self.reactor), _CONNECT_RETRY)
            except OSError as e:
                raise error.getConnectError(e) from None
        with ExitStack() as failing:
            failing.callback(sock.close)
            grow_send_buffer(sock, self.max_packet)
            transport = _ClientTransport(self.reactor, sock, factory, self.max_packet)
            factory.doStart()
            failing.callback(transport.stop_factory)
            protocol = factory.buildProtocol(transport.getPeer())
            if protocol is None:
                raise error.ConnectError(string="the factory built no protocol")
            transport.start(protocol)
            failing.pop_all()
        return protocol

    def __repr__(self) -> str:
        return f"<SeqpacketClientEndpoint {self.address.text}>"


def _mode(text: str) -> int:
    if not re.fullmatch("[0-7]{1,4}", text):
        raise AddressError(f"mode: {text!r} is not an octal number of up to four digits: write it as 770")
    return int(text, 8)


def _bytes(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or not int(text):
        raise AddressError(f"max_packet: {text!r} is not a number of bytes: give one from 1 to 999999999")
    return int(text)


def _seconds(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]*)?", text):
        raise AddressError(f"timeout: {text!r} is not a number of seconds: write it as 2.5")
    return float(text)


def _flag(text: str) -> bool:
    if text.lower() not in ("0", "1", "no", "yes", "false", "true"):
        raise AddressError(f"reuse: {text!r} is not a yes or no: give one of them")
    return text.lower() in ("1", "yes", "true")


@implementer(IPlugin, IStreamServerEndpointStringParser)
class ServerParser:
    """``seqpacket:ADDRESS[:mode=OCTAL][:group=NAME][:reuse=yes][:max_packet=BYTES]``."""

    prefix = "seqpacket"

    def parseStreamServer(  # type: ignore[override]
        self,
        reactor: Reactor,
        address: str,
        mode: str = "700",
        group: str | None = None,
        reuse: str = "no",
        max_packet: str = str(DEFAULT_MAX_PACKET),
    ) -> SeqpacketServerEndpoint:
        return SeqpacketServerEndpoint(
            reactor,
            address,
            mode=_mode(mode),
            group=group,
            reuse=_flag(reuse),
            max_packet=_bytes(max_packet),
        )


@implementer(IPlugin, IStreamClientEndpointStringParserWithReactor)
class ClientParser:
    """``seqpacket:ADDRESS[:timeout=SECONDS][:max_packet=BYTES]``."""

    prefix = "seqpacket"

    def parseStreamClient(  # type: ignore[override]
        self, reactor: Reactor, address: str, timeout: str = "30", max_packet: str = str(DEFAULT_MAX_PACKET)
    ) -> SeqpacketClientEndpoint:
        return SeqpacketClientEndpoint(reactor, address, timeout=_seconds(timeout), max_packet=_bytes(max_packet))
