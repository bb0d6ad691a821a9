"""A new policy comes into force, in slices."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock

from sbus.errors import CloseReason
from sbus.policy import Identity, Policy, Rights
from sbus.server.core.limits import Limits
from tests.support.buses import Bus, HandTurnedBus
from tests.unit.server.guarded import CLOSED, RULES, adopt, asking


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
