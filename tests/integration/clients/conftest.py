"""Fixtures that run one test with each client library."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import sbus
from sbus.client import blocking
from tests.integration.clients.backends import BACKENDS, AsyncioBackend, Backend, BlockingBackend, TwistedBackend
from tests.support.harness import Bus


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> bool | None:
    """Run a test that is a coroutine with the library that it names."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    backend = next(value for value in arguments.values() if isinstance(value, Backend))
    backend.run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture(params=BACKENDS, ids=lambda kind: kind.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each library."""
    made: Backend = request.param()
    return made


@pytest.fixture(params=(AsyncioBackend, TwistedBackend), ids=lambda kind: kind.name)
def looping(request: pytest.FixtureRequest) -> Backend:
    """Each library with an event loop, whose calls can be cancelled."""
    made: Backend = request.param()
    return made


@pytest.fixture
def twisted() -> TwistedBackend:
    return TwistedBackend()


@pytest.fixture
def native() -> AsyncioBackend:
    """The library for asyncio."""
    return AsyncioBackend()


@pytest.fixture
def waiting() -> BlockingBackend:
    """The blocking library."""
    return BlockingBackend()


@pytest.fixture
def client(shared: Bus) -> Iterator[blocking.Bus]:
    """A client of the blocking library at the shared bus."""
    with sbus.connect(str(shared.address)) as client:
        yield client
