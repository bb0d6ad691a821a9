"""Closing in other threads what may take long to close."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from sbus.syscalls.elsewhere import do_elsewhere, is_behind, is_overrun
from tests.support.reactors import Recorder
from tests.support.transports import World
from tests.support.waiting import wait_until

SLOW, QUICK = -2, -3
"""Users that do not exist."""


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What calls can wait for; it opens at the end."""
    made = threading.Event()
    yield made
    made.set()
    wait_until(is_behind, lambda behind: not behind)


def test_the_calls_of_one_user_hold_up_nobody_else(gate: threading.Event) -> None:
    """However many calls of a user wait, those of others are made, in order, and so are those behind failures."""
    made: list[int] = []
    done = threading.Event()

    def fail() -> None:
        raise OSError

    def fail_again() -> None:
        raise MemoryError

    for _ in range(100):
        do_elsewhere(gate.wait, SLOW)
    do_elsewhere(fail, QUICK)
    do_elsewhere(fail_again, QUICK)
    for number in range(100):
        do_elsewhere(lambda number=number: made.append(number), QUICK)  # type: ignore[misc]
    do_elsewhere(done.set, QUICK)
    assert done.wait(20)
    assert made == list(range(100))
    assert not is_behind()


def test_a_thread_ends_with_its_calls_and_another_one_begins(gate: threading.Event) -> None:
    """No thread waits for calls that may come."""
    before = len(os.listdir("/proc/self/task"))
    for _ in range(3):
        done = threading.Event()
        do_elsewhere(done.set, QUICK)
        assert done.wait(20)
        wait_until(lambda: len(os.listdir("/proc/self/task")), lambda count: count <= before)


def test_nothing_is_read_from_a_user_with_many_descriptors_to_close(gate: threading.Event) -> None:
    """A transport that passes descriptors waits while hundreds of calls of its user wait; others are read as ever."""
    world = World()
    recorders = Recorder(), Recorder()
    sockets = [world.connect(recorder) for recorder in recorders]
    passing, _ = world.transports
    user = SLOW
    assert passing.pass_payloads(True, user)
    for _ in range(300):
        do_elsewhere(gate.wait, user)
    assert is_overrun(user)
    for sock in sockets:
        sock.send(b"packet")
    world.turn()
    assert [recorder.packets for recorder in recorders] == [[], [b"packet"]]
    gate.set()
    wait_until(lambda: is_overrun(user), lambda overrun: not overrun)
    world.reactor.advance(0.06)
    world.turn()
    assert recorders[0].packets == [b"packet"]
    world.close()


def test_a_socket_is_not_looked_at_while_calls_of_its_user_wait(gate: threading.Event) -> None:
    """Also not if its protocol resumes, or reads on, meanwhile: the kernel would report the same packet for ever."""
    world, user = World(), SLOW
    sock = world.connect(Recorder())
    (transport,) = world.transports
    assert transport.pass_payloads(True, user)
    for _ in range(300):
        do_elsewhere(gate.wait, user)
    sock.send(b"packet")
    looks: list[None] = []
    transport.start_bundling(1 << 16)  # so that each read is announced
    transport.before_read = lambda: looks.append(None)
    for resume in (transport.resumeProducing, transport.read_on):
        transport.pauseProducing()
        resume()
        for _ in range(10):
            world.turn()
    assert len(looks) <= 4
    world.close()


def test_a_line_without_a_thread_gets_one_when_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that were made while the kernel had no thread left are made later, though nothing is read meanwhile."""
    user, done = -5, threading.Event()

    def refuse(*args: object) -> int:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("_thread.start_new_thread", refuse)
        for _ in range(300):
            do_elsewhere(lambda: None, user)
        do_elsewhere(done.set, user)
        assert is_overrun(user)
    wait_until(lambda: is_overrun(user), lambda overrun: not overrun)
    assert done.wait(20)
