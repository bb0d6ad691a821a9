"""When a queue's service takes a worker for gone."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest
from twisted.internet.task import Clock

from sbus.client.core import ClientCore
from sbus.queue.vigils import Vigils
from tests.support.descriptors import descriptors


class World(Clock):
    """A reactor, and the connection that keys are watched with.

    :ivar readers: the descriptors that are polled.
    :ivar sent: the packets.
    """

    def __init__(self) -> None:
        super().__init__()
        self.core = ClientCore()
        self.state = "connected"
        self.readers: list[Any] = []
        self.sent: list[bytes] = []
        self.ended: list[bytes] = []
        self.vigils = Vigils(self, b"queue/jobs/worker/", self.ended.append)
        self.vigils.connected(self, True)  # type: ignore[arg-type]

    def addReader(self, reader: Any) -> None:
        self.readers.append(reader)

    def removeReader(self, reader: Any) -> None:
        self.readers.remove(reader)

    def send(self, packets: list[bytes]) -> None:
        self.sent += packets

    def report(self, has_subscribers: bool) -> None:
        """Have the bus report on the key of the worker ``ab``."""
        self.core.extensions.watches.report(b"queue/jobs/worker/ab", has_subscribers)


@pytest.fixture
def world() -> World:
    return World()


def worker(pid: int) -> bytes:
    return b"ab !/cred/1/2/%d" % pid


def test_a_worker_whose_process_has_ended_is_gone(world: World) -> None:
    """The end of a process is noticed, also one before the service has looked; no descriptor stays."""
    before = descriptors()
    with subprocess.Popen(["sleep", "60"]) as process:
        world.vigils.expect(worker(process.pid))
        [reader] = world.readers
        process.kill()
        process.wait()
        reader.doRead()
        world.vigils.expect(worker(process.pid))
    world.advance(0)
    assert (world.ended, world.readers) == ([worker(process.pid)] * 2, [])
    assert descriptors().items() <= before.items()


def test_descriptors_are_left_for_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near the limit only a worker's connection is watched: stores and metrics need descriptors, too."""
    monkeypatch.setattr("sbus.queue.vigils.descriptor_limit", lambda: 64)
    before = descriptors()
    world.vigils.begin(worker(os.getpid()))
    assert world.readers == []
    assert descriptors().items() <= before.items()
    world.report(False)
    assert world.ended == [worker(os.getpid())]


def test_a_worker_of_another_bus_has_no_process_here(world: World) -> None:
    """The PID in a chain is one of another host, perhaps."""
    world.vigils.begin(b"ab !/cred/1/2/3/!/cred/4/5/%d" % os.getpid())
    assert world.readers == []


def test_a_worker_that_nobody_hears_is_gone(world: World) -> None:
    """A worker is gone when its subscription is, unless the service itself has no connection then."""
    world.vigils.begin(worker(os.getpid()))
    world.state = "reconnecting"
    world.report(False)
    assert world.ended == []
    world.state = "connected"
    world.report(False)
    assert world.ended == [worker(os.getpid())]
    assert world.sent[-1] == b"CMSG interest/off\0queue/jobs/worker/ab"


def test_the_key_of_a_worker_is_watched_once_it_is_here(world: World) -> None:
    """A worker that may still come back has no subscription, and is not gone for that."""
    holder = worker(os.getpid())
    world.vigils.expect(holder)
    assert world.sent == []
    for _ in range(2):
        world.vigils.begin(holder)
    assert [packet for packet in world.sent if b"interest" in packet] == [b"CMSG interest/on\0queue/jobs/worker/ab"]
    world.vigils.end(holder)
    assert (world.readers, world.sent[-1]) == ([], b"CMSG interest/off\0queue/jobs/worker/ab")
