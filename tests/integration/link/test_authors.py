"""Who published what crosses links, as the receivers on real buses are told."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.integration.link.conftest import StartBus, link_pid, name_of, wait_crossing
from tests.support.harness import OTHER_USER, THIRD_USER, Client
from tests.support.original import OriginalServer

SENDER_ON = b"CMSG sender/on"


class Reader:
    """A client that is told who publishes.

    :ivar author: the name last told.
    """

    def __init__(self, client: Client, pattern: bytes) -> None:
        self.client = client
        self.author = b""
        client.send(SENDER_ON)
        assert client.recv() == SENDER_ON + b"\0"
        client.sub(pattern)
        client.sync()

    def messages(self, key: bytes, count: int) -> list[tuple[bytes, bytes]]:
        """The payloads of the next messages with a key, each with its author."""
        found: list[tuple[bytes, bytes]] = []
        while len(found) < count:
            packet = self.client.recv()
            assert packet, found
            if packet.startswith(b"CMSG sender\0"):
                self.author = packet.partition(b"\0")[2].partition(b" ")[2]
            elif packet.startswith(b"MSG " + key + b"\0"):
                found.append((packet.partition(b"\0")[2], self.author))
        return found

    def author_of(self, payload: bytes) -> bytes:
        """The author of the next message with a payload, its key being ``a``."""
        while (found := self.messages(b"a", 1)[0])[0] != payload:
            pass
        return found[1]


def test_three_buses_and_three_users(tree: StartBus, as_root: None) -> None:
    """Both ways and across, each message has the chained name of its publisher, which that one knows as its own."""
    root = tree("root", None, "--mode=0777")
    one, two = tree("one", root, "--mode=0777"), tree("two", root, "--mode=0777")
    users = (None, OTHER_USER, THIRD_USER)
    publishers = [bus.client(user=user) for bus, user in zip((root, one, two), users, strict=True)]
    names = [name_of(publisher) for publisher in publishers]
    assert names[0] == publishers[0].credentials
    assert names[1] == b"!/cred/0/0/%d/" % link_pid(one) + publishers[1].credentials
    assert names[2] == b"!/cred/0/0/%d/" % link_pid(two) + publishers[2].credentials
    readers = [Reader(bus.client(), b"a/") for bus in (root, one, two)]
    for number, (publisher, bus) in enumerate(zip(publishers, (root, one, two), strict=True)):
        for other in (root, one, two):
            if other is not bus:
                probe = b"a/%d/" % number + Path(other.address).name.encode()
                wait_crossing(publisher, probe, other.client(probe))
    for number, publisher in enumerate(publishers):
        for _ in range(2):
            publisher.msg(b"a/x", b"%d" % number)
        publisher.sync()
    expected = sorted((b"%d" % number, names[number]) for number in (0, 0, 1, 1, 2, 2))
    for reader in readers:
        assert sorted(reader.messages(b"a/x", 6)) == expected


@pytest.mark.slow
def test_name_behind_two_links(tree: StartBus) -> None:
    """The name of a client two buses below has both links in it; one of the root's is as short two buses below."""
    root = tree("root")
    middle = tree("middle", root)
    leaf = tree("leaf", middle)
    low, high = leaf.client(), root.client()
    above, below = Reader(root.client(), b"a"), Reader(leaf.client(), b"a")
    wait_crossing(low, b"a", root.client(b"a"))
    wait_crossing(high, b"a", leaf.client(b"a"))
    low.msg(b"a", b"up")
    high.msg(b"a", b"down")
    own = b"!/cred/%d/%d/" % (os.getegid(), os.geteuid())
    chain = b"/".join(own + b"%d" % link_pid(bus) for bus in (middle, leaf))
    assert above.author_of(b"up") == chain + b"/" + low.credentials
    assert below.author_of(b"down") == high.credentials


def test_old_master(tree: StartBus, directory: Path) -> None:
    """Under a master that knows no senders, the link is the sender of what comes from there."""
    server = OriginalServer(directory / "root")
    try:
        leaf = tree("leaf", server.address)
        reader = Reader(leaf.client(), b"a")
        with Client(server.address) as above:
            wait_crossing(above, b"a", leaf.client(b"a"))
            above.msg(b"a", b"from above")
            assert reader.author_of(b"from above").endswith(b"/%d" % link_pid(leaf))
    finally:
        server.close()


@pytest.mark.slow
def test_nobody_is_taken_for_a_link_that_is_renamed(tree: StartBus, as_root: None, directory: Path) -> None:
    """Messages that are on their way when a bus gets a master have the name of their publisher, not the link's."""
    middle = tree("middle", directory / "root", "--mode=0777", wait=False)
    leaf = tree("leaf", middle, "--mode=0777")
    publisher = leaf.client(user=OTHER_USER)
    wait_crossing(publisher, b"a", middle.client(b"a"))
    os.kill(link_pid(leaf), signal.SIGSTOP)
    try:
        publisher.msg(b"a", b"on its way")
        publisher.sync()
        root = tree("root")
        reader = Reader(root.client(), b"a")
        wait_crossing(middle.client(), b"a", root.client(b"a"))
    finally:
        os.kill(link_pid(leaf), signal.SIGCONT)
    chain = b"/".join(b"!/cred/0/0/%d" % link_pid(bus) for bus in (middle, leaf))
    assert reader.author_of(b"on its way") == chain + b"/" + publisher.credentials
