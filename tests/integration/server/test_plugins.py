"""Components of another project: dropped into ``twisted/plugins``, used through the real twistd."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.support.harness import OTHER_USER, environment_with, goes_on, is_held_back, numbered, refusal, twistd

SMALL = "--max-packet=1024"

PLUGIN = '''
"""A third party's components."""
import os

from twisted.plugin import IPlugin
from zope.interface import implementer

from sbus.errors import Violation, ViolationReason
from sbus.flood import Verdict
from sbus.interfaces import ICredentials, ICredentialsPolicy, IHardStrategy, IQueueOrder, ISoftStrategy


@implementer(IPlugin, ISoftStrategy)
class Newest:
    """Keeps the five newest messages."""

    selector = b"blocking/soft/newest"
    always = None

    def decide(self, queue, packet):
        while queue.messages >= 5 and queue.drop_next():
            pass
        return Verdict.KEEP


@implementer(IPlugin, ISoftStrategy)
class Important:
    """Blocks for important messages, drops the others."""

    selector = b"blocking/soft/important"
    always = None

    def decide(self, queue, packet):
        return Verdict.BLOCK if packet.startswith(b"MSG important/") else Verdict.DROP


class Mistaken:
    always = None

    def decide(self, queue, packet):
        raise RuntimeError("the third party's mistake")


@implementer(IPlugin, ISoftStrategy)
class Broken(Mistaken):
    """Raises."""

    selector = b"blocking/soft/broken"


@implementer(IPlugin, IHardStrategy)
class BrokenHard(Mistaken):
    """Raises too."""

    selector = b"blocking/hard/broken"


@implementer(IPlugin, IHardStrategy)
class Evict:
    """Makes room for what is new."""

    selector = b"blocking/hard/evict"
    always = None

    def decide(self, queue, packet):
        return Verdict.KEEP if queue.drop_next() else Verdict.DROP


@implementer(IPlugin, IQueueOrder)
class Smallest:
    """The smallest first."""

    selector = b"order/smallest"
    newestFirst = None
    arrival = False

    def rank(self, arrival, size, newest_first):
        return size, -arrival if newest_first else arrival


@implementer(ICredentials)
class ReadMostly:
    restrictsPublishing = True

    def __init__(self, settings):
        self.settings = settings

    def mayConnect(self, peer):
        return peer.gid != 4444

    def checkSubscription(self, peer, pattern, secret):
        if pattern.startswith(b"private/"):
            raise Violation(ViolationReason.REFUSED_SUBSCRIPTION)

    def mayPublish(self, peer, key):
        return key.startswith(b"public/") or peer.uid == os.getuid()

    def mayBlock(self, receiver, publisher):
        return False


@implementer(IPlugin, ICredentialsPolicy)
class ReadMostlyPolicy:
    name = "read-mostly"
    description = "only the server's user publishes what is not public"

    def make(self, settings):
        return ReadMostly(settings)


newest, important, broken, broken_hard, evict, smallest = (
    Newest(), Important(), Broken(), BrokenHard(), Evict(), Smallest()
)
policy = ReadMostlyPolicy()
'''


@pytest.fixture
def plugins(directory):
    """Put a plugin where twistd finds it; returns the environment that does."""

    def install(text: str = PLUGIN, name: str = "acme_sbus") -> dict[str, str | None]:
        place = directory / "third-party" / "twisted" / "plugins"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{name}.py").write_text(text)
        path = [str(directory / "third-party"), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(path)}

    return install


class TestStrategies:
    """New ways of flood control, by control messages of their own."""

    def test_soft(self, bus, plugins):
        """A new soft mode keeps what it wants to keep; what it drops is counted and logged."""
        started = bus(SMALL, env=plugins())
        reader = started.client(b"flood")
        reader.cmsg(b"blocking/soft/newest")
        reader.sync()
        publisher = started.client()
        packets = numbered(b"flood", 500)
        for packet in packets:
            publisher.send(packet)
        assert publisher.sync() == []
        assert goes_on(started)
        got = reader.sync()
        held = len(got) - 5
        assert 0 < held < 50
        assert got == packets[:held] + packets[-5:]
        reader.close()
        started.wait_log("client 1 disconnected")
        assert started.dropped() == 500 - len(got)

    def test_soft_that_blocks(self, bus, plugins):
        """A new soft mode may block publishers, for some messages and not for others."""
        started = bus(SMALL, "--block-timeout=600", env=plugins())
        reader = started.client(b"important/*", b"idle/*")
        reader.cmsg(b"blocking/soft/important")
        reader.sync()
        publisher, bystander = started.client(), started.client()
        for packet in numbered(b"idle/talk", 500):
            publisher.send(packet)
        assert publisher.sync() == []
        kept = numbered(b"important/news", 20)
        for packet in kept:
            publisher.send(packet)
        assert is_held_back(publisher, bystander, b"MSG nobody\0")
        got = [packet for packet in reader.receive(len(kept)) if packet.startswith(b"MSG important")]
        while len(got) < len(kept):
            got += [packet for packet in reader.receive(1) if packet.startswith(b"MSG important")]
        assert got == kept
        assert publisher.sync() == []

    def test_hard(self, bus, plugins):
        """A new hard mode makes room in a full queue."""
        started = bus(SMALL, "--queue-messages=20", env=plugins())
        reader = started.client(b"flood")
        reader.cmsg(b"blocking/hard/evict")
        reader.sync()
        publisher = started.client()
        packets = numbered(b"flood", 500)
        for packet in packets:
            publisher.send(packet)
        publisher.sync()
        got = reader.sync()
        held = len(got) - 20
        assert got == packets[:held] + packets[-20:]

    def test_order(self, bus, plugins):
        """A new order sends what waits in its own order."""
        started = bus(SMALL, env=plugins())
        reader = started.client(b"flood")
        reader.cmsg(b"order/smallest")
        reader.sync()
        publisher = started.client()
        packets = [b"MSG flood\0%03d" % n + b"." * (n * 7 % 10 * 10) for n in range(200)]
        for packet in packets:
            publisher.send(packet)
        publisher.sync()
        got = reader.receive(200)
        held = next(n for n in range(200) if got[n] != packets[n])
        assert 0 < held < 50
        assert got[held:] == sorted(packets[held:], key=lambda packet: (len(packet), packet))

    def test_built_in_ones_are_still_there(self, bus, plugins):
        """The protocol's own modes are as they were, also after a new one was chosen."""
        started = bus(SMALL, env=plugins())
        reader = started.client(b"flood")
        reader.cmsg(b"blocking/soft/newest", b"order/smallest", b"blocking/soft/queue", b"order/queue")
        reader.sync()
        publisher = started.client()
        packets = numbered(b"flood", 500)
        for packet in packets:
            publisher.send(packet)
        publisher.sync()
        assert reader.sync() == packets

    def test_not_installed(self, bus):
        """Without the plugin its control message is an unknown one: ignored."""
        started = bus(SMALL)
        reader = started.client(b"flood")
        reader.cmsg(b"blocking/soft/newest")
        publisher = started.client()
        for packet in numbered(b"flood", 200):
            publisher.send(packet)
        publisher.sync()
        assert reader.sync() == numbered(b"flood", 200)

    @pytest.mark.parametrize("mode", [b"blocking/soft/broken", b"blocking/hard/broken"])
    def test_broken(self, bus, plugins, mode):
        """A plugin that raises an exception disconnects the client that chose it, and affects no other."""
        started = bus(SMALL, "--queue-messages=20", env=plugins())
        before, reader, after = (started.client(b"flood") for _ in range(3))
        reader.cmsg(mode)
        reader.sync()
        publisher = started.client()
        packets = numbered(b"flood", 100)
        for start in range(0, 100, 5):
            for packet in packets[start : start + 5]:
                publisher.send(packet)
            for other in (before, after):
                assert other.receive(5) == packets[start : start + 5]
        assert publisher.sync() == []
        started.wait_log("the third party's mistake")
        started.wait_log("client 2 disconnected: .*: an error in the server")
        got = reader.rest()
        assert got == packets[: len(got)]
        assert goes_on(started)
        assert started.stop() == 0


class TestPolicy:
    """A new credentials policy."""

    def test_publishing(self, as_root, bus, plugins):
        """A policy that restricts publishing is asked about each message; what it refuses is a violation."""
        started = bus("--credentials=read-mostly", "--mode=0777", env=plugins())
        reader = started.client(b"")
        client = started.client(user=OTHER_USER)
        allowed = [client.msg(b"public/%d" % (n % 2)) for n in range(100)]
        assert client.sync() == []
        assert reader.sync() == allowed
        client.msg(b"official")
        assert client.has_ended()
        started.wait_log(rf"violation by client 2, pid {client.pid} .*: the policy of the bus refuses this publication")
        official = reader.msg(b"official")
        assert reader.sync() == [official]

    def test_refused_each_time(self, as_root, bus, plugins):
        """It is asked again for a key that another client may publish with, in one batch or not."""
        started = bus("--credentials=read-mostly", "--mode=0777", "--on-violation=ignore", env=plugins())
        reader = started.client(b"")
        expected = [reader.msg(b"official") for _ in range(10)]
        assert reader.sync() == expected
        client = started.client(user=OTHER_USER)
        expected = []
        for _ in range(50):
            client.msg(b"official")
            expected.append(client.msg(b"public/x"))
        assert client.sync() == []
        assert reader.sync() == expected

    def test_subscribing(self, bus, plugins):
        """It refuses subscriptions."""
        started = bus("--credentials=read-mostly", env=plugins())
        client = started.client(b"public/")
        client.sub(b"private/*")
        assert client.has_ended()
        started.wait_log("violation by client 1, .*: the policy of the bus refuses this subscription")

    def test_connecting(self, as_root, bus, plugins):
        """It keeps peers out."""
        started = bus("--credentials=read-mostly", "--mode=0777", env=plugins())
        assert started.client(user=(OTHER_USER[0], 4444)).has_ended()
        assert started.client(user=(OTHER_USER[0], 4445)).sync() == []

    def test_blocking(self, bus, plugins):
        """It says whom a receiver may block."""
        started = bus("--credentials=read-mostly", SMALL, "--queue-messages=10", env=plugins())
        reader = started.client(b"public/*")
        reader.cmsg(b"blocking/soft/block")
        reader.sync()
        publisher = started.client()
        for packet in numbered(b"public/x", 500):
            publisher.send(packet)
        assert publisher.sync() == []
        got = reader.sync()
        assert 10 < len(got) < 60
        assert got == numbered(b"public/x", len(got))


class TestDiscovery:
    """How plugins are found, and what may be wrong with them."""

    def test_help(self, plugins):
        """twistd sbus --help lists what is installed."""
        result = subprocess.run(
            [*twistd(), "sbus", "--help"], env=environment_with(plugins()), capture_output=True, text=True
        )
        text = " ".join(result.stdout.split())
        for name in ("blocking/soft/newest", "blocking/hard/evict", "order/smallest"):
            assert name in text
        assert "read-mostly: only the server's user publishes what is not public" in text

    def test_named_twice(self, directory, plugins):
        """A name that is taken already is refused: in one line that says by whom."""
        env = plugins(PLUGIN.replace("blocking/soft/newest", "blocking/soft/queue"))
        line = refusal(directory, env=env)
        assert "blocking/soft/queue" in line
        assert "acme_sbus" in line

    def test_policy_named_twice(self, directory, plugins):
        """That goes for policies too."""
        line = refusal(directory, env=plugins(PLUGIN.replace('"read-mostly"', '"kernel"')))
        assert "kernel" in line
        assert "acme_sbus" in line

    def test_module_that_cannot_be_imported(self, bus, plugins):
        """A plugin module that cannot be imported does not affect the bus."""
        env = plugins("import no_such_module")
        assert goes_on(bus(env=env))
