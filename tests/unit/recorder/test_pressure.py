"""The choice between holding publishers and losing messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet import defer
from twisted.internet.task import Clock

from sbus.recorder.pressure import Pressure


class Side:
    """The bus and the journal of a recorder whose lag the test sets."""

    def __init__(self, max_lag: float = 5.0) -> None:
        self.clock = Clock()
        self.choices: list[str] = []
        self.questions: list[defer.Deferred[None]] = []
        self.waiting = 0.0
        self.pressure = Pressure(
            self.clock,
            max_lag,
            ask=self._ask,
            choose=self.choices.append,
            waiting=lambda: self.waiting,
        )

    def _ask(self) -> defer.Deferred[None]:
        self.questions.append(defer.Deferred())
        return self.questions[-1]

    def advance(self, seconds: float) -> None:
        self.clock.pump([0.1] * round(seconds * 10))


def test_a_lag_here() -> None:
    """Past the limit the bus is to discard; below half of it, to block again."""
    side = Side()
    side.pressure.note_traffic()
    side.waiting = 4.9
    side.advance(2)
    assert side.choices == ["block"]
    side.waiting = 5.1
    side.advance(1)
    assert side.choices == ["block", "discard"]
    side.questions.pop().callback(None)
    side.waiting = 2.6
    side.advance(1)
    assert side.choices == ["block", "discard"]
    side.waiting = 2.4
    side.advance(1)
    assert side.choices == ["block", "discard", "block"]


def test_a_lag_in_the_bus() -> None:
    """A question that the bus does not answer shows that messages wait in front of it."""
    side = Side()
    side.pressure.note_traffic()
    side.advance(5.4)
    assert side.choices == ["block"]
    side.advance(1)
    assert side.choices == ["block", "discard"]
    assert len(side.questions) == 1
    side.questions[0].callback(None)
    side.advance(1)
    assert side.choices == ["block", "discard", "block"]


def test_a_silent_bus_is_left_alone() -> None:
    """Without messages no question is sent and no timer runs; after `stop` neither, whatever comes."""
    side = Side()
    side.advance(10)
    assert side.questions == []
    side.pressure.note_traffic()
    side.advance(1)
    side.questions[0].callback(None)
    side.advance(2)
    assert len(side.questions) == 1
    assert side.clock.getDelayedCalls() == []
    side.pressure.note_traffic()
    side.pressure.stop()
    side.pressure.note_traffic()
    assert side.clock.getDelayedCalls() == []


def test_a_question_that_fails() -> None:
    """The end of the connection fails the question; nothing is logged as a bug."""
    side = Side()
    side.pressure.note_traffic()
    side.advance(1)
    side.pressure.stop()
    side.questions[0].errback(ValueError())
    assert side.clock.getDelayedCalls() == []


@given(st.lists(st.tuples(st.sampled_from(["traffic", "answer", "wait"]), st.floats(0, 9)), max_size=40))
def test_choices_alternate(plan: list[tuple[str, float]]) -> None:
    """For any course of things: choices alternate, and publishers are held only while no known lag is too long."""
    side = Side(max_lag=2.0)
    for what, amount in plan:
        if what == "traffic":
            side.pressure.note_traffic()
            side.waiting = amount
        elif what == "answer" and side.questions:
            side.questions.pop().callback(None)
        side.advance(round(amount, 1))
        assert side.choices == (["block", "discard"] * len(side.choices))[: len(side.choices)]
    side.waiting = 3.0
    side.pressure.note_traffic()
    side.advance(1)
    assert not side.pressure.is_blocking
    side.waiting = 0.0
    while side.questions:
        side.questions.pop().callback(None)
    side.advance(1)
    assert side.pressure.is_blocking
