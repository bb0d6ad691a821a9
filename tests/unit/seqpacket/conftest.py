"""What all tests of the transport share."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.support.transports import World


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
