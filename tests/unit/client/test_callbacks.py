"""Callbacks of a blocking client that read: inside one another up to a depth, in order, each exactly once."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.client.blocking.callbacks import DEEPEST, Callbacks
from sbus.client.dispatch import Message, OwnCallback
from sbus.client.responding import Responder


class Reader:
    """Callbacks that read: each has the next ones called."""

    def __init__(self, arrivals: list[int]) -> None:
        self.calls = Callbacks()
        self.arrivals = arrivals  # how many callbacks come with each read
        self.begun: list[int] = []
        self.depth = self.deepest = self.number = 0

    def read(self) -> None:
        if self.arrivals:
            for _ in range(self.arrivals.pop()):
                self.number += 1
                self.calls.call(self.callback, self.number)

    def callback(self, number: int) -> None:
        self.begun.append(number)
        self.depth += 1
        self.deepest = max(self.deepest, self.depth)
        self.read()
        self.depth -= 1


@given(arrivals=st.lists(st.integers(0, 20), max_size=50))
def test_callbacks_that_read(arrivals: list[int]) -> None:
    """They begin in the order in which they came, and the depth has a limit."""
    reader = Reader(arrivals)
    while reader.arrivals:
        reader.read()
    assert reader.begun == list(range(1, reader.number + 1))
    assert reader.deepest <= DEEPEST
    assert reader.calls.is_idle


def test_replies_and_requests_overtake_others() -> None:
    """A callback at the greatest depth may wait for them."""
    calls, called = Callbacks(), list[str]()

    def nest(depth: int) -> None:
        if depth < DEEPEST:
            calls.call(nest, depth + 1)
            return
        calls.call(called.append, "message")
        reply, request = (
            OwnCallback(lambda _: called.append("reply")),
            Responder(Mock(), lambda _: called.append("request")),
        )
        calls.call(reply, Message(b"", b""), deepest=calls.deepest_of(reply))
        calls.call(request, Message(b"", b""), deepest=calls.deepest_of(request))
        called.append("the callback returns")

    calls.call(nest, 1)
    assert called == ["reply", "request", "the callback returns", "message"]
    assert calls.is_idle


def test_errors_are_kept_in_order() -> None:
    """A callback that raises stops no other."""
    calls, called = Callbacks(), []

    def fail(number: int) -> None:
        called.append(number)
        raise ValueError(number)

    for number in range(3):
        calls.call(fail, number)
    assert called == [0, 1, 2]
    assert not calls.is_idle
    assert [error.args for error in calls.errors] == [(0,), (1,), (2,)]


def test_an_interrupted_callback_leaves_the_others() -> None:
    """What waits while a callback is interrupted is called by the next read."""
    calls, called = Callbacks(), list[int]()

    def nest(depth: int) -> None:
        if depth < DEEPEST:
            calls.call(nest, depth + 1)
            return
        for number in range(3):
            calls.call(called.append, number)
        raise KeyboardInterrupt

    first: Callable[[int], None] = nest
    with pytest.raises(KeyboardInterrupt) as raised:
        calls.call(first, 1)
    assert (called, calls.is_idle, calls.has_raised(raised.value)) == ([], False, True)
    calls.settle()
    assert (called, calls.is_idle, calls.has_raised(raised.value)) == ([0, 1, 2], True, False)


def test_a_callback_at_the_greatest_depth_may_wait() -> None:
    """It waits for packets, and not for callbacks that wait for it to return."""
    calls, called = Callbacks(), list[str]()

    def nest(depth: int) -> None:
        if depth < DEEPEST:
            calls.call(nest, depth + 1)
            return
        calls.call(called.append, "called", later=lambda _: called.append("called later"))
        assert calls.is_idle

    calls.call(nest, 1)
    assert called == ["called later"]


def test_cleared_callbacks_are_not_called() -> None:
    """What waits when the connection is closed is not called."""
    calls, called = Callbacks(), list[int]()

    def nest(depth: int) -> None:
        if depth < DEEPEST:
            calls.call(nest, depth + 1)
            return
        calls.call(called.append, 1)
        calls.clear()

    calls.call(nest, 1)
    assert called == []
