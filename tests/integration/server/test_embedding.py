"""`BusService` in programs of other projects."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from tests.support.harness import TIMEOUT, Client, Process, numbered, run

APPLICATION = """
import os
from twisted.application.internet import TimerService
from twisted.application.service import Application
from twisted.internet import reactor
from sbus.seqpacket.endpoints import SeqpacketServerEndpoint
from sbus.server.core.limits import Limits
from sbus.server.core.observers import Observer
from sbus.server.run.service import BusService

class Greeter(Observer):
    def subscribed(self, client, pattern):
        print("subscribed", pattern, flush=True)
        if pattern == b"greetings":
            bus.registry.publish(b"greetings", b"to pid %d" % client.peer.pid)

    def published(self, client, key, payload):
        print("published", key, payload, flush=True)
        if key == b"sum":
            bus.registry.publish(b"result", b"%d" % sum(map(int, payload.split())))

    def closed(self, client, reason):
        print("closed", reason.name, flush=True)

application = Application("somebody else's")
bus = BusService(
    SeqpacketServerEndpoint(reactor, os.path.abspath("bus")), limits=Limits(max_patterns=3), observers=[Greeter()]
)
bus.setServiceParent(application)
TimerService(0.01, bus.registry.publish, b"tick", b"tock").setServiceParent(application)
"""


@pytest.fixture
def embedded(spawn, directory):
    """An application of another project, with a bus in it."""
    (directory / "app.tac").write_text(APPLICATION)
    process = spawn(Process, directory, ["-n", "--pidfile=", "-y", "app.tac"])
    process.wait_log("sbus listens on")
    return process


class TestApplication:
    """A bus as one service among others."""

    def test_bus(self, embedded, directory):
        """Clients use it as any bus."""
        with Client(directory / "bus") as one, Client(directory / "bus") as other:
            other.sub(b"talk")
            other.sync()
            packets = numbered(b"talk", 100)
            for packet in packets:
                one.send(packet)
            assert other.receive(100) == packets

    def test_publishing_from_within(self, embedded, directory):
        """The program publishes without being a client: on its own account, and in answer to what clients do."""
        with Client(directory / "bus") as client:
            client.sub(b"tick")
            assert client.receive(3) == [b"MSG tick\0tock"] * 3
            client.unsub(b"tick")
            client.sync()
            client.sub(b"greetings", b"result")
            assert client.recv() == b"MSG greetings\0to pid %d" % os.getpid()
            client.msg(b"sum", b"1 2 39")
            assert client.recv() == b"MSG result\00042"

    def test_observers(self, embedded, directory):
        """The program's observer sees every event, but no secret payload and no rest of a secret key."""
        with Client(directory / "bus") as client:
            client.msg(b"open/key", b"payload")
            client.msg(b"!/cred/1/2/3/hidden", b"secret")
            client.sync()
        embedded.wait_log(r"published b'open/key' b'payload'")
        embedded.wait_log(r"published b'!/cred/1/2/3/' None")
        embedded.wait_log("closed PEER_CLOSED")
        assert "hidden" not in embedded.log
        assert "secret" not in embedded.log

    def test_limits(self, embedded, directory):
        """It has the limits that the program gave it."""
        with Client(directory / "bus") as client:
            client.sub(b"1", b"2", b"3", b"4")
            assert client.has_ended()

    def test_stop(self, embedded, directory):
        """It stops with the application, and removes its socket."""
        with Client(directory / "bus") as client:
            client.sync()
            embedded.kill(signal.SIGTERM)
            assert client.has_ended()
        embedded.wait()
        assert not (directory / "bus").exists()

    def test_address_in_use(self, spawn, directory, embedded):
        """An application whose bus cannot listen does not start; the reason is that of twistd sbus."""
        second = spawn(Process, directory, ["-n", "--pidfile=", "-y", "app.tac"])
        assert second.wait() != 0
        assert "ListenError" in second.log
        assert "is in use by a server that is running" in second.log
        with Client(directory / "bus") as client:
            assert client.sync() == []


def run_program(directory, program, *arguments):
    """Run a Python program; returns what it prints as JSON."""
    result = run([sys.executable, "-c", program, *arguments], directory, timeout=6 * TIMEOUT)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return json.loads(result.stdout)


TALKING = """
import contextlib, gc, json, os, socket, sys
from twisted.internet import defer, reactor, task, threads
from twisted.logger import globalLogBeginner
from sbus.errors import ListenError
from sbus.seqpacket.endpoints import SeqpacketServerEndpoint
from sbus.server.run.service import BusService

def connect(path):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(10)
    sock.connect(path)
    return sock

def talk(path, stay):
    "Subscribe, publish, receive; a client that is to stay keeps its subscription, and does not read."
    one, two = connect(path), connect(path)
    two.send(b"SUB talk"); two.send(b"CMSG !/cred/whoami"); two.recv(1000)
    for n in range(10):
        one.send(b"MSG talk\\0%d" % n)
    assert [two.recv(1000) for _ in range(10)] == [b"MSG talk\\0%d" % n for n in range(10)]
    two.send(b"CMSG blocking/soft/block")
    two.send(b"CMSG !/cred/whoami"); two.recv(1000)
    for n in range(50):
        one.send(b"MSG talk\\0" + b"." * 1000)
    if stay:
        return one, two
    one.close(); two.close()

def run(main):
    # Until logging begins, Twisted keeps the events, and whatever they are about.
    globalLogBeginner.beginLoggingTo([lambda event: None], redirectStandardIO=False)

    async def guarded():
        try:
            print(json.dumps(await main()))
        except BaseException:
            import traceback
            traceback.print_exc()
        reactor.stop()
    reactor.callWhenRunning(lambda: defer.Deferred.fromCoroutine(guarded()))
    reactor.run()
"""

CYCLES = (
    TALKING
    + """
async def count():
    await task.deferLater(reactor, 0)  # the call that reported the end is over, and what it holds
    gc.collect()
    kinds = ("BusService", "BusFactory", "SubscriptionRegistry", "BusProtocol", "SendQueue", "Backpressure",
             "PacketTransport", "PacketPort", "PatternIndex", "RouteCache")
    objects = [type(o).__name__ for o in gc.get_objects()]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "readers": len(reactor.getReaders()),
        "writers": len(reactor.getWriters()),
        "calls": len(reactor.getDelayedCalls()),
        **{kind: objects.count(kind) for kind in kinds},
    }

same = BusService(SeqpacketServerEndpoint(reactor, "bus")) if sys.argv[1] == "same" else None

async def cycle(n):
    service = same or BusService(SeqpacketServerEndpoint(reactor, "bus"))
    if n % 2:
        service.privilegedStartService()
    service.startService()
    clients = await threads.deferToThread(talk, "bus", n % 3) or ()
    for client in clients:
        client.send(b"MSG talk\\0not read before the stop")
    await service.stopService()
    assert not service.registry.clients
    assert not os.path.exists("bus")
    for client in clients:
        with contextlib.suppress(ConnectionResetError):  # It had published what was not read.
            while client.recv(10000): pass
        client.close()

async def main():
    for n in range(6):
        await cycle(n)
    before = await count()
    for n in range(48):
        await cycle(n)
    return [before, await count()]

run(main)
"""
)

GONE = (
    TALKING
    + """
import struct
from sbus.server.asks.last_values import LastValueRule
from sbus.server.core.limits import Limits
from sbus.server.core.listeners import Listener
from sbus.server.core.observers import Observer

class Ends(Observer):
    def closed(self, client, reason):
        global ended, bundled
        ended += 1
        bundled += client.settings.bundles
ended = bundled = 0

class Framed(socket.socket):
    "A stream socket on which each packet has its length in front."
    def send(self, packet):
        self.sendall(struct.pack("<I", len(packet)) + packet)
    def recv(self, size):
        size, = struct.unpack("<I", super().recv(4, socket.MSG_WAITALL))
        return super().recv(size, socket.MSG_WAITALL)

def door():
    sock = Framed(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(10)
    sock.connect("door")
    return sock

def ask(sock, *packets):
    for packet in packets:
        sock.send(packet)
    sock.send(b"CMSG !/cred/whoami")
    while not sock.recv(100000).startswith(b"CMSG !/cred"): pass

def flooded(*choices, timeout=10, ending=b"", reader=None):
    "A subscriber that reads nothing, and leaves, or is disconnected, with messages in its queue."
    reader, publisher = reader or connect("bus"), connect("bus")
    ask(reader, *choices, b"SUB flood")
    publisher.send(b"CMSG echo/off")
    publisher.settimeout(timeout)
    with contextlib.suppress(BlockingIOError):
        for n in range(500):
            publisher.send(b"MSG flood\\0" + b"." * 1000)
        ask(publisher)
    if ending:
        reader.send(ending)
    return [reader, publisher]

def half_closed():
    sock = connect("bus")
    ask(sock, b"SUB echoes")
    for n in range(300):
        sock.send(b"MSG echoes\\0" + b"." * 1000)
    sock.shutdown(socket.SHUT_WR)
    return [sock]

def broken():
    sock = connect("bus")
    sock.send(b"nonsense")
    assert sock.recv(1000) == b""
    return [sock]

def asked(*packets):
    sock = connect("bus")
    ask(sock, *packets)
    return [sock]

STORIES = [
    lambda: [connect("bus")],
    broken,
    half_closed,
    lambda: flooded(b"CMSG receipts/on"),
    lambda: flooded(b"CMSG receipts/on", b"CMSG bye/on", ending=b"nonsense"),
    lambda: flooded(b"CMSG blocking/soft/error"),
    lambda: flooded(b"CMSG blocking/hard/block", timeout=0),
    lambda: flooded(b"CMSG blocking/soft/latest"),
    lambda: flooded(b"CMSG order/stack", ending=b"CMSG order/random"),
    lambda: flooded(b"CMSG bundle/on"),
    lambda: flooded(b"CMSG bundle/on", ending=b"nonsense"),
    lambda: flooded(reader=door()),
    lambda: flooded(b"CMSG bundle/on", reader=door(), ending=b"nonsense"),
    lambda: asked(b"SUB kept/*", b"MSG kept/a\\0 1", b"CMSG last\\0kept/*", b"CMSG interest/on\\0some/key"),
    lambda: asked(*(b"SUB %d/*" % n for n in range(1000))),  # more than its user's balance pays for: it leaves in turns
    lambda: asked(b"SUB !/cred//0//a", b"SUB */b", b"CMSG interest/patterns", b"CMSG observer/on", b"CMSG chain/on"),
]

async def main():
    bus = BusService(
        SeqpacketServerEndpoint(reactor, "bus"),
        limits=Limits(queue_messages=100),
        observers=[Ends()],
        last_values=(LastValueRule(b"kept/*"),),
        listeners=[(Listener("door"), SeqpacketServerEndpoint(reactor, "door", stream=True))],
    )
    bus.startService()
    stays = await threads.deferToThread(connect, "bus")  # so that the user stays
    gc.freeze()  # else each look for garbage would go through all modules
    left = {}
    for number, story in enumerate(STORIES * 2):
        gc.collect()
        gc.disable()
        clients = await threads.deferToThread(story)
        expected = ended + len(bus.registry.clients) - 1
        for sock in clients:
            sock.close()
        del clients, sock
        while ended < expected or len(bus.registry.clients) > 1:
            await task.deferLater(reactor, 0.001)
        await task.deferLater(reactor, 0)  # the call that reported the end is over
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        kinds = {type(o).__name__ for o in gc.garbage if type(o).__module__.startswith("sbus")}
        if number >= len(STORIES) and kinds:
            left[number - len(STORIES)] = sorted(kinds)
        gc.garbage.clear()
        gc.enable()
    stays.close()
    await bus.stopService()
    return [ended, bundled, left]

run(main)
"""
)

TWO = (
    TALKING
    + """
async def main():
    buses = [BusService(SeqpacketServerEndpoint(reactor, name)) for name in ("one", "two")]
    for bus in buses:
        bus.startService()
    async def ask(name, *packets):
        return await threads.deferToThread(exchange, name, packets)
    def exchange(name, packets):
        for packet in packets:
            clients[name].send(packet)
        clients[name].send(b"CMSG !/cred/whoami")
        got = []
        while not (packet := clients[name].recv(10000)).startswith(b"CMSG"):
            if not packet:
                return "end-of-file"
            got.append(packet.decode())
        return got
    clients = {name: await threads.deferToThread(connect, name) for name in ("one", "two")}
    result = {}
    for name in clients:
        await ask(name, b"SUB ", b"SUB !/cred////")
    result["published on one"] = await ask("one", b"MSG a\\0one", b"MSG !/cred////x\\0one")
    result["seen on two"] = await ask("two")
    buses[1].registry.publish(b"b", b"from within")
    result["seen on one"] = await ask("one")
    result["published on two"] = await ask("two", b"MSG c\\0two")
    result["clients"] = [len(bus.registry.clients) for bus in buses]
    result["published"] = [bus.registry.counters.published for bus in buses]
    await buses[0].stopService()
    result["after the stop"] = await ask("two", b"MSG d\\0two")
    result["files"] = os.listdir(".")
    try:
        BusService(SeqpacketServerEndpoint(reactor, "two")).startService()
    except ListenError as e:
        result["third"] = str(e)
    result["after the third"] = await ask("two", b"MSG e\\0two")
    await buses[1].stopService()
    result["files at the end"] = os.listdir(".")
    for client in clients.values():
        client.close()
    return result

run(main)
"""
)


class TestLifetime:
    """Start and stop, many times."""

    @pytest.mark.parametrize("which", ["same", pytest.param("another", marks=pytest.mark.slow)])
    def test_no_leaks(self, directory, which):
        """Fifty times started, used and stopped, it leaves no descriptor, reader, call or object behind."""
        before, after = run_program(directory, CYCLES, which)
        assert after == before
        assert after["BusService"] == (1 if which == "same" else 0)
        assert after["BusProtocol"] == 0
        assert after["PacketTransport"] == 0
        assert after["calls"] == 0
        assert os.listdir(directory) == []

    def test_nothing_waits_for_the_collector(self, directory):
        """A client that has gone, however it was used and however it ended, leaves no cycle of references."""
        ended, bundled, left = run_program(directory, GONE)
        assert left == {}
        assert ended == 1 + 2 * 26  # the client that stays until the end, and those of all stories, twice
        assert bundled == 2 * 3
        assert os.listdir(directory) == []


MISTAKEN = (
    TALKING
    + """
from sbus.interfaces import IObserver
from sbus.server.core.observers import Observer

class Mistaken(Observer):
    pass

for event in IObserver.names():
    def fail(self, *_, event=event):
        seen.add(event)
        raise RuntimeError(event)
    setattr(Mistaken, event, fail)
seen = set()

async def main():
    bus = BusService(SeqpacketServerEndpoint(reactor, "bus"), observers=[Mistaken()])
    bus.startService()
    def use():
        talk("bus", False)
        wrong = connect("bus")
        wrong.send(b"UNSUB talk"); wrong.send(b"SUB talk"); wrong.send(b"UNSUB talk")
        wrong.send(b"nonsense")
        assert wrong.recv(1000) == b""
    await threads.deferToThread(use)
    await bus.stopService()
    return sorted(seen)

run(main)
"""
)


class TestObservers:
    """Observers that are wrong."""

    def test_mistaken(self, directory):
        """The exceptions of an observer are logged, and do not affect the bus."""
        seen = run_program(directory, MISTAKEN)
        assert {"connected", "subscribed", "published", "delivered", "violated", "closed"} <= set(seen)
        assert os.listdir(directory) == []


class TestTwo:
    """Two buses in one process."""

    def test_know_nothing_of_each_other(self, directory):
        """Messages, secrets, counters, clients and the end are each bus's own."""
        result = run_program(directory, TWO)
        assert result == {
            "published on one": ["MSG a\0one", "MSG !/cred////x\0one"],
            "seen on two": [],
            "seen on one": [],
            "published on two": ["MSG b\0from within", "MSG c\0two"],
            "clients": [1, 1],
            "published": [2, 2],
            "after the stop": ["MSG d\0two"],
            "files": ["two"],
            "third": f"{directory}/two is in use by a server that is running: stop that one, or choose another "
            "--socket",
            "after the third": ["MSG e\0two"],
            "files at the end": [],
        }
