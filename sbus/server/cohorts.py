"""Cohorts: congested late receivers of one user that get the same messages, which wait once for all of them.

.. rubric:: Theory of operation

A publisher should not pay for the silent receivers of another user, however many there are. To put each run behind the
queue of each late receiver costs 0.2 µs a receiver. But most late receivers of a user are alike: all subscribe to
what another program publishes, and none of them reads. They form a *cohort*, which has one list of what waits, and each
member has a position in it. A run is added to the cohort, whatever the number of its members. Flood control decides
about the members one by one, those with the oldest positions first, up to a position that is the same for all: so they
are offered the same list, of which some things are computed once (`sbus.flood.digest`).

The *plan* of a route says which cohorts get its messages, and which receivers are in none. If only some members of a
cohort are in the route, the cohort is split: afterwards the messages of that route are for all members of a cohort or
for none. Plans are kept, by the identity of the route's tuple and by the receivers in it, until a cohort changes.

.. rubric:: Invariants

* Nothing of its own waits undecided for a member, unless the cohort is *closed*: all that waits for it is in the
  cohort. It leaves the cohort before anything else looks at its queue, and takes a copy of what waits with it.
* A member is congested and late, and is like all other members in its user, and in whether it can block publishers and
  keeps the newest messages only.
* There are at most `MOST_COHORTS` for one user. One that cannot be split any more is closed: nothing is added to it,
  and what comes for its members waits in their own queues, behind what waits in the cohort.

Rejected: to decide about the members that cannot be split off. That was 13 to 33 µs for each of up to 16,384 receivers,
before one message could be delivered.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import NamedTuple

from sbus.flood.budget import UserShare
from sbus.flood.digest import Digest
from sbus.routing.runs import total_size
from sbus.server.interfaces import Publisher, Receiver

__all__ = ["MOST_COHORTS", "Cohort", "Cohorts", "Plan"]

MOST_COHORTS = 64
"""Cohorts of one user at most."""
_MOST_PLANNED = 65_536
"""Receivers in all plans together, beyond which the plans are made again."""
_PLAN = 4
"""The price of a plan, before its receivers."""
_PLANNED_AT_ONCE = 16
"""Receivers of a plan for one unit of work."""
_GONE = 1_024
"""A receiver that has gone counts as that many: few of those that plans contain are kept in memory for that."""


class Cohort:
    """Receivers that wait for the same messages, each of them from a position of its own on.

    :param user: the user of all of them.
    :param can_block: whether they are receivers that can block publishers.
    :param replaces: whether they keep the newest message of each key only.
    :param start: the position of the first message.
    :ivar members: the receivers, with the position of the first message that waits for each; the oldest position first.
    :ivar is_closed: whether nothing is added any more.
    :ivar variety: the part of the messages that flood control has last decided about that had keys of their own.
    :ivar due: a position, never behind the end: members with an older one want a turn, which brings them there.
    :ivar packets: the messages that wait for any member.
    :ivar start: the position of the first of them.
    :ivar size: their bytes.
    """

    __slots__ = (
        "_digest",
        "_digested",
        "can_block",
        "due",
        "is_closed",
        "members",
        "packets",
        "replaces",
        "size",
        "start",
        "user",
        "variety",
    )

    def __init__(self, user: UserShare, can_block: bool, replaces: bool, start: int = 0) -> None:
        self.user = user
        self.can_block = can_block
        self.replaces = replaces
        self.members: OrderedDict[Receiver, int] = OrderedDict()  # a dict looks for its first key past all that went
        self.is_closed = False
        self.variety = 1.0
        self.due = start
        self.packets: list[bytes] = []
        self.start = start
        self.size = 0
        self._digest: Digest | None = None
        self._digested = 0, 0

    @property
    def end(self) -> int:
        """The position behind the last message."""
        return self.start + len(self.packets)

    def oldest(self) -> int:
        """Return the oldest position of a member."""
        return next(iter(self.members.values()), self.end)

    def waiting(self) -> int:
        """Return the number of messages that wait for the member with the oldest position."""
        return self.end - self.oldest()

    def part(self, receiver: Receiver) -> list[bytes]:
        """Return what waits for a member, as a list of its own."""
        return self.packets[self.members[receiver] - self.start :]

    def advance(self, receiver: Receiver) -> Digest:
        """Move a member that is due to the position `due`.

        :returns: the messages in between, as a list that others with its old position get, too, and nobody changes.
        """
        position = self.members[receiver]
        self.members[receiver] = self.due
        self.members.move_to_end(receiver)
        digest = self._digest
        if digest is None or self._digested != (position, self.due):
            digest = self._digest = Digest(self.packets[position - self.start : self.due - self.start])
            self._digested = position, self.due
        return digest

    def forget_digest(self) -> None:
        """Forget the list that members were given, which keeps its messages in memory."""
        self._digest = None


class Plan(NamedTuple):
    """Where the messages of a route go.

    :ivar others: the receivers that are in no cohort, or in one that is closed.
    :ivar cohorts: the cohorts that get its messages.
    :ivar members: the members of these cohorts.
    :ivar blockable: whether a member of a cohort may block a publisher, where this was asked.
    """

    others: tuple[Receiver, ...]
    cohorts: tuple[Cohort, ...]
    members: int
    blockable: dict[tuple[Publisher, Cohort], bool]


class Cohorts:
    """The cohorts of all users.

    :param on_closed: called when a cohort is closed.
    :ivar of: the cohort of each receiver that is in one.
    :ivar bytes: bytes that wait for all cohorts; a packet counts for each cohort, and is charged to its user.
    :ivar effort: work of making plans since it was last set to 0.
    """

    __slots__ = ("_by_receivers", "_by_user", "_on_closed", "_planned", "_plans", "bytes", "effort", "of")

    def __init__(self, on_closed: Callable[[], None]) -> None:
        self._on_closed = on_closed
        self.of: dict[Receiver, Cohort] = {}
        self.bytes = 0
        self._by_user: dict[UserShare, dict[Cohort, None]] = {}
        self._plans: dict[int, tuple[tuple[Receiver, ...], Plan]] = {}
        self._by_receivers: dict[tuple[Receiver, ...], Plan] = {}
        self._planned = 0
        self.effort = 0

    def of_user(self, user: UserShare) -> dict[Cohort, None]:
        """Return the cohorts of a user, the oldest first."""
        return self._by_user.get(user, {})

    def join(self, receiver: Receiver, can_block: bool, replaces: bool, home: Cohort | None = None) -> bool:
        """Put a receiver, for which nothing waits, into a cohort, if there may be one.

        :param can_block: as for `Cohort`.
        :param replaces: the same.
        :param home: the cohort that it was in before, which suits it best.
        """
        cohorts = self._by_user.setdefault(receiver.user, {})
        for cohort in (home, next(reversed(cohorts), None)):
            if (
                cohort in cohorts
                and not cohort.is_closed
                and cohort.can_block is can_block
                and cohort.replaces is replaces
            ):
                break
        else:
            if len(cohorts) >= MOST_COHORTS:
                return False
            cohort = Cohort(receiver.user, can_block, replaces)
            cohorts[cohort] = None
        cohort.due = cohort.members[receiver] = cohort.end  # the oldest position stays the first
        self.of[receiver] = cohort
        self._forget_plans()
        return True

    def leave(self, receiver: Receiver) -> Cohort | None:
        """Take a receiver out of its cohort, and return that."""
        cohort = self.of.pop(receiver, None)
        if cohort is not None:
            del cohort.members[receiver]
            if not cohort.members:
                self._forget(cohort)
            else:
                self.trim(cohort)
            self._forget_plans()
        return cohort

    def trim(self, cohort: Cohort) -> None:
        """Forget messages that wait for no member any more, when they are most, and a digest that all have had."""
        if cohort.oldest() >= cohort.due:
            cohort.forget_digest()
        gone = cohort.oldest() - cohort.start
        if 2 * gone > len(cohort.packets):
            size = total_size(cohort.packets[:gone])
            del cohort.packets[:gone]
            cohort.start += gone
            cohort.size -= size
            self._count(cohort, -size)

    def forget(self) -> None:
        """A receiver has gone: forget the plans that contain it, soon."""
        self._planned += _GONE
        if self._planned > _MOST_PLANNED:
            self._forget_plans()

    def add(self, cohort: Cohort, packets: list[bytes], size: int) -> None:
        """Have messages wait for a cohort.

        :param size: their bytes.
        """
        cohort.packets += packets
        cohort.size += size
        self._count(cohort, size)

    def plan(self, receivers: tuple[Receiver, ...]) -> Plan:
        """Return the plan for a route, after splitting the cohorts of which it contains a part."""
        known = self._plans.get(id(receivers))
        if known is not None:
            return known[1]
        plan = self._by_receivers.get(receivers) or self._make(receivers)  # thousands of keys can have the same ones
        self._planned += len(receivers)
        self.effort += 1 + len(receivers) // _PLANNED_AT_ONCE
        if self._planned > _MOST_PLANNED:
            self._forget_plans()
            self._planned = len(receivers)
        self._plans[id(receivers)] = receivers, plan
        self._by_receivers[receivers] = plan
        return plan

    def _make(self, receivers: tuple[Receiver, ...]) -> Plan:
        # Set operations: plans are made again in each turn of a user with many late receivers.
        of = self.of
        others = list(itertools.filterfalse(of.__contains__, receivers))
        left = set(filter(of.__contains__, receivers))
        chosen: list[Cohort] = []
        while left:
            cohort: Cohort | None = of[next(iter(left))]
            assert cohort is not None
            members = cohort.members.keys() & left
            left -= members
            if cohort.is_closed:
                cohort = None
            elif len(members) < len(cohort.members):
                cohort = self._split(cohort, members)
            if cohort is None:
                others += members
            else:
                chosen.append(cohort)
        self.effort += _PLAN + len(receivers) // _PLANNED_AT_ONCE
        return Plan(tuple(others), tuple(chosen), len(receivers) - len(others), {})

    def _split(self, cohort: Cohort, members: Iterable[Receiver]) -> Cohort | None:
        """Move members into a cohort of their own, if there may be one more; else close theirs."""
        cohorts = self._by_user[cohort.user]
        self._forget_plans()
        if len(cohorts) >= MOST_COHORTS:
            cohort.is_closed = True
            self._on_closed()
            return None
        part = Cohort(cohort.user, cohort.can_block, cohort.replaces, cohort.start)
        part.packets, part.size, part.due = cohort.packets.copy(), cohort.size, cohort.due
        self._count(part, part.size)
        # Not a look at all members: a few are often parted from thousands.
        part.members.update(sorted(((each, cohort.members.pop(each)) for each in members), key=itemgetter(1)))
        self.of.update(dict.fromkeys(part.members, part))
        # It is as old as the other: those that were decided about last stay behind it.
        self._by_user[cohort.user] = {
            each: None for old in cohorts for each in ((old, part) if old is cohort else (old,))
        }
        return part

    def _count(self, cohort: Cohort, size: int) -> None:
        self.bytes += size
        cohort.user.charge_memory(size)

    def _forget(self, cohort: Cohort) -> None:
        self._count(cohort, -cohort.size)
        cohorts = self._by_user[cohort.user]
        del cohorts[cohort]
        if not cohorts:
            del self._by_user[cohort.user]

    def _forget_plans(self) -> None:
        if self._plans:
            self._plans.clear()
            self._by_receivers.clear()
        self._planned = 0
