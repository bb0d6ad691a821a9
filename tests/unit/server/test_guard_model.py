"""A bus with policies against the naive judge: what is delivered, refused and revoked, step by step."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from twisted.internet.defer import Deferred

from sbus.policy import Identity
from sbus.protocol.keys import matches_open
from sbus.protocol.notices import parse_denied
from sbus.server.bus.protocol import BusProtocol
from sbus.server.core.listeners import Listener
from tests.support.buses import Bus, Peer
from tests.support.examples import examples
from tests.unit.policy.worlds import KEYS, random_pattern, random_world

WHO = [
    Identity(1, 11, frozenset({10}), "main", True),
    Identity(1, 11, frozenset({10}), "main", True),
    Identity(2, 10, frozenset(), "app", True),
    Identity(65534, 12, frozenset({11}), "main", False),
]
OPEN_KEYS = [key for key in KEYS if len(key) < 6]
chances = st.randoms(use_true_random=False)


class GuardedBus(RuleBasedStateMachine):
    """Clients that subscribe and publish, while policies come and go."""

    @initialize(chance=chances)
    def begin(self, chance: random.Random) -> None:
        self.world = random_world(chance)
        self.bus = Bus(policy=self.world.policy())
        self.clients = [self._connect(who) for who in WHO]
        self.wanted: list[Counter[bytes]] = [Counter() for _ in WHO]

    def _connect(self, who: Identity) -> Peer:
        client = self.bus.connect(
            uid=who.uid,
            gid=who.gid,
            groups=who.groups,
            make=lambda registry: BusProtocol(registry, Listener(who.listener)),
        )
        client.send(b"CMSG denied/on")
        assert client.take() == [b"CMSG denied/on\0"]
        assert client.protocol.identity == who
        return client

    @rule(chance=chances, at=st.integers(0, 3))
    def subscribe(self, chance: random.Random, at: int) -> None:
        pattern = random_pattern(chance)
        self.clients[at].send(b"SUB " + pattern)
        if self.world.subscribes(WHO[at], pattern) or self.wanted[at][pattern]:
            self.wanted[at][pattern] += 1
        else:
            assert self._told(at) == [(b"SUB", pattern)]

    @rule(data=st.data(), at=st.integers(0, 3))
    def unsubscribe(self, data: st.DataObject, at: int) -> None:
        if patterns := sorted(+self.wanted[at]):
            pattern = data.draw(st.sampled_from(patterns))
            self.clients[at].send(b"UNSUB " + pattern)
            self.wanted[at][pattern] -= 1

    @rule(
        keys=st.lists(st.sampled_from(OPEN_KEYS), min_size=1, max_size=4), times=st.integers(1, 3), at=st.integers(0, 3)
    )
    def publish(self, keys: list[bytes], times: int, at: int) -> None:
        """A batch reaches whom it may, in order, and the denials stand in between."""
        sent = [(key, b"%d" % number) for number, key in enumerate(keys * times)]
        self.clients[at].send(*[b"MSG %b\0%b" % message for message in sent])
        for to, client in enumerate(self.clients):
            expected: list[tuple[bytes, bytes]] = []
            for key, payload in sent:
                if not self.world.publishes(WHO[at], key):
                    expected += [(b"MSG", key)] if to == at else []
                elif any(matches_open(pattern, key) for pattern in +self.wanted[to]):
                    expected.append((key, payload))
            assert self._heard(client) == expected

    @rule(chance=chances)
    def change_policy(self, chance: random.Random) -> None:
        """What the new policy refuses ends, and each client is told of it."""
        self.world = random_world(chance)
        done: list[int] = []
        Deferred.fromCoroutine(self.bus.registry.guard.adopt(self.world.policy())).addCallback(done.append)
        self.bus.settle()
        policy = self.bus.registry.guard.permissions.policy
        assert policy is not None
        assert done == [policy.generation]
        for at, wanted in enumerate(self.wanted):
            revoked = [pattern for pattern in +wanted if not self.world.subscribes(WHO[at], pattern)]
            for pattern in revoked:
                del wanted[pattern]
            assert sorted(self._told(at)) == sorted((b"SUB", pattern) for pattern in revoked)
            assert {pattern: count for pattern, (count, _) in self.clients[at].protocol.patterns.items()} == +wanted

    def _told(self, at: int) -> list[tuple[bytes, bytes]]:
        return self._heard(self.clients[at])

    def _heard(self, client: Peer) -> list[tuple[bytes, bytes]]:
        """Return each message as key and payload, and each denial as verb and key."""
        heard = []
        for packet in client.take():
            head, _, payload = packet.partition(b"\0")
            denial = parse_denied(payload) if head == b"CMSG denied" else None
            heard.append((denial.verb, denial.key) if denial else (head.removeprefix(b"MSG "), payload))
        return heard


TestGuardedBus = GuardedBus.TestCase
TestGuardedBus.settings = settings(max_examples=examples(200), stateful_step_count=30, deadline=None)
