"""The port: accepts a bounded number at a time, survives failing connections, and does not spin."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from twisted.internet.interfaces import IListeningPort
from twisted.internet.protocol import Factory
from twisted.logger import ILogObserver, LogEvent, globalLogPublisher
from zope.interface import implementer
from zope.interface.verify import verifyObject

from sbus.protocol.keys import PeerCredentials
from sbus.seqpacket.interfaces import IPeerGate
from sbus.seqpacket.multiplexer import Multiplexer
from sbus.seqpacket.pacing import AcceptPacer
from sbus.seqpacket.port import PacketPort
from sbus.syscalls import addresses, listening
from sbus.syscalls.sockets import max_sendable
from tests.support.descriptors import descriptors
from tests.support.reactors import BatchRecorder, HandTurnedReactor, Recorder, received


class Recorders(Factory):
    """Makes recorders, and keeps them.

    :ivar build: makes the next protocol; may be replaced.
    """

    noisy = False

    def __init__(self) -> None:
        self.made: list[Recorder] = []
        self.addresses: list[Any] = []
        self.build: Callable[[], Recorder | None] = Recorder

    def buildProtocol(self, addr: Any) -> Any:
        self.addresses.append(addr)
        protocol = self.build()
        if protocol is not None:
            self.made.append(protocol)
        return protocol


@implementer(IPeerGate)
class Gate(Recorders):
    """Recorders behind a gate.

    :ivar answers: the next answers.
    :ivar seen: the peers of all connections.
    """

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[bool] = []
        self.seen: list[PeerCredentials] = []

    def admits(self, peer: PeerCredentials) -> bool:
        self.seen.append(peer)
        return self.answers.pop(0)


class FailingSocket:
    """A listening socket whose accept fails in ways that a test chooses.

    :ivar errors: what the next calls of accept fail with; 0 is a call that goes through.
    :ivar accepts: how often accept was called.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.errors: list[int] = []
        self.accepts = 0

    def accept(self) -> Any:
        self.accepts += 1
        number = self.errors.pop(0) if self.errors else 0
        if number:
            raise OSError(number, os.strerror(number))
        return self._sock.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class World:
    """A listening port in a reactor that the test turns."""

    def __init__(self, directory: Path, factory: Any = None) -> None:
        self.reactor = HandTurnedReactor()
        Multiplexer.of(self.reactor).accepting = AcceptPacer(lambda: 0.0)  # a test's own load takes no share
        self.path = str(directory / "socket")
        self.factory: Any = factory or Recorders()
        bound: Any = listening.listen(addresses.parse(self.path))
        self.sock = FailingSocket(bound.sock)
        bound.sock = self.sock
        self.port = PacketPort(self.reactor, bound, self.factory, 1000)
        self.port.startListening()
        self.peers: list[socket.socket] = []

    @property
    def made(self) -> list[Recorder]:
        made: list[Recorder] = self.factory.made
        return made

    def connect(self) -> socket.socket:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer.connect(self.path)
        peer.setblocking(False)
        self.peers.append(peer)
        return peer

    def turn(self, times: int = 1) -> None:
        self.reactor.turn(times)

    def close(self) -> None:
        """Close everything; nothing may be left in the reactor."""
        self.port.stopListening()
        for peer in self.peers:
            peer.close()
        self.reactor.settle()
        assert self.reactor.getReaders() == []
        assert self.reactor.getDelayedCalls() == []


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    before = descriptors()
    world = World(tmp_path)
    yield world
    world.close()
    assert not descriptors().items() - before.items()


@pytest.fixture
def logged() -> Iterator[list[LogEvent]]:
    """The events logged during the test."""
    events: list[LogEvent] = []

    @implementer(ILogObserver)
    def observe(event: LogEvent) -> None:
        events.append(event)

    globalLogPublisher.addObserver(observe)
    yield events
    globalLogPublisher.removeObserver(observe)


def failures(logged: list[LogEvent]) -> list[type]:
    return [event["log_failure"].type for event in logged if "log_failure" in event]


# --- accepting ----------------------------------------------------------------------------------


def test_accepts(world):
    """A client that connects gets a protocol, and a send buffer that takes a packet of the limit."""
    peer = world.connect()
    peer.send(b"hello")
    world.turn(2)
    (recorder,) = world.made
    assert recorder.packets == [b"hello"]
    assert max_sendable(recorder.transport.getHandle()) >= 1000
    assert not recorder.transport.getHandle().getblocking()
    assert recorder.transport.getHost() == world.port.getHost()
    assert world.port.getHost().name == os.fsencode(world.path)


def test_a_client_is_read_alone_first(tmp_path):
    """Of what a client has sent, the first packet is read alone: it shows whether the client sends large ones."""
    made = []

    class Batches(Factory):
        def buildProtocol(self, addr):
            made.append(BatchRecorder())
            return made[-1]

    world = World(tmp_path, Batches())
    peer = world.connect()
    for _ in range(20):
        peer.send(b"packet")
    world.turn(3)
    assert made[0].batches[0] == 1
    assert len(made[0].packets) == 20
    assert max(made[0].batches) > 10
    world.close()


def test_accepts_so_many_a_turn(world):
    """A turn accepts at most 64 connections, so that a rush of new clients does not stop the others."""
    for _ in range(100):
        world.connect()
    world.turn()
    assert len(world.made) == 64
    world.turn()
    assert len(world.made) == 100


def test_accepting_has_a_share_of_a_turn(world):
    """A turn whose share is spent by one connection accepts that one, and the others have later turns."""
    ticks = itertools.count()
    Multiplexer.of(world.reactor).accepting = AcceptPacer(lambda: float(next(ticks)))
    for _ in range(3):
        world.connect()
    made = []
    for _ in range(3):
        world.turn()
        made.append(len(world.made))
    assert made == [1, 2, 3]


def test_a_gate(tmp_path):
    """A factory that is a gate sees each peer first; a connection that it refuses is closed unread, without a trace."""
    world = World(tmp_path, Gate())
    answers = world.factory.answers = [True, False, True]
    before = descriptors()
    peers = [world.connect() for _ in range(3)]
    peers[1].send(b"read by nobody")
    world.reactor.settle()
    assert answers == []
    assert world.factory.seen == [PeerCredentials(os.getpid(), os.geteuid(), os.getegid())] * 3
    assert len(world.made) == 2
    assert received(peers[1])[-1:] == [b""]
    assert len(descriptors()) - len(before) == 3 + 2
    world.close()


def test_a_gate_that_raises(tmp_path, logged):
    """If a gate raises, its connection is closed, the error is logged, and the port goes on."""
    world = World(tmp_path, Gate())
    peer = world.connect()
    world.reactor.settle()
    assert received(peer) == [b""]
    assert failures(logged) == [IndexError]
    world.factory.answers = [True]
    world.connect()
    world.reactor.settle()
    assert len(world.made) == 1
    world.close()


def test_accepted_sockets_are_not_inherited(world):
    """A program that the server starts inherits none of its connections."""
    world.connect()
    world.turn()
    assert not os.get_inheritable(world.made[0].transport.fileno())


def test_connection_that_is_gone_already(world):
    """A client that connects, sends and leaves before it is accepted is served, and lost once."""
    peer = world.connect()
    peer.send(b"hello")
    peer.close()
    world.turn(3)
    (recorder,) = world.made
    assert recorder.packets == [b"hello"]
    assert len(recorder.lost) == 1


def test_factory_that_declines(world):
    """A connection for which the factory makes no protocol is closed."""
    world.factory.build = lambda: None
    peer = world.connect()
    world.turn()
    assert received(peer) == [b""]


@pytest.mark.parametrize("exception", [ZeroDivisionError, SystemExit])
def test_factory_that_raises(world, logged, exception):
    """A connection whose protocol cannot be made is logged and closed; the next ones are accepted."""

    def build():
        world.factory.build = Recorder
        raise exception

    world.factory.build = build
    first, second = world.connect(), world.connect()
    second.send(b"hello")
    world.turn(2)
    assert received(first) == [b""]
    assert world.made[0].packets == [b"hello"]
    assert failures(logged) == [exception]


def test_protocol_that_fails_to_start(world, logged):
    """A connection whose protocol raises when it is made is logged and closed; the next ones are accepted."""

    class Failing(Recorder):
        def connectionMade(self):
            world.factory.build = Recorder
            raise ZeroDivisionError

    world.factory.build = Failing
    first, second = world.connect(), world.connect()
    second.send(b"hello")
    world.turn(2)
    assert received(first) == [b""]
    bad, good = world.made
    assert [reason.type for reason in bad.lost] == [ZeroDivisionError]
    assert good.packets == [b"hello"]
    assert failures(logged) == [ZeroDivisionError]


# --- when accept fails --------------------------------------------------------------------------


def test_aborted_connections(world):
    """An error of the connection being accepted is skipped, and the next one is accepted."""
    world.sock.errors = [errno.ECONNABORTED, errno.EPROTO, errno.EINTR]
    world.connect()
    world.turn()
    assert len(world.made) == 1


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_no_descriptors(world, logged, number):
    """Without descriptors one peer a second is turned away, with one line in the log; later the port recovers."""
    first, second = world.connect(), world.connect()
    world.sock.errors = [number, 0, number, 0]
    world.turn(10)
    assert world.sock.accepts == 2
    assert received(first) == [b""]
    assert received(second) == []
    errors = [event for event in logged if event["log_level"].name == "error"]
    assert len(errors) == 1
    assert "ulimit -n" in errors[0]["log_format"]
    third = world.connect()
    third.send(b"hello")
    world.reactor.advance(1)
    world.turn(10)
    assert world.sock.accepts == 4
    assert received(second) == [b""]
    world.reactor.advance(1)
    world.turn(3)
    assert [recorder.packets for recorder in world.made] == [[b"hello"]]


def test_no_descriptors_at_all(world, monkeypatch):
    """A port without its spare descriptor turns no connection away, and gets the spare back with the next one."""
    first, second = world.connect(), world.connect()
    world.sock.errors = [errno.EMFILE, 0, errno.EMFILE]

    def refuse(*args):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as without:
        without.setattr("sbus.seqpacket.port.os.open", refuse)
        world.turn()
        assert received(first) == [b""]
        world.reactor.advance(1)
        world.turn(3)
        assert world.sock.accepts == 3
        assert received(second) == []
    world.reactor.advance(1)
    world.turn()
    assert len(world.made) == 1
    third = world.connect()
    world.sock.errors = [errno.EMFILE, 0]
    world.turn()
    assert received(third) == [b""]


@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.ENOMEM])
def test_no_memory(world, number):
    """Without memory no connection is turned away: the port waits a second."""
    peer = world.connect()
    world.sock.errors = [number]
    world.turn(10)
    assert world.sock.accepts == 1
    assert received(peer) == []
    world.reactor.advance(1)
    world.turn()
    assert len(world.made) == 1


def test_unexpected_error(world, logged):
    """An unexpected error of accept is logged, and the port tries again a second later instead of spinning."""
    world.connect()
    world.sock.errors = [errno.EPERM]
    world.turn(10)
    assert world.sock.accepts == 1
    assert failures(logged) == [PermissionError]
    world.reactor.advance(1)
    world.turn()
    assert len(world.made) == 1


def test_stop_while_waiting(world):
    """A port that is stopped while it waits for descriptors stays stopped."""
    world.connect()
    world.sock.errors = [errno.EMFILE, errno.EMFILE]
    world.turn()
    assert len(world.reactor.getDelayedCalls()) == 1
    world.port.stopListening()
    assert world.reactor.getDelayedCalls() == []


# --- stopping -----------------------------------------------------------------------------------


def test_stop(world):
    """Stopping closes the socket, removes the path and stops the factory, once; the Deferred has fired."""
    assert world.factory.numPorts == 1
    for _ in range(2):
        fired: list[object] = []
        world.port.stopListening().addCallback(fired.append)
        assert fired == [None]
        assert world.factory.numPorts == 0
        assert not os.path.exists(world.path)


def test_connections_outlive_the_port(world):
    """Connections stay open when the port has stopped."""
    peer = world.connect()
    world.turn()
    world.port.stopListening()
    peer.send(b"hello")
    world.turn()
    assert world.made[0].packets == [b"hello"]


def test_stop_while_accepting(world, logged):
    """A protocol can stop the port that accepts it: no connection is accepted after it."""

    def build():
        world.port.stopListening()
        return Recorder()

    world.factory.build = build
    first, second = world.connect(), world.connect()
    first.send(b"hello")
    world.turn(2)
    assert [recorder.packets for recorder in world.made] == [[b"hello"]]
    assert b"" not in received(first)
    assert received(second) == [b""]
    assert failures(logged) == []


def test_failed_start(tmp_path, monkeypatch):
    """A port that cannot start leaves nothing behind: no socket, no path, no started factory."""
    before = descriptors()
    bound = listening.listen(addresses.parse(str(tmp_path / "socket")))
    reactor, factory = HandTurnedReactor(), Recorders()

    def refuse(reader):
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(reactor, "addReader", refuse)
    with pytest.raises(OSError, match="no memory"):
        PacketPort(reactor, bound, factory).startListening()
    bound.close()
    assert factory.numPorts == 0
    assert os.listdir(tmp_path) == []
    assert not descriptors().items() - before.items()


def test_tracebacks_are_limited(world, logged, monkeypatch):
    """Connections that cannot be set up cost at most one traceback a second, however many there are."""

    def refuse(address):
        raise RuntimeError("no protocol")

    monkeypatch.setattr(world.factory, "buildProtocol", refuse)
    for _ in range(20):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.connect(world.path)
            world.reactor.settle()
    assert len([event for event in logged if "log_failure" in event]) == 1
    world.reactor.advance(1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(world.path)
        world.reactor.settle()
    assert [event["unlogged"] for event in logged if "log_failure" in event] == [0, 19]


def test_interface(world):
    """The port has everything that its interface promises, and knows its address."""
    verifyObject(IListeningPort, world.port)
    assert world.path in repr(world.port)


# --- out of descriptors, for real ---------------------------------------------------------------

SERVER = """
    import json, os, resource, signal, sys
    from twisted.internet import {reactor}
    {reactor}.install()
    from twisted.internet import reactor
    from twisted.internet.protocol import Factory, Protocol
    from sbus.seqpacket.endpoints import SeqpacketServerEndpoint

    later = reactor.callLater
    reactor.callLater = lambda delay, *call: later(delay / 10, *call)  # a rest is short
    accepts = 0

    class Counting:
        def __init__(self, sock):
            self.sock = sock
        def accept(self):
            global accepts
            accepts += 1
            return self.sock.accept()
        def __getattr__(self, name):
            return getattr(self.sock, name)

    class Greeting(Protocol):
        def connectionMade(self):
            self.transport.write(b"welcome")

    def report(*_):
        usage = resource.getrusage(resource.RUSAGE_SELF)
        os.write(1, json.dumps([accepts, usage.ru_utime + usage.ru_stime, reactor.seconds()]).encode() + b"\\n")

    def listen():
        port = SeqpacketServerEndpoint(reactor, sys.argv[1]).listen_now(Factory.forProtocol(Greeting))
        port._bound.sock = Counting(port._bound.sock)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 10, free + 10))
        report()

    signal.signal(signal.SIGUSR1, lambda *_: reactor.callFromThread(report))
    reactor.callWhenRunning(listen)
    reactor.run()
"""


@pytest.mark.parametrize(
    "reactor",
    [
        "epollreactor",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("pollreactor", "selectreactor", "asyncioreactor")),
    ],
)
def test_descriptors_run_out(tmp_path, reactor):
    """A server without descriptors turns peers away at its own pace, does not spin, and recovers by itself."""
    path = str(tmp_path / "socket")
    script = textwrap.dedent(SERVER).format(reactor=reactor)
    server = subprocess.Popen([sys.executable, "-c", script, path], stdout=subprocess.PIPE)
    output: Any = server.stdout

    def greeted(peer):
        try:
            return peer.recv(100) == b"welcome"
        except ConnectionResetError:
            return False

    def report():
        server.send_signal(signal.SIGUSR1)
        return json.loads(output.readline())

    peers = []
    try:
        output.readline()
        for _ in range(13):
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            peer.settimeout(10)
            peer.connect(path)
            peers.append(peer)
        served = [peer for peer in peers[:10] if greeted(peer)]
        assert served == peers[:10]
        # The crowd at the door: each is turned away in its turn, a pause apart.
        start, cpu, begun = report()
        assert not any(greeted(peer) for peer in peers[10:])
        accepts, spent, ended = report()
        assert accepts - start <= 10
        assert spent - cpu < 0.5 * (ended - begun) + 0.05
        # Nobody waits: accept says EMFILE all the same, so it must not be asked.
        start, cpu, begun = accepts, spent, ended
        while ended - begun < 0.4:
            accepts, spent, ended = report()
        assert accepts - start <= 3
        # Somebody leaves, somebody comes.
        peers[0].close()
        while True:
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            peer.settimeout(10)
            peer.connect(path)
            peers.append(peer)
            if greeted(peer):
                break
    finally:
        server.terminate()
        server.wait(10)
        output.close()
        for peer in peers:
            peer.close()
