"""What programs need to test themselves: real buses that come and go with a test, clients that record, fakes.

================================  ===================================================================
`RunningBus`, `running_bus`       a real server in a process of its own (also as the pytest fixture
                                  ``sbus_bus``, see `sbus.testing.pytest_plugin`)
`BusMixin`, `InProcessBus`        a real server inside of a trial test, on the reactor of the tests
`RecordingClient` and the like    subscribe, and keep all that comes for the test to look at
`FakePacketTransport`             a connection without a socket, for tests of protocols
================================  ===================================================================

Nothing is imported before it is used: who needs a server process does not load Twisted.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sbus.testing.clients import AsyncioRecordingClient, RecordingClient, TwistedRecordingClient
    from sbus.testing.fakes import FakePacketTransport
    from sbus.testing.servers import RunningBus, running_bus
    from sbus.testing.trial import BusMixin, InProcessBus

__all__ = [
    "AsyncioRecordingClient",
    "BusMixin",
    "FakePacketTransport",
    "InProcessBus",
    "RecordingClient",
    "RunningBus",
    "TwistedRecordingClient",
    "running_bus",
]

_HOMES = {
    "AsyncioRecordingClient": "clients",
    "BusMixin": "trial",
    "FakePacketTransport": "fakes",
    "InProcessBus": "trial",
    "RecordingClient": "clients",
    "RunningBus": "servers",
    "TwistedRecordingClient": "clients",
    "running_bus": "servers",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
