"""The Twisted client as a service that keeps the connection up."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from twisted.internet import defer
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.logger import LogLevel, capturedLogs, formatEvent
from zope.interface import implementer

from sbus.client import tx
from sbus.client.connecting import Backoff
from sbus.client.subscription import HIGH_WATER
from sbus.client.tx.service import BusClientService
from sbus.errors import Closed, Disconnected
from sbus.seqpacket.endpoints import SeqpacketClientEndpoint
from tests.integration.clients.backends import Client, Gaps, TwistedBackend, turn, unread, wait_stuck
from tests.integration.clients.deferreds import QUICK, Push, done
from tests.integration.clients.fake_servers import FakeServer
from tests.support.harness import Bus
from tests.support.reactors import hurried
from tests.support.servers import StartBus
from tests.support.waiting import paused

WHOAMI = b"CMSG !/cred/whoami"

# --- the service ----------------------------------------------------------------------------------


async def test_service_connects_when_the_server_is_there(
    twisted: TwistedBackend, bus: StartBus, directory: Path
) -> None:
    """A service may start before the server, and says once why it is not connected; `whenConnected` fires with the bus,
    set up once.
    """
    setups: list[tx.Bus] = []

    async def setup(connected: tx.Bus) -> None:
        setups.append(connected)
        connected.subscribe("k")
        await connected.fence()

    service = BusClientService(twisted.reactor, str(directory / "bus"), setup=setup, backoff=QUICK)
    waiting = [service.whenConnected() for _ in range(3)]
    waiting[1].addErrback(lambda failure: failure.trap(defer.CancelledError))
    with capturedLogs() as events:
        service.startService()
        waiting[1].cancel()
        await turn()
        assert not waiting[0].called
        server = bus()
        connected = await done(waiting[0])
    assert (await done(waiting[2]), await done(service.whenConnected())) == (connected, connected)
    assert setups == [connected]
    [warning] = [formatEvent(event) for event in events if event["log_level"] is LogLevel.warn]
    assert warning.startswith(f"no bus at {directory}/bus: ")
    assert warning.endswith("; trying again")
    assert server.dropped() == 0
    await done(service.stopService())
    with pytest.raises(Closed):
        await done(connected.publish("k"))


async def test_service_keeps_the_connection_up(twisted: TwistedBackend, bus: StartBus) -> None:
    """After each loss the same bus reconnects, restores its subscriptions and calls `on_gap`."""
    server = bus()
    gaps = Gaps()
    got: list[bytes] = []
    service = BusClientService(
        twisted.reactor,
        str(server.address),
        setup=lambda connected: connected.subscribe("k", lambda message: got.append(message.payload)),
        backoff=QUICK,
        on_gap=gaps,
    )
    service.startService()
    connected = await done(service.whenConnected())
    for kills in (1, 2):
        server.kill(signal.SIGKILL)
        server.wait()
        server = bus("--reuse")
        await gaps.wait(kills)
        assert await done(service.whenConnected()) is connected
        await done(connected.publish("k", b"%d" % kills))
        await done(connected.fence())
    assert got == [b"1", b"2"]
    await done(service.stopService())


async def test_service_that_is_stopped_while_it_connects(twisted: TwistedBackend, directory: Path) -> None:
    """A service that is connecting stops at once, fails `whenConnected`, and can be started again."""
    with FakeServer(directory / "fake") as server:
        service = BusClientService(twisted.reactor, str(directory / "none"), backoff=Backoff(first=60.0))
        full = BusClientService(twisted.reactor, str(server.address))
        silent = BusClientService(twisted.reactor, str(server.address))
        for which in (service, silent, full):
            for _ in range(2):
                if which is full:
                    server.vanish()
                    server.listen(0)
                    server.fill()
                waiting = which.whenConnected()
                which.startService()
                await turn()
                if which is silent:
                    assert await (await server.accept()).receive() == WHOAMI
                await done(which.stopService())
                with pytest.raises(Closed, match="stopped before it was connected"):
                    await done(waiting)
        await done(service.stopService())


async def test_setup_that_fails_is_done_again(twisted: TwistedBackend, shared: Bus) -> None:
    """A setup that fails is logged; the connection is closed, and another one made after a pause."""
    buses: list[tx.Bus] = []

    def setup(connected: tx.Bus) -> None:
        buses.append(connected)
        if len(buses) < 3:
            raise ZeroDivisionError

    service = BusClientService(twisted.reactor, str(shared.address), setup=setup, backoff=QUICK)
    service.startService()
    assert await done(service.whenConnected()) is buses[2]
    assert [type(error) for error in twisted.take_failures()] == [ZeroDivisionError] * 2
    for connected in buses[:2]:
        with pytest.raises(Closed):
            await done(connected.publish("k"))
    await done(service.stopService())


@pytest.mark.parametrize("has_setup", [False, True])
async def test_service_and_a_bus_that_names_no_senders(
    twisted: TwistedBackend, directory: Path, has_setup: bool
) -> None:
    """A connection that ends at once, as the bus names no senders, is not set up, and another one is made."""
    buses: list[tx.Bus] = []
    setup = buses.append if has_setup else None
    with FakeServer(directory / "fake") as server:
        service = BusClientService(twisted.reactor, str(server.address), sender=True, backoff=QUICK, setup=setup)
        service.startService()
        waiting = service.whenConnected()
        peer = await server.accept()
        await peer.answer()
        assert await peer.receive_until(b"") == [WHOAMI, b""]
        peer = await server.accept()
        assert not waiting.called
        assert await peer.receive_until(WHOAMI) == [b"CMSG sender/on", WHOAMI]
        peer.send(b"CMSG sender/on\0", WHOAMI + b"\0!/cred/1/2/3")
        await peer.answer()
        connected = await done(waiting)
        assert connected.state == "connected"
        assert buses == ([connected] if has_setup else [])
        await done(service.stopService())


async def test_service_that_is_stopped_while_it_is_set_up(twisted: TwistedBackend, shared: Bus) -> None:
    """Stopping the service cancels the setup's Deferred; a setup may also stop the service itself."""
    forever: defer.Deferred[None] = defer.Deferred()
    service = BusClientService(twisted.reactor, str(shared.address), setup=lambda connected: forever)
    service.startService()
    waiting = service.whenConnected()
    while service._setting_up is None:
        await turn()
    await done(service.stopService())
    assert forever.called
    with pytest.raises(Closed):
        await done(waiting)

    stopping: list[defer.Deferred[None]] = []
    own = BusClientService(
        twisted.reactor, str(shared.address), setup=lambda connected: stopping.append(own.stopService())
    )
    own.startService()
    with pytest.raises(Closed):
        await done(own.whenConnected())
    await done(stopping[0])


async def test_gap_in_which_the_application_closes(twisted: TwistedBackend, directory: Path) -> None:
    """An application may close the bus in `on_gap`."""
    with FakeServer(directory / "fake") as server:
        closing: list[defer.Deferred[None]] = []

        def on_gap(error: Exception) -> None:
            closing.append(client.raw.close())

        client: Client = await twisted.connect(server.address, reconnect=QUICK, on_gap=on_gap)
        (await server.accept()).close()
        peer = await server.accept()
        assert await peer.receive() == WHOAMI
        peer.send(WHOAMI + b"\0!/cred/1/2/3")
        assert await peer.receive() == b""
        await done(closing[0])


async def test_server_that_is_gone_while_paused(twisted: TwistedBackend, bus: StartBus) -> None:
    """If a send notices the end, every waiting call fails, however much is unread."""
    server = bus()
    client, publisher = await twisted.connect(server.address), await twisted.connect(server.address)
    sub = await client.subscribe("p")
    await client.fence()
    await publisher.publish_many([("p", b"%d " % i + bytes(100)) for i in range(3 * HIGH_WATER)])
    await wait_stuck(lambda: unread(client), publisher)
    closed = client.raw.whenClosed()
    server.kill(signal.SIGKILL)
    server.wait()
    with pytest.raises(Disconnected):
        await done(client.raw.publish("x", b"1"))
    for ending in (closed, client.raw.fence()):
        with pytest.raises(Disconnected):
            await done(ending)
    await done(client.raw.close())
    got = [int(message.payload.split()[0]) for message in await sub.get_ready()]
    assert len(got) >= HIGH_WATER
    assert got == list(range(len(got)))


async def test_push_producer_is_paused_while_there_is_no_connection(twisted: TwistedBackend, directory: Path) -> None:
    """A push producer is paused when the connection is lost, and resumed on the next one."""
    with FakeServer(directory / "fake") as server:
        client = await twisted.connect(server.address, reconnect=QUICK)
        await client.subscribe("k")
        peer = await server.accept()
        producer = Push(client)
        client.raw.registerProducer(producer, True)
        assert producer.reported == []
        server.vanish()
        peer.close()
        with pytest.raises(Disconnected):
            await client.fence()
        assert producer.reported == ["pause"]
        server.listen()
        peer = await server.accept()
        assert (await peer.answer())[0] == b"SUB k"
        while producer.reported[:2] != ["pause", "resume"]:
            await turn()
        producer.stop()
        client.raw.unregisterProducer()


@implementer(IStreamClientEndpoint)
class Faltering:
    """An endpoint that fails in odd ways before it connects again."""

    def __init__(self, reactor: Any, address: str, *failures: Exception) -> None:
        self._real = SeqpacketClientEndpoint(reactor, address)
        self._failures: list[Exception | None] = [None, *failures]

    def connect(self, factory: Any) -> Any:
        failure = self._failures.pop(0) if self._failures else None
        return self._real.connect(factory) if failure is None else defer.fail(failure)


async def test_attempt_that_fails_for_want_of_descriptors_is_not_the_last(
    twisted: TwistedBackend, directory: Path
) -> None:
    """After any error of an attempt to reconnect, another attempt follows."""
    with FakeServer(directory / "fake") as server:
        failures = [OSError(errno.EMFILE, os.strerror(errno.EMFILE))] * 2
        endpoint = Faltering(twisted.reactor, str(server.address), *failures)
        bus = await done(tx.connect(twisted.reactor, endpoint, reconnect=QUICK))
        (await server.accept()).close()
        with pytest.raises(Disconnected):
            await done(bus.fence())
        fence = bus.fence()
        peer = await server.accept()
        for _ in range(2):  # the client's own fence comes first
            await peer.answer()
        await done(fence)
        await done(bus.close())


async def test_service_stops_beside_a_server_that_stands_still(twisted: TwistedBackend, bus: StartBus) -> None:
    """A service beside a paused server stops after its timeout, with packets unsent."""
    server = bus()
    service = BusClientService(twisted.reactor, str(server.address))
    service.startService()
    connected = await done(service.whenConnected())
    with paused(server.pid):
        while len(connected.outbox) < 10:
            connected.publish("k", bytes(50_000)).addErrback(lambda failure: failure.trap(Closed))
            await turn()
        with hurried(twisted.reactor, 200):
            await done(service.stopService())
    with pytest.raises(Closed):
        await done(connected.publish("k"))
