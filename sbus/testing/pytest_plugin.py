"""The pytest fixture ``sbus_bus``, available wherever sbus is installed.

Every run of pytest loads this module, so it imports nothing but pytest at the top.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sbus.testing.servers import RunningBus

__all__ = ["sbus_bus"]


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker ``sbus_options``."""
    config.addinivalue_line(
        "markers", "sbus_options(**options): options of twistd sbus for the fixture sbus_bus, such as max_packet=1000"
    )


@pytest.fixture
def sbus_bus(request: pytest.FixtureRequest) -> Iterator[RunningBus]:
    """A real message bus for this test alone, at ``sbus_bus.address``.

    The marker ``sbus_options(max_packet=1000)`` on the test, its class or its module sets options of ``twistd sbus``.
    If the test fails, its report includes the server's log. If the server fails, the test fails.
    """
    from sbus.testing.servers import running_bus

    options: dict[str, Any] = {}
    for marker in reversed(list(request.node.iter_markers("sbus_options"))):
        options.update(marker.kwargs)
    bus = None
    try:
        with running_bus(**options) as bus:
            yield bus
    finally:
        if bus is not None:
            sys.stdout.write(bus.log)
