"""Queue shares: the users whose messages wait in a receiver's queue, with the weight of each.

A receiver that blocks publishers of several users, as a recorder does, blocks only those of users with more than a fair
part of its queue: of its messages, if their number is nearer to its limit than their bytes are, and otherwise of its
bytes. So a user with few messages is not blocked because one other user, or forty, flood the bus.

The queue knows its messages, but not their users. So the shares keep a list of (user, messages, bytes) beside it, and
drop from its front the messages that must have left the queue. This is exact for a first-in, first-out queue from which
nothing was dropped, and an estimate for others. Adjacent messages of one user are one entry. Only receivers that can
block the publisher at hand and are congested have a list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from sbus.flood import QueueLimits

__all__ = ["QueueShares"]


class QueueShares:
    """The shares of one receiver's queue, by user.

    :param limits: the limits of the queue.
    """

    __slots__ = ("_limits", "_line", "_of", "_total")

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._line: deque[tuple[Hashable, int, int]] = deque()
        self._of: dict[Hashable, tuple[int, int]] = {}
        self._total = (0, 0)

    def add(self, user: Hashable, messages: int, size: int, queued: int) -> None:
        """Note that messages were kept.

        :param user: the user of their publisher.
        :param size: the bytes in them.
        :param queued: the messages in the queue, these included.
        """
        line = self._line
        if line and line[-1][0] is user:
            line[-1] = user, line[-1][1] + messages, line[-1][2] + size
        else:
            line.append((user, messages, size))
        self._change(user, messages, size)
        while line and self._total[0] > queued:
            first, its_messages, its_size = line[0]
            gone = min(its_messages, self._total[0] - queued)
            if gone < its_messages:
                gone_size = its_size * gone // its_messages
                line[0] = first, its_messages - gone, its_size - gone_size
            else:
                gone_size = its_size
                line.popleft()
            self._change(first, -gone, -gone_size)

    def _change(self, user: Hashable, messages: int, size: int) -> None:
        had_messages, had_size = self._of.get(user, (0, 0))
        if had_messages + messages > 0:
            self._of[user] = had_messages + messages, had_size + size
        else:
            self._of.pop(user, None)
        self._total = self._total[0] + messages, self._total[1] + size

    def has_more_than_fair(self, user: Hashable) -> bool:
        """Return whether a user has more than its part of the messages, or of the bytes, that wait.

        The part is one over the number of users with something there; alone, a user has more than that by definition.
        """
        users = len(self._of)
        if users < 2:
            return True
        (messages, size), (all_messages, all_bytes) = self._of.get(user, (0, 0)), self._total
        if all_messages * self._limits.bytes >= all_bytes * self._limits.messages:
            return messages * users > all_messages
        return size * users > all_bytes
