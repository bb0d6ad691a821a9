"""Closing in threads of its own what may take long to close."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from sbus.syscalls.elsewhere import do_elsewhere, is_behind, is_overrun
from tests.support.reactors import Recorder
from tests.support.transports import World
from tests.support.waiting import wait_until


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What calls can wait for; it opens at the end."""
    made = threading.Event()
    yield made
    made.set()
    wait_until(is_behind, lambda behind: not behind)


def test_a_call_that_waits_holds_up_no_other(gate: threading.Event) -> None:
    """Behind a call that waits, and one that fails, others are done."""
    done = threading.Event()

    def fail() -> None:
        raise OSError

    do_elsewhere(gate.wait)
    do_elsewhere(fail)
    do_elsewhere(done.set)
    assert done.wait(20)


def test_with_too_many_calls_nobody_else_may_pass_descriptors(gate: threading.Event) -> None:
    """A transport passes no descriptors while more than a thousand calls wait, and does so again afterwards."""
    world = World()
    world.connect(Recorder())
    (transport,) = world.transports
    for _ in range(1_100):
        do_elsewhere(gate.wait)
    assert is_behind()
    assert is_overrun()
    assert not transport.pass_payloads(True)
    gate.set()
    wait_until(is_overrun, lambda overrun: not overrun)
    assert transport.pass_payloads(True)
    world.close()
