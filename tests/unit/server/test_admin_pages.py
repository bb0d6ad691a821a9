"""What the pages of the admin socket answer about a bus."""

from __future__ import annotations

import base64
import json
import os
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from zope.interface import implementer

from sbus.admin.pages import CLIENT_SORTS, Asked, Problem
from sbus.journal.keytext import as_text, from_text
from sbus.server.asks.last_values import LastValueRule
from sbus.server.core.credentials import AccessSettings, KernelCredentials
from sbus.server.core.interfaces import ICredentials
from sbus.server.core.limits import Limits
from sbus.server.core.users import RECORDER
from sbus.server.ops.admin_pages import pages
from sbus.server.ops.tap import Tap
from sbus.server.ops.viewers import UnroutedViewer
from tests.support.buses import Bus
from tests.unit.server.mailboxes import MANY, PUBLISHER, kinds, message, readers_of


def got(bus: Bus, path: str, *, is_owner: bool = True, **parameters: str) -> Any:
    """Return what a page answers."""
    page, _ = pages(bus.registry)["GET", path]
    return json.loads("".join(piece or "" for piece in page(Asked(parameters, is_owner))))


def test_patterns():
    """Each pattern is there once, with the number of its subscribers; secret ones are cut."""
    bus = Bus()
    for patterns in ((b"a/*", b"b"), (b"a/*", b"c")):
        bus.connect().send(*(b"SUB " + pattern for pattern in patterns))
    secret = bus.connect(pid=7)
    secret.send(b"SUB !/cred/100/1000/7/hidden")
    found = got(bus, "/v1/patterns")
    assert {row["pattern"]: row["subscribers"] for row in found["patterns"]} == {
        "a/*": 2,
        "b": 1,
        "c": 1,
        "!/cred/100/1000/7/": 1,
    }
    assert found["patterns"][0]["pattern"] == "a/*"
    assert got(bus, "/v1/patterns", limit="1")["total"] == 4
    assert [row["pattern"] for row in got(bus, "/v1/patterns", client="2")["patterns"]] == ["a/*", "c"]
    assert [row["pattern"] for row in got(bus, "/v1/patterns", prefix="b")["patterns"]] == ["b"]
    with pytest.raises(Problem, match="no client 9"):
        got(bus, "/v1/patterns", client="9")


def test_clients_that_a_policy_judges():
    """Each has its open patterns, however long, in pieces that take the bus no time; secret ones are left out."""
    bus = Bus()
    long = [
        b"\xff" * 3000,
        b"a" + "\U0001f600".encode() * 1000,
        b"ab" + "\u20ac".encode() * 1000,
        b"\x80" * 1001 + b'"\\',
    ]
    patterns = [b"", b"*", b"\\", *long, *(b"%d" % number for number in range(1000))]
    bus.connect(pid=42).send(*(b"SUB " + pattern for pattern in patterns), b"SUB !/cred/100/1000/42/hidden")
    bus.connect(pid=7)
    pieces = [piece or "" for piece in pages(bus.registry)["GET", "/v1/policy/clients"][0](Asked({}))]
    one, other = json.loads("".join(pieces))["clients"]
    assert [*map(from_text, one["patterns"])] == patterns
    assert [*map(as_text, patterns)] == one["patterns"]
    assert (other["pid"], other["patterns"]) == (7, [])
    assert max(map(len, pieces)) < 8000


def test_patterns_whose_last_values_are_kept():
    """A pattern of ``--last-value`` is listed with the clients that are subscribed to it, and only with them."""
    bus = Bus(last_values=(LastValueRule(b"a/*"), LastValueRule(b"b")))
    assert got(bus, "/v1/patterns") == {"total": 0, "patterns": []}
    bus.connect().send(b"SUB a/*")
    bus.connect().send(b"SUB a/*")
    row = {"pattern": "a/*", "is_secret": False, "subscribers": 2}
    assert got(bus, "/v1/patterns") == {"total": 1, "patterns": [row]}
    assert got(bus, "/v1/patterns", client="1") == {"total": 1, "patterns": [row]}


def test_last_values():
    """Kept messages come with their values for root and the server's user alone."""
    bus = Bus(last_values=(LastValueRule(b"a/*"),))
    bus.connect(uid=1001).send(b"MSG a/1\0one", b"MSG a/2\0two", b"MSG b\0no")
    found = got(bus, "/v1/last", head="2")
    assert [(row["key"], row["size"], base64.b64decode(row["head"])) for row in found["last"]] == [
        ("a/2", 3, b"tw"),
        ("a/1", 3, b"on"),
    ]
    assert (found["total"], found["last"][0]["uid"]) == (2, 1001)
    assert [row["key"] for row in got(bus, "/v1/last", pattern="a/1")["last"]] == ["a/1"]
    assert [row["head"] for row in got(bus, "/v1/last", is_owner=False)["last"]] == [None, None]
    with pytest.raises(Problem, match="--last-value"):
        got(Bus(), "/v1/last")


def test_explain_changes_nothing():
    """Asking who would get a message puts no key into the route cache."""
    bus = Bus()
    bus.connect().send(b"SUB a/*")
    misses = bus.registry.router.misses
    found = got(bus, "/v1/explain", key="a/b")
    assert [(row["client"], row["pattern"]) for row in found["receivers"]] == [(1, "a/*")]
    assert not bus.registry.routes
    assert bus.registry.router.misses == misses


def test_explain_finds_each_kind_of_pattern():
    """Every pattern that matches is found, as the router finds it."""
    bus = Bus()
    for pattern in (b"", b"a/", b"a/b", b"*/b", b"a/b*", b"*/", b"a", b"a/c", b"b/"):
        bus.connect().send(b"SUB " + pattern)
    found = got(bus, "/v1/explain", key="a/b")
    assert {row["client"] for row in found["receivers"]} == {1, 2, 3, 4, 5, 6}
    assert {row["pattern"] for row in found["receivers"]} == {"", "a/", "a/b", "*/b", "a/b*", "*/"}


def test_explain_who_loses_it():
    """A receiver whose socket is full and that then discards would not get it; one that queues would."""
    bus = Bus()
    lossy, patient, publisher = bus.connect(capacity=0), bus.connect(capacity=0), bus.connect()
    lossy.send(b"SUB k", b"CMSG blocking/soft/discard", b"CMSG whoami")
    patient.send(b"SUB k")
    lossy.protocol.reply(b"x", b"")
    bus.registry.delivery.flush()
    publisher.send(b"MSG k\0")
    found = got(bus, "/v1/explain", key="k")
    assert [(row["client"], row["is_congested"]) for row in found["receivers"]] == [(2, True)]
    assert [(row["client"], row["reason"]) for row in found["others"]] == [(1, "congested")]


def test_explain_echo():
    """A publisher that has chosen echo/off would not get its own message."""
    bus = Bus()
    bus.connect().send(b"SUB k", b"CMSG echo/off")
    assert got(bus, "/v1/explain", key="k")["total"] == 1
    found = got(bus, "/v1/explain", key="k", publisher="1")
    assert (found["total"], found["others"][0]["reason"]) == (0, "echo")


def test_explain_secrets():
    """Open patterns and other credentials do not get a secret message, and its rest is not shown."""
    bus = Bus()
    bus.connect(pid=7).send(b"SUB !/cred/100/1000/7/hidden")
    bus.connect().send(b"SUB ")
    bus.connect(pid=8).send(b"SUB !/cred/100/1000/8/hidden")
    found = got(bus, "/v1/explain", key="!/cred/100/1000/7/hidden")
    assert "hidden" not in json.dumps(found)
    assert [row["client"] for row in found["receivers"]] == [1]
    assert {row["client"]: row["reason"] for row in found["others"]} == {2: "secret", 3: "credentials"}


def test_explain_a_secret_of_a_bus_with_a_master():
    """A key with the link's name in front is for clients here; one without it for the link, if secrets go up."""
    name, key = "!/cred/1/2/3", "!/cred/100/1000/7/hidden"
    for secrets_go_up in (False, True):
        bus = Bus(secrets_go_up=secrets_go_up)
        bus.connect(pid=7).send(b"SUB !/cred////hidden")
        assert got(bus, "/v1/explain", key=key)["total"] == (not secrets_go_up)
        assert bus.registry.upstream.dropped_secrets == 0
        bus.connect(uid=0).send(b"CMSG link/path\0" + b"f" * 32 + b" above", b"CMSG link/up\0" + name.encode())
        found = got(bus, "/v1/explain", key=f"{name}/{key}")
        assert "hidden" not in json.dumps(found)
        assert [row["client"] for row in found["receivers"]] == [1]
        found = got(bus, "/v1/explain", key=key)
        assert [row["client"] for row in found["receivers"]] == [2 if secrets_go_up else 1]


def test_explain_a_client():
    """For a client that would get nothing, the answer says where its patterns and the key part."""
    bus = Bus()
    bus.connect().send(b"SUB a/b/c", b"SUB z")
    bus.connect()
    found = got(bus, "/v1/explain", key="a/b", receiver="1")
    assert found["others"][0]["reason"] == "no-match"
    assert found["compared"][0]["pattern"] == "a/b/c"
    assert "the key ends here" in found["compared"][0]["why"]
    assert got(bus, "/v1/explain", key="a/b", receiver="2")["others"][0]["text"] == "it has no subscriptions"


def test_explain_long_patterns():
    """Long patterns are compared one by one, so that no piece of the answer takes long, and are shown cut."""
    bus = Bus()
    key = b"k" * 7000
    bus.connect().send(*(b"SUB %b%d" % (key, n) for n in range(30)), b"SUB a/" + b"x" * 100_000)
    page, _ = pages(bus.registry)["GET", "/v1/explain"]
    pieces = list(page(Asked({"key": key.decode(), "receiver": "1"})))
    assert len(pieces) > 30
    found = json.loads("".join(piece or "" for piece in pieces))
    assert {len(row["pattern"]) for row in found["compared"]} == {1024}
    assert all("the key's segment ends here" in row["why"] for row in found["compared"])
    found = got(bus, "/v1/explain", key="a/b", receiver="1")
    assert found["compared"][0]["why"] == "pattern and key differ here"


@implementer(ICredentials)
class NoPublishing(KernelCredentials):
    """Allows no user to publish keys that begin with x."""

    restrictsPublishing = True

    def mayPublish(self, peer: Any, key: bytes) -> bool:
        return not key.startswith(b"x")


def test_explain_the_policy():
    """If the credentials policy does not let the publisher publish, nobody would get the message."""
    bus = Bus(credentials=NoPublishing(AccessSettings(), None))
    bus.connect().send(b"SUB ")
    found = got(bus, "/v1/explain", key="x", publisher="1")
    assert (found["is_refused"], found["total"], found["others"][0]["reason"]) == (True, 0, "policy")
    assert got(bus, "/v1/explain", key="y", publisher="1")["total"] == 1


def test_clients_show_who_blocks_them():
    """A publisher that is blocked names its receivers; the status counts it."""
    bus = Bus()
    slow, publisher = bus.connect(capacity=1), bus.connect()
    slow.send(b"SUB k", b"CMSG blocking/soft/block")
    publisher.send(*[b"MSG k\0"] * 4)
    clients = {row["client"]: row for row in got(bus, "/v1/clients")["clients"]}
    assert list(clients) == [2, 1]
    assert (clients[2]["blocked_by"], clients[2]["is_paused"], clients[1]["soft_strategy"]) == ([1], True, "block")
    bus.clock.advance(2)
    status = got(bus, "/v1/status")
    assert (status["held_publishers"], status["held_seconds"], status["queues"]) == (1, 2.0, 1)
    assert (status["queue_messages"], status["queue_largest_bytes"]) == (3, 18)
    slow.drain()
    status = got(bus, "/v1/status")
    assert (status["held_publishers"], status["held_seconds"], status["queues"], status["queue_messages"]) == (
        0,
        2,
        0,
        0,
    )


def figures(bus: Bus, page: Any = None) -> dict[str, float]:
    """Return the samples of the metrics, by name and labels, without the label that all of them share.

    :param page: the page, which remembers its earlier answers; a new page by default.
    """
    page = page or pages(bus.registry)["GET", "/metrics"][0]
    text = "".join(piece or "" for piece in page(Asked({})))
    return {
        " ".join([sample.name, *(value for label, value in sample.labels.items() if label != "bus")]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_totals():
    """The metrics count what happens: messages and bytes in and out, what nobody wanted, and the ends by reason."""
    bus = Bus()
    reader, lossy, publisher = bus.connect(), bus.connect(capacity=1), bus.connect()
    reader.send(b"SUB k")
    lossy.send(b"SUB k", b"CMSG blocking/soft/discard")
    publisher.send(b"MSG k\0abc", b"MSG k\0abc", b"MSG other\0")
    publisher.send(b"nonsense")
    found = figures(bus)
    assert found["sbus_published_messages_total"] == 3
    assert found["sbus_published_bytes_total"] == 9 + 9 + 10
    assert found["sbus_unrouted_messages_total"] == 1
    assert (found["sbus_routed_messages_total"], found["sbus_delivered_messages_total"]) == (4, 3)
    assert (found["sbus_routed_bytes_total"], found["sbus_delivered_bytes_total"]) == (36, 27)
    assert (found["sbus_dropped_messages_total discard"], found["sbus_dropped_bytes_total"]) == (1, 9)
    assert found["sbus_violations_total unknown-verb"] == 1
    assert found["sbus_clients_disconnected_total violation"] == 1
    assert found["sbus_route_cache_misses_total"] == 2
    assert found["sbus_route_cache_hits_total"] == 1
    assert (found["sbus_patterns"], found["sbus_clients"], found["sbus_clients_connected_total"]) == (2, 2, 3)


def test_no_counter_falls():
    """A falling counter looks like a restart. Copies in the mail for a client that has left make none fall."""
    bus = Bus()
    readers, publisher = readers_of(bus), bus.connect(uid=PUBLISHER)
    publisher.transport.deliver(message(1))
    readers[0].transport.hang_up()
    publisher.transport.deliver(message(2))
    assert kinds(bus) == ["Mail", "end", "Mail"]
    page, _ = pages(bus.registry)["GET", "/metrics"]
    before = figures(bus, page)
    bus.settle()
    after = figures(bus, page)
    assert after["sbus_delivered_messages_total"] == 2 * MANY - 2
    assert {name for name in before if name.endswith("_total") and after[name] < before[name]} == set()


def test_nobody_subscribed():
    """A message is unrouted in the metric exactly if the answer to `probe` is 0: observers do not count, nor does echo
    that is off; the events agree."""
    bus = Bus(last_values=(LastValueRule(b"k*"),))
    observer, other, reader, publisher = bus.connect(), bus.connect(), bus.connect(), bus.connect()
    observer.send(b"CMSG observer/on", b"SUB ")
    other.send(b"SUB k2", b"SUB k4", b"CMSG observer/on")
    reader.send(b"SUB k3", b"SUB k4")
    publisher.send(b"CMSG echo/off", b"SUB own")
    viewer = UnroutedViewer(bus.registry.dialect, bus.registry.interest.uncounted)
    tap = Tap(bus.registry, lambda: 1.0)
    for key, unrouted in ((b"k1", 1), (b"k2", 1), (b"k3", 0), (b"k4", 0), (b"own", 1)):
        publisher.take()
        publisher.send(b"CMSG probe\0" + key)
        assert publisher.take() == [b"CMSG probe\0%d %b" % (1 - unrouted, key)]
        for is_watched in (False, True):
            before = bus.registry.counters.unrouted
            if is_watched:
                tap.add(viewer)
            publisher.send(b"MSG %b\0x" % key, b"MSG %b\0y" % key)
            assert bus.registry.counters.unrouted - before == 2 * unrouted, key
            tap.remove(viewer)
        assert sum(flow.messages for flow in viewer.take().values()) == 2 * unrouted
    observer.send(b"CMSG observer/off")
    before = bus.registry.counters.unrouted
    publisher.send(b"MSG k1\0")
    assert bus.registry.counters.unrouted == before


def test_queues_and_limits():
    """Lagging receivers, held publishers and users at a limit show while they last."""
    bus = Bus(limits=Limits(user_patterns=2, block_timeout=30.0))
    slow, publisher = bus.connect(capacity=1), bus.connect()
    slow.send(b"SUB k", b"SUB l", b"CMSG blocking/soft/block")
    publisher.send(*[b"MSG k\0"] * 4)
    bus.clock.advance(1)
    found = figures(bus)
    assert (found["sbus_clients_lagging"], found["sbus_queue_messages"], found["sbus_queue_largest_bytes"]) == (
        1,
        3,
        18,
    )
    assert (found["sbus_publishers_held"], found["sbus_publishers_held_seconds_total"]) == (1, 1)
    assert found["sbus_users_at_limit patterns"] == 1
    assert found["sbus_delivered_messages_total"] == 1
    slow.drain()
    found = figures(bus)
    assert (found["sbus_clients_lagging"], found["sbus_queue_messages"], found["sbus_publishers_held"]) == (0, 0, 0)
    assert found["sbus_delivered_messages_total"] == 4


def test_a_recorder_that_is_gone():
    """A recorder that the bus should have, and that is not connected, shows as 0; without one there is no figure."""
    bus = Bus()
    assert not any(name.startswith("sbus_attached_up") for name in figures(bus))
    bus.registry.attached["recorder"] = lambda: bus.registry.members.is_attached(RECORDER)
    assert figures(bus)["sbus_attached_up recorder"] == 0
    assert got(bus, "/v1/status")["has_recorder"] is False
    bus.registry.members.sidecars[77] = RECORDER
    bus.connect(uid=os.geteuid(), pid=77)
    assert figures(bus)["sbus_attached_up recorder"] == 1


def test_sorts():
    """Clients can be sorted by each of `CLIENT_SORTS`, which the command line and the page offer, and nothing else."""
    bus = Bus()
    bus.connect()
    assert [got(bus, "/v1/clients", sort=sort)["total"] for sort in CLIENT_SORTS] == [1] * len(CLIENT_SORTS)
    with pytest.raises(Problem, match=f"use one of {', '.join(CLIENT_SORTS)}$"):
        got(bus, "/v1/clients", sort="name")
