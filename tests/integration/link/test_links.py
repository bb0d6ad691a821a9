"""Servers behind servers, as real processes: what crosses, under which names, and what a link cannot be used for."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from sbus.client.blocking import connect
from tests.integration.link.conftest import StartBus, link_pid, name_of, wait_crossing
from tests.support.harness import TIMEOUT, Client
from tests.support.original import OriginalServer
from tests.support.waiting import paused


def test_three_levels(tree: StartBus) -> None:
    """A message crosses two links in either direction, from leaf to leaf, once, and only where it is wanted."""
    root = tree("root")
    middle = tree("middle", root)
    leaf, other = tree("leaf", middle), tree("other", root)
    top, one, two = root.client(b"a/"), leaf.client(b"a/*"), other.client(b"a/1")
    wait_crossing(one, b"a/probe", top)
    sent = [one.msg(b"a/1", b"from the leaf"), top.msg(b"a/1", b"from the root"), top.msg(b"a/2")]
    assert sorted(one.receive(3)) == sorted(sent)
    assert sorted(top.receive(3)) == sorted(sent)
    assert sorted(two.receive(2)) == sorted(sent[:2])
    assert not any(client.sync() for client in (one, two, top))
    assert middle.client().sync() == []


def test_names_are_chains_and_secrets_find_them(tree: StartBus) -> None:
    """Names grow by a link at each level; a secret goes from a leaf to another branch's leaf and back, unseen."""
    root = tree("root")
    middle = tree("middle", root, "--upstream-secrets")
    leaf, other = tree("leaf", middle, "--upstream-secrets"), tree("other", root, "--upstream-secrets")
    alice, bob, spies = leaf.client(), other.client(), [bus.client(b"") for bus in (root, middle, leaf, other)]
    own = b"!/cred/%d/%d/" % (os.getegid(), os.geteuid())
    a, b = name_of(alice), name_of(bob)
    assert a == b"/".join(own + b"%d" % pid for pid in (link_pid(middle), link_pid(leaf), os.getpid()))
    assert b == b"/".join(own + b"%d" % pid for pid in (link_pid(other), os.getpid()))
    alice.sub(a + b"/in/*")
    bob.sub(b + b"/in/*")
    alice.sync()
    bob.sync()
    assert bob.receive(0) == []
    sent = alice.msg(b + b"/in/1", b"who are you?")
    assert bob.recv() == sent
    answer = bob.msg(a + b"/in/2", b"the one you wrote to")
    assert alice.recv() == answer
    assert [spy.sync() for spy in spies] == [[]] * 4


def test_subscription_is_in_force_when_whoami_is_answered(tree: StartBus) -> None:
    """Behind a whoami that was answered two links below, the root's messages arrive: the fence holds through a tree."""
    root = tree("root")
    leaf = tree("leaf", tree("middle", root))
    client, publisher = leaf.client(), root.client()
    for number in range(20):
        key = b"fence/%d" % number
        client.sub(key)
        assert client.sync() == []
        sent = publisher.msg(key)
        assert client.recv() == sent


def test_loop_of_two_buses_is_refused_with_both_names(tree: StartBus, directory: Path) -> None:
    """Two buses that name each other as master: one line of a log names both, and messages do not go round."""
    one = tree("one", directory / "two", wait=False)
    two = tree("two", one, wait=False)
    while "close a loop" not in one.log + two.log:
        time.sleep(0.01)
    (line, *_) = [line for line in (one.log + two.log).splitlines() if "close a loop" in line]
    assert "'one'" in line
    assert "'two'" in line
    client = one.client(b"x")
    sent = client.msg(b"x")
    assert client.recv() == sent
    assert client.sync() == []


@pytest.mark.slow
def test_loop_of_three_buses_is_refused(tree: StartBus, directory: Path) -> None:
    """The link that would close a loop of three is refused with the names of its two buses, whichever it is."""
    buses = [tree("one", directory / "three", wait=False)]
    buses.append(tree("two", buses[0]))
    buses.append(tree("three", buses[1], wait=False))
    while not (lines := [line for bus in buses for line in bus.log.splitlines() if "close a loop" in line]):
        time.sleep(0.01)
    assert sum(f"'{name}'" in lines[0] for name in ("one", "two", "three")) == 2
    client = buses[2].client(b"x")
    sent = client.msg(b"x")
    assert client.recv() == sent
    assert client.sync() == []


def test_bus_starts_without_its_master(tree: StartBus, directory: Path) -> None:
    """A bus serves while its master is not there, and is linked soon after the master has come."""
    leaf = tree("leaf", directory / "root", wait=False)
    client = leaf.client(b"x")
    leaf.wait_log("link: no link: no bus at ")
    root = tree("root")
    leaf.wait_log("link: linked to root")
    sent = root.client().msg(b"x")
    assert client.recv() == sent


def test_master_of_the_original_kind(tree: StartBus, directory: Path) -> None:
    """Below a server that knows no extension, everything listed is carried, names are chains, and secrets arrive."""
    server = OriginalServer(directory / "root")
    try:
        leaf = tree("leaf", server.address, "--upstream-secrets", lists=("--upstream-out=up/", "--upstream-in="))
        below = leaf.client(b"")
        with Client(server.address) as above:
            above.sub(b"up/x")
            assert above.sync() == []
            wait_crossing(below, b"up/x", above)
            sent = [below.msg(b"up/x"), below.msg(b"up/y"), below.msg(b"other")]
            assert above.recv() == sent[0]
            assert below.receive(3) == sent
            down = above.msg(b"up/x", b"down")
            assert below.recv() == down
            name = name_of(below)
            below.sub(name + b"/secret")
            below.sync()
            sent = [above.msg(name + b"/secret")]
            assert below.recv() == sent[0]
    finally:
        server.close()


def test_master_without_echo_off_is_refused(tree: StartBus, directory: Path) -> None:
    """A server that sends every message back to its publisher cannot be a master, and the log says so."""
    server = OriginalServer(directory / "root", knows_echo=False)
    try:
        leaf = tree("leaf", server.address, wait=False)
        leaf.wait_log("it does not know echo/off")
        assert "linked to" not in leaf.log
    finally:
        server.close()


def test_slow_leaf_harms_nobody(tree: StartBus) -> None:
    """A link that stands still loses messages for itself alone, and counts each; the others get every message."""
    root = tree("root", None, "--queue-messages=1000")
    leaf, other = tree("leaf", root), tree("other", root)
    far, near, there = leaf.client(b"x"), root.client(b"x"), other.client(b"x")
    publisher = root.client()
    sent = [b"MSG x\0%d" % number for number in range(5000)]
    with paused(link_pid(leaf)):
        for packet in sent:
            publisher.send(packet)
            assert near.recv() == packet
            assert there.recv() == packet
    got: list[bytes] = []
    while not (got and got[-1].startswith(b"MSG x\0again")):  # the link's queue is full until the link has read
        if far.has_input():
            got.append(far.recv())
        else:
            sent.append(publisher.msg(b"x", b"again %d" % len(sent)))
            assert near.recv() == there.recv() == sent[-1]
    root.stop()
    (found,) = leaf.wait_log(r"is down; lost so far: (\d+) messages up, (\d+) down")
    up, down = int(found[1]), int(found[2])
    while len(got) + down < len(sent):
        got.append(far.recv())
    assert (up, len(got) + down) == (0, len(sent))
    assert down > 0
    assert got == [packet for packet in sent if packet in set(got)]


def test_outage_is_counted_to_the_message(tree: StartBus) -> None:
    """What was wanted above and comes while the master is away is dropped, counted and told; later ones cross."""
    root = tree("root")
    leaf = tree("leaf", root)
    above, below = root.client(b"x"), leaf.client()
    wait_crossing(below, b"x", above)
    root.stop()
    leaf.wait_log("is down")
    for _ in range(100):
        below.msg(b"x")
    below.sync()
    leaf.mark()
    root = tree("root")
    leaf.wait_log("lost so far: 100 messages up, 0 down")
    above = root.client(b"x")
    while not above.has_input():
        sent = below.msg(b"x", b"again")
        below.sync()
    assert above.recv() == sent


@pytest.mark.parametrize("most", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_killed_links_double_nothing(tree: StartBus, most: int) -> None:
    """A link that is killed under load is started again; each message arrives once or not at all, and in order."""
    root = tree("root")
    leaf = tree("leaf", root)
    below, above = leaf.client(b"down"), root.client(b"up")
    one, two = leaf.client(), root.client()
    number, killed_at = 0, -1
    last = {b"up": -1, b"down": -1}
    for kills in range(most + 1):
        while min(last.values()) <= killed_at:
            for _ in range(50):
                one.msg(b"up", b"%d" % number)
                two.msg(b"down", b"%d" % number)
                number += 1
            for client in (above, below):
                while client.has_input():
                    key, _, text = client.recv()[4:].partition(b"\0")
                    assert int(text) > last[key], "doubled, or out of order"
                    last[key] = int(text)
        if kills < most:
            os.kill(link_pid(leaf), signal.SIGKILL)
            killed_at = number
            leaf.wait_log(r"link \d+ was started", kills + 2)
    assert one.sync() == two.sync() == []


@pytest.mark.slow
def test_killed_masters_double_nothing(tree: StartBus) -> None:
    """A master that is killed under load, and started again, gets each message once or not at all, and in order."""
    root = tree("root")
    leaf = tree("leaf", root)
    one = leaf.client()
    number = 0
    for kills in range(3):
        above = root.client(b"up")
        last = -1
        while last < number - 1 or not number:
            for _ in range(50):
                one.msg(b"up", b"%d" % number)
                number += 1
            one.sync()
            while above.has_input():
                text = above.recv().partition(b"\0")[2]
                assert int(text) > last, "doubled, or out of order"
                last = int(text)
        if kills < 2:
            root.stop(signal.SIGKILL)
            root = tree("root", None, "--reuse")
            leaf.wait_log("link: linked to root", kills + 2)


@pytest.mark.slow
def test_requests_go_on_with_a_new_link(tree: StartBus) -> None:
    """A client's requests to a responder on another bus get replies after its bus has another link, and so a new P."""
    root = tree("root")
    leaf, other = tree("leaf", root, "--upstream-secrets"), tree("other", root, "--upstream-secrets")
    with connect(str(leaf.address)) as asker, connect(str(other.address)) as answerer:
        requests = answerer.subscribe("ask")
        answerer.fence()

        def ask() -> None:
            found: list[bytes] = []
            asking = threading.Thread(target=lambda: found.append(asker.request("ask", timeout=TIMEOUT)))
            asking.start()
            answerer.answer(requests.get(timeout=TIMEOUT), b"yes")
            asking.join()
            assert found == [b"yes"]

        while not asker.has_subscribers("ask"):  # the links carry the subscription across; nothing announces it
            pass
        ask()
        for count in (2, 3):
            os.kill(link_pid(leaf), signal.SIGKILL)
            leaf.wait_log("link: linked to", count)
            while not asker.has_subscribers("ask"):
                pass
            ask()


def test_message_too_long_for_the_other_bus(tree: StartBus) -> None:
    """A message that the other bus does not take is lost, counted and logged with its size; the link stays up."""
    root = tree("root", None, "--max-packet=1000000")
    leaf = tree("leaf", root)
    below, above = leaf.client(b"k"), root.client(b"k")
    with connect(str(root.address)) as publisher:
        while not publisher.has_subscribers("k"):
            pass
        for size in (10, 400_000, 409_595, 900_000, 10):
            publisher.publish("k", bytes(size))
        publisher.fence()
    assert [len(packet) for packet in (below.recv(), below.recv(), below.recv())] == [16, 400_006, 16]
    assert len(above.sync()) == 5
    leaf.wait_log("a message was lost, as too long: it has 409601 bytes")
    assert leaf.log.count("linked to root") == 1


@pytest.mark.parametrize(("master", "bus"), [((), ("--max-packet=1000000",)), (("--max-packet=1000",), ())])
def test_message_too_long_for_the_master(tree: StartBus, master: tuple[str, ...], bus: tuple[str, ...]) -> None:
    """The master's limit counts on the way up, whether the bus below has a raised one, or the master a lower one."""
    root = tree("root", None, *master)
    leaf = tree("leaf", root, *bus)
    above = root.client(b"k")
    with connect(str(leaf.address)) as publisher:
        while not publisher.has_subscribers("k"):
            pass
        longest = 1000 if master else 409_600
        for size in (10, longest - 6, longest - 5, 10):
            publisher.publish("k", bytes(size))
        publisher.fence()
    assert [len(packet) for packet in (above.recv(), above.recv(), above.recv())] == [16, longest, 16]
    leaf.wait_log(f"a message was lost, as too long: it has {longest + 1} bytes")
    assert leaf.log.count("linked to root") == 1


def test_long_messages_between_buses_with_raised_limits(tree: StartBus) -> None:
    """A link learns the limits of its buses: messages of up to these cross both ways."""
    root = tree("root", None, "--max-packet=1000000")
    leaf = tree("leaf", root, "--max-packet=1000000")
    with connect(str(root.address)) as one, connect(str(leaf.address)) as other:
        for publisher, subscriber in ((one, other), (other, one)):
            subscriber.subscribe("k")
            subscriber.fence()
            while not publisher.has_subscribers("k"):
                pass
            publisher.publish("k", bytes(900_000))
            assert len(subscriber.receive(timeout=TIMEOUT).payload) == 900_000
            subscriber.control("echo/off")
            subscriber.fence()
