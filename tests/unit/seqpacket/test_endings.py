"""Closing a transport in any order of events, out of any callback: real sockets, a reactor that the test turns."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from twisted.internet.interfaces import IHalfCloseableProtocol
from twisted.internet.protocol import Protocol, connectionDone
from twisted.logger import ILogObserver, LogEvent, globalLogPublisher
from twisted.python.failure import Failure
from zope.interface import implementer

from sbus.interfaces import IPacketReceiver
from sbus.seqpacket.multiplexer import RETRY
from sbus.syscalls.sockets import LARGEST_SEND_BUFFER, grow_send_buffer
from tests.support.examples import examples
from tests.support.reactors import received
from tests.support.transports import World, numbered

BYE = b"bye"
PATIENCE = 5.0


class Planned(Exception):
    """An error of a protocol, a producer or a farewell."""


class Side:
    """A connection: its protocol and its producer, which act out of their callbacks as planned; and its peer.

    :ivar plans: the name of the next action, by callback.
    :ivar written: the packets that the transport has accepted, in order.
    :ivar is_orderly: nothing has happened that may cost accepted packets.
    """

    transport: Any

    def __init__(self, machine: Endings, kind: type[_Protocol], is_stream: bool) -> None:
        self.machine = machine
        self.plans: dict[str, tuple[str, Side]] = {}
        self.sent: list[bytes] = []
        self.written: list[bytes] = []
        self.packets: list[bytes] = []
        self.read: list[bytes] = []
        self.events: list[str] = []
        self.producer: _Producer | None = None
        self.faults = 0
        self.is_orderly = True
        self.is_draining = self.is_closing = self.is_paused = False
        self.has_ended = self.has_left = False
        self.is_half = kind in (_Half, _HalfBatch)
        connect: Any = machine.world.connect_stream if is_stream else machine.world.connect
        self.peer = connect(kind(self))
        self._send = self.transport.send_batch
        self.transport.send_batch = self._send_or_fail

    def _send_or_fail(self, packets: list[bytes]) -> int:
        if self.faults:
            self.faults -= 1
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
        sent: int = self._send(packets)
        return sent

    @property
    def is_lost(self) -> bool:
        return "connectionLost" in self.events

    def called(self, name: str, is_nested: bool = False) -> None:
        """Note a callback; act as planned.

        :param is_nested: whether it may come inside another callback, or inside a call of the transport.
        """
        self.machine.expect(not self.is_lost, f"{name} after connectionLost")
        self.machine.expect(is_nested or not self.machine.busy, f"{name} inside {self.machine.busy}")
        if name.endswith("ConnectionLost"):
            self.machine.expect(name not in self.events, f"a second {name}")
        self.events.append(name)
        action, target = self.plans.pop(name, ("", self))
        with self.machine.inside(name):
            if action:
                target.do(action)

    def do(self, action: str) -> None:
        getattr(self, action)()

    # --- actions of the protocol -----------------------------------------------------------------

    def write(self) -> None:
        size = len(self.written)
        if not (self.is_draining or self.is_closing) or self.producer is not None:
            self.written += numbered(1, size)
        self.transport.write(b"%04d" % size)

    def write_much(self) -> None:
        for _ in range(300):
            packet = b"%04d" % len(self.written) + bytes(900)
            if not (self.is_draining or self.is_closing) or self.producer is not None:
                self.written.append(packet)
            self.transport.write(packet)

    def flush(self) -> None:
        self.transport.flush()

    def pause(self) -> None:
        self.is_paused = True
        self.transport.pauseProducing()

    def resume(self) -> None:
        self.is_paused = False
        self.transport.resumeProducing()

    def lose(self) -> None:
        self.is_closing = True
        self.transport.loseConnection()

    def lose_writing(self) -> None:
        self.is_draining = True
        self.transport.loseWriteConnection()

    def abort(self) -> None:
        self.is_orderly, self.is_closing = False, True
        self.transport.abortConnection()

    def depart(self) -> None:
        self.is_orderly, self.is_closing = False, True
        self.transport.close_gracefully(self._farewell, 0.0, 1 << 20)

    def depart_late(self) -> None:
        self.is_orderly, self.is_closing = False, True
        self.transport.close_gracefully(self._farewell, PATIENCE, 1 << 20)

    def _farewell(self) -> list[bytes]:
        self.called("farewell")
        return [BYE]

    def push(self) -> None:
        self._register(True)

    def pull(self) -> None:
        self._register(False)

    def _register(self, streaming: bool) -> None:
        if self.producer is None:
            if self.is_lost:
                producer = mock.Mock()
                self.transport.registerProducer(producer, streaming)
                assert producer.mock_calls == [mock.call.stopProducing()]
                return
            self.producer = _Producer(self)
            self.transport.registerProducer(self.producer, streaming)

    def unregister(self) -> None:
        self.producer = None
        self.transport.unregisterProducer()

    def fail(self) -> None:
        self.is_orderly, self.is_closing = False, True
        raise Planned

    def leave(self) -> None:
        self.is_orderly, self.is_closing = False, True
        raise SystemExit


class _Producer:
    def __init__(self, side: Side) -> None:
        self._side = side

    def _called(self, name: str) -> None:
        self._side.machine.expect(self._side.producer is self, f"{name} of a producer that has ended")
        if name == "stopProducing":
            self._side.producer = None
        self._side.called(name, True)

    def pauseProducing(self) -> None:
        self._called("pauseProducing")

    def resumeProducing(self) -> None:
        self._called("resumeProducing")

    def stopProducing(self) -> None:
        self._called("stopProducing")


class _Protocol(Protocol):
    def __init__(self, side: Side) -> None:
        self.side = side

    def connectionMade(self) -> None:
        self.side.transport = self.transport

    def dataReceived(self, data: bytes) -> None:
        side = self.side
        side.machine.expect(not (side.is_paused or side.is_closing), "a packet though paused or closing")
        side.packets.append(data)
        side.called("dataReceived")

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.side.machine.expect(not self.side.machine.is_reading_on, "connectionLost inside read_on")
        self.side.called("connectionLost")
        self.side.machine.expect(self.side.producer is None, "a producer outlives its connection")


@implementer(IPacketReceiver)
class _Batch(_Protocol):
    def packetsReceived(self, packets: list[bytes]) -> int:
        for taken, packet in enumerate(packets):
            if self.side.is_paused or self.side.is_closing:
                return taken
            self.dataReceived(packet)
        return len(packets)


@implementer(IHalfCloseableProtocol)
class _Half(_Protocol):
    def readConnectionLost(self) -> None:
        self.side.called("readConnectionLost")

    def writeConnectionLost(self) -> None:
        self.side.called("writeConnectionLost")


class _HalfBatch(_Half, _Batch):
    pass


CALLBACKS = [
    "dataReceived",
    "readConnectionLost",
    "writeConnectionLost",
    "connectionLost",
    "farewell",
    "pauseProducing",
    "resumeProducing",
    "stopProducing",
]
ACTIONS = [
    "write",
    "write_much",
    "flush",
    "pause",
    "resume",
    "lose",
    "lose_writing",
    "abort",
    "depart",
    "depart_late",
    "push",
    "pull",
    "unregister",
]
RAISING = ["fail", "leave"]
which = st.integers(0, 1)


@implementer(ILogObserver)
class Endings(RuleBasedStateMachine):
    """Two connections act, on themselves and on each other, inside and outside of callbacks, and their peers end."""

    @initialize(
        kinds=st.lists(st.sampled_from([_Protocol, _Batch, _Half, _HalfBatch]), min_size=2, max_size=2),
        is_stream=st.booleans(),
    )
    def begin(self, kinds: list[type[_Protocol]], is_stream: bool) -> None:
        self.world = World()
        self.busy: list[str] = []
        self.is_reading_on = False
        self.broken: list[str] = []
        globalLogPublisher.addObserver(self)
        self.sides = [Side(self, kind, is_stream) for kind in kinds]

    def __call__(self, event: LogEvent) -> None:
        failure = event.get("log_failure")
        self.expect(failure is None or failure.check(Planned, SystemExit), f"logged: {failure}")

    def expect(self, condition: object, text: str) -> None:
        """Note a broken promise: in a callback, the transport would take it for an error of its protocol."""
        if not condition:
            self.broken.append(text)

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        self.busy.append(name)
        try:
            yield
        finally:
            self.busy.pop()

    @rule(callback=st.sampled_from(CALLBACKS), action=st.sampled_from([*ACTIONS, *RAISING]), who=which, whom=which)
    def plan(self, callback: str, action: str, who: int, whom: int) -> None:
        """Have a callback do something to its own connection or to the other one."""
        if action in RAISING and (callback == "pauseProducing" or who != whom):
            return  # `write` raises that, out of whatever has called it
        self.sides[who].plans[callback] = action, self.sides[whom]

    @rule(action=st.sampled_from(ACTIONS), who=which)
    def act(self, action: str, who: int) -> None:
        """Do something outside of all callbacks."""
        with self.inside(action):
            try:
                self.sides[who].do(action)
            except (Planned, SystemExit):
                self.sides[who].transport.abortConnection()

    @rule(who=which)
    def read_on(self, who: int) -> None:
        self.sides[who].is_paused = False
        self.is_reading_on = True
        self.sides[who].transport.read_on()
        self.is_reading_on = False

    @rule(count=st.integers(1, 3), who=which)
    def lack_memory(self, count: int, who: int) -> None:
        self.sides[who].faults = count

    @rule(count=st.integers(1, 100), who=which)
    def send(self, count: int, who: int) -> None:
        side = self.sides[who]
        if side.has_ended:
            return
        for packet in numbered(count, len(side.sent)):
            try:
                side.peer.send(packet)
            except OSError:
                break
            side.sent.append(packet)

    @rule(who=which, is_gone=st.booleans())
    def end(self, who: int, is_gone: bool) -> None:
        """Have a peer send no more, or close."""
        side = self.sides[who]
        if side.has_left:
            return
        self._receive(side)
        if not side.is_closing and not side.is_half:
            side.is_orderly = False
        side.has_ended = True
        if is_gone:
            side.is_orderly, side.has_left = False, True
            side.peer.close()
        else:
            side.peer.shutdown(socket.SHUT_WR)

    @rule(who=which)
    def stop_reading(self, who: int) -> None:
        side = self.sides[who]
        if not side.has_left:
            self._receive(side)
            side.is_orderly = False
            side.peer.shutdown(socket.SHUT_RD)

    @rule(who=which)
    def receive(self, who: int) -> None:
        self._receive(self.sides[who])

    def _receive(self, side: Side) -> None:
        if not side.has_left and b"" not in side.read:
            side.read += received(side.peer)

    @rule(time=st.sampled_from([0, 0, RETRY, PATIENCE]), turns=st.integers(1, 2))
    def turn(self, time: float, turns: int) -> None:
        self.world.reactor.advance(time)
        self.world.turn(turns)

    @invariant()
    def keeps_its_promises(self) -> None:
        if not hasattr(self, "sides"):
            return
        assert self.broken == []
        for side in self.sides:
            assert side.packets == side.sent[: len(side.packets)]
            read = [packet for packet in side.read if packet]
            if read[-1:] == [BYE]:
                del read[-1]
            assert read == side.written[: len(read)]

    def teardown(self) -> None:
        if not hasattr(self, "sides"):
            return
        try:
            for side in self.sides:
                side.plans.clear()
                if side.producer is not None:
                    side.unregister()
                side.resume()
            quiet = 0
            while quiet < 4:  # there may be three errors on the way
                before = [len(side.read) for side in self.sides]
                self.world.reactor.advance(RETRY)
                self.world.settle()
                for side in self.sides:
                    self._receive(side)
                quiet = quiet + 1 if before == [len(side.read) for side in self.sides] else 0
            self.world.reactor.advance(PATIENCE)
            self.world.settle()
            self.keeps_its_promises()
            for side in self.sides:
                self._check(side)
            self.world.close()
            self.keeps_its_promises()
            for side in self.sides:
                assert side.is_lost
                assert side.transport.fileno() == -1
        finally:
            globalLogPublisher.removeObserver(self)

    def _check(self, side: Side) -> None:
        """Check that a connection has ended only with a cause, and that nothing is missing."""
        if not side.is_closing:
            assert side.packets == side.sent
        else:
            assert side.is_lost
        if side.is_orderly:
            assert [packet for packet in side.read if packet] == side.written
            assert (b"" in side.read) == (side.is_closing or side.is_draining)
            assert side.is_lost == (side.is_closing or (side.has_ended and side.is_draining))


TestEndings = Endings.TestCase
TestEndings.settings = settings(max_examples=examples(200), stateful_step_count=30, deadline=None)


# --- single orders of events ------------------------------------------------------------------------


def _begun(kind: type[_Protocol]) -> tuple[Endings, Side, Side]:
    machine = Endings()
    machine.begin([kind, kind], False)
    one, other = machine.sides
    return machine, one, other


def test_a_flush_ends_no_connection():
    """A protocol may flush a connection that takes its leave, as for a late receiver: it is lost soon, but not inside.

    Else a protocol that iterates over receivers would lose one meanwhile.
    """
    machine, leaving, other = _begun(_Protocol)
    grow_send_buffer(leaving.transport.getHandle(), LARGEST_SEND_BUFFER)  # so that the farewell finds no room
    for _ in range(4):
        leaving.write_much()
    machine.turn(0, 2)
    leaving.depart_late()
    machine.turn(0, 2)
    assert not leaving.is_lost
    leaving.transport._poll(0)  # the other one is served first
    machine.receive(0)
    machine.plan("dataReceived", "flush", 1, 0)
    machine.send(1, 1)
    machine.turn(0, 2)
    assert other.packets
    assert leaving.is_lost
    machine.keeps_its_promises()
    machine.teardown()


def test_a_producer_that_has_left_is_not_stopped():
    """A producer that is unregistered once the peer reads no more is not stopped after that."""
    machine, side, _ = _begun(_Half)
    side.push()
    side.write()
    machine.stop_reading(0)
    side.flush()
    side.unregister()
    machine.turn(0, 2)
    assert side.events == ["writeConnectionLost"]
    machine.keeps_its_promises()
    machine.teardown()


def test_a_producer_is_stopped_before_the_loss():
    """A producer is stopped before its connection is lost, also if another connection is being closed by then."""
    machine, side, other = _begun(_Protocol)
    side.push()
    other.abort()
    side.lose()
    side.write()
    machine.end(0, True)
    side.flush()
    machine.turn(0, 2)
    assert side.events == ["stopProducing", "connectionLost"]
    machine.teardown()


def test_a_socket_that_the_kernel_does_not_watch_again():
    """If a paused socket cannot come back into the epoll set, its connection is lost with the kernel's error."""
    machine, side, _ = _begun(_Protocol)
    side.pause()
    machine.send(1, 0)
    machine.end(0, True)
    machine.turn(0, 2)
    multiplexer = side.transport._multiplexer
    epoll, multiplexer._epoll = multiplexer._epoll, mock.Mock(wraps=multiplexer._epoll)
    multiplexer._epoll.register.side_effect = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # max_user_watches
    side.resume()
    machine.turn(0, 2)
    multiplexer._epoll = epoll
    assert side.is_lost
    (logged,) = machine.broken
    assert "No space left" in logged
    machine.broken.clear()
    side.is_closing = True
    machine.teardown()
