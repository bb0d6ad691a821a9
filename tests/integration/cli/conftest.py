"""What tests of the commands share: a raw subscriber, and a bus with last values."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.harness import Bus, Client
from tests.support.servers import StartBus


@pytest.fixture
def subscriber(shared: Bus) -> Iterator[Client]:
    """A raw client that is subscribed to ``t/``.

    A test whose publisher is stopped in the middle uses the key ``flood`` instead: what that one has left in its socket
    is delivered while the next test runs.
    """
    with Client(shared.address) as client:
        client.sub(b"t/")
        client.sync()
        yield client


@pytest.fixture(scope="module")
def keeping(module_bus: StartBus) -> Bus:
    """A bus with last values below ``state/``, as the page has it."""
    return module_bus("--last-value=state/")
