"""Reactors to test the transport on: every real one, and one that a test turns.

No other module imports Twisted's `ReactorBuilder`, which is in its wheel but not public.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any
from typing import Protocol as TypingProtocol
from unittest import mock

import pytest
from twisted.internet import asyncioreactor, interfaces
from twisted.internet.defer import Deferred
from twisted.internet.protocol import Protocol, connectionDone
from twisted.internet.test.reactormixins import ReactorBuilder
from twisted.internet.testing import MemoryReactorClock
from twisted.python.failure import Failure
from twisted.trial.unittest import SkipTest, SynchronousTestCase
from zope.interface import implementer

from sbus.interfaces import IPacketReceiver
from sbus.protocol.packets import DEFAULT_MAX_PACKET
from sbus.seqpacket.multiplexer import Multiplexer
from sbus.seqpacket.transport import PacketTransport
from sbus.syscalls.polling import is_readable
from sbus.syscalls.socket_directory import new_socket_directory
from tests.support.descriptors import descriptors

__all__ = [
    "AsyncioSelectorReactor",
    "BatchRecorder",
    "HalfRecorder",
    "HandTurnedReactor",
    "PacketReactorBuilder",
    "Recorder",
    "each_reactor",
    "hurried",
    "in_reactor",
    "received",
    "socket_pair",
]

TIMEOUT = 10
"""Seconds after which a test that is still running has failed."""


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected, non-blocking SEQPACKET sockets."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    return one, other


@contextmanager
def hurried(reactor: Any, times: float) -> Iterator[None]:
    """Have a reactor make each call so many times earlier, so that a test need not wait for what takes seconds."""
    later = reactor.callLater
    with mock.patch.object(reactor, "callLater", lambda delay, *call, **how: later(delay / times, *call, **how)):
        yield


class _Peer(TypingProtocol):
    def recv(self, size: int, /) -> bytes: ...


def received(peer: _Peer) -> list[bytes]:
    """Return all packets that a raw peer can read right now; an empty packet at the end is end of file."""
    packets: list[bytes] = []
    while not packets or packets[-1]:
        try:
            packets.append(peer.recv(1 << 20))
        except BlockingIOError:
            break
        except ConnectionResetError:
            pass  # reported once, before the packets that still wait
    return packets


# --- protocols that record their calls ----------------------------------------------------------


class Recorder(Protocol):
    """Records its calls, and fires the Deferreds of tests that wait for them.

    :ivar packets: the packets that ``dataReceived`` got, call by call.
    :ivar lost: the reasons that ``connectionLost`` got; there should never be more than one.
    :ivar react: called with each packet.
    :ivar call_soon: fires the Deferreds, so that a test does not go on in the middle of a batch.
    """

    transport: Any

    def __init__(self, react: Callable[[bytes], object] | None = None) -> None:
        self.packets: list[bytes] = []
        self.lost: list[Failure] = []
        self.react = react
        self.call_soon: Callable[..., object] = lambda call, *args: call(*args)
        self._waiting: list[tuple[Callable[[], object], Deferred[None]]] = []

    def dataReceived(self, data: bytes) -> None:
        self.packets.append(data)
        try:
            if self.react is not None:
                self.react(data)
        finally:
            self.noticed()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.lost.append(reason)
        self.noticed()

    def when(self, condition: Callable[[], object]) -> Deferred[None]:
        """Return a Deferred that fires with the first call after which the condition holds."""
        deferred: Deferred[None] = Deferred()
        if condition():
            deferred.callback(None)
        else:
            self._waiting.append((condition, deferred))
        return deferred

    def whenLost(self) -> Deferred[None]:
        """Return a Deferred that fires when the connection is lost."""
        return self.when(lambda: self.lost)

    def whenCount(self, count: int) -> Deferred[None]:
        """Return a Deferred that fires when `count` packets have come."""
        return self.when(lambda: len(self.packets) >= count)

    def noticed(self) -> None:
        """Fire the Deferreds whose condition holds now."""
        for waiting in tuple(self._waiting):
            if waiting[0]() and waiting in self._waiting:
                self._waiting.remove(waiting)
                self.call_soon(waiting[1].callback, None)


@implementer(IPacketReceiver)
class BatchRecorder(Recorder):
    """A recorder that takes batches.

    :ivar batches: the number of packets that ``packetsReceived`` got, call by call.
    :ivar room: packets that it takes before it pauses the transport; None for any number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []
        self.room: int | None = None

    def packetsReceived(self, packets: list[bytes]) -> int:
        self.batches.append(len(packets))
        taken = packets[: self.room]
        if self.room is not None:
            self.room -= len(taken)
            if not self.room:
                self.transport.pauseProducing()
        self.packets += taken
        self.noticed()
        return len(taken)


@implementer(interfaces.IHalfCloseableProtocol)
class HalfRecorder(Recorder):
    """A recorder of half-closed connections.

    :ivar halves: which ends were lost, in order: "read", "write".
    """

    def __init__(self, react: Callable[[bytes], object] | None = None) -> None:
        super().__init__(react)
        self.halves: list[str] = []

    def whenHalf(self) -> Deferred[None]:
        """Return a Deferred that fires when one end is lost."""
        return self.when(lambda: self.halves)

    def readConnectionLost(self) -> None:
        self.halves.append("read")
        self.noticed()

    def writeConnectionLost(self) -> None:
        self.halves.append("write")
        self.noticed()


# --- a reactor that a test turns ----------------------------------------------------------------


class HandTurnedReactor(MemoryReactorClock):
    """A reactor that looks at sockets, and whose time passes, only when a test says so."""

    def turn(self, times: int = 1) -> None:
        """Turn the reactor: make the calls that are due, then read what is readable.

        Calls that are scheduled meanwhile, if only by 0 seconds, wait for the next turn, as with real reactors
        (`Clock.advance` would make them at once).
        """
        for _ in range(times):
            due: list[Any] = [call for call in self.getDelayedCalls() if call.getTime() <= self.seconds()]
            for call in due:
                if call.active():
                    self.calls.remove(call)
                    call.called = 1
                    call.func(*call.args, **call.kw)
            for reader in self.getReaders():
                if is_readable(reader, 0):
                    reader.doRead()

    def settle(self) -> None:
        """Turn until no work is left that is due now."""
        self.turn(8)


# --- real reactors ------------------------------------------------------------------------------


@implementer(interfaces.IReadDescriptor)
class _Readable:
    """Waits for a raw socket with the reactor itself, apart from the code under test."""

    def __init__(self, reactor: Any, sock: socket.socket) -> None:
        self._reactor = reactor
        self._sock = sock
        self.ready: Deferred[None] = Deferred()
        reactor.addReader(self)

    def fileno(self) -> int:
        return self._sock.fileno()

    def doRead(self) -> None:
        self._reactor.removeReader(self)
        ready, self.ready = self.ready, Deferred()
        ready.callback(None)

    def connectionLost(self, reason: Failure) -> None:
        """Fire too: a poll reactor reports a hang-up like this, and a raw socket learns it by reading."""
        self.doRead()

    def logPrefix(self) -> str:
        return "a raw peer"


@implementer(interfaces.IWriteDescriptor)
class _Writable(_Readable):
    """The same for writing."""

    def __init__(self, reactor: Any, sock: socket.socket) -> None:
        self._reactor = reactor
        self._sock = sock
        self.ready = Deferred()
        reactor.addWriter(self)

    def doRead(self) -> None:
        self._reactor.removeWriter(self)
        ready, self.ready = self.ready, Deferred()
        ready.callback(None)

    doWrite = doRead


if TYPE_CHECKING:

    class _Base(ReactorBuilder, SynchronousTestCase):
        """The base of the test cases that `makeTestCaseClasses` makes."""
else:
    _Base = ReactorBuilder


def AsyncioSelectorReactor(case: Any) -> Any:
    """Return an asyncio reactor with its own loop (called as a method of the test)."""
    loop = asyncio.new_event_loop()
    case.addCleanup(loop.close)
    return asyncioreactor.AsyncioSelectorReactor(loop)


class PacketReactorBuilder(_Base):
    """The base of tests that run on every reactor; each test method is ``async`` and decorated with `in_reactor`.

    After each test its connections are closed. Each protocol must have had exactly one ``connectionLost``, and neither
    a descriptor nor a reader in the reactor may be left.
    """

    _reactors = [
        "twisted.internet.epollreactor.EPollReactor",
        "twisted.internet.pollreactor.PollReactor",
        "twisted.internet.selectreactor.SelectReactor",
        "tests.support.reactors.AsyncioSelectorReactor",
    ]

    reactor: Any

    def setUp(self) -> None:
        super().setUp()
        self._protocols: list[Recorder] = []
        self._sockets: list[socket.socket] = []
        self.path = new_socket_directory()
        self.addCleanup(shutil.rmtree, self.path)

    def buildReactor(self) -> Any:
        """Build the reactor; all four must be available."""
        try:
            return super().buildReactor()
        except SkipTest as why:
            raise AssertionError(f"the reactor cannot be built: {why}") from why

    def connect(
        self,
        protocol: Recorder,
        max_packet: int = DEFAULT_MAX_PACKET,
        transport_class: type[PacketTransport] = PacketTransport,
    ) -> socket.socket:
        """Give a protocol a connection; returns the raw socket at the other end."""
        ours, peer = socket_pair()
        self._sockets.append(peer)
        self.watch(protocol)
        transport_class(self.reactor, ours, max_packet).start(protocol)
        return peer

    def watch(self, protocol: Recorder) -> Recorder:
        """Close a protocol that was connected in another way after the test, too."""
        protocol.call_soon = lambda call, *args: self.reactor.callLater(0, call, *args)
        self._protocols.append(protocol)
        return protocol

    def readable(self, peer: socket.socket) -> Deferred[None]:
        """Return a Deferred that fires when a raw socket is readable."""
        return _Readable(self.reactor, peer).ready

    def writable(self, peer: socket.socket) -> Deferred[None]:
        """Return a Deferred that fires when a raw socket is writable."""
        return _Writable(self.reactor, peer).ready

    def turns(self, count: int = 1) -> Deferred[None]:
        """Return a Deferred that fires after `count` turns of the reactor."""
        deferred: Deferred[None] = Deferred()

        def turn(left: int) -> None:
            if left:
                self.reactor.callLater(0, turn, left - 1)
            else:
                deferred.callback(None)

        turn(count)
        return deferred

    async def send(self, peer: socket.socket, *packets: bytes) -> None:
        """Send packets from a raw socket, and wait when it is full."""
        for packet in packets:
            while True:
                try:
                    peer.send(packet)
                    break
                except BlockingIOError:
                    await self.writable(peer)

    async def receive(self, peer: socket.socket, count: int) -> list[bytes]:
        """Receive `count` packets at a raw socket; end of file counts as an empty one."""
        packets: list[bytes] = []
        while len(packets) < count:
            try:
                packets.append(peer.recv(1 << 20))
            except BlockingIOError:
                await self.readable(peer)
        return packets

    async def tidyUp(self) -> None:
        """Close what is still open, and check that each protocol had one ``connectionLost``."""
        for sock in self._sockets:
            sock.close()
        for protocol in self._protocols:
            if not protocol.lost:
                protocol.transport.abortConnection()
                await protocol.whenLost()
        losses = [len(protocol.lost) for protocol in self._protocols]
        assert losses == [1] * len(losses), f"connectionLost was called {losses} times"
        multiplexers = [reader for reader in self.reactor.getReaders() if isinstance(reader, Multiplexer)]
        assert not multiplexers, "a multiplexer without sockets is still in the reactor"


def in_reactor(test: Callable[[Any], Coroutine[Any, Any, None]]) -> Callable[[Any], None]:
    """Run an ``async`` test method of a `PacketReactorBuilder` inside its reactor."""

    @wraps(test)
    def run(self: PacketReactorBuilder) -> None:
        self.reactor = self.buildReactor()
        outcome: list[Any] = []

        async def play() -> None:
            before = descriptors()
            try:
                await test(self)
            finally:
                await self.tidyUp()
            left = descriptors().items() - before.items()
            assert not left, f"descriptors were left open: {left}"

        def start() -> None:
            Deferred.fromCoroutine(play()).addBoth(outcome.append).addBoth(lambda _: self.reactor.stop())

        self.reactor.callWhenRunning(start)
        self.runReactor(self.reactor, timeout=TIMEOUT)
        if isinstance(outcome[0], Failure):
            outcome[0].raiseException()

    return run


def each_reactor(*cases: type[PacketReactorBuilder], is_quick: bool = False) -> dict[str, Any]:
    """Return the tests of some cases, by name, on every reactor.

    :param is_quick: whether quick runs use all reactors for them; otherwise they use only epoll, like twistd.
    """
    made = [item for case in cases for item in case.makeTestCaseClasses().items()]
    return {name: test if is_quick or "EPoll" in name else pytest.mark.slow(test) for name, test in made}
