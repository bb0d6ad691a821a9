"""Counts of refusals for each user and rule, which outlive the connections.

A client that has not asked for denials is disconnected with each refusal; its user may then leave, and return a moment
later. So the numbers are not the user's. The rows that were counted last stay, up to `MOST`, which takes 150 KB.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

__all__ = ["MOST", "Denied", "DeniedRow"]

MOST = 1024
"""Rows that are kept. Users do not choose UIDs or rules, but a range of subordinate UIDs has 65,536 of them."""


@dataclass(frozen=True, slots=True)
class DeniedRow:
    """The refusals of one user by one rule.

    :ivar uid: the user, or its owner.
    :ivar count: packets that were refused.
    :ivar at: when the last one was, in seconds since 1970.
    """

    uid: int
    rule: str
    count: int
    at: float


class Denied:
    """The numbers of refusals by user and rule."""

    def __init__(self) -> None:
        self._rows: OrderedDict[tuple[int, str], tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, uid: int, rule: str) -> None:
        """Count a refusal."""
        count, _ = self._rows.pop((uid, rule), (0, 0.0))
        self._rows[uid, rule] = count + 1, time.time()
        if len(self._rows) > MOST:
            self._rows.popitem(last=False)

    def latest(self, most: int = MOST) -> list[DeniedRow]:
        """Return rows, those that were counted last first."""
        rows = reversed(self._rows.items())
        return [DeniedRow(uid, rule, *row) for ((uid, rule), row), _ in zip(rows, range(most), strict=False)]
