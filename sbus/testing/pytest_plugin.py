"""The pytest fixture ``sbus_bus``, for everybody who has sbus installed; it costs nothing until a test asks for it.

Here nothing but pytest may be imported at the top, as every run of pytest loads this.
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
    """Tell pytest of our marker."""
    config.addinivalue_line(
        "markers", "sbus_options(**options): options of twistd sbus for the fixture sbus_bus (max_packet=1000)"
    )


@pytest.fixture
def sbus_bus(request: pytest.FixtureRequest) -> Iterator[RunningBus]:
    """A real message bus for this test alone: ``sbus_bus.address`` says where.

    The marker ``sbus_options(max_packet=1000)`` on the test, its class or its module sets options of
    ``twistd sbus``. If the test fails, its report has the server's log; if the server fails, so does the test.
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
