"""Whose messages wait in a receiver's queue: the users that its publishers count as, with their bytes.

A receiver that blocks publishers of several users, as a recorder does, holds only those of the user with most in its
queue. So a user that publishes a message now and then is not held because another one floods the bus.

The queue knows its bytes and not whose they are, so the shares keep a line of (user, bytes) beside it, and drop from
the front what must have left the queue. That is exact for a queue that is first in, first out, which nothing was
dropped from; for others it is an estimate. Neighbours of one user are one entry. There is a line only for receivers
that can block the publisher at hand and are congested.
"""

from __future__ import annotations

from collections import Counter, deque

__all__ = ["QueueShares"]


class QueueShares:
    """The shares of one receiver's queue, by user ID."""

    __slots__ = ("_line", "_of", "_total")

    def __init__(self) -> None:
        self._line: deque[tuple[int, int]] = deque()
        self._of: Counter[int] = Counter()
        self._total = 0

    def add(self, uid: int, size: int, queued: int) -> None:
        """Note that messages were kept.

        :param uid: the user of their publisher.
        :param size: the bytes in them.
        :param queued: the bytes in the queue, these included.
        """
        line, of = self._line, self._of
        if line and line[-1][0] == uid:
            line[-1] = uid, line[-1][1] + size
        else:
            line.append((uid, size))
        of[uid] += size
        self._total += size
        while self._total > queued and line:
            first, its_size = line[0]
            gone = min(its_size, self._total - queued)
            self._total -= gone
            of[first] -= gone
            if not of[first]:
                del of[first]
            if gone < its_size:
                line[0] = first, its_size - gone
            else:
                line.popleft()

    def has_most(self, uid: int) -> bool:
        """Return whether no other user has more in the queue."""
        return not self._of or self._of[uid] >= max(self._of.values())
