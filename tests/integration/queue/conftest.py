"""Fixtures: a bus and a service of a queue, and tests that are coroutines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.clients import conftest as clients
from tests.support.nats import NatsServer
from tests.support.queues import QueueProcess
from tests.support.servers import StartBus

pytest_pyfunc_call = clients.pytest_pyfunc_call
backend, looping, native = clients.backend, clients.looping, clients.native


class Queued:
    """A bus, and the service of the queue ``jobs`` on it."""

    def __init__(self, bus: Any, service: QueueProcess) -> None:
        self.bus = bus
        self.address = bus.address
        self.service = service


@pytest.fixture
def nats(spawn: Callable[..., Any], directory: Path, tmp_path: Path) -> NatsServer:
    """A nats-server with JetStream."""
    server: NatsServer = spawn(NatsServer, directory, "-js", "-sd", str(tmp_path))
    return server.wait_started()


@pytest.fixture
def store(request: pytest.FixtureRequest) -> str:
    """The option of a store; parametrized with ``jetstream``, one in JetStream."""
    return f",store={request.getfixturevalue('nats').url}" if getattr(request, "param", "") == "jetstream" else ""


@pytest.fixture
def queued(bus: StartBus, spawn: Callable[..., Any], directory: Path, store: str) -> Callable[..., Queued]:
    """Start a bus, and a service with the options of the queue: ``queued('=jobs/,lease=1s')``."""

    def start(options: str = "=jobs/", *more: str) -> Queued:
        server = bus()
        service = spawn(QueueProcess, directory, server.address, f"--queue=jobs{options}{store}", *more)
        return Queued(server, service.wait_started())

    return start
