"""The requests of one side of a link to the other: subscriptions to the patterns that are wanted here.

.. rubric:: Theory of operation

One side of a link knows the patterns that its clients *want*, and the operator has *listed* the patterns that may
cross. For each pair of them the link asks the other side for their intersection, which is one pattern or none. The
intersections *needed* are counted. Those that another one covers are left out: one copy of a message is enough.

`Interest` decides which subscriptions to make and to end (`Change`), and when. It does no I/O and has no clock: the
caller passes the time, in seconds, and does what `changes` returns, in that order. Changes are decided when they are
done: a pattern that came and went while it waited for the rate costs nothing.

Invariants, at every moment, each change taken as done:

* *New before old.* From the call of `changes` after a pattern was added (or as soon as the rate allows) until it is
  removed, a pattern that is asked for matches every key that it matches. When a wide pattern ends, the narrow ones that
  it covered are asked for first.
* When nothing has changed for a while, no pattern that is asked for covers another.

==========================  ===========================================================================================
limit                       what happens at it
==========================  ===========================================================================================
`rate` changes a second     The others wait, except after `restart`: the other side has forgotten everything.
`rate` patterns that wait   The interest *collapses*: it asks for the listed patterns whole, which covers all others in
                            one step. It expands again as the rate allows. One user can cause this.
`limit`, `max_bytes`        It collapses as well if it asks for about that many patterns, or bytes of them. It expands
                            when half of the limit is enough.
a refusal                   A pattern that the other side does not allow covers nothing. It is asked for again once in
                            `RETRY` to 2 × `RETRY` seconds, one after another. If it is a listed one, those under it
                            are asked for up to the limit while the interest is collapsed.
`delay` seconds             A pattern that has not been needed for that time is given up, so a client that reconnects
                            costs nothing.
==========================  ===========================================================================================
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from sbus.errors import UsageError
from sbus.link.covering import CoverIndex
from sbus.protocol.patterns import Shape, intersect, pattern_cost, shape

__all__ = ["CONSIDERED", "DELAY", "LIMIT", "MAX_BYTES", "NOTED", "RATE", "RETRY", "Change", "Interest"]

DELAY = 2.0
"""Seconds after which a pattern that is needed no longer is given up."""
RETRY = 60.0
"""Seconds after which a refused pattern is asked for again: the other side may have a new policy by then."""
_TRUST = RETRY / 2
"""Seconds after which such a pattern counts as allowed, and those under it are given up: a refusal may take long."""
_PAUSE = 1.0
"""Seconds between two such patterns, if there are not more of them than fit `RETRY` then; and between two walks through
all needed patterns after refusals. Anybody may want thousands that are refused."""
RATE = 1000
"""Changes a second at most."""
LIMIT = 8192
"""Patterns to ask for at most: half of what a server allows a client by default."""
MAX_BYTES = 1 << 19
"""Bytes of these patterns: half of what a server allows a client by default."""

CONSIDERED = 32
"""The maximal number of patterns that a call of `Interest.changes` considers in vain: less than 4 ms, mostly 0.1 ms.
The thread may be that of a bus, and any client chooses wanted patterns."""

NOTED = 64
"""The maximal number of noted patterns that one call of `Interest.changes` counts: mostly 2 ms."""
_SORTED = 1024
"""Patterns at most that are put into the best order when a wide one ends: that takes longer than to find them."""
_BURST = 10
"""The part of a second's changes that may come at once is one in this many."""

_Place = tuple[int, bool, int, int, Shape]


class Change(NamedTuple):
    """One thing to do at the other side.

    :ivar is_new: whether to subscribe; else to unsubscribe.
    """

    is_new: bool
    pattern: bytes


class Interest:
    """The patterns to ask the other side for.

    :param listed: the patterns that may cross; patterns that match no key, and secret ones, are refused.
    :param limit: patterns to ask for at most.
    :param max_bytes: bytes of these at most, as a server counts them (`sbus.protocol.patterns.pattern_cost`).
    :param delay: seconds after which a pattern is given up.
    :param rate: changes a second at most.
    :ivar is_collapsed: whether the listed patterns are asked for whole, because there were too many.
    :raises UsageError: if a listed pattern cannot be used, or the listed ones alone exceed a limit.
    """

    def __init__(
        self,
        listed: Iterable[bytes],
        *,
        limit: int = LIMIT,
        max_bytes: int = MAX_BYTES,
        delay: float = DELAY,
        rate: float = RATE,
    ) -> None:
        self._listed = self._widest(listed)
        self._listed_bytes = sum(map(_cost, self._listed))
        if len(self._listed) > limit or self._listed_bytes > max_bytes:
            raise UsageError(f"too many patterns are listed: the limits are {limit:,} patterns and {max_bytes:,} bytes")
        self._limit = limit
        self._max_bytes = max_bytes
        self._delay = delay
        self._most_new = int(rate)  # new patterns that may wait
        self._rate = rate * (1 - 1 / _BURST)
        self._burst = max(1.0, rate / _BURST)
        self._tokens = self._burst
        self._filled_at = 0.0
        self.is_collapsed = False
        self._wanted: Counter[bytes] = Counter()
        self._counts: Counter[Shape] = Counter()
        self._needed = CoverIndex()
        self._ordered: list[_Place] = []  # the same, the widest first
        self._needed_bytes = 0
        self._asked = CoverIndex()
        self._bytes = 0
        self._dooms: dict[Shape, float] = {}
        self._leaving: dict[Shape, None] = {}
        self._new: dict[Shape, int] = {}
        self._again: dict[Shape, None] = {}
        self._refused: dict[Shape, float] = {}
        self._cold: dict[Shape, None] = {}
        self._cold_bytes = 0
        self._tried: dict[Shape, float] = {}
        self._retry_at = 0.0
        self._unchecked: list[_Place] = []
        self._is_unsure = False
        self._check_at = 0.0
        self._number = 0
        self._noted: deque[tuple[bool, bytes, int]] = deque()

    # --- what is wanted ----------------------------------------------------------------------

    def add(self, pattern: bytes, number: int = 0) -> None:
        """Count an open pattern that is wanted once more.

        :param number: the number of the change, if the source numbers them.
        """
        self._number = max(self._number, number)
        self._wanted[pattern] += 1
        if self._wanted[pattern] == 1:
            for needed in self._crossing(pattern):
                self._count(needed)
                self._new.setdefault(needed, self._number)

    def remove(self, pattern: bytes, now: float, number: int = 0) -> None:
        """Count a pattern once less; one that is not wanted is ignored."""
        self._number = max(self._number, number)
        if pattern not in self._wanted:
            return
        self._wanted[pattern] -= 1
        if not self._wanted[pattern]:
            del self._wanted[pattern]
            for needed in self._crossing(pattern):
                self._uncount(needed, now)
            self._maybe_expand(now)

    def note(self, is_new: bool, pattern: bytes, number: int) -> None:
        """Add or remove a pattern, at a later call of `changes`: this takes almost no time."""
        self._noted.append((is_new, pattern, number))

    def apply(self, is_new: bool, pattern: bytes, number: int, now: float) -> None:
        """Add or remove a pattern while there is nobody to ask: `restart` asks for all that is wanted then."""
        self._noted.append((is_new, pattern, number))
        self._apply_noted(now)
        self._new.clear()

    def _apply_noted(self, now: float) -> None:
        for _ in range(min(len(self._noted), NOTED)):
            is_new, pattern, number = self._noted.popleft()
            if is_new:
                self.add(pattern, number)
            else:
                self.remove(pattern, now, number)

    def _count_noted(self, now: float, changes: list[Change]) -> None:
        """Count some of the patterns that were noted."""
        self._apply_noted(now)
        if len(self._noted) > self._most_new:
            self._collapse(now, changes)
            self._number = self._noted[-1][2]  # the listed patterns cover them, counted or not

    def replace(self, patterns: Iterable[bytes], now: float, number: int = 0) -> None:
        """Take a new list in place of all that was wanted, such as the list of a source that has restarted.

        Patterns that are on both lists are not touched. `settled` begins again at the numbers of the new source.
        """
        self._noted.clear()
        self._number = number
        self._new = dict.fromkeys(self._new, number)
        wanted = Counter(iter(patterns))  # not `patterns`: of a mapping, Counter would take the values
        for pattern, count in wanted.items():
            if pattern not in self._wanted:
                self.add(pattern, number)
            self._wanted[pattern] = count
        for pattern in self._wanted.keys() - wanted.keys():
            self._wanted[pattern] = 1
            self.remove(pattern, now, number)
        self._maybe_expand(now)  # pending notes had prevented it

    # --- what is asked for -------------------------------------------------------------------

    @property
    def asked(self) -> list[bytes]:
        """The patterns that the other side is subscribed to, if it has followed all changes."""
        return [each.pattern() for each in (*self._asked, *self._leaving)]

    @property
    def settled(self) -> int:
        """The number up to which the requested patterns cover each added one.

        The other side has to confirm what `changes` has returned by then, before a client here may count on it.
        """
        return next(iter(self._new.values())) - 1 if self._new else self._number

    def restart(self, now: float) -> list[Change]:
        """Return all subscriptions to make at another side that knows none."""
        self._asked = CoverIndex()
        self._bytes = 0
        self._dooms.clear()
        self._leaving.clear()
        self._new.clear()
        self._again.clear()
        self._refused.clear()
        self._cold.clear()
        self._cold_bytes = 0
        self._tried.clear()
        self._forget_checks()
        changes: list[Change] = []
        for *_, needed in self._ordered:
            self._consider(needed, now, changes)
        return changes

    def refuse(self, pattern: bytes, now: float) -> None:
        """Note that the other side does not allow a pattern.

        It then covers no others, and is not asked for again for a while: anybody may want it again and again.
        """
        refused = shape(pattern)
        if refused is None or (refused not in self._asked and refused not in self._leaving):
            return
        self._asked.discard(refused)
        self._leaving.pop(refused, None)
        self._dooms.pop(refused, None)
        self._bytes -= _cost(refused)
        self._tried.pop(refused, None)
        self._refused[refused] = now
        if refused not in self._needed:
            self._cool(refused)
        self._is_unsure = True

    def _cool(self, refused: Shape) -> None:
        """Remember a refused pattern that nobody needs, as long as there are not too many of these."""
        self._cold[refused] = None
        self._cold_bytes += _cost(refused)
        while len(self._cold) > self._limit or self._cold_bytes > self._max_bytes:
            oldest = next(iter(self._cold))
            self._warm(oldest)
            del self._refused[oldest]

    def _warm(self, refused: Shape) -> None:
        del self._cold[refused]
        self._cold_bytes -= _cost(refused)

    def _next_retry(self) -> float:
        return max(self._retry_at, next(iter(self._refused.values()), math.inf) + RETRY)

    def _retry(self, now: float) -> None:
        """Have the pattern that was refused first considered again; forget those that nobody needs.

        One that has not been refused again takes the place of those under it.
        """
        while self._tried and next(iter(self._tried.values())) + _TRUST <= now:
            allowed = next(iter(self._tried))
            del self._tried[allowed]
            if allowed in self._asked:
                self._give_up_covered(allowed, now)
        for _ in range(CONSIDERED):
            if self._next_retry() > now:
                return
            self._retry_at = now + min(_PAUSE, RETRY / len(self._refused))
            first = next(iter(self._refused))
            del self._refused[first]
            if first in self._cold:
                self._warm(first)
                self._retry_at = 0.0
            else:
                self._tried[first] = now
                self._again[first] = None

    def lower_limit(self) -> None:
        """Ask for fewer patterns from now on: the other side has refused as many as it has been asked for.

        If only the listed patterns were asked for, fewer would not do: the cause is elsewhere, and the limit stays.
        """
        asked = len(self._asked) + len(self._leaving)
        if asked > len(self._listed):
            self._limit = max(len(self._listed), min(self._limit, asked) // 2)

    def due(self, now: float) -> float | None:
        """Return the time at which `changes` has something to return; None for never."""
        if self._noted:
            return now
        if self._new or self._again or self._leaving or self._unchecked:
            first = now
        else:
            trusted = next(iter(self._tried.values()), math.inf) + _TRUST
            check = self._check_at if self._is_unsure else math.inf
            first = min(next(iter(self._dooms.values()), math.inf), self._next_retry(), trusted, check)
            if first == math.inf:
                return None
        self._refill(now)
        return max(first, now + max(0.0, 1 - self._tokens) / self._rate)

    def changes(self, now: float) -> list[Change]:
        """Return what to do now, in order."""
        self._refill(now)
        self._retry(now)
        changes: list[Change] = []
        in_vain = checked = 0
        if self._noted:
            self._count_noted(now, changes)
            self._tokens -= len(changes)
        while self._tokens >= 1 and in_vain < CONSIDERED:
            done = len(changes)
            if self._new:
                needed = next(iter(self._new))
                del self._new[needed]
                self._consider(needed, now, changes)
                in_vain += len(changes) == done
            elif self._again:
                needed = next(iter(self._again))
                del self._again[needed]
                self._consider(needed, now, changes)
                in_vain += len(changes) == done
            elif checked < CONSIDERED // 2 and self._check(now, changes):
                checked += len(changes) == done
                in_vain += len(changes) == done
            elif self._leaving:
                asked = next(iter(self._leaving))
                del self._leaving[asked]
                self._bytes -= _cost(asked)
                changes.append(Change(False, asked.pattern()))
            elif not self._expire(now, changes):
                break
            self._tokens -= len(changes) - done
        if self._tokens < 1 and len(self._new) > self._most_new:
            done = len(changes)
            self._collapse(now, changes)
            self._tokens -= len(changes) - done
        if self.is_collapsed and not self._new:
            self._maybe_expand(now)
        return changes

    def _consider(self, needed: Shape, now: float, changes: list[Change]) -> None:
        """Ask for a pattern, unless it is needed no longer, is asked for, or is covered."""
        if needed not in self._needed or needed in self._refused:
            return
        if needed in self._asked:
            if needed in self._dooms and self._asked.cover_of(needed, self._dooms) is None:
                del self._dooms[needed]
                self._give_up_covered(needed, now)
        elif self._asked.cover_of(needed) is None:
            self._ask(needed, now, changes)

    def _check(self, now: float, changes: list[Change]) -> bool:
        """Consider one needed pattern of those that a refusal may have left uncovered; return whether there was one."""
        if not self._unchecked and self._is_unsure and self._check_at <= now:
            self._is_unsure = False
            self._check_at = now + _PAUSE
            self._unchecked = self._ordered[::-1]
        if not self._unchecked:
            return False
        self._consider(self._unchecked.pop()[-1], now, changes)
        return True

    def _forget_checks(self) -> None:
        self._unchecked.clear()
        self._is_unsure = False

    def _ask(self, needed: Shape, now: float, changes: list[Change]) -> None:
        if needed in self._leaving:
            del self._leaving[needed]  # it is still asked for
        else:
            cost = _cost(needed)
            is_full = len(self._asked) + len(self._leaving) >= self._limit or self._bytes + cost > self._max_bytes
            if is_full and not self.is_collapsed:
                self._collapse(now, changes)
                return
            if is_full and needed not in self._listed:
                return  # under a refused listed pattern: it is asked for when this expands
            self._bytes += cost
            changes.append(Change(True, needed.pattern()))
        self._asked.add(needed)
        self._give_up_covered(needed, now)

    def _give_up_covered(self, asked: Shape, now: float) -> None:
        if asked not in self._tried:
            for covered in self._asked.covered_by(asked):
                self._dooms.setdefault(covered, now + self._delay)

    def _expire(self, now: float, changes: list[Change]) -> bool:
        """Begin to give up the first pattern whose time has come; return whether there was one."""
        for asked, when in self._dooms.items():
            if when > now:
                break
            del self._dooms[asked]
            self._asked.discard(asked)
            self._leaving[asked] = None
            if asked in self._needed:
                self._again[asked] = None
            if asked in self._listed:
                covered, most = [each for *_, each in self._ordered], self._limit  # others, too, but without a walk
            else:
                covered, most = list(islice(self._needed.covered_by(asked), self._most_new + 1)), self._most_new
                if len(covered) <= _SORTED:
                    covered.sort(key=_widest_first)
            if len(covered) > most:
                self._collapse(now, changes)
                return True
            self._again.update(dict.fromkeys(covered))
            return True
        return False

    def _collapse(self, now: float, changes: list[Change]) -> None:
        if not self.is_collapsed:
            self.is_collapsed = True
            for each in self._listed:
                self._count(each)
        for each in self._listed:
            self._consider(each, now, changes)
        self._new.clear()  # all are covered now, or under a refused one, and wait until this expands
        self._again.clear()
        if any(each in self._refused for each in self._listed):
            self._is_unsure = True
        else:
            self._forget_checks()

    def _maybe_expand(self, now: float) -> None:
        if not self.is_collapsed or self._noted:
            return
        # The listed patterns are among them, and are given up last, so there must be room for all at once.
        most = min(self._limit, self._limit // 2 + len(self._listed))
        most_bytes = min(self._max_bytes, self._max_bytes // 2 + self._listed_bytes)
        if len(self._needed) > most or self._needed_bytes > most_bytes:
            return
        is_refused = any(each not in self._asked for each in self._listed)  # and has covered nothing
        if is_refused and len(self._asked) + len(self._leaving) + len(self._needed) - len(self._listed) > self._limit:
            return  # what is not asked for yet must find room, or it would collapse again
        self.is_collapsed = False
        for each in self._listed:
            self._uncount(each, now)
        self._is_unsure = self._is_unsure or is_refused

    # --- counting ----------------------------------------------------------------------------

    def _crossing(self, pattern: bytes) -> Iterator[Shape]:
        """Yield the intersections of a pattern with the listed ones."""
        wanted = shape(pattern)
        if wanted is not None:
            for listed in self._listed:
                both = intersect(wanted, listed)
                if both is not None:
                    yield both

    def _count(self, needed: Shape) -> None:
        self._counts[needed] += 1
        if self._counts[needed] == 1:
            if needed in self._cold:
                self._warm(needed)
            self._needed.add(needed)
            insort(self._ordered, _widest_first(needed))
            self._needed_bytes += _cost(needed)

    def _uncount(self, needed: Shape, now: float) -> None:
        self._counts[needed] -= 1
        if not self._counts[needed]:
            del self._counts[needed]
            self._needed.discard(needed)
            del self._ordered[bisect_left(self._ordered, _widest_first(needed))]
            self._needed_bytes -= _cost(needed)
            self._tried.pop(needed, None)
            if needed in self._refused:
                self._cool(needed)
            if needed in self._asked:
                self._dooms.setdefault(needed, now + self._delay)

    def _refill(self, now: float) -> None:
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._filled_at) * self._rate)
        self._filled_at = now

    def _widest(self, patterns: Iterable[bytes]) -> list[Shape]:
        """Return the shapes of the listed patterns, without those that others cover."""
        index = CoverIndex()
        for pattern in patterns:
            if pattern.startswith(b"!/") or (listed := shape(pattern)) is None:
                raise UsageError(f"no open key matches the listed pattern {pattern!r}: see 'sbus match'")
            index.add(listed)
        return sorted((each for each in index if index.cover_of(each) is None), key=_widest_first)


def _cost(needed: Shape) -> int:
    return pattern_cost(needed.pattern(), b"/")


def _widest_first(each: Shape) -> _Place:
    """Sort a pattern before all that it covers."""
    size = sum(map(len, each.parts))
    stars = sum(part.endswith(b"*") for part in each.parts)
    return len(each.parts), not each.is_below, size - stars, -stars, each
