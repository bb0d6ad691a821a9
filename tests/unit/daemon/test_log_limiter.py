"""The limiter of a log, on a clock that the tests turn: its budget, first lines, and sums that account for all."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.task import Clock
from twisted.logger import ILogObserver, Logger, LogLevel, eventAsText
from twisted.python.failure import Failure
from zope.interface import implementer

from sbus.daemon.log_budget import LogBudget, Rank, json_size, text_size
from sbus.daemon.log_limiter import INTERVAL, LimitedLogger, LogLimiter

RATE = 10_000


@implementer(ILogObserver)
class Log:
    """A limiter, its clock, and the lines that it lets through."""

    def __init__(self, rate: int = RATE, size: Any = text_size, budget: LogBudget | None = None) -> None:
        self.clock = Clock()
        self.budget = budget or LogBudget(self.clock.seconds, rate, size)
        self.size = size
        self.events: list[dict[str, Any]] = []
        self.sizes: list[tuple[float, int]] = []
        self.limiter = LogLimiter(self.clock, self, self.budget)
        self.logger = LimitedLogger("test", self.limiter)

    def __call__(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        self.sizes.append((self.clock.seconds(), self.size(event)))

    def report(self, user: int, kind: str, text: str = "it happened", times: int = 1) -> None:
        if self.limiter.wants(user, kind, LogLevel.warn, times):
            self.logger.warn("{text}", text=text, uid=user, kind=kind, times=times)

    def take(self) -> list[str]:
        """Return the texts since the last call."""
        events, self.events = self.events, []
        return [eventAsText(event, includeTimestamp=False) for event in events]


@pytest.mark.parametrize("least", ["debug", "info", "warn", "error", "critical"])
def test_below_the_level_costs_nothing(least):
    """Events below the log's level have no line, are in no sum, and take nothing of the budget."""
    clock = Clock()
    log = Log(budget=LogBudget(clock.seconds, RATE, level=least))
    levels = list(LogLevel.iterconstants())
    wanted = levels[levels.index(LogLevel.lookupByName(least)) :]
    for level in levels:
        for _ in range(1_000):
            if log.limiter.wants(1, level.name, level):
                log.logger.emit(level, "{text}", text="it happened", uid=1, kind=level.name)
    log.clock.advance(INTERVAL)
    assert {event["log_level"] for event in log.events} == set(wanted)
    summed = re.findall("(debug|info|warn|error|critical)", " ".join(event.get("events", "") for event in log.events))
    assert sorted(summed) == sorted(level.name for level in wanted)


def test_first_at_once_then_sums():
    """The first event of each kind of a user has a line, more of them as far as 2,500 bytes go, the rest a sum."""
    log = Log()
    for _ in range(4_211):
        log.report(1000, "clients connected", "client 7 connected")
        log.report(1000, "violations (BAD_ID)", "violation by client 7")
    log.report(1001, "clients connected", "client 8 connected")
    lines = log.take()
    assert lines[:2] == ["[test#warn] client 7 connected", "[test#warn] violation by client 7"]
    assert lines[-1] == "[test#warn] client 8 connected"
    assert 2 * 10 < len(lines) < 2 * 50
    log.clock.advance(INTERVAL)
    (line,) = log.take()
    assert re.fullmatch(r"\[sbus.log#warn\] user 1000: .* in 10.0 s, which are not logged one by one", line)
    found = re.findall(r"[:,] ([\d,]+) (?:violations \(BAD_ID\)|clients connected)", line)
    assert len(found) == 2
    assert sum(int(number.replace(",", "")) for number in found) == 2 * 4_211 - (len(lines) - 1)
    log.report(1000, "clients connected", "client 9 connected")
    assert log.take() == ["[test#warn] client 9 connected"], "a new interval begins with a line"
    log.clock.advance(INTERVAL)
    assert log.take() == []
    assert log.clock.getDelayedCalls() == []


def test_a_storm_is_not_formatted():
    """Once a user's lines have no room in an interval, the user's further events are counted, and never formatted."""
    sizes: list[int] = []

    def size(event: dict[str, Any]) -> int:
        sizes.append(text_size(event))
        return sizes[-1]

    log = Log(size=size)
    for _ in range(1_000):
        log.report(1000, "connections refused", "refused a connection")
    passed = len(log.events)
    assert 2 < passed < 100
    assert len(sizes) <= 2 * passed + 1, "each is measured by the limiter and by this test, and one is in vain"


def test_one_user_takes_no_line_from_another():
    """A storm of one user does not delay the first line of another user, nor that of another kind."""
    log = Log()
    for _ in range(100):
        for user in range(1_000, 1_060):
            log.report(user, "clients connected", "x" * 100)
    log.take()
    log.report(7, "messages dropped", "dropped 1 message", 1)
    assert log.take() == ["[test#warn] dropped 1 message"]


def test_users_and_kinds_are_bounded():
    """Of 10,000 users with 100 kinds each, the table has 65 and 41."""
    log = Log()
    for user in range(10_000):
        for kind in range(100 if user % 100 == 0 else 1):
            log.report(user, f"kind {kind}")
    assert len(log.limiter._users) <= 65
    assert all(len(entry.counts) <= 41 and len(entry.kinds) <= 40 for entry in log.limiter._users.values())
    lines = len(log.take())
    log.limiter.stop()
    assert lines + counted(log.events) == 9_900 + 100 * 100


def counted(events: list[dict[str, Any]]) -> int:
    """Return the number of events in sums."""
    return sum(
        int(number.replace(",", ""))
        for event in events
        if event["log_namespace"] == "sbus.log"
        for number in re.findall(r"([\d,]+) (?:kind|other)", event["events"])
    )


steps = st.lists(
    st.tuples(
        st.integers(0, 70),  # user
        st.integers(0, 45),  # kind
        st.integers(0, 5_000),  # length
        st.integers(1, 40),  # how often
        st.sampled_from([0.0, 0.0, 0.01, 0.3, 3.0, 9.0, 30.0]),  # seconds until the next
    ),
    max_size=40,
)


@given(steps, st.sampled_from([1_000, RATE, 100_000]), st.sampled_from([text_size, json_size]))
def test_budget_and_accounts(steps, rate, size):
    """In any four seconds or longer the log grows by no more than the rate; each event is in a line or in a sum."""
    log = Log(rate, size)
    happened = 0
    for user, kind, length, repeated, pause in steps:
        for _ in range(repeated):
            log.report(user, f"kind {kind}", "x" * length)
        happened += repeated
        log.clock.advance(pause)
    log.limiter.stop()
    assert log.clock.getDelayedCalls() == []
    lines = sum(event["log_namespace"] == "test" for event in log.events)
    assert lines + counted(log.events) == happened
    for i, (since, _) in enumerate(log.sizes):
        total = 0
        for at, size_of_line in log.sizes[i:]:
            total += size_of_line
            assert total <= rate * max(4.0, at - since)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.sampled_from([0.0, 0.1, 4.0])), max_size=60))
def test_first_of_each_kind_at_once(steps):
    """While the budget lasts, the first event of a kind and user within an interval has a line at once."""
    log = Log(rate=1_000_000)
    seen: set[tuple[int, int]] = set()
    began = None
    for user, kind, pause in steps:
        if began is None or log.clock.seconds() - began >= INTERVAL:
            seen.clear()
            began = log.clock.seconds()
        before = len(log.events)
        log.report(user, f"kind {kind}")
        if (user, kind) not in seen:
            assert len(log.events) == before + 1
        seen.add((user, kind))
        log.clock.advance(pause)
    log.limiter.stop()


def test_sums_wait_for_their_budget_and_grow():
    """A sum for which there is no budget stays, and is written later with what came meanwhile."""
    log = Log()
    log.budget._balance = 0.0
    log.report(1, "kind 1")
    assert log.take() == []
    log.budget._balance = -1e6
    log.clock.advance(INTERVAL)
    assert log.take() == []
    log.report(1, "kind 1")
    log.budget._balance = float(RATE)
    log.clock.advance(INTERVAL)
    assert [line for line in log.take() if "sbus.log" in line] == [
        "[sbus.log#warn] user 1: 2 kind 1 in 20.0 s, which are not logged one by one"
    ]


def test_stop_without_budget_writes_one_line():
    """At the end the sums of all users fit in one line, if there is no budget for one of each."""
    log = Log()
    log.budget._balance = 0.0
    for user in range(50):
        log.report(user, "kind 1")
    log.limiter.stop()
    assert log.take() == [
        "[sbus.log#warn] other users: 50 kind 1 in 0.0 s, which are not logged one by one",
    ]
    assert log.clock.getDelayedCalls() == []


def test_tracebacks_are_limited_by_kind_and_cut():
    """A traceback is logged at once, its repetitions are summed up; a long one keeps its beginning and its end."""

    def deep(n: int) -> None:
        if n:
            deep(n - 1)
        raise ValueError("the end of it")

    log = Log()
    logger = Logger(namespace="sbus.test", observer=log.limiter)  # as one of the modules that have no limiter

    def fail() -> None:
        try:
            deep(100)
        except ValueError:
            logger.failure("Error in {where}", failure=Failure(), where="a test")

    for _ in range(100):
        fail()
    lines = log.take()
    assert 1 <= len(lines) <= 2
    assert lines[0].startswith("[sbus.test#critical] Error in a test\nTraceback")
    assert lines[0].endswith("the end of it\n")
    assert len(lines[0]) < log.budget.longest
    log.clock.advance(INTERVAL)
    (line,) = log.take()
    assert re.search(r"the server: \d+ lines like 'Error in \{where\}' \(ValueError\) in", line)


def test_two_limiters_share_a_budget():
    """The lines of one limiter pass another one behind it, and both together keep to the budget."""
    log = Log()
    inner = LogLimiter(log.clock, log.limiter, log.budget)
    own = LimitedLogger("sbus.server", inner)
    for number in range(1_000):
        own.warn("{text}", text="x" * 100, uid=5, kind="kind 1")
        log.logger.warn("another {number}", number=number)
    inner.stop()
    log.limiter.stop()
    lines = log.take()
    assert sum("xxx" in line for line in lines) + sum("another" in line and "like" not in line for line in lines) < 100
    summed = [line for line in lines if "sbus.log" in line]
    assert len(summed) == 2
    assert sum(size for _, size in log.sizes) < 2 * RATE


@pytest.mark.parametrize("rank", [Rank.ORDINARY, Rank.FIRST_OF_USER, Rank.SUM])
def test_ranks_leave_room_for_higher_ones(rank):
    """When lines of one rank are refused, those of the next rank are not."""
    clock = Clock()
    budget = LogBudget(clock.seconds)
    while budget.take(100, rank):
        pass
    ranks = list(Rank)
    assert budget.take(100, ranks[ranks.index(rank) + 1])


def test_a_clock_that_goes_back_adds_nothing():
    """If the time goes back, the budget waits."""
    now = 100.0
    budget = LogBudget(lambda: now)
    while budget.take(100, Rank.FIRST):
        pass
    now = 0.0
    assert not budget.take(100, Rank.FIRST)
    now = 1.0
    assert budget.take(100, Rank.FIRST)


def test_counting_is_cheap():
    """An event that is counted is not formatted."""
    log = Log()
    log.budget._balance = 0.0
    formatted = Counter[str]()

    class Costly:
        def __str__(self) -> str:
            formatted["times"] += 1
            return "x"

        __repr__ = __str__

    for _ in range(1_000):
        log.limiter({"log_format": "{x}", "x": Costly(), "log_level": LogLevel.warn, "log_time": 0.0})
    assert not formatted
