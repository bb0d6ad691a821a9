"""Members: numbers, the limit, sidecars, and what fires when they are gone."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sbus.protocol.keys import PeerCredentials
from sbus.server.bus.members import Members
from sbus.server.core.listeners import MAIN, Listener
from sbus.server.core.users import RECORDER
from tests.support.examples import examples

LIMIT = 3
SIDECAR = 77
SMALL = Listener("small", max_clients=1)


class User:
    """A user that is nothing but its clients."""

    def __init__(self, uid: int) -> None:
        self.uid = uid
        self.clients: dict[Any, None] = {}


ROOT = User(0)


class Client:
    """A client that is nothing but a number."""

    def __init__(self, pid: int, listener: Listener, user: User) -> None:
        self.peer = PeerCredentials(pid, user.uid, 100)
        self.user = user
        self.number = 0
        self.listener = listener


class MembersMachine(RuleBasedStateMachine):
    """Clients and sidecars that come and go, against two plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.members = Members(LIMIT)
        self.members.sidecars[SIDECAR] = RECORDER
        self.users = [User(1), User(2)]
        self.ordinary: list[Any] = []
        self.sidecars: list[Any] = []
        self.numbers: list[int] = []
        self.empty: list[Any] = []
        self.gone: list[Any] = []

    @rule(
        is_sidecar=st.booleans(),
        has_its_pid=st.booleans(),
        listener=st.sampled_from([MAIN, SMALL]),
        of=st.integers(0, 1),
    )
    def come(self, is_sidecar, has_its_pid, listener, of):
        new: Any = Client(SIDECAR if is_sidecar or has_its_pid else 5, listener, ROOT if is_sidecar else self.users[of])
        is_full = listener is SMALL and any(each.listener is SMALL for each in self.ordinary)
        assert self.members.has_room(new.peer, listener) == (is_sidecar or (len(self.ordinary) < LIMIT and not is_full))
        assert new not in self.members
        if self.members.has_room(new.peer, listener):
            self.members.add(new)
            (self.sidecars if is_sidecar else self.ordinary).append(new)
            self.numbers.append(new.number)

    @rule(data=st.data())
    def go(self, data):
        if self.ordinary + self.sidecars:
            one = data.draw(st.sampled_from(self.ordinary + self.sidecars))
            was_ordinary = one in self.ordinary
            (self.ordinary if was_ordinary else self.sidecars).remove(one)
            expected = self.empty if was_ordinary and not self.ordinary else []
            expected = expected + self.gone if not self.ordinary + self.sidecars else expected
            fired = self.members.remove(one)
            assert fired == expected
            for deferred in fired:
                deferred.callback(None)
            self.empty = [each for each in self.empty if not each.called]
            self.gone = [each for each in self.gone if not each.called]

    @rule(data=st.data(), to=st.integers(0, 1))
    def change_user(self, data, to):
        if self.ordinary:
            one = data.draw(st.sampled_from(self.ordinary))
            before, one.user = one.user, self.users[to]
            self.members.recount(one, before)

    @rule()
    def wait_until_empty(self):
        self.empty.append(self.members.when_empty())
        assert not self.empty[-1].called

    @rule()
    def wait_until_gone(self):
        deferred = self.members.when_gone()
        assert deferred.called == (not self.ordinary + self.sidecars)
        if not deferred.called:
            self.gone.append(deferred)

    @rule(sidecars=st.booleans())
    def list_all(self, sidecars):
        expected = self.ordinary + (self.sidecars if sidecars else [])
        found = self.members.all(sidecars=sidecars)
        assert [one.number for one in found] == sorted(one.number for one in expected)

    @invariant()
    def numbers_count_up(self):
        assert self.numbers == list(range(1, len(self.numbers) + 1))
        assert set(self.members.clients) == {one.number for one in self.ordinary + self.sidecars}

    @invariant()
    def users_know_their_clients(self):
        for each in self.users:
            clients = {one.number for one in self.ordinary + self.sidecars if one.user is each}
            assert {one.number for one in each.clients} == clients
            at_small = sum(one.user is each and one.listener is SMALL for one in self.ordinary)
            assert self.members._of_user_at["small", each.uid] == at_small


TestMembers = MembersMachine.TestCase
TestMembers.settings = settings(max_examples=examples(150), stateful_step_count=25)
