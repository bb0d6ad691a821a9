"""Closing in other threads what may take long to close."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from sbus.flood import PayloadShare
from sbus.server.core.users import Users
from sbus.syscalls.elsewhere import Closing
from sbus.syscalls.polling import is_readable
from tests.support.reactors import Recorder
from tests.support.transports import World
from tests.support.waiting import wait_until


def threads() -> int:
    """Return the number of threads of this process."""
    return len(os.listdir("/proc/self/task"))


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What calls can wait for; it opens at the end."""
    made, before = threading.Event(), threads()
    yield made
    made.set()
    wait_until(threads, lambda count: count <= before)


def test_the_calls_of_one_user_hold_up_nobody_else(gate: threading.Event) -> None:
    """However many calls of a user wait, those of others are made, in order, and so are those behind failures."""
    made: list[int] = []
    done = threading.Event()

    def fail() -> None:
        raise OSError

    def fail_again() -> None:
        raise MemoryError

    slow, quick = Closing(), Closing()
    for _ in range(100):
        slow.close(gate.wait)
    quick.close(fail)
    quick.close(fail_again)
    for number in range(100):
        quick.close(lambda number=number: made.append(number))  # type: ignore[misc]
    quick.close(done.set)
    assert done.wait(20)
    assert made == list(range(100))


def test_many_users_have_few_threads(gate: threading.Event) -> None:
    """Users who hold up all threads hold up those who close something, later, and nobody who frees memory."""
    started, done, freed = threading.Semaphore(0), threading.Event(), threading.Event()

    def wait() -> None:
        started.release()
        gate.wait()

    hostile = [Closing() for _ in range(100)]
    for closing in hostile:
        closing.close(wait)
    for _ in range(64):
        assert started.acquire(timeout=20)
    late = Closing()
    late.close(done.set)
    late.free(freed.set)
    assert freed.wait(20)
    assert not done.is_set()
    assert not started.acquire(blocking=False)
    gate.set()
    assert done.wait(20)


def test_users_take_turns(gate: threading.Event) -> None:
    """One user's memory is freed in turns with that of the others, however much of it waits."""
    made: list[str] = []
    done = threading.Event()
    closings = {name: Closing() for name in "abc"}
    closings["a"].free(gate.wait)
    for name, closing in closings.items():
        for _ in range(3):
            closing.free(lambda name=name: made.append(name))  # type: ignore[misc]
    closings["a"].free(done.set)
    gate.set()
    assert done.wait(20)
    assert "".join(made[:6]) == "bcabca"


def test_a_failure_is_its_own(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a call that raises what no close raises, the others of the line are made."""
    failures: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", failures.append)
    closing, done = Closing(), threading.Event()

    def fail() -> None:
        raise ValueError

    closing.free(fail)
    closing.free(done.set)
    assert done.wait(20)
    assert len(failures) == 1


def test_a_child_leaves_the_calls_of_its_parent(gate: threading.Event) -> None:
    """After fork(2), the numbers of descriptors may mean other files."""
    closing = Closing()
    closing.close(gate.wait)
    closing.close(lambda: os._exit(1))
    pid = os.fork()
    if not pid:
        done = threading.Event()
        closing.close(done.set)
        os._exit(0 if done.wait(20) else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert closing._closing is not None
    closing._closing.calls.clear()  # else they end this process


def test_what_waits_outlives_the_connections_of_its_user(gate: threading.Event) -> None:
    """A user who leaves and comes back must not have as many calls again, and again."""
    users = Users(1 << 20)
    user = users.connect(1000)
    for _ in range(300):
        user.payloads.close(gate.wait)
    users.disconnect(user)
    users.forget(user)
    del user
    assert users.connect(1000).payloads.is_overrun()


def test_a_thread_ends_with_its_calls_and_another_one_begins(gate: threading.Event) -> None:
    """No thread waits for calls that may come."""
    before, closing = threads(), Closing()
    for _ in range(3):
        done = threading.Event()
        closing.close(done.set)
        assert done.wait(20)
        wait_until(threads, lambda count: count <= before)


def test_nothing_is_read_from_a_user_with_many_descriptors_to_close(gate: threading.Event) -> None:
    """A transport that passes descriptors waits while hundreds of calls of its user wait; others are read as ever."""
    world = World()
    recorders = Recorder(), Recorder()
    sockets = [world.connect(recorder) for recorder in recorders]
    passing, _ = world.transports
    share = PayloadShare()
    assert passing.pass_payloads(True, share)
    for _ in range(300):
        share.close(gate.wait)
    assert share.is_overrun()
    for sock in sockets:
        sock.send(b"packet")
    world.turn()
    assert [recorder.packets for recorder in recorders] == [[], [b"packet"]]
    gate.set()
    wait_until(share.is_overrun, lambda overrun: not overrun)
    world.reactor.advance(0.06)
    world.turn()
    assert recorders[0].packets == [b"packet"]
    world.close()


def test_sockets_that_wait_to_be_closed_are_bounded(gate: threading.Event) -> None:
    """A user whose descriptors take long to close gets none on more connections: each would leave a socket to close."""
    world, share = World(), PayloadShare()
    share.close(gate.wait)
    ended = 0
    while ended < 400:
        peer = world.connect(Recorder())
        if not world.transports[-1].pass_payloads(True, share):
            break
        socket.send_fds(peer, [b"packet"], [0])
        world.transports[-1].abortConnection()
        world.settle()
        peer.close()
        ended += 1
    assert 200 < ended < 300
    world.close()


def test_what_came_before_the_end_of_payloads_is_closed_elsewhere(gate: threading.Event) -> None:
    """Also if it is read behind the end: the kernel would close it at once, which may take long."""
    world, share, recorder = World(), PayloadShare(), Recorder()
    peer = world.connect(recorder)
    (transport,) = world.transports
    assert transport.pass_payloads(True, share)
    share.close(gate.wait)
    reading, writing = os.pipe()
    with open(reading, "rb") as pipe:
        socket.send_fds(peer, [b"packet"], [writing])
        os.close(writing)
        assert transport.pass_payloads(False, share)
        world.settle()
        recorder.packets.clear()
        assert not is_readable(pipe, 0)
        gate.set()
        assert is_readable(pipe, 20)
    world.close()


def test_a_socket_is_not_looked_at_while_calls_of_its_user_wait(gate: threading.Event) -> None:
    """Also not if its protocol resumes, or reads on, meanwhile: the kernel would report the same packet for ever."""
    world, share = World(), PayloadShare()
    sock = world.connect(Recorder())
    (transport,) = world.transports
    assert transport.pass_payloads(True, share)
    for _ in range(300):
        share.close(gate.wait)
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
    closing, done = Closing(), threading.Event()

    def refuse(*args: object) -> int:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("_thread.start_new_thread", refuse)
        for _ in range(300):
            closing.close(lambda: None)
        closing.close(done.set)
        assert closing.is_overrun()
    wait_until(closing.is_overrun, lambda overrun: not overrun)
    assert done.wait(20)
