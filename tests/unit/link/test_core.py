"""The core of links between real servers without sockets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.task import Clock

from sbus.link.core import LOOP_RETRY, Side
from sbus.policy import Policy, Rule
from sbus.protocol.keys import matches_open
from tests.support.buses import Bus, Peer
from tests.support.examples import examples
from tests.support.links import Link, settle

WHOAMI = b"CMSG !/cred/whoami"


class Tree:
    """Buses with links: bus `n` has the bus `parents[n - 1]` as its master."""

    def __init__(self, parents=(0,), lists=None, **options) -> None:
        self.clock = Clock()
        secrets = options.get("secrets", False)
        self.buses = [
            Bus(clock=self.clock, name=f"bus{n}", secrets_go_up=secrets and n > 0) for n in range(len(parents) + 1)
        ]
        self.parents = (None, *parents)
        self.lists = lists or [((b"",), (b"",))] * len(parents)
        self.links = [
            Link(self.buses[n + 1], self.buses[parent], *self.lists[n], pid=70 + n, **options)
            for n, parent in enumerate(parents)
        ]
        self.settle()

    def settle(self) -> None:
        settle(self.links)

    def wait(self, seconds: float) -> None:
        for _ in range(4):
            self.clock.advance(seconds / 4)
            self.settle()

    def client(self, bus: int, *packets: bytes, **ids) -> Peer:
        client = self.buses[bus].connect(**ids)
        client.send(*packets)
        self.settle()
        return client

    def send(self, client: Peer, *packets: bytes) -> None:
        client.send(*packets)
        self.settle()

    def way(self, start: int, end: int) -> list[tuple[int, Side]]:
        """The links on the way from one bus to another, each with the side from which a message comes."""

        def up(bus: int) -> list[int]:
            parent = self.parents[bus]
            return [bus] if parent is None else [bus, *up(parent)]

        rising, falling = up(start), up(end)
        while len(rising) > 1 and len(falling) > 1 and rising[-2] == falling[-2]:
            rising.pop()
            falling.pop()
        return [(n - 1, Side.BELOW) for n in rising[:-1]] + [(n - 1, Side.ABOVE) for n in reversed(falling[:-1])]


def test_messages_cross_both_ways():
    """A message reaches the subscribers of the other bus as it was published, once, and does not come back."""
    tree = Tree()
    below, above = tree.client(1, b"SUB a/"), tree.client(0, b"SUB a/")
    tree.send(below, b"MSG a/1\0up")
    tree.send(above, b"MSG a/2\0down")
    assert below.take() == above.take() == [b"MSG a/1\0up", b"MSG a/2\0down"]
    assert tree.links[0].core.carried == [1, 1]


def test_only_what_is_wanted_and_listed_crosses():
    """What nobody subscribes to on the other side stays here, and so does what is not listed."""
    tree = Tree(lists=[((b"out/",), (b"in/",))])
    below, above = tree.client(1, b"SUB "), tree.client(0, b"SUB */x")
    tree.send(below, b"MSG out/x\0", b"MSG out/y\0", b"MSG in/x\0")
    tree.send(above, b"MSG out/x\0", b"MSG in/x\0", b"MSG in/y\0")
    assert above.take() == [b"MSG out/x\0", b"MSG out/x\0", b"MSG in/x\0"]
    assert below.take() == [b"MSG out/x\0", b"MSG out/y\0", b"MSG in/x\0", b"MSG in/x\0", b"MSG in/y\0"]
    assert tree.links[0].core.carried == [1, 2]
    tree.send(above, b"UNSUB */x")
    tree.wait(3)
    tree.send(below, b"MSG out/x\0")
    assert tree.links[0].core.carried == [1, 2]


def test_whoami_chain_of_three_levels():
    """Names grow by a link at each level, and a secret message finds its way down, up, and from leaf to leaf."""
    tree = Tree((0, 1, 0), secrets=True)
    alice, bob = tree.client(2, WHOAMI, pid=501), tree.client(3, WHOAMI, pid=502)
    (a,), (b,) = alice.take(), bob.take()
    a, b = a.partition(b"\0")[2], b.partition(b"\0")[2]
    assert a == b"!/cred/1/0/70/!/cred/1/0/71/!/cred/100/1000/501"
    assert b == b"!/cred/1/0/72/!/cred/100/1000/502"
    tree.send(alice, b"SUB " + a + b"/inbox")
    tree.send(bob, b"SUB " + b + b"/inbox")
    spies = [tree.client(bus, b"SUB ") for bus in range(4)]
    tree.send(alice, b"MSG " + b + b"/inbox\0hello")
    assert bob.take() == [b"MSG " + b + b"/inbox\0hello"]
    tree.send(bob, b"MSG " + a + b"/inbox\0hello to you")
    assert alice.take() == [b"MSG " + a + b"/inbox\0hello to you"]
    root = tree.client(0)
    tree.send(root, b"MSG " + a + b"/inbox\0from the root")
    assert alice.take() == [b"MSG " + a + b"/inbox\0from the root"]
    assert [spy.take() for spy in spies] == [[]] * 4


def test_secrets_do_not_go_up_unless_asked_for():
    """Without secrets a message to a client above stays below and is lost; one from above arrives all the same."""
    tree = Tree()
    alice, root = tree.client(1, pid=501), tree.client(0, b"SUB !/cred////x", pid=502)
    tree.send(alice, WHOAMI)
    name = alice.take()[0].partition(b"\0")[2]
    tree.send(alice, b"SUB " + name + b"/x", b"MSG !/cred/100/1000/502/x\0")
    assert root.take() == []
    tree.send(root, b"MSG " + name + b"/x\0")
    assert alice.take() == [b"MSG " + name + b"/x\0"]


def test_forged_names_get_nothing():
    """Made-up chains lead nowhere: not up, not down, and not to the link itself."""
    tree = Tree(secrets=True)
    below, above = tree.client(1, b"SUB "), tree.client(0, b"SUB ")
    victim = tree.client(0, b"SUB !/cred////x", pid=502)
    p = b"!/cred/1/0/70"
    for key in (p + b"/x", p + b"/link/echo", b"!/cred/1/0/99/!/cred/100/1000/502/x", p + b"/!/cred/1/1/1/x"):
        tree.send(below, b"MSG " + key + b"\0")
        tree.send(above, b"MSG " + key + b"\0")
    assert below.take() == above.take() == victim.take() == []
    liar = tree.client(1, b"SUB !/cred/100/1000/502/x", pid=503)
    assert not liar.is_connected
    assert tree.links[0].core.is_up


def test_fence_holds_through_the_tree():
    """When whoami is answered three levels down, the subscription is in force at the root."""
    tree = Tree((0, 1))
    leaf, root = tree.client(2), tree.client(0)
    leaf.send(b"SUB x", WHOAMI)
    assert leaf.take() == []
    for _ in range(50):
        for link in tree.links:
            link.pump()
        if leaf.take():
            break
    else:
        pytest.fail("no answer")
    root.send(b"MSG x\0now")
    tree.settle()
    assert leaf.take() == [b"MSG x\0now"]


def test_loop_of_two_is_refused_with_both_names():
    """Two buses that have each other as master: at least one link is refused, in one line with both names."""
    clock = Clock()
    one, two = Bus(clock=clock, name="one"), Bus(clock=clock, name="two")
    links = [Link(one, two, pid=70), Link(two, one, pid=71)]
    settle(links)
    refused = [line for link in links for line in link.lines if "loop" in line]
    assert refused
    assert all("'one'" in line and "'two'" in line and "\n" not in line for line in refused)
    assert not all(link.core.is_up for link in links)
    assert {retry for link in links for retry in link.retries if retry is not None} == {LOOP_RETRY}
    client = one.connect()
    client.send(b"SUB x", b"MSG x\0")
    settle(links)
    assert client.take() == [b"MSG x\0"]


@pytest.mark.parametrize("late", range(3))
def test_loop_of_three_is_refused(late):
    """A loop of three buses is refused, whichever link comes last; the other two work."""
    clock = Clock()
    buses = [Bus(clock=clock, name=name) for name in ("one", "two", "three")]
    links = []
    for n in ((late + 1) % 3, (late + 2) % 3, late):
        links.append(Link(buses[n], buses[(n + 1) % 3], pid=70 + n))
        settle(links)
    assert [link.core.is_up for link in links] == [True, True, False]
    (line,) = [line for line in links[-1].lines if "loop" in line]
    assert "'" + ("one", "two", "three")[late] + "'" in line


def test_loop_that_closes_above_is_noticed():
    """A master that gets a master of its own passes the new path on, and a loop far above is found."""
    clock = Clock()
    buses = [Bus(clock=clock, name=f"bus{n}") for n in range(3)]
    links = [Link(buses[0], buses[1], pid=70), Link(buses[1], buses[2], pid=71)]
    settle(links)
    client = buses[0].connect()
    client.send(b"CMSG link/path")
    (path,) = client.take()
    assert [line[33:] for line in path.partition(b"\0")[2].split(b"\n")] == [b"bus0", b"bus1", b"bus2"]
    links.append(Link(buses[2], buses[0], pid=72))
    settle(links)
    assert [link.core.is_up for link in links] == [True, True, False]


def test_master_of_the_original_kind():
    """A master that tells nothing of interest gets all that is listed, and every message crosses."""
    tree = Tree(lists=[((b"a/", b"b"), (b"",))], uid=4242)
    below, above = tree.client(1, b"SUB "), tree.client(0, b"SUB ")
    assert tree.links[0].core.is_up
    tree.send(below, b"MSG a/1\0", b"MSG b\0", b"MSG c\0")
    assert above.take() == [b"MSG a/1\0", b"MSG b\0"]
    assert tree.links[0].core.carried == [2, 0]
    below.take()
    tree.send(above, b"MSG a/1\0", b"MSG c\0")
    assert below.take() == [b"MSG a/1\0", b"MSG c\0"]


def test_link_without_rights_below_is_refused():
    """A link that the bus below does not trust says so, and carries nothing."""
    clock = Clock()
    below, above = Bus(clock=clock), Bus(clock=clock)
    link = Link.__new__(Link)
    original = below.connect
    below.connect = lambda **ids: original(**{**ids, "uid": 4242})  # type: ignore[method-assign]
    Link.__init__(link, below, above)
    settle([link])
    assert not link.core.is_up
    assert any("run the link as root" in line for line in link.lines)


def test_lost_master_is_counted_and_returns():
    """While the master is away messages for it are dropped and counted; afterwards they cross again."""
    tree = Tree()
    below, above = tree.client(1, b"SUB down"), tree.client(0, b"SUB up")
    link = tree.links[0]
    link.break_off(Side.ABOVE)
    tree.send(below, b"MSG up\0001", b"MSG up\0002", b"MSG other\0")
    assert link.core.lost == [2, 0]
    link.connect(Side.ABOVE)
    tree.settle()
    tree.send(below, b"MSG up\0003")
    tree.send(above, b"MSG down\0")
    assert above.take() == [b"MSG up\0003"]
    assert below.take() == [b"MSG down\0"]
    tree.wait(2)
    assert tree.buses[1].registry.upstream.lost == (2, 0)


def test_a_master_that_refuses_a_connection_at_once_lowers_no_limit():
    """Its reason is not what the link has asked for, as it has asked for nothing yet."""
    tree = Tree()
    tree.client(1, *(b"SUB %d" % number for number in range(50)))
    link = tree.links[0]
    for _ in range(10):
        link.break_off(Side.ABOVE)
        link.core.connected(Side.ABOVE)
        link.core.received(Side.ABOVE, [b"CMSG bye\0user-limit too many"], tree.clock.seconds())
        link.core.disconnected(Side.ABOVE)
    link.connect(Side.ABOVE)
    tree.settle()
    interest = link.core._above.interest
    assert len(interest.asked) == 50
    assert not interest.is_collapsed


def test_a_pattern_that_was_listed_is_given_up_as_any_other():
    """What the master names in its list, as the link comes up, can be given up, and wanted again."""
    tree = Tree()
    reader, publisher = tree.client(0), tree.client(1)
    tree.links[0].break_off(Side.ABOVE)
    tree.send(reader, b"SUB x")
    tree.links[0].connect(Side.ABOVE)
    tree.settle()
    for _ in range(2):
        tree.send(publisher, b"MSG x\0")
        assert reader.take() == [b"MSG x\0"]
        tree.send(reader, b"UNSUB x")
        tree.wait(3)
        tree.send(reader, b"SUB x")
    assert tree.links[0].core.is_up


def test_losses_that_a_bus_reports_are_counted():
    """What a bus drops because the link does not read is counted by its receipts."""
    tree = Tree()
    below, above = tree.client(1), tree.client(0, b"SUB a")
    peer = tree.links[0].peer(Side.BELOW)
    peer.send(b"CMSG blocking/soft/discard")
    peer.stall()
    below.send(*[b"MSG a\0"] * 5)
    peer.drain()
    tree.send(below, b"MSG a\0")
    assert tree.links[0].core.lost == [5, 0]
    assert above.take() == [b"MSG a\0"]


KEYS = (b"a", b"b/c", b"b/d", b"e/f/g")
PATTERNS = st.sampled_from((b"a", b"b/", b"b/c", b"*", b"", b"e/*/g", b"*/d"))
LISTED = st.lists(st.sampled_from((b"", b"a", b"b/", b"*/d", b"e/")), max_size=3).map(tuple)


@st.composite
def trees(draw):
    parents = [draw(st.integers(0, n)) for n in range(draw(st.integers(1, 4)))]
    return parents, [(draw(LISTED), draw(LISTED)) for _ in parents]


@settings(max_examples=examples(250), deadline=None)
@given(trees(), st.data())
def test_every_message_that_may_cross_arrives_once(shape, data):
    """In any tree, whatever is subscribed and whichever links break, what may cross arrives once, and in order.

    A message may cross a link that is up, if its key is listed for that direction. What comes to a broken link, because
    it was wanted on the other side, is counted as lost there.
    """
    parents, lists = shape
    tree = Tree(parents, lists)
    count = len(tree.buses)
    clients = [tree.client(bus, b"CMSG echo/off") for bus in range(count) for _ in range(2)]
    patterns: list[list[bytes]] = [[] for _ in clients]
    broken: set[int] = set()
    number = 0
    for step in data.draw(st.lists(st.sampled_from("ssuppppbr"), max_size=30), "steps"):
        at = data.draw(st.integers(0, len(clients) - 1), "client")
        if step == "s":
            pattern = data.draw(PATTERNS)
            patterns[at].append(pattern)
            tree.send(clients[at], b"SUB " + pattern)
        elif step == "u" and patterns[at]:
            tree.send(clients[at], b"UNSUB " + patterns[at].pop())
            if data.draw(st.booleans()):
                tree.wait(3)
        elif step == "b":
            n = at % len(tree.links)
            broken.add(n)
            tree.links[n].break_off(Side.ABOVE)
            tree.settle()
        elif step == "r" and broken:
            n = broken.pop()
            tree.links[n].connect(Side.ABOVE)
            tree.settle()
            assert tree.links[n].core.is_up
        elif step == "p":
            before = [sum(link.core.lost) for link in tree.links]
            packets = []
            for _ in range(data.draw(st.integers(1, 3))):
                number += 1
                packets.append(b"MSG %b\0%d" % (data.draw(st.sampled_from(KEYS)), number))
            tree.send(clients[at], *packets)
            for other, client in enumerate(clients):
                way = tree.way(at // 2, other // 2)
                expected = [
                    packet
                    for packet in packets
                    if other != at
                    and _matches(patterns[other], packet)
                    and all(n not in broken and _matches(lists[n][side], packet) for n, side in way)
                ]
                assert client.take() == expected
            for n, link in enumerate(tree.links):
                assert n in broken or sum(link.core.lost) == before[n]


def _matches(patterns, packet: bytes) -> bool:
    return any(matches_open(pattern, packet[4 : packet.index(b"\0")]) for pattern in patterns)


def test_link_takes_its_place_before_the_master_is_there():
    """From the moment that the bus below has answered, it knows its link; a second one is refused at once."""
    clock = Clock()
    below, above = Bus(clock=clock), Bus(clock=clock)
    first = Link(below, above, pid=70)
    first.break_off(Side.ABOVE)
    settle([first])
    assert below.registry.upstream.has_link
    assert not below.registry.upstream.is_up
    second = Link(below, above, pid=71)
    settle([first, second])
    assert not second.core.is_up
    assert any("there can be one" in line for line in second.lines)
    first.connect(Side.ABOVE)
    settle([first, second])
    assert first.core.is_up


def test_what_comes_and_goes_without_a_master_is_not_kept():
    """Patterns that end while there is no master take no memory: anybody may subscribe to any number of them."""
    tree = Tree()
    (link,) = tree.links
    client = tree.client(1, b"SUB a/0")
    link.break_off(Side.ABOVE)
    for number in range(2000):
        tree.send(client, b"SUB a/%d" % number, b"UNSUB a/%d" % number)
    interest = link.core._above.interest
    assert list(interest._wanted) == [b"a/0"]
    assert not interest._noted
    assert not interest._new
    tree.send(client, b"UNSUB a/0", b"SUB a/1")
    link.connect(Side.ABOVE)
    tree.settle()
    above = tree.client(0)
    tree.send(above, b"MSG a/0\0", b"MSG a/1\0")
    assert client.take() == [b"MSG a/1\0"]


def test_what_a_policy_forbids_is_lost_alone():
    """A client that wants, or publishes, what the master's policy forbids costs nobody else the link."""
    clock = Clock()
    policy = Policy([Rule(0, "read", "", subscribe=(b"read/",))], closed=[(b"locked/", ""), (b"read/", "")])
    below, above = Bus(clock=clock), Bus(clock=clock, policy=policy)
    link = Link(below, above)
    settle([link])
    assert link.core.is_up
    user, other = below.connect(), above.connect(uid=0)
    below.connect().send(b"SUB ")  # of which a part is closed
    user.send(b"SUB locked/a", b"SUB open")
    other.send(b"SUB open", b"SUB read/b")
    settle([link])
    user.send(b"MSG read/b\0", b"MSG open\0up")
    settle([link])
    other.send(b"MSG open\0down")
    settle([link])
    assert user.take() == [b"MSG open\0up", b"MSG open\0down"]
    assert other.take() == [b"MSG open\0up", b"MSG open\0down"]
    assert link.core.is_up
    assert link.core.lost == [1, 0]
    [line] = [line for line in link.lines if "denies" in line]
    assert "SUB  (rule closed)" in line
