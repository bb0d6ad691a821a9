"""What only the Twisted client has: endpoints, Deferreds, and a reactor that it leaves clean."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from twisted.internet.endpoints import UNIXClientEndpoint

from sbus.client import tx
from sbus.errors import Closed, ConnectError, Disconnected, InvalidKey, PacketTooLong, UsageError
from sbus.seqpacket.endpoints import SeqpacketClientEndpoint
from tests.integration.clients.backends import TwistedBackend, turn
from tests.integration.clients.deferreds import done
from tests.integration.clients.fake_servers import FakeServer
from tests.support.harness import Bus

# --- endpoints ------------------------------------------------------------------------------------


async def test_address_may_be_an_endpoint(twisted: TwistedBackend, shared: Bus) -> None:
    """A path, an endpoint's string and an endpoint connect alike, and errors name the address."""
    for address in (
        str(shared.address),
        f"seqpacket:{shared.address}",
        f"seqpacket:{shared.address}:timeout=3",
        SeqpacketClientEndpoint(twisted.reactor, str(shared.address)),
    ):
        bus = await done(tx.connect(twisted.reactor, address))
        assert (await done(bus.whoami())).startswith(b"!/cred/")
        await done(bus.close())
        with pytest.raises(Closed):
            await done(bus.publish("k"))
    with pytest.raises(ConnectError, match="seqpacket:/none: No such file"):
        await done(tx.connect(twisted.reactor, "seqpacket:/none"))


async def test_publish_fails_through_its_deferred(twisted: TwistedBackend, shared: Bus) -> None:
    """Whatever is wrong with a message or the connection, the Deferred fails, as those of other calls do."""
    client = await twisted.connect(shared.address)
    bus: tx.Bus = client.raw
    bad: Any = [
        (("!", b""), InvalidKey),
        (("k", "text"), UsageError),
        (("k", bytes(1 << 20)), PacketTooLong),
    ]
    for message, error in bad:
        for call in (bus.publish(*message), bus.publish_many([message])):
            with pytest.raises(error):
                await done(call)
    many: Any = 1
    with pytest.raises(TypeError):
        await done(bus.publish_many(many))
    bus.close_now()
    for call in (bus.publish("k"), bus.publish_many([("k", b"")]), bus.publish_many([])):
        with pytest.raises(Closed):
            await done(call)


async def test_endpoint_of_streams_is_refused(twisted: TwistedBackend, directory: Path) -> None:
    """An endpoint whose connections do not keep packets apart is refused; none stays open."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(directory / "stream"))
        server.listen()
        endpoint = UNIXClientEndpoint(twisted.reactor, str(directory / "stream"))
        with pytest.raises(UsageError, match="does not keep packets apart"):
            await done(tx.connect(twisted.reactor, endpoint))
        peer = server.accept()[0]
        with peer:
            await turn()
            assert peer.recv(1) == b""


async def test_transport_is_there_for_its_options(twisted: TwistedBackend, shared: Bus) -> None:
    """``.transport`` is the transport; after the end it raises the reason."""
    client = await twisted.connect(shared.address)
    handle = client.raw.transport.getHandle()
    assert handle.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_SEQPACKET
    await client.close()
    with pytest.raises(Closed):
        _ = client.raw.transport


async def test_close_returns_when_the_socket_is_closed(twisted: TwistedBackend, shared: Bus) -> None:
    """When the Deferred of `close` has fired, the socket is closed; a second `close` fires then too."""
    client = await twisted.connect(shared.address)
    fd = client.socket.fileno()
    closing = [client.raw.close(), client.raw.close()]
    for deferred in closing:
        await done(deferred)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


async def test_waiting_for_the_end(twisted: TwistedBackend, directory: Path) -> None:
    """`whenClosed` fires after `close`, and fails with the reason if the server has closed."""
    with FakeServer(directory / "fake") as server:
        client = await twisted.connect(server.address)
        waiting = client.raw.whenClosed()
        (await server.accept()).close()
        for deferred in (waiting, client.raw.whenClosed()):
            with pytest.raises(Disconnected, match="the server closed the connection"):
                await done(deferred)
        client = await twisted.connect(server.address)
        waiting = client.raw.whenClosed()
        await client.close()
        assert await done(waiting) is None
        assert await done(client.raw.whenClosed()) is None


# --- the reactor ----------------------------------------------------------------------------------


TRIAL = """
from twisted.internet import defer, reactor
from twisted.trial.unittest import TestCase

from sbus.client import tx
from sbus.client.tx.service import BusClientService
from sbus.errors import Disconnected

ADDRESS = {address!r}


class Tests(TestCase):
    async def test_use(self):
        bus = await tx.connect(reactor, ADDRESS)
        sub = bus.subscribe("k")
        for i in range(200):
            bus.publish("k", b"%d" % i)
        async for message in sub:
            if message.payload == b"199":
                break
        self.assertTrue((await bus.whoami()).startswith(b"!/cred/"))
        await bus.close()

    async def test_cancel(self):
        bus = await tx.connect(reactor, ADDRESS)
        for call in (bus.whoami(), bus.request("nobody"), bus.subscribe("k").get(), bus.fence(timeout=60)):
            call.cancel()
            await self.assertFailure(call, defer.CancelledError)
        await bus.close()

    async def test_service(self):
        service = BusClientService(reactor, ADDRESS, setup=lambda bus: bus.subscribe("k"))
        service.startService()
        await (await service.whenConnected()).fence()
        await service.stopService()

    async def test_service_without_a_server(self):
        service = BusClientService(reactor, ADDRESS + ".none")
        service.startService()
        await service.stopService()
"""


@pytest.mark.parametrize("reactor", ["epoll", "asyncio"])
def test_reactor_is_left_clean(reactor: str, shared: Bus, directory: Path) -> None:
    """Trial finds nothing left in real reactors."""
    (directory / "test_clean.py").write_text(TRIAL.format(address=str(shared.address)))
    command = [sys.executable, "-m", "twisted.trial", f"--reactor={reactor}", "--unclean-warnings", "test_clean"]
    ended = subprocess.run(
        command, cwd=directory, env={**os.environ, "PYTHONPATH": str(directory)}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "PASSED (successes=4)" in ended.stdout
    assert "Dirty" not in ended.stdout + ended.stderr
