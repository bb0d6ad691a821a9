"""The guard: who may publish and subscribe, by the policy."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock

from sbus.errors import CloseReason, UsageError, ViolationReason
from sbus.protocol.keys import EARLY
from sbus.server import Observer
from sbus.server.core.credentials import AccessSettings, KernelCredentials
from sbus.server.core.users import RECORDER
from tests.support.buses import Bus, Peer
from tests.unit.server.guarded import CLOSED, RULES, adopt, asking


class Log(Observer):
    """Keeps what is denied and audited."""

    def __init__(self) -> None:
        self.denied_events: list[tuple[Any, ...]] = []
        self.audited_events: list[tuple[Any, ...]] = []

    def denied(self, client: Any, verb: bytes, key: bytes, verdict: Any, is_enforced: bool) -> None:
        self.denied_events.append((client.number, verb, key, verdict.rule, is_enforced))

    def audited(self, client: Any, verb: bytes, key: bytes, verdict: Any, count: int) -> None:
        self.audited_events.append((client.number, verb, key, verdict.rule, count))


def test_whoever_asks_is_told_and_stays(policy):
    """A refused message reaches nobody, a refused pattern gets nothing, and the client is told verb, key and rule."""
    bus = Bus(policy=policy(CLOSED))
    sender, reader = asking(bus), asking(bus)
    reader.send(b"SUB sensors/", b"SUB elsewhere", b"SUB ")
    assert reader.take() == [b"CMSG denied\0SUB elsewhere default", b"CMSG denied\0SUB  default"]
    sender.send(b"MSG sensors/a\0x", b"MSG sensors/calibration/b\0y", b"MSG elsewhere\0z", b"MSG sensors/c\0")
    assert sender.take() == [
        b"CMSG denied\0MSG sensors/calibration/b sensors",
        b"CMSG denied\0MSG elsewhere default",
    ]
    assert reader.take() == [b"MSG sensors/a\0x", b"MSG sensors/c\0"]
    counters = bus.registry.counters
    assert (counters.denied, counters.denied_by) == (4, {"default": 3, "sensors": 1})
    rows = bus.registry.users.denied.latest()
    assert {row.rule: row.count for row in rows} == counters.denied_by
    assert {row.uid for row in rows} == {sender.protocol.user.uid}
    assert counters.violations == 0


def test_others_are_disconnected(policy):
    """A client that has not asked breaks the protocol, and its bye names the rule."""
    bus = Bus(policy=policy(CLOSED))
    client = bus.connect()
    client.send(b"CMSG bye/on")
    client.send(b"MSG sensors/calibration/x\0")
    assert not client.is_connected
    assert client.protocol.reason is CloseReason.VIOLATION
    bye = b"CMSG bye\0violation the client broke the protocol: "
    assert client.take()[1:] == [bye + b"the policy of the bus refuses this publication (rule sensors)"]
    assert bus.registry.counters.violations_by[ViolationReason.REFUSED_PUBLICATION] == 1


def test_denied_off_ends_it(policy):
    """After denied/off, a refusal ends the connection again."""
    bus = Bus(policy=policy(CLOSED))
    client = asking(bus)
    client.send(b"CMSG denied/off")
    assert client.take() == [b"CMSG denied/off\0"]
    client.send(b"SUB x")
    assert not client.is_connected


def test_foreign_secrets_need_no_policy():
    """The rule of secret keys is told as any other, on a bus without a policy."""
    bus = Bus()
    client = asking(bus)
    client.send(b"SUB !/cred//7//x", b"CMSG last\0!/cred//7//")
    assert client.take() == [b"CMSG denied\0SUB !/cred//7//x secret", b"CMSG denied\0SUB !/cred//7// secret"]
    client.send(b"SUB !/cred//bad//x")
    assert client.protocol.reason is CloseReason.VIOLATION, "a malformed key is no matter of permission"


def test_a_refused_snapshot_is_told_as_a_subscription(policy):
    """CMSG last of a refused pattern is answered with a denial, and not with last/done."""
    bus = Bus(policy=policy(CLOSED))
    client = asking(bus)
    client.send(b"CMSG last\0x")
    assert client.take() == [b"CMSG denied\0SUB x default"]


def test_long_keys_are_cut(policy):
    """A denial has the first 1,024 bytes of the key."""
    bus = Bus(policy=policy(CLOSED))
    client = asking(bus)
    client.send(b"MSG " + b"k" * 3000 + b"\0")
    assert client.take() == [b"CMSG denied\0MSG " + b"k" * 1024 + b" default"]


def test_a_pattern_that_is_too_large_is_not_judged(policy):
    """It breaks a limit, whatever the policy says: to judge it would take long, each time that it is refused."""
    log = Log()
    bus = Bus(policy=policy(CLOSED), observers=(log,))
    client = asking(bus)
    client.send(b"SUB no/" + b"a/" * 5_000)
    assert not client.is_connected
    assert log.denied_events == []
    assert bus.registry.counters.violations_by[ViolationReason.TOO_MANY_PATTERN_BYTES] == 1


def test_denials_hold_no_publisher_up(policy):
    """While 64 replies wait, denials are summed up, and the client goes on publishing."""
    bus = Bus(policy=policy(CLOSED))
    client, reader = asking(bus), bus.connect()
    reader.send(b"SUB sensors/")
    client.stall()
    client.send(*[b"MSG no\0"] * 1000, b"MSG sensors/x\0")
    client.send(*[b"MSG no\0"] * 500, b"MSG sensors/y\0")
    assert reader.take() == [b"MSG sensors/x\0", b"MSG sensors/y\0"]
    assert not client.protocol.is_paused
    client.drain()
    told = client.take()
    assert told[:-1] == [b"CMSG denied\0MSG no default"] * (len(told) - 1)
    assert told[-1] == b"CMSG denied\0several %d" % (1500 - len(told) + 1)
    assert 60 <= len(told) <= 66
    client.send(b"MSG no\0")
    assert client.take() == [b"CMSG denied\0MSG no default"]


def test_runs_stay_runs(policy):
    """A run whose keys are judged alike is delivered at once, and its route keeps the verdict."""
    bus = Bus(policy=policy(CLOSED))
    sender, reader = bus.connect(), bus.connect()
    reader.send(b"SUB sensors/")
    sender.send(b"MSG sensors/a\0", b"MSG sensors/b\0")
    runs: list[int] = []
    deliver = bus.registry.deliver

    def counting(packets: list[bytes], *rest: Any) -> int:
        runs.append(len(packets))
        return deliver(packets, *rest)

    bus.registry.deliver = counting
    sender.send(*[b"MSG sensors/a\0", b"MSG sensors/b\0"] * 20)
    assert runs == [40]


def test_equal_receivers_of_different_zones_are_no_run(policy):
    """Keys with the same receivers that are judged differently do not share a route."""
    bus = Bus(policy=policy(RULES))
    sender, reader = asking(bus), bus.connect(uid=7)
    reader.send(b"SUB ")
    for _ in range(3):
        sender.send(b"MSG sensors/a\0", b"MSG sensors/calibration/a\0", b"MSG sensors/a\0")
        assert reader.take() == [b"MSG sensors/a\0"] * 2
        assert sender.take() == [b"CMSG denied\0MSG sensors/calibration/a sensors"]


def test_without_echo_and_with_rights(policy):
    """A client without echo does not get its own messages, whatever its rights."""
    bus = Bus(policy=policy(CLOSED))
    client, reader = bus.connect(), bus.connect()
    client.send(b"CMSG echo/off", b"SUB sensors/")
    reader.send(b"SUB sensors/")
    for _ in range(3):
        client.send(b"MSG sensors/a\0", b"MSG sensors/a\0")
    assert client.take() == []
    assert len(reader.take()) == 6


def test_audited_uses_are_noted_each(policy):
    """A rule with audit = true leaves an event for each message and each subscription."""
    log = Log()
    bus = Bus(policy=policy(CLOSED + "audit = true\n"), observers=(log,))
    client = asking(bus)
    client.send(b"SUB sensors/", b"MSG sensors/a\0", b"MSG sensors/a\0")
    assert log.audited_events == [
        (1, b"SUB", b"sensors/", "sensors", 1),
        (1, b"MSG", b"sensors/a", "sensors", 1),
        (1, b"MSG", b"sensors/a", "sensors", 1),
    ]
    assert client.take() == [b"MSG sensors/a\0"] * 2
    assert log.denied_events == []


def test_mode_audit_refuses_nothing(policy):
    """What a policy in mode audit forbids is done, and observers hear of it."""
    log = Log()
    bus = Bus(policy=policy('mode = "audit"\n' + CLOSED), observers=(log,))
    client = bus.connect(uid=5)
    client.send(b"SUB x", b"MSG x\0y")
    assert client.take() == [b"MSG x\0y"]
    assert log.denied_events == [(1, b"SUB", b"x", "default", False), (1, b"MSG", b"x", "default", False)]
    assert bus.registry.counters.denied == 0


def test_the_program_is_not_judged(policy):
    """The program around the bus publishes what it likes, and the recorder that the bus has started reads all.

    A client of another user that had the recorder's PID before it, and waited at the socket since, is judged as ever.
    """
    bus = Bus(policy=policy(CLOSED))
    bus.registry.members.sidecars[77] = RECORDER
    recorder, other = bus.connect(uid=os.geteuid(), pid=77), bus.connect(uid=os.geteuid() + 1, pid=77)
    recorder.send(b"SUB ")
    other.send(b"SUB ")
    assert not other.is_connected
    other = bus.connect(uid=os.geteuid() + 1, pid=77)
    recorder.transport.hang_up()
    bus.settle()
    assert other.is_connected
    assert not bus.registry.members.is_attached(RECORDER), "it counts as a client"
    recorder = bus.connect(uid=os.geteuid(), pid=77)
    recorder.send(b"SUB ")
    bus.registry.publish(b"elsewhere", b"x")
    bus.settle()
    assert recorder.take() == [b"MSG elsewhere\0x"]


@pytest.mark.parametrize(("groups", "word"), [([], b"MSG k\0"), ([50], b"CMSG denied\0MSG k no")])
def test_supplementary_groups_come_from_the_kernel(policy, groups, word):
    """A rule about a group is about clients with that supplementary group."""
    bus = Bus(policy=policy('[[rule]]\nname = "no"\ngroups = [50]\ndeny_publish = ["k"]\n'))
    client = asking(bus, groups=groups)
    client.send(b"SUB k", b"MSG k\0")
    assert client.take() == [word]


def test_interest_is_only_told_of_what_one_may_publish(policy):
    """For a key that a client may not publish, probe and interest say 1; a new policy changes the answer."""
    bus = Bus(policy=policy(CLOSED))
    client = asking(bus)
    client.send(b"CMSG interest/on\0sensors/a", b"CMSG interest/on\0secret", b"CMSG probe\0secret")
    assert client.take() == [b"CMSG interest\x000 sensors/a", b"CMSG interest\x001 secret", b"CMSG probe\x001 secret"]
    adopt(bus, policy(""))
    bus.clock.advance(1)
    assert client.take() == [b"CMSG interest\x000 secret"]
    adopt(bus, policy(CLOSED))
    bus.clock.advance(1)
    assert client.take() == [b"CMSG interest\x001 secret"]


# --- plug-ins -------------------------------------------------------------------------------------


class Plugin(KernelCredentials):
    """Lets nobody publish ``no``, and counts the questions."""

    restrictsPublishing = True

    def __init__(self, seconds: float) -> None:
        super().__init__(AccessSettings(), None)
        self.verdictSeconds = seconds
        self.asked: list[bytes] = []
        self.refused = b"no"

    def mayPublish(self, peer: Any, key: bytes) -> bool:
        self.asked.append(key)
        return key != self.refused


def test_a_plugin_is_asked_for_every_message():
    """Without verdictSeconds, a plug-in is asked for each message."""
    plugin = Plugin(0)
    bus = Bus(credentials=plugin)
    client = asking(bus)
    client.send(b"SUB yes", *[b"MSG yes\0"] * 3, b"MSG no\0")
    assert plugin.asked == [b"yes"] * 3 + [b"no"]
    assert client.take() == [*[b"MSG yes\0"] * 3, b"CMSG denied\0MSG no credentials"]


def test_a_verdict_of_a_plugin_is_kept_for_its_time():
    """With verdictSeconds, a plug-in is asked once for each peer and key, and again after that time."""
    plugin = Plugin(5)
    bus = Bus(credentials=plugin)
    client, other = asking(bus, pid=1), asking(bus, pid=2)
    client.send(b"SUB yes", *[b"MSG yes\0"] * 3, b"MSG no\0")
    client.send(*[b"MSG yes\0"] * 3, b"MSG no\0")
    other.send(b"MSG yes\0")
    assert plugin.asked == [b"yes", b"no", b"yes"]
    plugin.refused = b"yes"
    bus.clock.advance(4.9)
    client.take()
    client.send(b"MSG yes\0")
    assert client.take() == [b"MSG yes\0"]
    bus.clock.advance(0.2)
    client.send(b"MSG yes\0", b"MSG no\0")
    assert client.take() == [b"CMSG denied\0MSG yes credentials"]


def test_a_policy_and_a_plugin_must_both_agree(policy):
    """A message is published only if neither the policy nor the plug-in refuses it."""
    bus = Bus(credentials=Plugin(5), policy=policy('closed = ["closed"]'))
    client = asking(bus)
    for _ in range(2):
        client.send(b"MSG no\0", b"MSG closed\0", b"MSG yes\0")
        assert client.take() == [b"CMSG denied\0MSG no credentials", b"CMSG denied\0MSG closed closed"]


def test_mode_audit_is_that_of_the_policy_alone(policy):
    """A plug-in refuses also what a policy in mode audit allows, or would refuse, and hides who subscribes to it."""
    log = Log()
    text = 'mode = "audit"\nclosed = ["closed", "no"]'
    bus = Bus(credentials=Plugin(5), policy=policy(text), observers=(log,))
    client = asking(bus)
    client.send(b"MSG no\0", b"MSG closed\0", b"CMSG interest/on\0no")
    assert client.take() == [b"CMSG denied\0MSG no credentials", b"CMSG interest\x001 no"]
    assert log.denied_events == [(1, b"MSG", b"no", "credentials", True), (1, b"MSG", b"closed", "closed", False)]


def test_the_links_name_is_no_way_around_a_denied_secret(policy):
    """On a bus with a master, a key that begins with the link's name, old or new, is judged as the key behind it."""
    bus = Bus(policy=policy('[[rule]]\nname = "no"\nusers = [1000]\ndeny_publish = ["!/cred//2000/"]\n'))
    link, victim, client = bus.connect(uid=0), bus.connect(uid=2000, pid=6000), asking(bus)
    victim.send(b"SUB !/cred////x")
    key = b"!/cred/100/2000/6000/x"
    for name in (b"!/cred/0/0/1", b"!/cred/0/0/2"):
        link.send(b"CMSG link/up\0" + name)
        for sent in (key, b"!/cred/0/0/1/" + key):
            client.send(b"MSG %b\0" % sent)
            assert client.take() == [b"CMSG denied\0MSG %b no" % sent]
    assert victim.take() == []


def test_a_client_that_comes_again_has_the_rights_of_before(policy):
    """They are not made anew for each connection, which takes long with many rules; a new policy forgets them."""
    bus = Bus(policy=policy(CLOSED))
    known: set[int] = set()
    for _ in range(3):
        client = bus.connect()
        rights = weakref.ref(client.protocol.rights)
        known.add(id(rights()))
        client.transport.loseConnection()
        bus.settle()
        del client
        gc.collect()
        assert rights() is not None
    assert len(known) == 1
    assert adopt(bus, policy(CLOSED)) == [2]
    gc.collect()
    assert rights() is None


def test_a_bus_of_the_early_dialect_takes_no_policy(policy):
    """The patterns of a policy would match no key, and deny nothing."""
    with pytest.raises(UsageError, match="current dialect"):
        Bus(policy=policy(CLOSED), dialect=EARLY)
    bus = Bus(dialect=EARLY)
    failed: list[Any] = []
    Deferred.fromCoroutine(bus.registry.guard.adopt(policy(CLOSED))).addErrback(failed.append)
    assert failed[0].check(UsageError)


def test_an_observer_changes_the_policy_behind_the_batch(policy):
    """What an observer puts into force while it is notified is no part of the batch: nobody gets a message after it."""

    class Switch(Observer):
        def published(self, client: Any, key: bytes, payload: bytes | None) -> None:
            if key == b"sensors/a":
                Deferred.fromCoroutine(bus.registry.guard.adopt(policy('closed = [""]\n')))

    bus = Bus(policy=policy(CLOSED), observers=(Switch(),))
    reader, sender = asking(bus), asking(bus)
    reader.send(b"SUB sensors/")
    sender.send(b"MSG sensors/b\0", b"MSG sensors/a\0", b"MSG sensors/b\0")
    assert reader.take() == [
        *(b"MSG sensors/%b\0" % name for name in (b"b", b"a", b"b")),
        b"CMSG denied\0SUB sensors/ closed",
    ]


# --- rates ----------------------------------------------------------------------------------------


RATE = '[[rule]]\nname = "slow"\nusers = [1000]\nmax_rate = 400\n'


def flooded(bus: Bus, clients: list[Peer], reader: Peer, seconds: float) -> int:
    """Let time pass while clients have more to send than they may; return the messages that came."""
    for client in clients:
        client.transport.deliver(*[b"MSG k\0"] * 1000)
    for _ in range(int(seconds * 1000)):
        bus.clock.advance(0.001)
    return len(reader.take())


@pytest.mark.parametrize("count", [1, 3])
def test_a_rate_is_one_of_the_user(policy, count):
    """The clients of a user with max_rate are read at that rate together, within a twentieth; nothing is lost."""
    bus = Bus(policy=policy(RATE), clock=Clock())
    reader = bus.connect(uid=7)
    reader.send(b"SUB k")
    clients = [bus.connect() for _ in range(count)]
    assert 380 <= flooded(bus, clients, reader, 1.0) <= 420
    assert 380 <= flooded(bus, [], reader, 1.0) <= 420
    for _ in range(20_000):
        bus.clock.advance(0.001)
    assert bus.registry.counters.published == 1000 * count


def test_others_are_read_as_ever(policy):
    """A rate is for the users that the rule names."""
    bus = Bus(policy=policy(RATE))
    reader, other = bus.connect(uid=7), bus.connect(uid=8)
    reader.send(b"SUB k")
    other.send(*[b"MSG k\0"] * 1000)
    assert len(reader.take()) == 1000


def test_the_answer_to_a_subscription_is_never_summed_up(policy):
    """A client that reads nothing is told of each refused pattern once it reads; it is not read until then."""
    bus = Bus(policy=policy(CLOSED))
    client = asking(bus)
    client.stall()
    patterns = [b"no/%d" % number for number in range(300)]
    client.send(*[b"MSG no\0"] * 100, *[b"SUB " + pattern for pattern in patterns])
    assert client.protocol.is_paused
    for _ in range(20):
        client.drain()
    told = client.take()
    assert [packet for packet in told if b"\0SUB " in packet] == [
        b"CMSG denied\0SUB %b default" % pattern for pattern in patterns
    ]
