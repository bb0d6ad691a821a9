"""Plans of routes: which cohorts get the messages of a route, and which receivers are in none.

.. rubric:: Theory of operation

A run is added to a cohort in one step, so it has to be for all members or for none. To make the plan of a route, each
cohort is split of which the route contains only a part. After some runs the cohorts fit the routes, and nothing is
split any more.

To make a plan takes time in proportion to the receivers, so plans are kept until a cohort changes. A plan is found by
the identity of the route's tuple, which is the same in each run. Thousands of keys can have equal routes, and a route
without its publisher (``echo/off``) is a new tuple for each run, so a second table finds plans by the receivers. Both
tables keep receivers in memory; after some have gone, the tables are emptied (`Plans.note_gone`).
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from sbus.server.cohorts import Cohort, Cohorts
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


class Plans:
    """The plans of routes.

    :param cohorts: the cohorts of all users, which are split as routes require.
    :ivar effort: work of making plans since it was last set to 0.
    """

    __slots__ = ("_by_receivers", "_by_route", "_of", "_planned", "_split", "effort")

    def __init__(self, cohorts: Cohorts) -> None:
        self._of = cohorts.of
        self._split = cohorts.split
        cohorts.on_changed = self._forget_all
        self._by_route: dict[int, tuple[tuple[Receiver, ...], Plan]] = {}  # with the tuple, whose ID stays its own
        self._by_receivers: dict[tuple[Receiver, ...], Plan] = {}
        self._planned = 0
        self.effort = 0

    def find(self, receivers: tuple[Receiver, ...]) -> Plan:
        """Return the plan of a route, after splitting the cohorts of which it contains only a part."""
        known = self._by_route.get(id(receivers))
        if known is not None:
            return known[1]
        plan = self._by_receivers.get(receivers) or self._make(receivers)
        self._planned += _KEPT_PLAN + len(receivers)
        self.effort += 1 + len(receivers) // _PLANNED_AT_ONCE
        if self._planned > _MOST_PLANNED:
            self._forget_all()
            self._planned = _KEPT_PLAN + len(receivers)
        self._by_route[id(receivers)] = receivers, plan
        self._by_receivers[receivers] = plan
        return plan

    def note_gone(self) -> None:
        """Note that a receiver has gone: soon no plan contains it any more."""
        self._planned += _GONE
        if self._planned > _MOST_PLANNED:
            self._forget_all()

    def _make(self, receivers: tuple[Receiver, ...]) -> Plan:
        # Set operations: plans are made again in each turn of a user with many late receivers.
        of = self._of
        others = list(itertools.filterfalse(of.__contains__, receivers))
        left = set(filter(of.__contains__, receivers))
        cohorts: list[Cohort] = []
        while left:
            cohort = of[next(iter(left))]
            members = cohort.members.keys() & left
            left -= members
            if not cohort.is_closed and len(members) < len(cohort.members):
                cohort = self._split(cohort, members)
            if cohort.is_closed:
                others += members
            else:
                cohorts.append(cohort)
        self.effort += _PLAN + len(receivers) // _PLANNED_AT_ONCE
        return Plan(tuple(others), tuple(cohorts), len(receivers) - len(others))

    def _forget_all(self) -> None:
        if self._by_route:
            self._by_route.clear()
            self._by_receivers.clear()
        self._planned = 0
