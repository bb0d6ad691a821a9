"""Two buses and their link under load both ways, while each of them stands still, dies or gets another policy."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.link.conftest import StartBus, link_pid, wait_crossing
from tests.support.harness import Bus
from tests.support.waiting import paused, wait_until

POLICIES = ("version = 1\n", 'version = 1\n[[rule]]\nname = "no-b"\ndeny_publish = ["up/b"]\n')
LOST = b"CMSG lost\0"


class End:
    """One of the two buses: its publisher, and the receivers of what the other publishes and of what this one does.

    :ivar sent: the messages that this bus has taken.
    :ivar got: the messages of the other bus that have arrived here.
    :ivar told: messages that receipts have reported here.
    """

    def __init__(self, own: bytes, other: bytes) -> None:
        self.own, self.other = own, other
        self.sent = self.got = self.told = 0
        self.last = Counter[bytes]()

    def connect(self, bus: Bus) -> None:
        self.publisher = bus.client()
        self.receiver = bus.client(self.other + b"/*")
        self.receiver.cmsg(b"receipts/on")
        self.echo = bus.client(self.own + b"/a")

    def publish(self, count: int) -> None:
        """Publish messages with the keys ``a`` and ``b`` in turn, as many as there is room for."""
        for _ in range(count):
            if not self.publisher.push(b"MSG %b/%b\0%d" % (self.own, b"ab"[self.sent % 2 :][:1], self.sent + 1)):
                break
            self.sent += 1

    def receive(self) -> None:
        """Receive what is there: each message comes once, in the order of its key, and none comes back."""
        for client in (self.receiver, self.echo):
            while client.has_input() and (packet := client.recv()):
                if packet.startswith(LOST):
                    self.told += int(packet[len(LOST) :].split()[0])
                elif packet.startswith(b"MSG "):
                    key, _, number = packet[4:].partition(b"\0")
                    assert int(number) > self.last[key], f"{key!r}: {number!r} after {self.last[key]}"
                    self.last[key] = int(number)
                    self.got += client is self.receiver


def load(ends: list[End], seconds: float, rate: int = 60) -> None:
    """Publish on both buses, and receive there.

    :param rate: messages on each bus every 2 ms: a rate that the link can carry, so that it loses none but in pauses.
    """
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for end in ends:
            end.publish(rate)
            end.receive()
        time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 4])
def test_every_loss_is_counted(tree: StartBus, directory: Path, seed: int) -> None:
    """However long a bus or the link stands still: published = arrived + counted by the link or a bus, both ways."""
    rng = random.Random(seed)
    policy = directory / "policy.toml"
    policy.write_text(POLICIES[0])
    root = tree("root", None, f"--policy={policy}", "--queue-messages=2000")
    leaf = tree("leaf", root)
    ends = [End(b"up", b"down"), End(b"down", b"up")]
    for end, bus in zip(ends, (leaf, root), strict=True):
        end.connect(bus)
    for here, there in ((leaf, root), (root, leaf)):
        wait_crossing(here.client(), b"probe", there.client(b"probe"))
    for _ in range(6):
        load(ends, 0.3)
        event = rng.choice(["root", "leaf", "link", "policy"])
        if event == "policy":
            policy.write_text(rng.choice(POLICIES))
            os.kill(root.pid, signal.SIGHUP)
        else:
            with paused({"root": root.pid, "leaf": leaf.pid, "link": link_pid(leaf)}[event]):
                load(ends, rng.uniform(0.2, 2.0))
    up, down = ends

    def move() -> tuple[int, int]:
        before = up.got, down.got
        load(ends, 2.0, 0)
        return up.got - before[0], down.got - before[1]

    wait_until(move, lambda moved: moved == (0, 0))
    root.stop()
    (found,) = leaf.wait_log(r"is down; lost so far: (\d+) messages up, (\d+) down")
    # The same loss may be counted twice: by the link, and by the bus of the receiver, whose CPU time decides how many.
    assert max(int(found[1]), down.told) <= up.sent - down.got <= int(found[1]) + down.told
    assert down.sent - up.got == up.told >= int(found[2])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 5])
def test_killed_at_both_ends(tree: StartBus, directory: Path, seed: int) -> None:
    """Whoever dies, and whatever the policy is after that: nothing is doubled or out of order, and all flows again."""
    rng = random.Random(seed)
    policy = directory / "policy.toml"
    policy.write_text(POLICIES[0])
    root = tree("root", None, f"--policy={policy}")
    leaf = tree("leaf", root)
    ends = [End(b"up", b"down"), End(b"down", b"up")]
    up, down = ends
    up.connect(leaf)
    down.connect(root)
    for _ in range(5):
        load(ends, 0.3)
        links = leaf.log.count("linked to root") + 1
        event = rng.choice(["root", "leaf", "link"])
        if event == "root":
            root.stop(rng.choice([signal.SIGKILL, signal.SIGTERM]))
            policy.write_text(rng.choice(POLICIES))
            up.publish(500)
            root = tree("root", None, "--reuse", f"--policy={policy}")
            down.connect(root)
            leaf.wait_log("linked to root", links)
        elif event == "link":
            os.kill(link_pid(leaf), signal.SIGKILL)
            leaf.wait_log("linked to root", links)
        else:
            leaf.stop(signal.SIGKILL)
            leaf = tree("leaf", root, "--reuse")
            up.connect(leaf)
    before = up.sent, down.sent

    def flows() -> bool:
        load(ends, 0.1)
        return down.last[b"up/a"] > before[0] and up.last[b"down/b"] > before[1]

    wait_until(flows)
