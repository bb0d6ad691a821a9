"""Features of the Twisted client alone: endpoints, producers, a service that reconnects, a clean reactor."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from twisted.internet import defer
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.logger import LogLevel, capturedLogs, formatEvent
from zope.interface import implementer

from sbus.client import tx
from sbus.client.connecting import Backoff
from sbus.client.subscription import HIGH_WATER
from sbus.client.tx.service import BusClientService
from sbus.errors import Closed, ConnectError, Disconnected, InvalidKey, PacketTooLong, UsageError
from sbus.seqpacket.endpoints import SeqpacketClientEndpoint
from sbus.syscalls.batch import BATCH
from tests.integration.clients.backends import (
    Client,
    FakeServer,
    Gaps,
    TwistedBackend,
    turn,
    unread,
    wait_quiet,
    wait_stuck,
)
from tests.support.harness import TIMEOUT, Bus
from tests.support.reactors import hurried
from tests.support.servers import StartBus
from tests.support.waiting import paused

QUICK = Backoff(first=0.01, factor=1.2, longest=0.05)
WHOAMI = b"CMSG !/cred/whoami"


async def done(deferred: defer.Deferred[Any]) -> Any:
    return await asyncio.wait_for(deferred.asFuture(asyncio.get_running_loop()), TIMEOUT)


# --- endpoints -------------------------------------------------------------------------------


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


# --- producers -------------------------------------------------------------------------------


class Push:
    """A push producer that publishes in each turn of the loop, and records the calls that it gets."""

    def __init__(self, client: Client) -> None:
        self.bus = client.raw
        self.reported: list[str] = []
        self.stopped = False
        self.published = 0
        self._call: Any = None
        self._going = False

    def begin(self) -> None:
        self._going = True
        self._produce()

    def _produce(self) -> None:
        self._call = None
        while self._going and self.published % 50 < 49:
            self._publish()
        if self._going:
            self._publish()
            self._call = asyncio.get_running_loop().call_later(0, self._produce)

    def _publish(self) -> None:
        number, self.published = self.published, self.published + 1
        self.bus.publish("k", b"%d " % number + bytes(2000)).addErrback(lambda failure: failure.trap(Disconnected))

    def pauseProducing(self) -> None:
        self.reported.append("pause")
        self.stop()

    def resumeProducing(self) -> None:
        self.reported.append("resume")
        self.begin()

    def stopProducing(self) -> None:
        self.reported.append("stop")
        self.stopped = True
        self.stop()

    def stop(self) -> None:
        self._going = False
        if self._call is not None:
            self._call.cancel()
            self._call = None


class Pull:
    """A pull producer that publishes one message each time it is resumed, `count` in all."""

    def __init__(self, client: Client, count: int) -> None:
        self.bus = client.raw
        self.count = count
        self.published = 0
        self.stopped = False

    def resumeProducing(self) -> None:
        if self.published == self.count:
            self.bus.unregisterProducer()
            return
        number, self.published = self.published, self.published + 1
        self.bus.publish("k", b"%d " % number + bytes(2000)).addErrback(lambda failure: failure.trap(Disconnected))

    def stopProducing(self) -> None:
        self.stopped = True


def numbers(packets: list[bytes]) -> list[int]:
    return [int(packet.partition(b"\0")[2].split()[0]) for packet in packets]


async def test_push_producer_follows_the_socket(twisted: TwistedBackend, bus: StartBus) -> None:
    """A push producer is paused while the socket is full, and resumed when all is sent; nothing is lost."""
    server = bus()
    client = await twisted.connect(server.address)
    subscriber = server.client(b"k")
    producer = Push(client)
    with paused(server.pid):
        client.raw.registerProducer(producer, True)
        assert producer.reported == []
        producer.begin()
        await wait_quiet(lambda: producer.published)
        assert producer.reported == ["pause"]
        assert 1 <= len(client.raw.outbox) < 1 + 65_536 / 2000
        held = producer.published
    while producer.published < held + 2000:
        await turn()
    client.raw.unregisterProducer()
    producer.stop()
    await client.fence()
    assert producer.reported == ["pause", "resume"] * (len(producer.reported) // 2) + ["pause"] * (
        len(producer.reported) % 2
    )
    assert numbers(subscriber.sync()) == list(range(producer.published))
    before = list(producer.reported)
    await client.publish("k", b"x")
    assert producer.reported == before


async def test_pull_producer_is_asked_when_nothing_waits(twisted: TwistedBackend, bus: StartBus) -> None:
    """A pull producer is resumed once for each message, and not while the socket is full."""
    server = bus()
    client = await twisted.connect(server.address)
    subscriber = server.client(b"k")
    producer = Pull(client, 5000)
    steps: list[int] = []

    def watch(before: int) -> None:
        steps.append(producer.published - before)
        if producer.published < producer.count:
            asyncio.get_running_loop().call_soon(watch, producer.published)

    with paused(server.pid):
        client.raw.registerProducer(producer, False)
        await wait_quiet(lambda: producer.published)
        assert 0 < producer.published < producer.count
        assert len(client.raw.outbox) == 1
    watch(producer.published)
    got = numbers(await asyncio.to_thread(subscriber.receive, 5000))
    await client.fence()
    assert got == list(range(5000))
    assert max(steps) <= BATCH  # the reactor does other work, however fast the server is
    assert not producer.stopped


async def test_one_producer_at_a_time(twisted: TwistedBackend, shared: Bus) -> None:
    """A second producer is refused while there is one; a producer is stopped at the end."""
    client = await twisted.connect(shared.address)
    one, two, three = Push(client), Push(client), Push(client)
    client.raw.registerProducer(one, True)
    with pytest.raises(RuntimeError, match="never unregistered"):
        client.raw.registerProducer(two, True)
    client.raw.unregisterProducer()
    client.raw.unregisterProducer()
    client.raw.registerProducer(two, True)
    await client.close()
    client.raw.registerProducer(three, True)
    assert (one.reported, two.reported, three.reported) == ([], ["stop"], ["stop"])


async def test_producer_survives_a_lost_connection(twisted: TwistedBackend, bus: StartBus) -> None:
    """A producer is paused without a connection, and resumed on the next one; unsent messages are sent."""
    server = bus()
    client = await twisted.connect(server.address, reconnect=QUICK)
    subscriber = server.client(b"k")
    push = Push(client)
    client.raw.registerProducer(push, True)
    push.begin()
    await asyncio.to_thread(subscriber.receive, 100)
    server.kill(signal.SIGKILL)
    server.wait()
    await wait_quiet(lambda: push.published)
    assert push.reported[-1] == "pause"
    server = bus("--reuse")
    subscriber = server.client(b"k")
    held = push.published
    while push.published < held + 100:
        await turn()
    client.raw.unregisterProducer()
    push.stop()
    await client.fence()
    got = numbers(subscriber.sync())
    assert got == list(range(got[0], push.published))
    pull = Pull(client, 300)
    client.raw.registerProducer(pull, False)
    while pull.published < 100:
        await turn()
    server.kill(signal.SIGKILL)
    server.wait()
    await wait_quiet(lambda: pull.published)
    bus("--reuse")
    while pull.published < 300:
        await turn()
    await client.settle()


async def test_producers_are_stopped_at_the_end(twisted: TwistedBackend, directory: Path) -> None:
    """The end of the connection stops its producer."""
    for make in (Push, lambda client: Pull(client, 10**9)):
        with FakeServer(directory / "fake") as server:
            client = await twisted.connect(server.address)
            peer = await server.accept()
            producer: Any = make(client)
            client.raw.registerProducer(producer, make is Push)
            peer.close()
            with pytest.raises(Disconnected):
                await client.fence()
            assert producer.stopped
            await turn()
            server.vanish()


async def test_producer_that_fails_is_logged(twisted: TwistedBackend, shared: Bus) -> None:
    """An exception of a producer is logged and does not affect the connection."""

    class Broken:
        def resumeProducing(self) -> None:
            raise ZeroDivisionError

        def stopProducing(self) -> None:
            raise KeyError

    client = await twisted.connect(shared.address)
    client.raw.registerProducer(Broken(), False)
    assert [type(error) for error in twisted.take_failures()] == [ZeroDivisionError]
    await client.fence()
    await client.close()
    assert [type(error) for error in twisted.take_failures()] == [KeyError]


# --- the service -----------------------------------------------------------------------------


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


# --- the reactor -----------------------------------------------------------------------------

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
