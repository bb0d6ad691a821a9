"""Endpoints, as classes and as strings: what they listen on and connect to, and how they fail."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from twisted.application.internet import ClientService, StreamServerEndpointService
from twisted.internet import defer, error
from twisted.internet.endpoints import clientFromString, quoteStringArgument, serverFromString
from twisted.internet.interfaces import (
    IStreamClientEndpoint,
    IStreamClientEndpointStringParserWithReactor,
    IStreamServerEndpoint,
    IStreamServerEndpointStringParser,
)
from twisted.internet.protocol import Factory
from twisted.plugin import getPlugins
from zope.interface.verify import verifyObject

from sbus.errors import AddressError, ListenError
from sbus.protocol.packets import DEFAULT_MAX_PACKET
from sbus.seqpacket.endpoints import ClientParser, SeqpacketClientEndpoint, SeqpacketServerEndpoint, ServerParser
from sbus.syscalls import addresses
from sbus.syscalls.sockets import max_sendable
from tests.support.descriptors import descriptors
from tests.support.reactors import HandTurnedReactor, Recorder


class Recorders(Factory):
    """Makes recorders, and keeps them."""

    noisy = False
    protocol = Recorder

    def __init__(self) -> None:
        self.made: list[Any] = []

    def buildProtocol(self, addr: Any) -> Any:
        protocol = super().buildProtocol(addr)
        self.made.append(protocol)
        return protocol


class World:
    """A reactor that the test turns, the ports that listen in it, and its connections."""

    def __init__(self, directory: Path) -> None:
        self.reactor = HandTurnedReactor()
        self.directory = directory
        self.path = str(directory / "socket")
        self.servers = Recorders()
        self.clients = Recorders()
        self.ports: list[Any] = []

    def listen(self, endpoint: Any = None, factory: Factory | None = None) -> Any:
        if endpoint is None:
            endpoint = SeqpacketServerEndpoint(self.reactor, self.path)
        port = result(endpoint.listen(factory or self.servers))
        self.ports.append(port)
        return port

    def connect(self, endpoint: Any = None) -> Any:
        if endpoint is None:
            endpoint = SeqpacketClientEndpoint(self.reactor, self.path)
        return result(endpoint.connect(self.clients))

    def meet(self, client: Any) -> None:
        """Check that a client's packets reach the server, and the server's reach the client."""
        self.reactor.settle()
        server = self.servers.made[-1]
        client.transport.write(b"there")
        server.transport.write(b"back")
        self.reactor.settle()
        assert server.packets[-1] == b"there"
        assert client.packets[-1] == b"back"

    def close(self) -> None:
        for port in self.ports:
            port.stopListening()
        for protocol in (*self.servers.made, *self.clients.made):
            if protocol is not None and not protocol.lost:
                protocol.transport.abortConnection()
        self.reactor.settle()
        assert self.reactor.getReaders() == []
        assert self.reactor.getDelayedCalls() == []
        assert (self.servers.numPorts, self.clients.numPorts) == (0, 0)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    before = descriptors()
    world = World(tmp_path)
    yield world
    world.close()
    assert not descriptors().items() - before.items()


def result(deferred: defer.Deferred[Any]) -> Any:
    """Return the result of a Deferred that has fired already."""
    fired: list[Any] = []
    deferred.addCallback(fired.append)
    failures: list[Any] = []
    deferred.addErrback(failures.append)
    if failures:
        failures[0].raiseException()
    assert fired, "it has not fired yet"
    return fired[0]


# --- addresses ----------------------------------------------------------------------------------


def test_path(world):
    """A path is listened on and connected to, and removed when the port stops."""
    port = world.listen()
    assert port.getHost().name == os.fsencode(world.path)
    world.meet(world.connect())
    assert world.clients.made[0].transport.getPeer() == port.getHost()
    port.stopListening()
    assert os.listdir(world.directory) == []


def test_relative_path(world, monkeypatch):
    """A relative path is relative to the current directory, and is removed from another one too."""
    monkeypatch.chdir(world.directory)
    port = world.listen(SeqpacketServerEndpoint(world.reactor, "here"))
    world.meet(world.connect(SeqpacketClientEndpoint(world.reactor, "here")))
    monkeypatch.chdir("/")
    port.stopListening()
    assert os.listdir(world.directory) == []


@pytest.mark.parametrize("text", ["@sbus-test-{}", "/dev/unix/abstract/{}"])
def test_abstract(world, text):
    """An abstract address is listened on and connected to, as a name or in hexadecimal."""
    address = text.format(os.urandom(8).hex())
    port = world.listen(SeqpacketServerEndpoint(world.reactor, address))
    assert port.getHost().name.startswith(b"\0")
    world.meet(world.connect(SeqpacketClientEndpoint(world.reactor, address)))


def test_random_abstract(world):
    """A random abstract address can be read off the endpoint, and connected to."""
    endpoint = SeqpacketServerEndpoint(world.reactor, "/dev/unix/abstract")
    port = world.listen(endpoint)
    assert endpoint.address.text.startswith("/dev/unix/abstract/00")
    assert port.getHost().name == endpoint.address.name
    world.meet(world.connect(SeqpacketClientEndpoint(world.reactor, endpoint.address.text)))
    other = SeqpacketServerEndpoint(world.reactor, "/dev/unix/abstract")
    assert other.address.name != endpoint.address.name


def test_inherited_descriptor(world):
    """An endpoint listens on a socket that the parent process made; its path stays when the port stops."""
    parent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent.bind(world.path)
    endpoint = SeqpacketServerEndpoint(world.reactor, f"/dev/fd/{os.dup(parent.fileno())}")
    port = world.listen(endpoint)
    assert port.getHost().name == os.fsencode(world.path)
    world.meet(world.connect())
    port.stopListening()
    assert os.listdir(world.directory) == ["socket"]
    parent.close()


def test_bound_ahead(world):
    """An endpoint listens on the socket that was made ahead."""
    endpoint = SeqpacketServerEndpoint(world.reactor, world.path)
    endpoint.bind()
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    raw.connect(world.path)
    raw.send(b"early")
    world.listen(endpoint)
    world.reactor.settle()
    assert world.servers.made[0].packets == [b"early"]
    raw.close()


def test_no_socket_from_systemd(world, monkeypatch):
    """Without a socket from systemd, or one of that name, the error says what to write into the unit."""
    for text in ("systemd", "systemd:other"):
        with pytest.raises(ListenError, match="ListenSequentialPacket="):
            world.listen(SeqpacketServerEndpoint(world.reactor, text))


def test_mode_and_group(world):
    """The path gets the requested permissions and group; the default is 0700."""
    world.listen()
    assert stat.S_IMODE(os.stat(world.path).st_mode) == 0o700
    other = str(world.directory / "other")
    world.listen(SeqpacketServerEndpoint(world.reactor, other, mode=0o620, group=os.getgid()))
    assert stat.S_IMODE(os.stat(other).st_mode) == 0o620
    assert os.stat(other).st_gid == os.getgid()


def test_reuse(world):
    """A path without a server is replaced only on request; one in use, or a file, never."""
    stale = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stale.bind(world.path)
    stale.close()
    with pytest.raises(ListenError, match="--reuse"):
        world.listen()
    world.listen(SeqpacketServerEndpoint(world.reactor, world.path, reuse=True))
    with pytest.raises(ListenError, match="in use"):
        world.listen(SeqpacketServerEndpoint(world.reactor, world.path, reuse=True))
    (world.directory / "file").write_text("precious")
    with pytest.raises(ListenError, match="not a socket"):
        world.listen(SeqpacketServerEndpoint(world.reactor, str(world.directory / "file"), reuse=True))
    assert (world.directory / "file").read_text() == "precious"
    world.meet(world.connect())


def test_limit(world):
    """Both ends send a packet of the limit, the default or another; the server's buffer grows when it has to."""
    world.listen()
    client = world.connect()
    world.meet(client)
    server = world.servers.made[-1]
    assert max_sendable(client.transport.getHandle()) >= DEFAULT_MAX_PACKET
    assert max_sendable(server.transport.getHandle()) < DEFAULT_MAX_PACKET
    server.transport.write(bytes(DEFAULT_MAX_PACKET))
    world.reactor.settle()
    assert client.packets[-1] == bytes(DEFAULT_MAX_PACKET)
    small = SeqpacketServerEndpoint(world.reactor, str(world.directory / "small"), max_packet=10_000)
    world.listen(small)
    client = world.connect(SeqpacketClientEndpoint(world.reactor, small.address.text, max_packet=20_000))
    world.meet(client)
    assert max_sendable(client.transport.getHandle()) >= 20_000
    client.transport.write(bytes(20_000))
    world.reactor.settle()
    world.servers.made[-1].lost[0].trap(error.ConnectionAborted)


def test_failed_start(world, monkeypatch):
    """A port that cannot be started leaves no socket and no path behind."""

    def refuse(reader):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(world.reactor, "addReader", refuse)
    with pytest.raises((OSError, ListenError)):
        world.listen()
    assert os.listdir(world.directory) == []


# --- strings ------------------------------------------------------------------------------------


def test_strings(world):
    """serverFromString and clientFromString know ``seqpacket:`` without an import."""
    server = serverFromString(world.reactor, f"seqpacket:{world.path}:mode=770")
    client = clientFromString(world.reactor, f"seqpacket:{world.path}:timeout=5")
    assert isinstance(server, SeqpacketServerEndpoint)
    assert isinstance(client, SeqpacketClientEndpoint)
    world.listen(server)
    world.meet(world.connect(client))
    assert stat.S_IMODE(os.stat(world.path).st_mode) == 0o770


def test_all_options(world):
    """Every option of the classes can be given in the string."""
    text = f"seqpacket:address={world.path}:mode=0640:group=root:reuse=yes:max_packet=5000"
    server: Any = serverFromString(world.reactor, text)
    assert (server.address.text, server.mode, server.group) == (world.path, 0o640, "root")
    assert (server.reuse, server.max_packet) == (True, 5000)
    client: Any = clientFromString(world.reactor, f"seqpacket:{world.path}:timeout=2.5:max_packet=5000")
    assert (client.address.text, client.timeout, client.max_packet) == (world.path, 2.5, 5000)
    server = serverFromString(world.reactor, f"seqpacket:{world.path}:group=12:reuse=0")
    assert (server.group, server.reuse, server.mode) == ("12", False, 0o700)


def test_escaped_colons(world):
    """A colon in an address is written with a backslash, as in all of Twisted's endpoint strings; an equals sign \
needs the option's name before it."""
    for name, option in (("a:b", ""), ("a:b=c", "address=")):
        quoted = quoteStringArgument(str(world.directory / name))
        assert "\\:" in quoted
        port = world.listen(serverFromString(world.reactor, f"seqpacket:{option}{quoted}:mode=700"))
        assert os.listdir(world.directory) == [name]
        world.meet(world.connect(clientFromString(world.reactor, f"seqpacket:{option}{quoted}")))
        port.stopListening()


def test_abstract_string(world):
    """An abstract address works in a string."""
    name = f"@sbus-test-{os.urandom(8).hex()}"
    world.listen(serverFromString(world.reactor, f"seqpacket:{name}"))
    world.meet(world.connect(clientFromString(world.reactor, f"seqpacket:{name}")))


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("seqpacket:/a:mode=rwx", "mode.*'rwx'.*octal"),
        ("seqpacket:/a:mode=780", "mode.*'780'.*octal"),
        ("seqpacket:/a:mode=77777", "mode.*'77777'.*octal"),
        ("seqpacket:/a:mode=-700", "mode.*'-700'.*octal"),
        ("seqpacket:/a:max_packet=many", "max_packet.*'many'"),
        ("seqpacket:/a:max_packet=0", "max_packet.*'0'"),
        ("seqpacket:/a:max_packet=-5", "max_packet.*'-5'"),
        ("seqpacket:/a:reuse=maybe", "reuse.*'maybe'.*yes.*no"),
        ("seqpacket:", "empty"),
        ("seqpacket:@", "@"),
        ("seqpacket:" + "x" * 200, "200 bytes"),
        ("seqpacket:/dev/unix/abstract/xyz", "hexadecimal"),
    ],
)
def test_wrong_server_strings(text, hint):
    """A wrong option in a server's string is named in the error, with what would be right."""
    with pytest.raises(AddressError, match=hint):
        serverFromString(HandTurnedReactor(), text)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("seqpacket:/a:timeout=soon", "timeout.*'soon'"),
        ("seqpacket:/a:timeout=-1", "timeout.*'-1'"),
        ("seqpacket:/a:timeout=nan", "timeout.*'nan'"),
        ("seqpacket:/a:max_packet=1e3", "max_packet.*'1e3'"),
        ("seqpacket:/dev/fd/3", "not connect"),
        ("seqpacket:systemd", "not connect"),
    ],
)
def test_wrong_client_strings(text, hint):
    """A wrong option in a client's string is named in the error, with what would be right."""
    with pytest.raises(AddressError, match=hint):
        clientFromString(HandTurnedReactor(), text)


def test_unknown_option():
    """An unknown option is named in the error, as with Twisted's own endpoints."""
    with pytest.raises(TypeError, match="'mod'"):
        serverFromString(HandTurnedReactor(), "seqpacket:/a:mod=700")
    with pytest.raises(TypeError, match="'mode'"):
        clientFromString(HandTurnedReactor(), "seqpacket:/a:mode=700")


def test_interfaces():
    """The plugins and the endpoints have everything that their interfaces promise."""
    reactor = HandTurnedReactor()
    verifyObject(IStreamServerEndpoint, SeqpacketServerEndpoint(reactor, "/a"))
    verifyObject(IStreamClientEndpoint, SeqpacketClientEndpoint(reactor, "/a"))
    assert "/a" in repr(SeqpacketServerEndpoint(reactor, "/a"))
    assert "/a" in repr(SeqpacketClientEndpoint(reactor, "/a"))
    servers = [plugin for plugin in getPlugins(IStreamServerEndpointStringParser) if plugin.prefix == "seqpacket"]
    clients = [
        plugin for plugin in getPlugins(IStreamClientEndpointStringParserWithReactor) if plugin.prefix == "seqpacket"
    ]
    assert [type(plugin) for plugin in servers] == [ServerParser]
    assert [type(plugin) for plugin in clients] == [ClientParser]


SCRIPT = """
    import sys
    from twisted.internet.defer import Deferred
    from twisted.internet.endpoints import clientFromString, serverFromString
    from twisted.internet.protocol import Factory, Protocol
    from twisted.internet.task import react

    class Echo(Protocol):
        def dataReceived(self, data):
            self.transport.write(data)

    class Asking(Protocol):
        def __init__(self):
            self.answers, self.done = [], Deferred()
        def connectionMade(self):
            self.transport.writeSequence([b"a", b"bc", b"def"])
        def dataReceived(self, data):
            self.answers.append(data)
            if len(self.answers) == 3:
                self.done.callback(None)

    async def main(reactor, path):
        port = await serverFromString(reactor, f"seqpacket:{path}:mode=600").listen(Factory.forProtocol(Echo))
        asking = await clientFromString(reactor, f"seqpacket:{path}").connect(Factory.forProtocol(Asking))
        await asking.done
        await port.stopListening()
        print(asking.answers, [name for name in sys.modules if name.startswith("sbus.server")])

    react(main, sys.argv[1:])
"""


def test_installed_plugins(tmp_path):
    """A program listens and connects with the string ``seqpacket:`` alone."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path / "socket")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "[b'a', b'bc', b'def'] []", done.stderr
    assert os.listdir(tmp_path) == []


# --- connecting ---------------------------------------------------------------------------------


def test_nobody_there(world):
    """Without a socket, without a server, or with something else there, connecting fails with a ConnectError."""
    with pytest.raises(error.ConnectError):
        world.connect()
    stale = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stale.bind(world.path)
    with pytest.raises(error.ConnectionRefusedError):
        world.connect()
    stale.close()
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.bind(str(world.directory / "stream"))
    stream.listen()
    with pytest.raises(error.ConnectError):
        world.connect(SeqpacketClientEndpoint(world.reactor, str(world.directory / "stream")))
    stream.close()
    assert world.clients.made == []


@pytest.fixture
def crowded(world: World) -> Iterator[socket.socket]:
    """A server with a full backlog."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(world.path)
    server.listen(0)
    server.setblocking(False)
    waiting = []
    try:
        while True:
            waiting.append(addresses.connect(addresses.parse(world.path)))
    except BlockingIOError:
        yield server
    for peer in waiting:
        peer.close()
    server.close()


def test_full_backlog(world, crowded):
    """A client of a server that is behind with accepting tries until it gets in."""
    connected = SeqpacketClientEndpoint(world.reactor, world.path).connect(world.clients)
    for _ in range(10):
        world.reactor.advance(0.01)
    assert not connected.called
    peer, _ = crowded.accept()
    for _ in range(3):
        world.reactor.advance(0.01)
    assert result(connected) is world.clients.made[0]
    peer.close()


def test_full_backlog_for_too_long(world, crowded):
    """A client that does not get in within its time-out fails with a TimeoutError."""
    connected = SeqpacketClientEndpoint(world.reactor, world.path, timeout=0.5).connect(world.clients)
    for _ in range(45):
        world.reactor.advance(0.01)
    assert not connected.called
    for _ in range(10):
        world.reactor.advance(0.01)
    with pytest.raises(error.TimeoutError):
        result(connected)
    assert world.clients.made == []


def test_cancelled(world, crowded):
    """A client that is cancelled stops trying."""
    connected = SeqpacketClientEndpoint(world.reactor, world.path).connect(world.clients)
    world.reactor.advance(0.01)
    connected.cancel()
    with pytest.raises(defer.CancelledError):
        result(connected)
    assert world.reactor.getDelayedCalls() == []


def test_reset_while_trying(world, crowded):
    """A client that tries fails at once when the server goes away meanwhile."""
    connected = SeqpacketClientEndpoint(world.reactor, world.path).connect(world.clients)
    crowded.close()
    world.reactor.advance(0.01)
    with pytest.raises(error.ConnectionRefusedError):
        result(connected)


# --- factories ----------------------------------------------------------------------------------


def test_factories_are_started_and_stopped(world):
    """Factories are started once for each port and connection, and stopped when these end."""
    port = world.listen()
    assert world.servers.numPorts == 1
    clients = [world.connect() for _ in range(3)]
    world.meet(clients[-1])
    assert world.clients.numPorts == 3
    assert world.servers.numPorts == 1
    for left, client in zip((2, 1, 0), clients, strict=True):
        client.transport.loseConnection()
        world.reactor.settle()
        assert world.clients.numPorts == left
    port.stopListening()
    assert world.servers.numPorts == 0


def test_no_protocol(world):
    """A client whose factory makes no protocol fails to connect, and the factory is stopped."""
    world.listen()
    world.clients.buildProtocol = lambda addr: None
    with pytest.raises(error.ConnectError, match="no protocol"):
        world.connect()
    assert world.clients.numPorts == 0


def test_factory_that_raises(world):
    """A client whose factory raises fails with that exception, and the factory is stopped."""
    world.listen()

    def fail():
        raise ZeroDivisionError

    world.clients.protocol = fail
    with pytest.raises(ZeroDivisionError):
        world.connect()
    assert world.clients.numPorts == 0


def test_protocol_that_fails_to_start(world):
    """A client whose protocol raises when it is connected fails with that, and all is closed and stopped."""

    class Failing(Recorder):
        def connectionMade(self):
            raise ZeroDivisionError

    world.listen()
    world.clients.protocol = Failing
    with pytest.raises(ZeroDivisionError):
        world.connect()
    world.reactor.settle()
    assert world.clients.numPorts == 0
    assert len(world.clients.made[0].lost) == 1
    assert len(world.servers.made[0].lost) == 1


def test_protocol_that_fails_to_end(world):
    """A client whose protocol raises in connectionLost still has its factory stopped."""

    class Failing(Recorder):
        def connectionLost(self, reason=None):
            super().connectionLost(reason)
            raise ZeroDivisionError

    world.listen()
    world.clients.protocol = Failing
    world.connect().transport.loseConnection()
    world.reactor.settle()
    assert world.clients.numPorts == 0


# --- what Twisted builds on endpoints -----------------------------------------------------------


def test_client_service(world):
    """ClientService connects, connects again when the connection is lost, and stops; packets keep their edges."""
    endpoint = SeqpacketClientEndpoint(world.reactor, world.path)
    service = ClientService(endpoint, world.clients, retryPolicy=lambda attempts: 1.0, clock=world.reactor)
    service.startService()
    world.reactor.settle()
    assert world.clients.made == []
    world.listen()
    world.reactor.advance(1)
    first: Any = result(service.whenConnected())
    assert first is world.clients.made[0]
    world.reactor.settle()
    world.servers.made[0].transport.writeSequence([b"a", b"bc", b"def"])
    world.reactor.settle()
    assert first.packets == [b"a", b"bc", b"def"]
    world.servers.made[0].transport.loseConnection()
    world.reactor.settle()
    assert len(first.lost) == 1
    world.reactor.advance(1)
    second = result(service.whenConnected())
    assert second is not first
    world.meet(second)
    stopped = service.stopService()
    world.reactor.settle()
    result(stopped)
    assert len(second.lost) == 1
    assert world.clients.numPorts == 0


def test_server_service(world):
    """StreamServerEndpointService listens while it runs."""
    service = StreamServerEndpointService(SeqpacketServerEndpoint(world.reactor, world.path), world.servers)
    service.startService()
    world.meet(world.connect())
    result(service.stopService())
    assert not os.path.exists(world.path)


def test_start_and_stop_many_times(world):
    """A hundred starts and stops, each with a connection, leave no descriptor, path or timer behind."""
    before = descriptors()
    for _ in range(100):
        port = world.listen()
        client = world.connect()
        world.meet(client)
        port.stopListening()
        client.transport.loseConnection()
        world.reactor.settle()
        assert world.reactor.getReaders() == []
    assert not descriptors().items() - before.items()
    assert os.listdir(world.directory) == []
    assert world.reactor.getDelayedCalls() == []
