"""The multiplexer: in the reactor while it has sockets, fair to all of them, and robust against their failures."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from twisted.internet import main
from twisted.internet.interfaces import IReadDescriptor
from twisted.logger import ILogObserver, LogEvent, globalLogPublisher
from twisted.python.failure import Failure
from zope.interface import implementer
from zope.interface.verify import verifyObject

from sbus.seqpacket.multiplexer import GONE, HANGUP, READ, RETRY, WRITE, Multiplexer
from sbus.seqpacket.transport import PacketTransport
from tests.support.descriptors import descriptors
from tests.support.reactors import HandTurnedReactor, Recorder, socket_pair


class Handler:
    """A socket in the multiplexer that records its calls.

    :ivar react: called when it is ready.
    """

    def __init__(self, multiplexer: Multiplexer, events: int = READ, name: str = "") -> None:
        self.multiplexer = multiplexer
        self.sock, self.peer = socket_pair()
        self.name = name
        self.events: list[int] = []
        self.exclusive: list[bool] = []
        self.failures: list[Failure] = []
        self.reasons: list[Failure] = []
        self.react: Callable[[], object] = lambda: None
        multiplexer.add(self.sock.fileno(), self, events)

    def ready(self, events: int, exclusive: bool) -> None:
        self.events.append(events)
        self.exclusive.append(exclusive)
        self.react()

    def failed(self, failure: Failure) -> None:
        self.failures.append(failure)

    def lost(self, reason: Failure) -> None:
        self.reasons.append(reason)
        self.close()

    def close(self) -> None:
        self.multiplexer.remove(self.sock.fileno())
        self.sock.close()
        self.peer.close()


@pytest.fixture
def reactor() -> HandTurnedReactor:
    return HandTurnedReactor()


@pytest.fixture
def multiplexer(reactor: HandTurnedReactor) -> Multiplexer:
    return Multiplexer.of(reactor)


@pytest.fixture
def handlers(multiplexer: Multiplexer) -> Iterator[Callable[..., Handler]]:
    """Makes handlers, and closes those that are left."""
    made: list[Handler] = []

    def make(**choices: Any) -> Handler:
        made.append(Handler(multiplexer, **choices))
        return made[-1]

    yield make
    for handler in made:
        if handler.sock.fileno() >= 0:
            handler.close()


@pytest.fixture
def logged() -> Iterator[list[LogEvent]]:
    """The failures that are logged during the test."""
    events: list[LogEvent] = []

    @implementer(ILogObserver)
    def observe(event: LogEvent) -> None:
        if "log_failure" in event:
            events.append(event)

    globalLogPublisher.addObserver(observe)
    yield events
    globalLogPublisher.removeObserver(observe)


# --- in the reactor, and out of it --------------------------------------------------------------


def test_in_the_reactor_while_it_has_sockets(reactor, multiplexer, handlers):
    """The multiplexer is in the reactor only while it has a socket."""
    assert reactor.getReaders() == []
    assert multiplexer.fileno() == -1
    one, two = handlers(), handlers()
    assert reactor.getReaders() == [multiplexer]
    assert os.readlink(f"/proc/self/fd/{multiplexer.fileno()}") == "anon_inode:[eventpoll]"
    one.close()
    assert reactor.getReaders() == [multiplexer]
    two.close()
    assert reactor.getReaders() == []
    assert multiplexer.fileno() == -1
    multiplexer.doRead()


def test_comes_back(reactor, multiplexer, handlers):
    """A multiplexer that was idle goes on with the next socket."""
    handlers().close()
    handler = handlers()
    handler.peer.send(b"one")
    reactor.turn()
    assert handler.events == [READ]


def test_no_descriptor_is_left(reactor):
    """A hundred starts and stops leave no descriptor open, and no buffers in the multiplexer."""
    before = descriptors()
    for _ in range(100):
        recorder = Recorder()
        ours, peer = socket_pair()
        PacketTransport(reactor, ours).start(recorder)
        peer.send(b"one")
        reactor.turn()
        peer.close()
        reactor.settle()
        assert recorder.lost
        assert recorder.packets == [b"one"]
    assert not descriptors().items() - before.items()
    assert reactor.getReaders() == []


def test_one_hub_a_reactor(reactor, multiplexer):
    """A reactor has one multiplexer, and shares it with no other."""
    other = HandTurnedReactor()
    assert Multiplexer.of(reactor) is multiplexer
    assert Multiplexer.of(other) is not multiplexer
    assert Multiplexer.of(other).reactor is other


def test_reactors_do_not_meet(handlers):
    """The turn of one reactor serves no socket of another's."""
    mine, yours = HandTurnedReactor(), HandTurnedReactor()
    one, two = Handler(Multiplexer.of(mine)), Handler(Multiplexer.of(yours))
    one.peer.send(b"one")
    two.peer.send(b"two")
    mine.turn()
    assert (one.events, two.events) == ([READ], [])
    yours.turn()
    assert (one.events, two.events) == ([READ], [READ])
    one.close()
    assert mine.getReaders() == []
    assert len(yours.getReaders()) == 1
    two.close()


def test_hub_goes_with_its_reactor():
    """Neither a reactor that is no longer used nor its multiplexer stays in memory."""
    reactor = HandTurnedReactor()
    Handler(Multiplexer.of(reactor)).close()
    gone = weakref.ref(reactor), weakref.ref(Multiplexer.of(reactor))
    del reactor
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_read_descriptor(multiplexer):
    """The multiplexer is a read descriptor, as the reactor expects."""
    verifyObject(IReadDescriptor, multiplexer)
    assert multiplexer.logPrefix() == "sbus"


# --- what is ready ------------------------------------------------------------------------------


def test_events(reactor, multiplexer, handlers):
    """A socket gets the events that it is watched for, and always a hang-up."""
    handler = handlers(events=WRITE)
    handler.peer.send(b"one")
    reactor.turn()
    assert handler.events == [WRITE]
    multiplexer.modify(handler.sock.fileno(), 0)
    reactor.turn()
    assert handler.events == [WRITE]
    multiplexer.modify(handler.sock.fileno(), READ)
    reactor.turn()
    assert handler.events == [WRITE, READ]
    multiplexer.modify(handler.sock.fileno(), 0)
    handler.peer.close()
    reactor.turn()
    assert handler.events[2] & HANGUP
    assert not handler.events[2] & (READ | WRITE)


def test_alone(reactor, handlers):
    """A socket learns whether it alone is ready."""
    one, two = handlers(), handlers()
    one.peer.send(b"one")
    reactor.turn()
    two.peer.send(b"two")
    reactor.turn()
    assert one.exclusive == [True, False]
    assert two.exclusive == [False]


def test_crowded(reactor, multiplexer, handlers):
    """Sockets are contended if more than one has packets to be read; a socket that is only writable does not count."""
    one, two = handlers(), handlers(events=WRITE)
    seen = []
    one.react = lambda: seen.append(multiplexer.contended)
    one.peer.send(b"one")
    reactor.turn()
    multiplexer.modify(two.sock.fileno(), READ)
    reactor.turn()
    two.peer.send(b"two")
    reactor.turn()
    assert seen == [False, False, True]


def test_so_many_a_turn(reactor, handlers):
    """A turn serves at most 64 sockets; those that are always ready are served in rotation."""
    many = [handlers() for _ in range(200)]
    for handler in many:
        handler.peer.send(b"one")
    reactor.turn()
    assert sum(len(handler.events) for handler in many) == 64
    reactor.turn(3)
    assert {len(handler.events) for handler in many} == {1, 2}


def test_looks_again_while_something_is_read(reactor, multiplexer, handlers):
    """A socket that becomes ready while others read is served in the same turn, and a turn has an end."""
    one, two, mute = handlers(), handlers(), handlers()

    def read():
        one.sock.recv(100)
        multiplexer.has_read = True
        two.peer.send(b"for two")

    one.react = read
    one.peer.send(b"one")
    reactor.turn()
    assert len(one.events) == len(two.events) == 1
    assert mute.events == []
    rounds = []

    def read_for_ever():
        rounds.append(multiplexer.pass_number)
        multiplexer.has_read = True

    two.react = read_for_ever
    reactor.turn()
    assert rounds == list(range(32))


@pytest.mark.parametrize(("seconds", "passes"), [(0.0, 32), (1 / 2048, 8), (1 / 8192, 8), (1 / 16384, 12), (1 / 32, 4)])
def test_many_passes_are_short(multiplexer, handlers, now, seconds, passes):
    """Eight passes have 5 ms, the ones that follow them half a millisecond; a socket alone has two for each look."""
    now[0] = 100.0
    handler = handlers()

    def read_for_ever():
        now[0] += seconds
        multiplexer.has_read = True

    handler.react = read_for_ever
    handler.peer.send(b"one")
    multiplexer.doRead()
    assert len(handler.events) == passes


def test_removed_in_the_same_turn(reactor, multiplexer, handlers):
    """A socket that another one removes in the same turn gets no more calls."""
    one, two = handlers(), handlers()
    one.react = two.close
    two.react = one.close
    one.peer.send(b"one")
    two.peer.send(b"two")
    reactor.turn()
    assert len(one.events) + len(two.events) == 1


def test_remove_all_in_a_turn(reactor, multiplexer, handlers):
    """A turn in which the last socket is removed ends well."""
    handler = handlers()
    handler.react = handler.close
    handler.peer.send(b"one")
    reactor.turn()
    assert reactor.getReaders() == []
    assert handler.failures == []


def test_remove_unknown(multiplexer, handlers):
    """Removing a socket that is not there does nothing."""
    handler = handlers()
    multiplexer.remove(handler.peer.fileno())
    handler.close()
    multiplexer.remove(0)


# --- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("exception", [ZeroDivisionError, SystemExit])
def test_failure_is_contained(reactor, handlers, logged, exception):
    """An exception in one socket is logged and passed to its handler; the others are served.

    That includes those for which the reactor would drop the multiplexer with all its sockets.
    """

    def fail():
        raise exception

    many = [handlers() for _ in range(10)]
    bad = many[4]
    bad.react = fail
    for handler in many:
        handler.peer.send(b"one")
    reactor.turn()
    assert all(handler.events for handler in many)
    assert [len(handler.failures) for handler in many] == [0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    bad.failures[0].trap(exception)
    assert [event["log_failure"].type for event in logged] == [exception]
    assert logged[0]["handler"] is bad


def test_failure_of_a_failure(reactor, handlers, logged):
    """An exception while a failed socket is cleaned up is logged, and does not reach other sockets."""

    def fail(*_):
        raise ZeroDivisionError

    bad, good = handlers(), handlers()
    bad.react = fail
    bad.failed = fail
    for handler in (bad, good):
        handler.peer.send(b"one")
    reactor.turn()
    assert good.events == [READ]
    assert len(logged) == 2


def test_reactor_gives_up(reactor, multiplexer, handlers, logged):
    """A reactor that stops closes every socket of its multiplexer, even if one of them raises."""

    def fail(reason):
        raise ZeroDivisionError

    many = [handlers() for _ in range(5)]
    many[2].lost = fail
    reason = Failure(main.CONNECTION_LOST)
    for reader in reactor.removeAll():
        reader.connectionLost(reason)
    assert [handler.reasons for handler in many] == [[reason], [reason], [], [reason], [reason]]
    assert len(logged) == 1
    assert multiplexer.fileno() == -1
    late = handlers()
    late.peer.send(b"one")
    reactor.turn()
    assert late.events == [READ]


# --- soon ---------------------------------------------------------------------------------------


def test_soon_in_a_turn(reactor, multiplexer, handlers):
    """Calls deferred during a turn run at its end, after every socket was served, in order."""
    calls: list[Any] = []
    many = [handlers() for _ in range(3)]

    def react(i):
        calls.append(("ready", i))
        multiplexer.call_soon(calls.append, ("soon", i))

    for i, handler in enumerate(many):
        handler.react = lambda i=i: react(i)
        handler.peer.send(b"one")
    reactor.turn()
    assert [what for what, _ in calls] == ["ready"] * 3 + ["soon"] * 3
    assert [i for _, i in calls[:3]] == [i for _, i in calls[3:]]


def test_soon_outside_of_a_turn(reactor, multiplexer):
    """Calls deferred outside a turn are made by the reactor, in order, and never at once."""
    calls: list[int] = []
    for i in range(3):
        multiplexer.call_soon(calls.append, i)
    assert calls == []
    assert len(reactor.getDelayedCalls()) == 1
    reactor.advance(0)
    assert calls == [0, 1, 2]
    assert reactor.getDelayedCalls() == []


def test_soon_before_a_turn(reactor, multiplexer, handlers):
    """Calls deferred before a turn run once, in that turn, before those that the turn defers."""
    calls: list[str] = []
    handler = handlers()
    handler.react = lambda: multiplexer.call_soon(calls.append, "in the turn")
    handler.peer.send(b"one")
    multiplexer.call_soon(calls.append, "before")
    multiplexer.doRead()
    assert calls == ["before", "in the turn"]
    reactor.advance(0)
    assert calls == ["before", "in the turn"]


def test_soon_out_of_soon(reactor, multiplexer, handlers):
    """Calls deferred by deferred calls run in the same turn, but a turn has an end."""
    calls: list[int] = []

    def again(i):
        calls.append(i)
        multiplexer.call_soon(again, i + 1)

    handler = handlers()
    handler.react = lambda: multiplexer.call_soon(again, 0)
    handler.peer.send(b"one")
    multiplexer.doRead()
    assert calls == [0, 1, 2, 3]
    multiplexer.modify(handler.sock.fileno(), 0)
    reactor.turn()
    assert len(calls) < 10
    assert calls == list(range(len(calls)))
    before = len(calls)
    reactor.turn()
    assert len(calls) > before


@pytest.mark.parametrize("exception", [ZeroDivisionError, SystemExit])
def test_soon_that_fails(reactor, multiplexer, logged, exception):
    """An exception in a deferred call is logged, and the other calls are made."""

    def fail():
        raise exception

    calls: list[str] = []
    multiplexer.call_soon(calls.append, "one")
    multiplexer.call_soon(fail)
    multiplexer.call_soon(calls.append, "two")
    reactor.advance(0)
    assert calls == ["one", "two"]
    assert [event["log_failure"].type for event in logged] == [exception]


def test_closing_is_done_in_slices(reactor, multiplexer, handlers, logged, now):
    """Steps of closing take a bounded time in each turn, in order; sockets are served between two slices."""
    done = list[int]()

    def step(number: int) -> None:
        done.append(number)
        now[0] += 0.0004
        if number == 1:
            multiplexer.close_soon(step, 10)
            raise ZeroDivisionError

    handler = handlers()
    handler.react = lambda: [multiplexer.close_soon(step, number) for number in range(10)]
    handler.peer.send(b"one")
    multiplexer.doRead()
    assert done == [0, 1, 2]
    handler.react = lambda: now.append(len(done))
    while len(done) < 11:
        multiplexer.doRead()
        (call,) = reactor.getDelayedCalls()
        call.cancel()
        multiplexer._close_some()
    assert done == list(range(11))
    assert now[1:] == [3, 6, 9]
    assert reactor.getDelayedCalls() == []
    assert [event["log_failure"].type for event in logged] == [ZeroDivisionError]


def test_what_is_tried_again_has_a_slice(reactor, multiplexer, now):
    """All calls that are made again share a bounded time, in turns; one that is taken back is not made."""
    made: list[str] = []

    def again(name: str) -> Callable[[], None]:
        def call() -> None:
            made.append(name)
            now[0] += 0.0004
            multiplexer.try_again(call)

        return call

    calls = [again(name) for name in "abcde"]
    for call in calls:
        multiplexer.try_again(call)
        multiplexer.try_again(call)
    for expected in ("", "abc", "dea", "bcd"):
        assert "".join(made) == expected
        made.clear()
        reactor.advance(RETRY)
    multiplexer.try_no_more(calls[4])
    made.clear()
    for _ in range(4):
        reactor.advance(RETRY)
    assert sorted("".join(made[:4])) == list("abcd")
    for call in calls:
        multiplexer.try_no_more(call)
    assert reactor.getDelayedCalls() == []


def test_what_is_tried_again_and_fails(reactor, multiplexer, logged):
    """A call that raises is logged, and the others are made."""
    made: list[str] = []
    multiplexer.try_again(lambda: 1 // 0)
    multiplexer.try_again(lambda: made.append("made"))
    reactor.advance(RETRY)
    assert made == ["made"]
    assert [event["log_failure"].type for event in logged] == [ZeroDivisionError]
    assert reactor.getDelayedCalls() == []


# --- hang-ups -----------------------------------------------------------------------------------


def test_hang_ups_come_first(multiplexer, handlers):
    """What peers sent before they closed is read before the sockets that became ready earlier or later."""
    order: list[str] = []
    some = [handlers(name=name) for name in "abcdef"]
    for handler in some:
        handler.react = partial(order.append, handler.name)
        handler.peer.send(b"one")
        if handler.name in "bde":
            handler.peer.close()
    multiplexer.doRead()
    assert order == [*"bdeacf"]
    assert multiplexer.contended


def test_hang_ups_without_packets_are_no_contention(multiplexer, handlers):
    """A socket with packets is contended only if another one has some as well."""
    one, gone = handlers(), handlers(events=WRITE)
    seen: list[bool] = []
    one.react = lambda: seen.append(multiplexer.contended)
    one.peer.send(b"one")
    gone.peer.close()
    gone.react = gone.close
    multiplexer.doRead()
    assert seen == [False]


def test_a_suspended_socket_is_not_reported(reactor, multiplexer, handlers):
    """A socket whose peer has hung up costs no look until its owner wants to read it, and then comes at once."""
    handler = handlers()
    fd = handler.sock.fileno()
    handler.peer.send(b"last words")
    handler.peer.close()
    multiplexer.suspend(fd)
    multiplexer.suspend(fd)
    multiplexer.modify(fd, 0)
    reactor.turn(2)
    assert handler.events == []
    multiplexer.modify(fd, READ)
    reactor.turn()
    assert handler.events == [READ | GONE]


def test_a_socket_that_suspends_itself(reactor, multiplexer, handlers):
    """A socket can leave the epoll set while it is served."""
    handler = handlers()
    handler.react = lambda: multiplexer.suspend(handler.sock.fileno())
    handler.peer.close()
    reactor.turn(3)
    assert handler.events == [READ | GONE]


@pytest.mark.parametrize("end", ["remove", "stop"])
def test_the_end_of_a_suspended_socket(reactor, multiplexer, handlers, logged, end):
    """A suspended socket can be removed, is lost when the reactor stops, and leaves the next of its number alone."""
    handler = handlers()
    fd = handler.sock.fileno()
    multiplexer.suspend(fd)
    handler.peer.close()
    if end == "remove":
        handler.close()
    else:
        multiplexer.connectionLost(Failure(main.CONNECTION_LOST))
        assert len(handler.reasons) == 1
    assert reactor.getReaders() == []
    next_one = handlers()
    assert next_one.sock.fileno() == fd
    next_one.peer.send(b"one")
    reactor.turn()
    assert next_one.events == [READ]
    assert handler.events == []
    assert logged == []


def test_no_socket_to_suspend(multiplexer, handlers):
    """To suspend a socket that is closed, or when there is none, does nothing."""
    multiplexer.suspend(5)
    handler = handlers()
    multiplexer.suspend(-1)
    handler.peer.send(b"one")
    multiplexer.doRead()
    assert handler.events == [READ]


# --- passes -------------------------------------------------------------------------------------


def test_a_hook_ends_the_passes(multiplexer, handlers):
    """Every hook is asked after each pass in which a socket was ready; one that refuses ends the turn."""
    handler, asked = handlers(), list[str]()
    handler.react = lambda: setattr(multiplexer, "has_read", True)

    def answer(name: str, passes: int) -> bool:
        asked.append(name)
        return asked.count(name) < passes

    askers = (partial(answer, "a", 3), partial(answer, "b", 100))
    for asker in askers:
        multiplexer.ask_after_pass(asker)
    multiplexer.doRead()
    assert asked == []
    handler.peer.send(b"one")
    multiplexer.doRead()
    assert asked == ["a", "b"] * 3
    assert len(handler.events) == 3
    multiplexer.ask_no_more(askers[0])
    multiplexer.doRead()
    assert asked[6:] == ["b"] * 32
    multiplexer.ask_no_more(askers[1])
    multiplexer.doRead()
    assert len(asked) == 38


def test_hooks_are_asked_before_deferred_calls(multiplexer, handlers):
    """A hook that measures reads sees them alone, also in a pass in which nothing was read."""
    handler, order = handlers(), list[str]()

    def ready() -> None:
        order.append("ready")
        multiplexer.call_soon(order.append, "deferred")

    handler.react = ready
    multiplexer.ask_after_pass(lambda: order.append("pass") or True)  # type: ignore[func-returns-value]
    handler.peer.send(b"one")
    multiplexer.doRead()
    assert order == ["ready", "pass", "deferred"]


# --- buffers ------------------------------------------------------------------------------------


def test_buffers_are_shared(multiplexer):
    """Sockets with the same limit read through the same buffers, whose size has a bound."""
    assert multiplexer.reader(1000) is multiplexer.reader(1000)
    assert multiplexer.reader(1000) is not multiplexer.reader(1001)
    for limit in (1000, 409_600, 1 << 20, 16 << 20):
        reader = multiplexer.reader(limit)
        assert reader.max_packet == limit
        assert 1 <= reader.batch <= 64
        assert reader.batch * limit <= 32 << 20
    assert multiplexer.reader(409_600).batch == 64


def test_buffers_are_freed(multiplexer, handlers):
    """An idle multiplexer keeps no buffers."""
    handler = handlers()
    reader = multiplexer.reader(1000)
    handler.close()
    assert multiplexer.reader(1000) is not reader


def test_failed_registration(reactor, multiplexer):
    """A descriptor that cannot be watched leaves nothing behind, neither in the multiplexer nor in the reactor."""
    with open(__file__) as file:
        before = descriptors()
        with pytest.raises(PermissionError):
            multiplexer.add(file.fileno(), Handler.__new__(Handler), READ)
        assert reactor.getReaders() == []
        assert not descriptors().items() - before.items()
