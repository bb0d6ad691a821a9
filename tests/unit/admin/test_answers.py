"""Answers on their way: slices, turns, readers that do not read, and errors."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.logger import Logger

from sbus.admin.answers import _REST, SLICE, TICK, Answers
from sbus.admin.pages import Pieces, Problem


class Request:
    """A request that notes what is written; its peer reads when it is told to."""

    def __init__(self) -> None:
        self.text = ""
        self.headers: dict[bytes, bytes] = {}
        self.producer: Any = None
        self.status = 200
        self.is_finished = self.is_lost = False
        self._finished: list[Deferred[None]] = []

    def notifyFinish(self) -> Deferred[None]:
        self._finished.append(Deferred())
        return self._finished[-1]

    def setHeader(self, name: bytes, value: bytes) -> None:
        self.headers[name] = value

    def setResponseCode(self, code: int) -> None:
        self.status = code

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        assert streaming
        self.producer = producer

    def unregisterProducer(self) -> None:
        self.producer = None

    def write(self, data: bytes) -> None:
        self.text += data.decode()

    def finish(self) -> None:
        self.is_finished = True
        self._end()

    def loseConnection(self) -> None:
        self.is_lost = True

    def disconnect(self) -> None:
        finished, self._finished = self._finished, []
        for each in finished:
            each.addErrback(lambda _: None)
            each.errback(ConnectionError())

    def _end(self) -> None:
        finished, self._finished = self._finished, []
        for each in finished:
            each.callback(None)


class Turns(Clock):
    """A reactor of which each call is a turn."""

    def turn(self) -> float:
        """Run the next call; return how long after the last one it was due."""
        (call, *_others) = sorted(self.getDelayedCalls(), key=lambda c: c.getTime())
        waited = call.getTime() - self.seconds()
        self.advance(max(0.0, waited))
        return waited


@pytest.fixture
def reactor() -> Turns:
    return Turns()


@pytest.fixture
def answers(reactor: Turns) -> Answers:
    return Answers(reactor, Logger())


def start(answers: Answers, pieces: Iterator[str | None]) -> Request:
    request = Request()
    answers.start(request, lambda: (pieces, "text/plain"))
    return request


def slow(pieces: int, seconds: float) -> Pieces:
    for number in range(pieces):
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass
        yield f"{number} "


def test_an_answer(reactor: Turns, answers: Answers) -> None:
    """Nothing is made before the next turn; then the pieces come in order, and one that is not there is waited for."""
    request = start(answers, iter(["a", None, "b"]))
    assert len(request.text) == 0
    reactor.turn()
    assert (request.text, request.is_finished) == ("a", False)
    waited = []
    while not request.is_finished:  # two turns more if the machine is so busy that a slice is over after one piece
        waited.append(reactor.turn())
        assert (request.text == "ab") is any(each == pytest.approx(TICK) for each in waited)
    assert request.text == "ab"
    assert not reactor.getDelayedCalls()


def test_all_answers_share_one_slice(reactor: Turns, answers: Answers) -> None:
    """Of a storm of requests, one slice is answered in a turn, and the bus has three times as long after it."""
    requests = [start(answers, slow(3, SLICE * 1.1)) for _ in range(20)]
    reactor.turn()
    made = sum(len(request.text.split()) for request in requests)
    assert made <= 2
    waited = [reactor.turn() for _ in range(20)]
    assert min(waited) >= _REST * SLICE
    assert sum(len(request.text.split()) for request in requests) <= 2 * 21
    for _ in range(200):
        if not reactor.getDelayedCalls():
            break
        reactor.turn()
    assert all(request.is_finished for request in requests)


def test_a_reader_that_does_not_read(reactor: Turns, answers: Answers) -> None:
    """While the connection's buffer is full no piece is made; the answer goes on when the peer has read."""
    made: list[int] = []

    def pages() -> Pieces:
        for number in range(1000):
            made.append(number)
            yield "x" * 1000

    request = start(answers, pages())
    reactor.turn()
    request.producer.pauseProducing()
    before = len(made)
    while reactor.getDelayedCalls():
        reactor.turn()
    assert len(made) <= before + 1
    request.producer.resumeProducing()
    while reactor.getDelayedCalls():
        reactor.turn()
    assert (len(made), request.is_finished) == (1000, True)


@pytest.mark.parametrize("when", ["before", "between", "paused", "resting"])
def test_a_peer_that_goes(reactor: Turns, answers: Answers, when: str) -> None:
    """A peer that disconnects ends its page, whatever it was waiting for."""
    ended: list[bool] = []

    def page() -> Pieces:
        try:
            while True:
                yield None if when == "resting" else "x"
        finally:
            ended.append(True)

    request = start(answers, page())
    if when != "before":
        reactor.turn()
    if when == "paused":
        request.producer.pauseProducing()
    request.disconnect()
    for call in reactor.getDelayedCalls():
        reactor.advance(max(0.0, call.getTime() - reactor.seconds()))
    assert ended == ([] if when == "before" else [True])
    assert not request.is_finished
    assert not [call for call in reactor.getDelayedCalls() if call.active()]


def test_problems(reactor: Turns, answers: Answers) -> None:
    """A page that refuses, at once or with its first piece, is answered with a problem; a bug is one of the server."""

    def refuses() -> Pieces:
        raise Problem(404, "no: ask for something else")
        yield ""

    def fails() -> Pieces:
        raise ZeroDivisionError
        yield ""

    for page, status in ((refuses, 404), (fails, 500)):
        request = start(answers, page())
        reactor.turn()
        assert (request.status, json.loads(request.text)["status"], request.is_finished) == (status, status, True)


def test_a_bug_in_the_middle(reactor: Turns, answers: Answers) -> None:
    """An answer that fails after it has begun is cut off, and others go on."""

    def fails() -> Pieces:
        yield "a"
        raise ZeroDivisionError

    broken, other = start(answers, fails()), start(answers, iter(["b"]))
    while reactor.getDelayedCalls():
        reactor.turn()
    assert (broken.is_lost, broken.is_finished, other.text) == (True, False, "b")


def test_the_end_of_the_service(reactor: Turns, answers: Answers) -> None:
    """When the service stops, all pages end, and nothing is due."""
    ended: list[bool] = []

    def page() -> Pieces:
        try:
            while True:
                yield None
        finally:
            ended.append(True)

    start(answers, page())
    reactor.turn()
    answers.stop()
    assert ended == [True]
    assert not reactor.getDelayedCalls()
