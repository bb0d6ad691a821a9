"""Admission: the exact edges of the limits of one user, the reserves, and a model of both."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sbus.errors import CloseReason
from sbus.server.bus.admission import (
    BURST_SECONDS,
    DESCRIPTOR_RESERVE,
    RESERVE,
    AcceptRates,
    Admission,
    descriptor_reserve,
    reserve,
)
from sbus.server.core.limits import Limits
from sbus.server.core.shares import Shares
from sbus.server.core.users import RECORDER, Users, is_exempt
from tests.support.buses import Bus
from tests.support.examples import examples

EXEMPT = 0
CLIENTS, CONNECTS, KEPT = (
    CloseReason.TOO_MANY_USER_CLIENTS,
    CloseReason.TOO_MANY_USER_CONNECTS,
    CloseReason.KEPT_FOR_OTHERS,
)


class Door:
    """An admission with a clock and with descriptors that a test sets.

    :ivar open: descriptors that are not of connections.
    """

    def __init__(self, *, files: int = 1 << 20, **limits) -> None:
        self.now = 1000.0
        self.limits = Limits(**limits)
        self.users = Users(1 << 20, shares=Shares(self.limits))
        self.files = files
        self.open = 20
        self.accepted = 0
        self.admission = Admission(
            self.limits,
            self.users,
            clock=lambda: self.now,
            count_open=lambda: self.open + self.users.connections + 1,
            limit=lambda: self.files,
        )
        self.connections: list = []

    def connect(self, uid: int) -> CloseReason | None:
        """Have a user connect; return why the connection was refused."""
        if len(self.connections) >= self.limits.max_clients:
            return CloseReason.TOO_MANY_CLIENTS
        reason = self.admission.refusal(uid, len(self.connections))
        if reason is None:
            self.connections.append(self.users.connect(uid))
        return reason

    def connect_often(self, uid: int, times: int) -> list[CloseReason | None]:
        return [self.connect(uid) for _ in range(times)]

    def leave(self, uid: int) -> None:
        user = next(user for user in self.connections if user.uid == uid)
        self.connections.remove(user)
        self.users.disconnect(user)
        self.users.forget(user)


# --- the rate -----------------------------------------------------------------------------------


def rates(rate: int) -> tuple[AcceptRates, list[float]]:
    now = [1000.0]
    return AcceptRates(lambda _: rate, lambda: now[0]), now


@pytest.mark.parametrize("rate", [1, 200])
def test_the_burst(rate):
    """A user may connect for five seconds' worth at once: n - 1 and n times, and not n + 1 times."""
    found, _ = rates(rate)
    burst = rate * BURST_SECONDS
    assert [found.take(7) for _ in range(burst + 1)] == [True] * burst + [False]
    assert found.take(8), "each user has a bucket of its own"


def test_the_default_rate():
    """By default a user may connect 200 times a second, and 1,000 times at once."""
    door = Door(user_clients=5000)
    assert door.connect_often(7, 1001) == [None] * 1000 + [CONNECTS]
    door.now += 1
    assert door.connect_often(7, 201) == [None] * 200 + [CONNECTS]


def test_the_rate_comes_back():
    """A spent bucket fills by the rate, up to the burst; a refused connection costs nothing."""
    found, now = rates(4)
    assert [found.take(7) for _ in range(22)].count(True) == 20
    now[0] += 0.125
    assert not found.take(7), "half a connection is none"
    now[0] += 0.125
    assert (found.take(7), found.take(7)) == (True, False)
    now[0] += 3600
    assert [found.take(7) for _ in range(21)].count(True) == 20


def test_reconnecting_does_not_fill_the_bucket():
    """The bucket stays when the user's last client leaves."""
    door = Door(user_accepts=1)
    for _ in range(BURST_SECONDS):
        assert door.connect(7) is None
        door.leave(7)
    assert len(door.users) == 0
    assert door.connect(7) is CONNECTS


def test_full_buckets_are_forgotten():
    """Users who have not connected for a while take no memory; those who have keep their buckets."""
    found, now = rates(1)
    for uid in range(1000):
        now[0] += 1
        for _ in range(BURST_SECONDS):
            found.take(uid)
        assert not found.take(uid)
        assert len(found) < 65
    assert not found.take(999)


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40)), max_size=120),
)
def test_no_more_than_the_rate(rate, steps):
    """In any span of time a user is let in no more than the burst and the rate allow, and never less."""
    found, now = rates(rate)
    taken: dict[int, list[float]] = {}
    tokens: dict[int, float] = {}
    last: dict[int, float] = {}
    for uid, wait in steps:
        now[0] += wait / 16
        left = min(
            rate * BURST_SECONDS, tokens.get(uid, rate * BURST_SECONDS) + (now[0] - last.get(uid, now[0])) * rate
        )
        last[uid] = now[0]
        allowed = found.take(uid)
        assert allowed == (left >= 1)
        tokens[uid] = left - allowed
        if allowed:
            taken.setdefault(uid, []).append(now[0])
    for times in taken.values():
        for at, first in enumerate(times):
            for count, end in enumerate(times[at:], 1):
                assert count <= rate * BURST_SECONDS + (end - first) * rate + 1e-9


# --- clients, and the reserves ------------------------------------------------------------------


def test_clients_of_one_user():
    """A user may have n - 1 and n clients, not n + 1; a client that leaves makes room; others are not concerned."""
    door = Door(user_clients=3)
    assert door.connect_often(7, 4) == [None, None, None, CLIENTS]
    assert door.connect(8) is None
    door.leave(7)
    assert door.connect_often(7, 2) == [None, CLIENTS]


def test_the_default_number_of_clients():
    """By default a user may have 256 clients, however many the bus may have."""
    assert Door().connect_often(7, 257) == [None] * 256 + [CLIENTS]


def test_clients_of_a_user_with_a_limit_of_its_own():
    """A user who is named may have more, or fewer, clients than the others."""
    door = Door(user_clients=3, user_clients_of={7: 5, 8: 1})
    assert door.connect_often(7, 6) == [None] * 5 + [CLIENTS]
    assert door.connect_often(8, 2) == [None, CLIENTS]
    assert door.connect_often(9, 4) == [None] * 3 + [CLIENTS]


@pytest.mark.parametrize(("places", "kept"), [(0, 0), (3, 0), (4, 1), (255, 63), (256, 64), (16_384, 64)])
def test_the_size_of_the_reserve(places, kept):
    """64 places are kept for users without a connection, or a quarter of them if that is less."""
    assert reserve(places) == kept


def test_the_last_clients():
    """When only the reserve of --max-clients is left, a user with a client gets no other; each new user gets one."""
    door = Door(max_clients=400, user_clients=400)
    assert door.connect_often(7, 337) == [None] * 336 + [KEPT]
    assert [door.connect(uid) for uid in range(100, 100 + RESERVE)] == [None] * RESERVE
    assert door.connect(99) is CloseReason.TOO_MANY_CLIENTS
    door.leave(7)
    assert (door.connect(7), door.connect(100), door.connect(99)) == (KEPT, KEPT, None)


def test_the_last_descriptors():
    """When only 317 descriptors are left, a user with a client gets no other, and each new user gets one."""
    door = Door(files=20 + 1_000 + DESCRIPTOR_RESERVE, user_clients=10_000, user_accepts=10_000)
    assert door.connect_often(7, 1_001) == [None] * 1_000 + [KEPT]
    assert [door.connect(uid) for uid in range(100, 110)] == [None] * 10
    door.leave(7)
    assert door.connect(7) is KEPT
    for uid in range(100, 110):
        door.leave(uid)
    assert door.connect_often(7, 2) == [None, KEPT]


def test_descriptors_that_others_take():
    """What the process opens besides is noticed while the reserve is near, and a limit that changes at once."""
    door = Door(files=20 + 1_000 + DESCRIPTOR_RESERVE, user_clients=10_000, user_accepts=10_000)
    assert door.connect_often(7, 950) == [None] * 950
    door.open += 50
    door.now += 1
    assert door.connect(7) is KEPT
    door.files += 1
    assert door.connect_often(7, 2) == [None, KEPT]
    door.open -= 10
    door.now += 1
    assert door.connect_often(7, 11) == [None] * 10 + [KEPT]


def test_descriptors_are_seldom_counted():
    """The descriptors are counted at the first connection, and not for each one."""
    door = Door(user_accepts=10_000, user_clients=2_000)
    door.connect(1)
    counted: list[int] = []

    def count() -> int:
        counted.append(1)
        return 40

    door.admission._count_open = count
    door.connect_often(7, 1000)
    assert len(counted) == 1


@pytest.mark.parametrize("uid", [EXEMPT, os.geteuid()])
def test_exempt_users(uid):
    """Root and the server's own user have no limits, and the reserves are theirs too."""
    door = Door(user_clients=1, user_accepts=1, max_clients=100, files=100)
    assert door.connect_often(uid, 100) == [None] * 100
    assert door.connect(uid) is CloseReason.TOO_MANY_CLIENTS


def test_the_recorder_is_not_exempt():
    """The recorder is one user, with the limits of one, whatever user its process has."""
    assert not is_exempt(RECORDER)
    door = Door(user_clients=2)
    assert door.connect_often(RECORDER, 3) == [None, None, CLIENTS]
    assert door.connect(EXEMPT) is None


OF_SOME = {1: 9, 2: 2}
"""Clients of the users in `AdmissionMachine` who may have another number than 6."""


class AdmissionMachine(RuleBasedStateMachine):
    """Users who come and go, against counts by hand: no limit is passed, and somebody new is let in."""

    def __init__(self) -> None:
        super().__init__()
        self.door = Door(max_clients=20, user_clients=6, user_clients_of=OF_SOME, user_accepts=2, files=45)
        self.kept = reserve(20)
        self.kept_files = descriptor_reserve(45)
        self.held: dict[int, int] = {}
        self.fresh = 1000

    def total(self) -> int:
        return sum(self.held.values())

    def come(self, uid: int) -> CloseReason | None:
        reason = self.door.connect(uid)
        if reason is None:
            self.held[uid] = self.held.get(uid, 0) + 1
        return reason

    @rule(uid=st.integers(1, 5), times=st.integers(1, 8))
    def connect(self, uid, times):
        for _ in range(times):
            mine, free, free_files = self.held.get(uid, 0), 20 - self.total(), 45 - self.door.open - self.total()
            reason = self.come(uid)
            if reason is None:
                assert mine < OF_SOME.get(uid, 6)
                assert not mine or (free > self.kept and free_files > self.kept_files)
            elif reason is CLIENTS:
                assert mine == OF_SOME.get(uid, 6)
            elif reason is KEPT:
                assert mine
                assert free <= self.kept or free_files <= self.kept_files

    @rule()
    def somebody_new(self):
        self.fresh += 1
        new = len([uid for uid in self.held if uid])
        reason = self.come(self.fresh)
        if new + self.held.get(EXEMPT, 0) < self.kept:
            assert reason is None
        assert reason in (None, CloseReason.TOO_MANY_CLIENTS)

    @rule()
    def root(self):
        assert self.come(EXEMPT) in (None, CloseReason.TOO_MANY_CLIENTS)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def go(self, data):
        uid = data.draw(st.sampled_from(sorted(self.held)))
        self.door.leave(uid)
        self.held[uid] -= 1
        if not self.held[uid]:
            del self.held[uid]

    @rule(seconds=st.sampled_from([0.25, 1.0, 60.0]))
    def wait(self, seconds):
        self.door.now += seconds

    @invariant()
    def limits_hold(self):
        assert all(count <= OF_SOME.get(uid, 6) for uid, count in self.held.items() if uid)
        assert self.total() == self.door.users.connections <= 20
        assert {uid: self.door.users.connections_of(uid) for uid in self.held} == self.held


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(max_examples=examples(60), stateful_step_count=40)


# --- on a bus -----------------------------------------------------------------------------------


def test_a_bus_without_a_gate():
    """A connection whose port asks nobody has the limits on clients all the same; the counters say so."""
    bus = Bus(limits=Limits(user_clients=2))
    peers = [bus.connect(uid=7) for _ in range(3)]
    assert [peer.is_connected for peer in peers] == [True, True, False]
    assert peers[2].protocol.reason is CLIENTS
    assert peers[2].take() == []
    assert (bus.registry.counters.refused, bus.registry.counters.user_limits) == (1, 1)
    assert bus.connect(uid=8).is_connected
    peers[0].transport.end()
    bus.settle()
    assert bus.connect(uid=7).is_connected


def test_patterns_of_one_user():
    """All clients of a user together may have n patterns; one more ends its client with the reason user-limit."""
    bus = Bus(limits=Limits(user_patterns=3, user_clients=9))
    first, second, other = bus.connect(uid=7), bus.connect(uid=7), bus.connect(uid=8)
    first.send(b"SUB a", b"SUB a", b"SUB b")
    second.send(b"SUB a", b"SUB a")
    other.send(b"SUB 1", b"SUB 2", b"SUB 3")
    assert [peer.is_connected for peer in (first, second, other)] == [True] * 3
    second.send(b"SUB c")
    assert not second.is_connected
    assert second.protocol.reason is CloseReason.USER_LIMIT
    assert (bus.registry.counters.violations, bus.registry.counters.user_limits) == (1, 1)
    assert bus.registry.users[7].patterns == 2
    first.send(b"SUB d")
    first.send(b"UNSUB d", b"SUB e")
    assert first.is_connected
    first.send(b"SUB f")
    assert first.protocol.reason is CloseReason.USER_LIMIT
    assert len(bus.registry.users) == 1


def test_patterns_beyond_the_limit_are_ignored_if_violations_are():
    """With --on-violation=ignore the pattern is not registered, and the client stays."""
    bus = Bus(limits=Limits(user_patterns=1), ignore_violations=True)
    client = bus.connect(uid=7)
    client.send(b"SUB a", b"SUB b", b"MSG a\0", b"MSG b\0")
    assert client.is_connected
    assert client.take() == [b"MSG a\0"]


@pytest.mark.parametrize("uid", [EXEMPT, os.geteuid()])
def test_exempt_patterns(uid):
    """Root and the server's own user may have any number of patterns and clients."""
    bus = Bus(limits=Limits(user_patterns=1, user_clients=1))
    clients = [bus.connect(uid=uid), bus.connect(uid=uid)]
    for client in clients:
        client.send(b"SUB a", b"SUB b")
        assert client.is_connected


def test_patterns_of_clients_that_left():
    """A client finds its user's room as if the patterns of one that has just left were gone, though they go slowly."""
    bus = Bus(limits=Limits(user_patterns=1000))
    old = bus.connect(uid=7)
    for n in range(1000):
        old.transport.deliver(b"SUB %d" % n)
    bus.settle()
    new = bus.connect(uid=7)
    old.protocol.close(CloseReason.PEER_CLOSED)
    old.transport.abortConnection()
    bus.clock.advance(0)
    new.transport.deliver(*[b"SUB %d" % n for n in range(1000, 1500)])
    assert bus.registry.users[7].patterns <= 1000
    bus.settle()
    new.transport.deliver(*[b"SUB %d" % n for n in range(1500, 2000)])
    bus.settle()
    for _ in range(50):
        bus.settle()
    assert new.is_connected
    assert bus.registry.users[7].patterns == 1000
    new.send(b"SUB x")
    assert not new.is_connected


def test_the_recorder_is_a_user_of_its_own():
    """The recorder's process shares no limit, turn or share of the queues with the user that it runs as."""
    bus = Bus(limits=Limits(user_clients=1, max_clients=8))
    bus.registry.members.sidecars[99] = RECORDER
    own = os.geteuid()
    recorder, other = bus.connect(uid=own, pid=99), bus.connect(uid=own)
    assert recorder.is_connected
    assert other.is_connected
    assert recorder.protocol.user is bus.registry.users[RECORDER]
    assert recorder.protocol.user is not other.protocol.user
    assert recorder.protocol.peer.uid == own
    recorder.send(b"CMSG !/cred/whoami")
    assert recorder.take() == [b"CMSG !/cred/whoami\0!/cred/100/%d/99" % own]


def test_owners():
    """With owners, UIDs count as the same user for limits; their credentials stay their own."""
    bus = Bus(
        limits=Limits(user_clients=1, user_clients_of={7: 2, 100_000: 9}),
        owner_of=lambda uid: 7 if uid >= 100_000 else uid,
    )
    clients = [bus.connect(uid=7, pid=1), bus.connect(uid=100_000, pid=2), bus.connect(uid=100_001, pid=3)]
    assert [client.is_connected for client in clients] == [True, True, False]
    assert clients[0].protocol.user is clients[1].protocol.user
    clients[1].send(b"CMSG !/cred/whoami", b"SUB !/cred/100/100000/2/x")
    assert clients[1].take() == [b"CMSG !/cred/whoami\0!/cred/100/100000/2"]
    assert clients[1].is_connected
    clients[1].send(b"SUB !/cred/100/7/1/x")
    assert clients[1].protocol.reason is CloseReason.VIOLATION
