"""Tools for testing programs that use a bus.

================================  ===================================================================
`RunningBus`, `running_bus`       a real server in a separate process (also as the pytest fixture
                                  ``sbus_bus``, see `sbus.testing.pytest_plugin`)
`BusMixin`, `InProcessBus`        a real server inside a trial test, on the test's own reactor
`RecordingClient` and its kin     clients that subscribe, and keep every message for the test
`FakePacketTransport`             a connection without a socket, for tests of protocols
================================  ===================================================================

Everything here is real where it can be: the server is the server, and its clients are the public ones. A mock of a bus
would have to repeat its matching, its flood control and its errors, and would be wrong first where they are subtle.
Only a protocol is tested against a fake, the transport, because the kernel cannot be made to fill a socket on request.

Nothing sleeps. A bus is returned when it has answered a client. A recording client is returned when the server has
confirmed its subscriptions. "Nothing more came" is a round trip after everything that the server had before
(``settle``), not a pause. So a test that passes on a loaded machine passes on every machine.

A name is imported when it is first used: a test that launches a server process does not load Twisted, and a run of
pytest that uses no bus loads the plugin alone. Tests hold both to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbus.lazy import lazy_names

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

__getattr__ = lazy_names(
    __name__,
    {
        "AsyncioRecordingClient": ".clients",
        "BusMixin": ".trial",
        "FakePacketTransport": ".fakes",
        "InProcessBus": ".trial",
        "RecordingClient": ".clients",
        "RunningBus": ".servers",
        "TwistedRecordingClient": ".clients",
        "running_bus": ".servers",
    },
)
