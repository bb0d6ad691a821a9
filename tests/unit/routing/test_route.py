"""Routes and groups: equal ones are one object, a message's receivers are those of its moment, and nobody is kept."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.routing.cache import RouteCache
from sbus.routing.route import Groups, Route


class User:
    """A user, as far as a route is concerned."""


class Client:
    """A receiver of a user, with a queue or without one."""

    def __init__(self, user: User, *, has_queue: bool = True) -> None:
        self.user = user
        self.queue: Any = object() if has_queue else None


def clients(user: User, count: int) -> tuple[Client, ...]:
    return tuple(Client(user) for _ in range(count))


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12))
def test_groups_divide_the_receivers(kinds):
    """Each receiver is in one group, that of its user, and in the order of the route; some have no queue."""
    users = [User() for _ in range(4)]
    receivers = tuple(Client(users[at], has_queue=has_queue) for at, has_queue in kinds)
    groups = Groups().of(receivers)
    assert sorted(map(id, receivers)) == sorted(id(each) for group in groups for each in group.receivers)
    assert len({id(group.user) for group in groups}) == len(groups)
    for group in groups:
        assert group.receivers
        assert group.members == set(group.receivers)
        assert [*group.receivers] == [each for each in receivers if each in group.members]
        for each in group.receivers:
            assert (each.user if each.queue is not None else None) is group.user


@pytest.mark.parametrize("where", range(4))
def test_receivers_without_a_queue_come_first(where):
    """Receivers inside the program are one group, before all others and without a user: they get everything at once."""
    one, two, inside = User(), User(), User()
    receivers = [*clients(one, 1), *clients(two, 1), *clients(one, 1)]
    keeper = Client(inside, has_queue=False)
    receivers.insert(where, keeper)
    groups = Groups().of(receivers)
    assert groups[0].receivers == (keeper,)
    assert [group.user for group in groups] == [None, one, two]


def test_equal_groups_are_one_object():
    """The same receivers of a user are one group, on whatever routes and beside whatever others."""
    one, two, groups = User(), User(), Groups()
    ours, theirs = clients(one, 3), clients(two, 2)
    first, second = groups.of([*ours, *theirs]), groups.of([theirs[0], *ours])
    assert first[0] is second[1]
    assert first[1] is not second[0]
    assert groups.of(ours[:2])[0] is not first[0]


def test_a_receiver_that_belongs_to_another_user_now():
    """A client that becomes a service belongs to another user, and its groups with it."""
    one, two, groups = User(), User(), Groups()
    (client,) = receivers = clients(one, 1)
    before = groups.of(receivers)
    client.user = two
    after = groups.of(receivers)
    assert (before[0].user, after[0].user) == (one, two)
    assert groups.of(receivers)[0] is after[0]


def test_groups_belong_to_the_routes_that_refer_to_them():
    """Without a route, or a message on its way, a group is forgotten."""
    groups = Groups()
    (group,) = groups.of(clients(User(), 3))
    gone = weakref.ref(group)
    del group
    gc.collect()
    assert gone() is None
    assert not groups._groups


def test_groups_are_made_when_they_are_needed():
    """A route has no groups until somebody asks for them, and then keeps them."""
    route = Route(clients(User(), 2), Groups())
    assert not route.has_groups
    groups = route.groups
    assert route.has_groups
    assert route.groups is groups


@pytest.mark.parametrize("are_needed", [False, True])
def test_a_route_that_is_replaced_has_groups_again(are_needed):
    """The user who subscribes, and not the next publisher, pays for the groups of a route that needed them."""
    cache: RouteCache[Client] = RouteCache()
    receivers = clients(User(), 3)
    before = cache.remember(b"a", None, receivers[:2])
    if are_needed:
        assert before.groups
    cache.replace(b"a", receivers)
    after = cache.routes[b"a"]
    assert after.receivers == receivers
    assert after.has_groups is are_needed
    cache.replace(b"a", receivers)
    assert cache.routes[b"a"] is after


def test_a_message_keeps_the_receivers_of_its_moment():
    """A route is a value: a change of subscriptions makes another one, and leaves the groups of this one alone."""
    cache: RouteCache[Client] = RouteCache()
    receivers = clients(User(), 3)
    before = cache.remember(b"a", None, receivers)
    (group,) = before.groups
    cache.replace(b"a", receivers[1:])
    assert before.receivers == group.receivers == receivers
    assert cache.routes[b"a"].groups[0].receivers == receivers[1:]


def test_who_left_is_not_kept():
    """After the last route and the last message that a receiver is part of, no group refers to it or to its user."""
    cache: RouteCache[Client] = RouteCache()
    user = User()
    receivers = clients(user, 3)
    leaves, user_leaves = weakref.ref(receivers[0]), weakref.ref(user)
    for key in (b"a", b"b"):
        assert cache.remember(key, None, receivers).groups[0].members
    on_its_way = cache.routes[b"a"].groups[0]
    for key in (b"a", b"b"):
        cache.replace(key, receivers[1:])
    del receivers, user
    gc.collect()
    assert leaves() is not None
    del on_its_way
    gc.collect()
    assert leaves() is None
    cache.clear()
    gc.collect()
    assert user_leaves() is None


def test_equal_routes_learn_together():
    """What a copy takes is known of a route, whichever of its keys a message has; it is never less than 1 ns."""
    cache: RouteCache[Client] = RouteCache()
    receivers = clients(User(), 2)
    first, second = (cache.remember(key, None, receivers) for key in (b"a", b"b"))
    for _ in range(20):
        first.learn(1_000, 1_000 * 40_000)
    assert 39_000 < second.ns <= 40_000
    for _ in range(40):
        second.learn(1_000, 0)
    assert first.ns == 1
