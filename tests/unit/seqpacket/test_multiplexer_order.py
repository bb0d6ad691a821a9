"""What the multiplexer does first: calls for soon, hang-ups, and passes that end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from twisted.internet import main
from twisted.python.failure import Failure

from sbus.seqpacket.multiplexer import GONE, READ, RETRY, WRITE

# --- soon -----------------------------------------------------------------------------------------


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


# --- hang-ups -------------------------------------------------------------------------------------


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


# --- passes ---------------------------------------------------------------------------------------


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
