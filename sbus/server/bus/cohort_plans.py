"""Plans of routes: which members of which cohorts get the messages of a route, and which receivers are in none.

.. rubric:: Theory of operation

The server adds a run to a cohort in one step: for all members, or with a mask of the members in the route. Making a
plan takes time in proportion to the receivers, so the server keeps plans and applies to each the changes since it was
last up to date. It makes a plan again in three cases: there are more changes than receivers; some changes are no longer
kept; or a receiver of another route has joined a cohort whose members were all in the plan.

A plan is found by the identity of the route's tuple, which is the same in each run. Thousands of keys can have equal
routes, and a route without its publisher (``echo/off``) is a new tuple for each run, so a second table finds plans by
the receivers. Both tables, and the changes, keep receivers in memory; `Plans.note_gone` empties them after enough
receivers have disconnected.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from sbus.server.bus.cohorts import Change, Cohort, Cohorts
from sbus.server.core.interfaces import Receiver

__all__ = ["Plan", "Plans"]

_MOST_PLANNED = 65_536
"""Receivers in all plans together, beyond which all plans are forgotten."""
_KEPT_PLAN = 16
"""A plan counts as this many planned receivers more, so that the plans of small routes take 2 MB at most."""
_MASKED = 64
"""A mask of this many bits counts as one planned receiver more."""
_PLAN = 4
"""The price of making a plan, before its receivers, in units of work (`sbus.server.core.turns`)."""
_PLANNED_AT_ONCE = 16
"""Receivers of a plan for one unit of work."""
_FOLLOWED = 8
"""Changes that a plan follows for one unit of work; to make it again costs as much for twice as many receivers."""
_GONE = 1_024
"""A receiver that has gone counts as this many planned ones, so that the plans keep at most 64 of them in memory."""


class Plan(NamedTuple):
    """Where the messages of a route go.

    :ivar others: the receivers that are in no cohort.
    :ivar cohorts: tuples (cohort, mask, number of members that get the messages). The mask is None if all members get
        them. It may have bits of receivers of the route that have left the cohort.
    :ivar members: the number of members in all cohorts together.
    """

    others: tuple[Receiver, ...]
    cohorts: tuple[tuple[Cohort, int | None, int], ...]
    members: int


class _Kept:
    """A plan that follows the changes of the cohorts.

    :ivar receivers: those of the route.
    :ivar plan: the plan.
    :ivar version: `Cohorts.version` when it was last up to date.
    """

    __slots__ = ("_cohorts", "_others", "plan", "receivers", "version")

    def __init__(self, receivers: tuple[Receiver, ...], plan: Plan, version: int) -> None:
        self.receivers = receivers
        self.replace(plan, version)

    def replace(self, plan: Plan, version: int) -> None:
        """Begin with a plan that was just made."""
        self.plan = plan
        self.version = version
        self._others: dict[Receiver, None] = {}  # those of the plan, once it has followed a change
        self._cohorts: dict[Cohort, tuple[int | None, int]] = {}

    def follow(self, changes: Iterable[Change], version: int) -> bool:
        """Apply changes of cohorts; return False if the plan has to be made again.

        The invariant: the plan's masks have the bits of the members that are in the route, and of no other members.
        """
        plan, others, cohorts = self.plan, self._others, self._cohorts
        if not (others or cohorts):
            others.update(dict.fromkeys(plan.others))
            cohorts.update({cohort: (mask, members) for cohort, mask, members in plan.cohorts})
        for receiver, cohort, column, has_joined, is_alone in changes:
            mask, members = cohorts.get(cohort, (0, 0))
            if not has_joined:
                if mask is None or mask >> column & 1:
                    others[receiver] = None
                    if members > 1:
                        cohorts[cohort] = mask, members - 1
                    else:
                        del cohorts[cohort]
            elif receiver in others:
                del others[receiver]
                if is_alone:
                    mask = None
                elif mask is not None and not mask >> column & 1:
                    mask |= 1 << column
                cohorts[cohort] = mask, members + 1
            elif mask is None:
                return False
        self.plan = Plan(
            tuple(others),
            tuple((cohort, mask, members) for cohort, (mask, members) in cohorts.items()),
            len(self.receivers) - len(others),
        )
        self.version = version
        return True


class Plans:
    """The plans of routes.

    :param cohorts: the cohorts of all users.
    :ivar effort: work of making plans since it was last set to 0, as far as cohorts had changed.
    :ivar searches: the same, for routes that were new while the cohorts had not changed.
    """

    __slots__ = ("_by_receivers", "_by_route", "_cohorts", "_planned", "_seen", "effort", "searches")

    def __init__(self, cohorts: Cohorts) -> None:
        self._cohorts = cohorts
        self._by_route: dict[int, tuple[tuple[Receiver, ...], _Kept]] = {}  # with the tuple, whose ID stays its own
        self._by_receivers: dict[tuple[Receiver, ...], _Kept] = {}
        self._planned = 0
        self._seen = -1  # `Cohorts.version` when a plan was last made or brought up to date
        self.effort = self.searches = 0

    def find(self, receivers: tuple[Receiver, ...]) -> Plan:
        """Return the plan of a route."""
        known = self._by_route.get(id(receivers))
        if known is not None:
            return known[1].plan if known[1].version == self._cohorts.version else self._renewed(known[1])
        kept, price = self._by_receivers.get(receivers), 1 + len(receivers) // _PLANNED_AT_ONCE
        has_changed = kept is None and self._cohorts.version != self._seen
        if kept is None:
            price += _plan_work(receivers)
            kept = _Kept(receivers, self._make(receivers), self._cohorts.version)
            self._seen = self._cohorts.version
        if has_changed:
            self.effort += price
        else:
            self.searches += price
        size = _KEPT_PLAN + len(receivers)
        size += sum(mask.bit_length() for _, mask, _ in kept.plan.cohorts if mask is not None) // _MASKED
        self._planned += size
        if self._planned > _MOST_PLANNED:
            self._forget_all()
            self._planned = size
        self._by_route[id(receivers)] = receivers, kept
        self._by_receivers[receivers] = kept
        return self._renewed(kept)

    def note_gone(self) -> None:
        """Note that a receiver has gone: soon no plan contains it any more."""
        self._planned += _GONE
        if self._planned > _MOST_PLANNED:
            self._forget_all()

    def _renewed(self, kept: _Kept) -> Plan:
        """Return a plan, brought up to date."""
        version, changes, receivers = self._cohorts.version, self._cohorts.changes, kept.receivers
        missed = version - kept.version
        if missed:
            self.effort += 1 + missed // _FOLLOWED
            if (
                missed > len(changes)
                or missed > len(receivers)
                or not kept.follow(itertools.islice(changes, len(changes) - missed, None), version)
            ):
                self.effort += _plan_work(receivers)
                kept.replace(self._make(receivers, kept.plan), self._cohorts.version)
            self._seen = self._cohorts.version
        return kept.plan

    def _make(self, receivers: tuple[Receiver, ...], old: Plan | None = None) -> Plan:
        parts: dict[Cohort | None, list[Receiver]] = {}
        for receiver, home in zip(receivers, map(self._cohorts.of.get, receivers), strict=True):
            parts.setdefault(home, []).append(receiver)
        others = tuple(parts.pop(None, ()))
        before = {cohort: mask for cohort, mask, _ in old.cohorts if mask is not None} if old else {}
        cohorts: list[tuple[Cohort, int | None, int]] = []
        for cohort, part in parts.items():
            assert cohort is not None
            mask = None if len(part) == len(cohort.members) else cohort.mask(part) | before.get(cohort, 0)
            cohorts.append((cohort, mask, len(part)))
        return Plan(others, tuple(cohorts), len(receivers) - len(others))

    def _forget_all(self) -> None:
        self._by_route.clear()
        self._by_receivers.clear()
        self._cohorts.forget_changes()
        self._planned = 0


def _plan_work(receivers: tuple[Receiver, ...]) -> int:
    """Return the price of making a plan."""
    return _PLAN + len(receivers) // _PLANNED_AT_ONCE
