"""Fixtures: a bus and a service of a queue, and tests that are coroutines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.clients import conftest as clients
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
def queued(bus: StartBus, spawn: Callable[..., Any], directory: Any) -> Callable[..., Queued]:
    """Start a bus, and a service with the options of the queue: ``queued('=jobs/,lease=1s')``."""

    def start(options: str = "=jobs/", *more: str) -> Queued:
        server = bus()
        service = spawn(QueueProcess, directory, server.address, f"--queue=jobs{options}", *more)
        return Queued(server, service.wait_started())

    return start
