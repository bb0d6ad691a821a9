"""Fixtures that run one test with each client library."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests.integration.clients.backends import SHELLS, AsyncioShell, BlockingShell, Shell, TwistedShell


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> bool | None:
    """Run a test that is a coroutine in the library that it asks for."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    shell = next(value for value in arguments.values() if isinstance(value, Shell))
    shell.run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture(params=SHELLS, ids=lambda kind: kind.name)
def shell(request: pytest.FixtureRequest) -> Shell:
    """Each library."""
    made: Shell = request.param()
    return made


@pytest.fixture(params=(AsyncioShell, TwistedShell), ids=lambda kind: kind.name)
def looping(request: pytest.FixtureRequest) -> Shell:
    """Each library whose calls can be cancelled."""
    made: Shell = request.param()
    return made


@pytest.fixture
def twisted() -> TwistedShell:
    return TwistedShell()


@pytest.fixture
def native() -> AsyncioShell:
    """The library for asyncio."""
    return AsyncioShell()


@pytest.fixture
def waiting() -> BlockingShell:
    """The library for programs that wait."""
    return BlockingShell()
