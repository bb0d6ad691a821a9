"""What all tests of the transport share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from twisted.logger import ILogObserver, LogEvent, globalLogPublisher
from zope.interface import implementer

from sbus.seqpacket.multiplexer import Multiplexer
from tests.support.reactors import HandTurnedReactor
from tests.support.transports import World
from tests.unit.seqpacket.handlers import Handler


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The multiplexer's clock, in seconds: a turn ends by what there is to do, and not by the time that it takes."""
    now = [0.0]
    monkeypatch.setattr("sbus.seqpacket.multiplexer.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture
def world() -> Iterator[World]:
    """A reactor turned by hand."""
    world = World()
    yield world
    world.close()


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
