"""What clients may do: judged for a run, told to those who ask, and changed while the bus goes on."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock

from sbus.errors import CloseReason, UsageError, ViolationReason
from sbus.policy import Identity, Policy, Rights, load
from sbus.protocol.keys import EARLY
from sbus.server import Observer
from sbus.server.core.credentials import AccessSettings, KernelCredentials
from sbus.server.core.limits import Limits
from sbus.server.core.users import RECORDER
from tests.support.buses import Bus, HandTurnedBus, Peer

ON, ANSWER = b"CMSG denied/on", b"CMSG denied/on\0"
RULES = """
[[rule]]
name = "sensors"
users = [1000]
publish = ["sensors/"]
subscribe = ["sensors/", "alarms/*"]
deny_publish = ["sensors/calibration/"]
"""
CLOSED = 'default = "deny"\n' + RULES


@pytest.fixture
def policy(tmp_path: Path) -> Callable[[str], Policy]:
    """Makes a policy of TOML."""

    def make(text: str) -> Policy:
        path = tmp_path / "policy.toml"
        path.write_text(f"version = 1\n{text}")
        return load(str(path))

    return make


class Log(Observer):
    """Keeps what is denied and audited."""

    def __init__(self) -> None:
        self.denied_events: list[tuple[Any, ...]] = []
        self.audited_events: list[tuple[Any, ...]] = []

    def denied(self, client: Any, verb: bytes, key: bytes, verdict: Any, is_enforced: bool) -> None:
        self.denied_events.append((client.number, verb, key, verdict.rule, is_enforced))

    def audited(self, client: Any, verb: bytes, key: bytes, verdict: Any, count: int) -> None:
        self.audited_events.append((client.number, verb, key, verdict.rule, count))


def asking(bus: Bus, uid: int = 1000, **settings: Any) -> Peer:
    """Connect a client that stays when it is refused."""
    client = bus.connect(uid=uid, **settings)
    client.send(ON)
    assert client.take() == [ANSWER]
    return client


def adopt(bus: Bus, policy: Policy) -> list[int]:
    """Put a policy into force; return the generations that are in force, as they come."""
    done: list[int] = []
    Deferred.fromCoroutine(bus.registry.guard.adopt(policy)).addCallback(done.append)
    bus.settle()
    return done


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


# --- a new policy ------------------------------------------------------------------------------


def test_a_new_policy_is_in_force_for_everybody(policy):
    """Publishing is judged by the new policy at once, also for keys whose routes are known."""
    bus = Bus(policy=policy(RULES))
    sender, reader = asking(bus), bus.connect(uid=7)
    reader.send(b"SUB sensors/")
    bus.connect().send(b"SUB elsewhere")
    for _ in range(2):
        sender.send(b"MSG elsewhere\0", b"MSG sensors/x\0")
    assert len(reader.take()) == 2
    assert adopt(bus, policy('closed = ["elsewhere"]\n')) == [2]
    sender.send(b"MSG elsewhere\0", b"MSG sensors/calibration/x\0")
    assert sender.take() == [b"CMSG denied\0MSG elsewhere closed"]
    assert reader.take() == [b"MSG sensors/calibration/x\0"]


def test_a_revoked_subscription_ends(policy):
    """A subscription that the new policy refuses ends: the client is told, or disconnected with the reason."""
    bus = Bus(policy=policy(""))
    told, other, fine = asking(bus), bus.connect(), bus.connect()
    told.send(b"SUB a", b"SUB a", b"SUB b", b"SUB !/cred////x")
    other.send(b"CMSG bye/on", b"SUB a", b"SUB b")
    fine.send(b"SUB b")
    assert adopt(bus, policy('[[rule]]\nname = "no-a"\ndeny_subscribe = ["a*"]\n')) == [2]
    assert told.take() == [b"CMSG denied\0SUB a no-a"]
    assert set(told.protocol.patterns) == {b"b", b"!/cred////x"}
    assert other.protocol.reason is CloseReason.REVOKED
    assert other.take()[1].startswith(b"CMSG bye\0revoked ")
    assert other.protocol.patterns == {}
    bus.registry.publish(b"a", b"1")
    bus.registry.publish(b"b", b"2")
    bus.settle()
    assert (told.take(), fine.take()) == ([b"MSG b\x002"], [b"MSG b\x002"])
    told.send(b"SUB a")
    assert told.take() == [b"CMSG denied\0SUB a no-a"]


def test_many_revoked_subscriptions_are_each_denied(policy):
    """A client that loses a thousand subscriptions at once hears of each, also if it reads late: it must know them."""
    bus = Bus(policy=policy(""))
    client = asking(bus)
    client.stall()
    client.send(*[b"SUB a/%d" % number for number in range(1000)])
    done: list[int] = []
    Deferred.fromCoroutine(
        bus.registry.guard.adopt(policy('[[rule]]\nname = "no-a"\ndeny_subscribe = ["a/"]\n'))
    ).addCallback(done.append)
    for _ in range(30):
        bus.settle()
    assert done == [2]
    client.drain()
    assert sorted(client.take()) == sorted(b"CMSG denied\0SUB a/%d no-a" % number for number in range(1000))
    assert client.protocol.patterns == {}
    client.send(b"MSG b\0")  # it is read again
    assert client.take() == []
    assert not client.protocol.is_paused


def test_between_two_policies_both_hold_for_subscriptions(policy):
    """While subscriptions are judged, in slices, a new one has to satisfy the old policy and the new one."""
    bus = Bus(policy=policy('[[rule]]\nname = "no-a"\ndeny_subscribe = ["a/"]\n'))
    many, client = bus.connect(), asking(bus)
    many.send(*[b"SUB x/%d" % number for number in range(1000)])
    done: list[int] = []
    coming = policy('[[rule]]\nname = "no-b"\ndeny_subscribe = ["b/"]\ndeny_publish = ["b/"]\n')
    Deferred.fromCoroutine(bus.registry.guard.adopt(coming)).addCallback(done.append)
    between: list[int] = []

    def in_between() -> None:
        client.transport.deliver(b"SUB a/1", b"SUB b/1", b"SUB c/1", b"MSG b/1\0")
        bus.registry.delivery.flush()
        between.append(len(done))

    bus.clock.callLater(0, in_between)
    bus.settle()
    assert (between, done) == ([0], [2])
    assert client.take() == [b"CMSG denied\0SUB a/1 no-a", b"CMSG denied\0SUB b/1 no-b"]
    client.send(b"SUB a/1", b"SUB b/1", b"MSG b/1\0")
    assert client.take() == [b"CMSG denied\0SUB b/1 no-b", b"CMSG denied\0MSG b/1 no-b"]


def test_patterns_that_take_long_to_judge_hold_nobody_up(policy):
    """A new policy judges for a few milliseconds at a time, however long one pattern takes."""

    class SlowClock(Clock):
        def seconds(self) -> float:
            self.rightNow += 0.0005
            return self.rightNow

    bus = Bus(policy=policy(""), clock=SlowClock())
    bus.connect().send(*[b"SUB x/%d" % number for number in range(100)])
    turns = 0

    def turn() -> None:
        nonlocal turns
        if bus.registry.guard.permissions.policy is not coming:
            turns += 1
            bus.clock.callLater(0, turn)

    coming = policy("")
    Deferred.fromCoroutine(bus.registry.guard.adopt(coming))
    turn()
    for _ in range(100):
        bus.settle()
    assert bus.registry.guard.permissions.policy is coming
    assert 20 <= turns <= 60


class Counting(Policy):
    """A policy that counts the rights that are asked for, since `asked` was set to 0."""

    asked = 0

    def rights_of(self, identity: Identity) -> Rights:
        self.asked += 1
        return super().rights_of(identity)


def test_many_clients_get_their_rights_in_slices():
    """However many clients there are, a new policy stops the bus for a few milliseconds at a time."""
    bus = HandTurnedBus(policy=Policy(), limits=Limits(user_clients=1000))
    for _ in range(900):
        bus.connect()
    coming = Counting()
    done: list[int] = []
    Deferred.fromCoroutine(bus.registry.guard.adopt(coming)).addCallback(done.append)
    most = total = 0
    while not done:
        coming.asked = 0
        bus.turn()
        most, total = max(most, coming.asked), total + coming.asked
    assert total == 2 * 900, "to judge each client's patterns, and for its rights"
    assert most < 300


def test_a_client_does_not_wait_for_its_slice(policy):
    """From the moment in which a policy is in force, whatever a client sends is judged by it, as to rights and rate."""
    bus = HandTurnedBus(policy=policy(""), limits=Limits(user_clients=1000))
    for _ in range(500):
        bus.connect()
    reader, client = bus.connect(), asking(bus)
    reader.send(b"SUB ")
    client.send(b"MSG b\0")
    assert reader.take() == [b"MSG b\0"]
    coming = policy('[[rule]]\nname = "no-b"\ndeny_publish = ["b"]\nmax_rate = 10\n')
    done: list[int] = []
    Deferred.fromCoroutine(bus.registry.guard.adopt(coming)).addCallback(done.append)
    while bus.registry.guard.permissions.policy is not coming:
        bus.turn()
    client.transport.deliver(b"MSG b\0", *[b"MSG a\0"] * 10)
    assert client.take() == [b"CMSG denied\0MSG b no-b"]
    assert reader.take() == [], "b is denied, and it took the only token"
    assert not done


def test_from_audit_to_enforcing(policy):
    """What an audited policy let through is refused, or ended, when it is enforced; also while that is under way."""
    text = '[[rule]]\nname = "no-a"\ndeny_subscribe = ["a/"]\n'
    bus = Bus(policy=policy('mode = "audit"\n' + text))
    client, many = asking(bus), bus.connect()
    client.send(b"SUB a/1")
    many.send(*[b"SUB x/%d" % number for number in range(500)])
    done: list[int] = []
    Deferred.fromCoroutine(bus.registry.guard.adopt(policy(text))).addCallback(done.append)
    client.transport.deliver(b"SUB a/2")
    for _ in range(10):
        bus.settle()
    assert done == [2]
    assert client.protocol.patterns == {}
    assert sorted(client.take()) == [b"CMSG denied\0SUB a/1 no-a", b"CMSG denied\0SUB a/2 no-a"]


def test_two_policies_come_one_after_the_other(policy):
    """A policy that is announced while another one is on its way comes into force after it."""
    bus = Bus(policy=policy(""))
    many = bus.connect()
    many.send(*[b"SUB x/%d" % number for number in range(500)])
    done: list[int] = []
    for text in (CLOSED, ""):
        Deferred.fromCoroutine(bus.registry.guard.adopt(policy(text))).addCallback(done.append)
    for _ in range(20):
        bus.settle()
    assert done == [2, 3]
    in_force = bus.registry.guard.permissions.policy
    assert in_force is not None
    assert in_force.generation == 3
    assert not many.is_connected, "the first one has ended its subscriptions"


# --- plug-ins ----------------------------------------------------------------------------------


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


# --- rates -------------------------------------------------------------------------------------

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
