"""Pausing and resuming a transport in any order of events: real sockets, a reactor that the test turns."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sbus.seqpacket.multiplexer import GONE, READ, RETRY
from sbus.syscalls.batch import BATCH
from tests.support.examples import examples
from tests.support.reactors import BatchRecorder, HalfRecorder, Recorder, received
from tests.support.transports import World, numbered


class HalfBatchRecorder(BatchRecorder, HalfRecorder):
    """A recorder that takes batches, on a connection that closes half by half."""


class Faulty:
    """A reader for which the kernel has no memory now and then.

    :ivar faults: the next reads that fail.
    """

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self.faults = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def read(self, sock: socket.socket, most: int) -> tuple[list[bytes], bool]:
        if self.faults:
            self.faults -= 1
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return self._reader.read(sock, most)


class Pauses(RuleBasedStateMachine):
    """A protocol pauses, resumes and reads on, while its peer sends, ends or leaves, and the kernel lacks memory."""

    @initialize(
        kind=st.sampled_from([Recorder, BatchRecorder, HalfRecorder, HalfBatchRecorder]), is_stream=st.booleans()
    )
    def begin(self, kind: type[Recorder], is_stream: bool) -> None:
        self.world = World()
        self.recorder = kind()
        connect: Any = self.world.connect_stream if is_stream else self.world.connect
        self.peer = connect(self.recorder)
        self.transport = self.recorder.transport
        self.reader = self.transport._reader = Faulty(self.transport._reader)
        self.transport.before_read = self._before_read
        self.refusals = 0
        self.sent: list[bytes] = []
        self.has_ended = self.has_left = False

    def _before_read(self) -> None:
        if self.refusals:
            self.refusals -= 1
            self.transport.pauseProducing()

    @precondition(lambda self: not self.has_ended)
    @rule(count=st.integers(1, 80))
    def send(self, count: int) -> None:
        for packet in numbered(count, len(self.sent)):
            try:
                self.peer.send(packet)
            except BlockingIOError:
                break
            self.sent.append(packet)

    @precondition(lambda self: not self.has_ended)
    @rule()
    def end(self) -> None:
        self.peer.shutdown(socket.SHUT_WR)
        self.has_ended = True

    @precondition(lambda self: not self.has_left)
    @rule()
    def leave(self) -> None:
        self.peer.close()
        self.has_ended = self.has_left = True

    @rule()
    def pause(self) -> None:
        self.transport.pauseProducing()

    @rule()
    def resume(self) -> None:
        self.transport.resumeProducing()

    @rule()
    def read_on(self) -> None:
        self.transport.read_on()

    @rule(count=st.integers(1, 70))
    def take(self, count: int) -> None:
        """Have the protocol pause once it has taken so many packets more."""
        recorder = self.recorder
        if isinstance(recorder, BatchRecorder):
            recorder.room = count
        else:
            last = len(recorder.packets) + count
            recorder.react = lambda _: len(recorder.packets) == last and self.transport.pauseProducing()

    @rule()
    def blink(self) -> None:
        """Have the protocol pause and resume with the next packet, whatever is due by then."""
        self.recorder.react = lambda _: (self.transport.pauseProducing(), self.transport.resumeProducing())

    @rule(count=st.integers(1, 3))
    def fail(self, count: int) -> None:
        self.reader.faults = count

    @rule(count=st.integers(1, 3))
    def refuse(self, count: int) -> None:
        """Have the protocol pause when it is asked before a read."""
        self.refusals = count

    @rule(count=st.integers(1, 300))
    def write(self, count: int) -> None:
        """Fill the socket, so that room in it is reported, too."""
        self.transport.writeSequence([bytes(900)] * count)

    @precondition(lambda self: not self.has_left)
    @rule()
    def receive(self) -> None:
        received(self.peer)

    @rule(time=st.sampled_from([0, RETRY]))
    def turn(self, time: float) -> None:
        self.world.reactor.advance(time)
        self.world.turn()

    @rule()
    def rest(self) -> None:
        """However it came to rest, paused or not, nothing is reported again and again."""
        self.world.settle()
        for reader in self.world.reactor.getReaders():
            assert reader._epoll.poll(0) == []

    @invariant()
    def is_in_order(self) -> None:
        if hasattr(self, "recorder"):
            assert self.recorder.packets == self.sent[: len(self.recorder.packets)]

    def teardown(self) -> None:
        if not hasattr(self, "recorder"):
            return
        recorder = self.recorder
        recorder.react = None
        if isinstance(recorder, BatchRecorder):
            recorder.room = None
        self.refusals = 0
        self.transport.resumeProducing()
        for _ in range(4 + self.reader.faults):
            self.rest()
            self.world.reactor.advance(RETRY)
        self.rest()
        assert recorder.packets == self.sent
        if isinstance(recorder, HalfRecorder) and self.has_ended and not self.has_left:
            assert (recorder.halves, recorder.lost) == (["read"], [])
        else:
            assert len(recorder.lost) == self.has_ended
        self.world.close()
        assert len(recorder.lost) == 1


TestPauses = Pauses.TestCase
TestPauses.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)


def _begun(sent: int) -> Pauses:
    machine = Pauses()
    machine.begin(BatchRecorder, False)
    machine.send(sent)
    return machine


@pytest.mark.parametrize("how", [Pauses.resume, Pauses.read_on])
def test_nothing_anticipates_a_retry(how):
    """A peer that leaves while the kernel has no memory is read after the retry, whatever the protocol did before.

    Else the socket, which is out of the epoll set until the retry, never came back.
    """
    machine = _begun(1)
    machine.fail(2)
    machine.turn(0)
    machine.pause()
    how(machine)
    machine.leave()
    machine.rest()
    assert machine.recorder.packets == []
    machine.teardown()


def test_a_hang_up_between_a_resume_and_its_read():
    """The peer may leave while a resume is due: its packets come all the same."""
    machine = _begun(3)
    machine.pause()
    machine.resume()
    machine.leave()
    machine.transport.ready(READ | GONE, True)
    machine.teardown()


def test_a_peer_that_has_gone_is_read_to_its_end_at_once():
    """What waits of a peer that has gone comes in the call that reads on, in as many batches as it takes."""
    machine = _begun(2 * BATCH + 1)
    machine.pause()
    machine.leave()
    machine.rest()
    machine.transport.read_on()
    assert machine.recorder.packets == machine.sent
    machine.teardown()


def test_a_pause_that_is_over_before_a_report_changes_nothing_in_the_epoll_set(monkeypatch):
    """A paused socket stays in the epoll set until it is reported: each change is a system call."""
    machine = _begun(1)
    machine.rest()
    changes: list[int] = []
    monkeypatch.setattr(machine.transport._multiplexer, "modify", lambda fd, events: changes.append(events))
    for _ in range(3):
        machine.pause()
        machine.send(1)
        machine.read_on()
        assert machine.recorder.packets == machine.sent
    assert changes == []
    machine.pause()
    machine.send(1)
    machine.turn(0)
    assert changes == [0]
    monkeypatch.undo()
    machine.teardown()
