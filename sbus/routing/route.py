"""A route: the receivers of a key, and of each user's the group that shares one entry of mail.

.. rubric:: Theory of operation

Equal routes are one object, so a run of messages is recognised by comparing pointers (`sbus.routing.runs`). A route is
a value: a subscription that comes or goes makes another one, and messages on their way keep the receivers of their
moment.

Where not everybody may publish everything, the keys of a route have one *zone*: they are judged alike. So the verdict
on a class of clients is remembered for the whole route (`Route.verdicts`), and a run needs one look at it.

While several users are active, the server treats the receivers of each user together (`Route.groups`). Equal groups are
one object, too, on any route: messages with different keys can share an entry of mail. Groups are made when they are
first needed, and belong to the routes that refer to them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

__all__ = ["FIRST_NS", "MAX_CLASSES", "Group", "Groups", "Route", "learned"]


S = TypeVar("S")


class Group(Generic[S]):
    """The receivers of one user on a route.

    :ivar user: the user; None for the receivers inside the program, which have no queue.
    :ivar receivers: these receivers.
    :ivar members: the same as a set; made when it is needed.
    """

    def __init__(self, user: Any, receivers: tuple[S, ...]) -> None:
        self.user = user
        self.receivers = receivers

    @cached_property
    def members(self) -> frozenset[S]:
        return frozenset(self.receivers)

    def __repr__(self) -> str:
        return f"<Group of {len(self.receivers)}>"


class Groups:
    """The groups of one bus's routes; equal groups are one object."""

    def __init__(self) -> None:
        self._groups: WeakValueDictionary[tuple[Any, ...], Group[Any]] = WeakValueDictionary()

    def of(self, receivers: Iterable[Any]) -> tuple[Group[Any], ...]:
        """Return the receivers by user, each user's as one group; those without a queue come first."""
        by_user: dict[Any, list[Any]] = {None: []}
        for receiver in receivers:
            user = None if receiver.queue is None else receiver.user
            members = by_user.get(user)
            if members is None:
                by_user[user] = [receiver]
            else:
                members.append(receiver)
        return tuple(self._find(user, tuple(members)) for user, members in by_user.items() if members)

    def _find(self, user: Any, receivers: tuple[Any, ...]) -> Group[Any]:
        group = self._groups.get(receivers)
        if group is None or group.user is not user:
            group = self._groups[receivers] = Group(user, receivers)
        return group


FIRST_NS = 500
"""Nanoseconds that a copy counts for before one was measured: about the time that it takes in workload 1-64."""


def learned(ns: int, copies: int, took: int) -> int:
    """Return a new estimate of the time of a copy (nanoseconds), from the one before and copies that were measured.

    It goes half of the way, and no further up than by half: a measurement in which the process did not run says little.
    """
    return (ns + min(took // copies, 2 * ns) + 1) // 2


MAX_CLASSES = 16
"""Classes of clients whose verdicts a route remembers: a key has few publishers. More take 1 KiB each (200 UIDs that
publish 16,384 keys: 320 MB)."""
_NONE: Mapping[Any, Any] = MappingProxyType({})


class Route(Generic[S]):
    """The receivers of a key.

    :param all_groups: the groups of the same bus.
    :param zone: the zone of the keys of this route, for those who judge them; None if nobody does.
    :ivar receivers: the receivers, each once.
    :ivar verdicts: the known verdicts on classes of clients that publish with these keys; read only.
    :ivar ns: nanoseconds that a copy to one of them has taken lately.
    :ivar uses: the cached keys whose route this is.
    """

    __slots__ = ("_all_groups", "_groups", "ns", "receivers", "uses", "verdicts", "zone")

    def __init__(self, receivers: tuple[S, ...], all_groups: Groups, zone: Hashable = None) -> None:
        self.receivers = receivers
        self._all_groups = all_groups
        self.zone = zone
        self.verdicts = _NONE
        self.ns = FIRST_NS
        self.uses = 0
        self._groups: tuple[Group[S], ...] | None = None

    @property
    def groups(self) -> tuple[Group[S], ...]:
        """The receivers by user (`Groups.of`)."""
        groups = self._groups
        if groups is None:
            groups = self._groups = self._all_groups.of(self.receivers)
        return groups

    @property
    def has_groups(self) -> bool:
        """Whether they have been needed."""
        return self._groups is not None

    def remember(self, rights: Any, verdict: Any) -> None:
        """Remember the verdict on a class of clients."""
        if self.verdicts is _NONE or len(self.verdicts) >= MAX_CLASSES:
            self.verdicts = {}
        self.verdicts[rights] = verdict  # type: ignore[index]

    def forget_verdicts(self) -> None:
        """Forget the verdicts on all classes."""
        self.verdicts = _NONE

    def learn(self, copies: int, took: int) -> None:
        """Learn from a run how long a copy takes (nanoseconds)."""
        self.ns = learned(self.ns, copies, took)
