"""Plans of routes: which cohorts get the messages of a route, and which receivers are in none.

.. rubric:: Theory of operation

A run is added to a cohort in one step, so it has to be for all members or for none. Making the plan of a route splits
each cohort of which the route contains only a part. After some runs the cohorts fit the routes, and nothing is split
any more.

To make a plan takes time in proportion to the receivers, so plans are kept. When receivers have joined or left cohorts,
or cohorts were split, a plan *follows*: it applies the changes since it was last up to date. It is made again if there
are more changes than receivers, or more than are kept, if a cohort has to be split for it, or if one was closed.

A plan is found by the identity of the route's tuple, which is the same in each run. Thousands of keys can have equal
routes, and a route without its publisher (``echo/off``) is a new tuple for each run, so a second table finds plans by
the receivers. Both tables, and the changes, keep receivers in memory; after some have gone, they are emptied
(`Plans.note_gone`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from sbus.server.cohorts import Change, Cohort, Cohorts
from sbus.server.interfaces import Receiver

__all__ = ["Plan", "Plans"]

_MOST_PLANNED = 65_536
"""Receivers in all plans together, beyond which all plans are forgotten."""
_KEPT_PLAN = 16
"""A plan counts as this many planned receivers more, so that the plans of small routes take 2 MB at most."""
_PLAN = 4
"""The price of making a plan, before its receivers, in units of work (`sbus.server.turns`)."""
_PLANNED_AT_ONCE = 16
"""Receivers of a plan for one unit of work."""
_FOLLOWED = 8
"""Changes that a plan follows for one unit of work; to make it again costs as much for twice as many receivers."""
_GONE = 1_024
"""A receiver that has gone counts as this many planned ones, so that the plans keep at most 64 of them in memory."""


class Plan(NamedTuple):
    """Where the messages of a route go.

    :ivar others: the receivers that are in no cohort, or in one that is closed.
    :ivar cohorts: the cohorts that get the messages.
    :ivar members: the number of members of these cohorts.
    """

    others: tuple[Receiver, ...]
    cohorts: tuple[Cohort, ...]
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
        self._cohorts: dict[Cohort, None] = {}

    def follow(self, changes: Iterable[Change], version: int) -> bool:
        """Apply changes of cohorts; return False if the plan has to be made again.

        The invariant: all members of the plan's cohorts are in the route, and a receiver of the route that is in any
        other cohort is in a closed one.
        """
        plan, others, cohorts = self.plan, self._others, self._cohorts
        if not (others or cohorts):
            others.update(dict.fromkeys(plan.others))
            cohorts.update(dict.fromkeys(plan.cohorts))
        for receiver, old, new, is_alone in changes:
            if receiver is None:
                if old in cohorts:
                    assert new is not None
                    cohorts[new] = None
            elif new is None:
                if old in cohorts:
                    others[receiver] = None
                    if is_alone:
                        del cohorts[old]
            elif receiver in others:
                if is_alone:
                    cohorts[new] = None
                elif new not in cohorts:
                    return False
                del others[receiver]
            elif new in cohorts:
                return False
        self.plan = Plan(tuple(others), tuple(cohorts), len(self.receivers) - len(others))
        self.version = version
        return True


class Plans:
    """The plans of routes.

    :param cohorts: the cohorts of all users, which are split as routes require.
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
        """Return the plan of a route, after splitting the cohorts of which it contains only a part."""
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
        self._planned += _KEPT_PLAN + len(receivers)
        if self._planned > _MOST_PLANNED:
            self._forget_all()
            self._planned = _KEPT_PLAN + len(receivers)
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
                kept.replace(self._make(receivers), self._cohorts.version)
            self._seen = self._cohorts.version
        return kept.plan

    def _make(self, receivers: tuple[Receiver, ...]) -> Plan:
        homes = list(map(self._cohorts.of.get, receivers))
        cohorts: list[Cohort] = []
        members = 0
        for cohort, count in Counter(homes).items():
            if cohort is None or cohort.is_closed:
                continue
            if count < len(cohort.members):
                part = {receiver for receiver, home in zip(receivers, homes, strict=True) if home is cohort}
                cohort = self._cohorts.split(cohort, part)
            if not cohort.is_closed:
                cohorts.append(cohort)
                members += count
        others: tuple[Receiver, ...] = ()
        if members < len(receivers):
            others = tuple(
                receiver for receiver, home in zip(receivers, homes, strict=True) if home is None or home.is_closed
            )
        return Plan(others, tuple(cohorts), members)

    def _forget_all(self) -> None:
        self._by_route.clear()
        self._by_receivers.clear()
        self._cohorts.forget_changes()
        self._planned = 0


def _plan_work(receivers: tuple[Receiver, ...]) -> int:
    """Return the price of making a plan."""
    return _PLAN + len(receivers) // _PLANNED_AT_ONCE
