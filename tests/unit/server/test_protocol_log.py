"""What the log says about clients: sums, without payloads."""

from __future__ import annotations

from typing import Any

import pytest
from twisted.internet.task import Clock
from twisted.logger import globalLogPublisher

from sbus.server.core.limits import Limits
from sbus.server.ops.log_observer import LogObserver
from tests.support.buses import Bus
from tests.support.packets import message


def test_drops_are_logged_in_sums_without_payloads():
    """The first loss is logged at once, the others in one line for each client after the interval."""
    events: list[Any] = []
    observer: Any = events.append
    globalLogPublisher.addObserver(observer)
    try:
        clock = Clock()
        log = LogObserver(clock)
        bus = Bus(limits=Limits(queue_messages=1), observers=(log,))
        reader, publisher = bus.connect(), bus.connect()
        reader.send(b"SUB k")
        reader.stall()
        for _ in range(50):
            publisher.send(message("k", b"sensitive"))
        lines = [e for e in events if "messages" in e]
        assert [e["messages"] for e in lines] == [1]
        clock.advance(10)
        lines = [e for e in events if "messages" in e]
        assert [e["messages"] for e in lines] == [1, 48]
        assert lines[1]["uid"] == 1000
        assert lines[1]["total"] == 49
        assert "sensitive" not in repr(lines)
        log.stop()
    finally:
        globalLogPublisher.removeObserver(observer)


@pytest.fixture
def logged():
    """What the log got, as (number, numbers of events in a sum)."""
    events: list[Any] = []
    observer: Any = events.append
    globalLogPublisher.addObserver(observer)

    def take() -> list[Any]:
        lines = [event.get("number") or event["events"] for event in events]
        events.clear()
        return lines

    yield take
    globalLogPublisher.removeObserver(observer)


def test_violations_are_logged_in_sums(logged):
    """The first violations of a user are logged at once, the others in one line after the interval, and at the end."""
    clock = Clock()
    log = LogObserver(clock)
    bus = Bus(ignore_violations=True, observers=(log,))
    first, second = bus.connect(), bus.connect(uid=1001)
    logged()
    first.send(*[b"nonsense"] * 500)
    second.send(b"nonsense")
    lines = logged()
    ones = len(lines) - 1
    assert lines == [1] * ones + [2]
    assert 8 < ones < 50
    clock.advance(10)
    assert logged() == [f"{500 - ones} violations (UNKNOWN_VERB)"]
    second.send(b"nonsense")
    assert logged() == [2]
    first.send(*[b"nonsense"] * 500)
    ones = len(logged())
    first.transport.end()
    bus.settle()
    assert logged() == [1]
    log.stop()
    assert logged() == [f"{500 - ones} violations (UNKNOWN_VERB)"]
    assert clock.getDelayedCalls() == []


def test_reconnecting_evades_no_sum(logged):
    """A user that connects anew for each violation is one user in the log."""
    clock = Clock()
    log = LogObserver(clock)
    bus = Bus(observers=(log,))
    for _ in range(1_000):
        bus.connect().send(b"nonsense")
    assert len(logged()) < 50
    clock.advance(10)
    (line,) = logged()
    for kind in ("clients connected", "violations (UNKNOWN_VERB)", "clients disconnected (VIOLATION)"):
        assert kind in line
    log.stop()


def test_a_range_of_uids_is_one_user_in_the_log(logged):
    """UIDs that count as one owner's share the lines of one user; each line names the UID itself."""
    clock = Clock()
    log = LogObserver(clock, owner_of=lambda uid: 1_000 if uid >= 100_000 else uid)
    bus = Bus(observers=(log,))
    lines = []
    for uid in range(100_000, 100_100):
        bus.connect(uid=uid).send(b"nonsense")
        lines += logged()
    assert len(lines) < 30
    clock.advance(10)
    (line,) = logged()
    assert "clients disconnected (VIOLATION)" in line
    lost = [bus.connect(uid=uid) for uid in range(100_000, 100_010)]
    log.stop()
    logged()
    for client in lost:
        log.dropped(client.protocol, 1, 1)
    assert len(logged()) == 1
    log.stop()


def test_losses_of_many_clients_are_few_lines(logged):
    """Where a thousand clients lose messages, the first loss has a line, and so has the sum of most of them."""
    clock = Clock()
    log = LogObserver(clock)
    bus = Bus(observers=(log,), limits=Limits(user_clients=1_000))
    clients = [bus.connect() for _ in range(1_000)]
    log.stop()
    logged()
    for client in clients:
        log.dropped(client.protocol, 2, 100)
    assert logged() == [1]
    clock.advance(10)
    assert 1 < len(logged()) < 50
    clock.advance(10)
    found = [line for line in logged() if isinstance(line, str)]
    assert len(found) == 1
    assert "messages dropped" in found[0]
    log.stop()
