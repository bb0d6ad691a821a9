"""The digest of a list of messages: what flood control asks about it, computed once for all receivers of this list.

A long list may consist of parts: lists that other queues share, each with a digest of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate, chain

from sbus.routing.runs import newest, shortest, total_size

__all__ = ["MOST_SEARCHES", "STEP", "Digest"]

_FEW_KEYS = 4
"""The most keys for which `Digest.rest` finds the newest messages among those of the whole list: a search for each."""
_SHORT = 1_024
"""Messages of several parts that are put together in one list: a queue takes one list faster than many."""
MOST_SEARCHES = 2
"""How often a list is searched for its smaller messages, for a size each time. Queues that differ much in what has room
would have it searched again for each of them, which takes 10 ms for all that can wait."""
STEP = 64
"""Messages in a step. A digest learns the bytes before each step, and the shortest packet in it."""


class Digest:
    """A list of messages, and what is known of it.

    :param packets: the messages, at least one. The caller must not change the list afterwards.
    :param size: their bytes; None to count them.
    :ivar size: their bytes.
    :ivar parts: the digests of the parts, in order; empty if the list has none.
    """

    __slots__ = (
        "_count",
        "_newest",
        "_packets",
        "_searches",
        "_shortest",
        "_shortest_in",
        "_sizes",
        "_smaller",
        "parts",
        "size",
    )

    def __init__(self, packets: list[bytes], size: int | None = None) -> None:
        self._packets = packets
        self._count = len(packets)
        self.size = total_size(packets) if size is None else size
        self.parts: list[Digest] = []
        self._newest: Digest | None = None
        self._smaller: tuple[int, Digest | None] = 0, None  # than which size, as last asked for
        self._searches = 0
        self._shortest = 0
        self._shortest_in: list[int] = []  # for each step
        self._sizes = [0]  # the bytes of the first 0, 1, 2, ... steps, as far as they were needed

    @classmethod
    def join(cls, parts: list[Digest]) -> Digest:
        """Return the digest of several lists put together."""
        joined = cls([], sum(part.size for part in parts))
        joined._count = sum(map(len, parts))
        joined.parts = parts
        return joined

    def __len__(self) -> int:
        return self._count

    @property
    def packets(self) -> list[bytes]:
        """The messages; the caller must not change the list."""
        if not self._packets and self.parts:
            self._packets = list(chain.from_iterable(part.packets for part in self.parts))
        return self._packets

    def newest(self) -> Digest:
        """Return the digest of the newest message of each key, in order.

        Lists can have parts in common: each part computes its own newest messages only once, for all of these lists.
        """
        if self._newest is None:
            packets = list(chain.from_iterable(part.newest().packets for part in self.parts)) or self.packets
            self._newest = Digest(newest(packets))
        return self._newest

    def rest(self, packets: list[bytes]) -> Digest:
        """Return the digest of what is left of the list when its first messages are gone.

        :param packets: the messages that are left, at least one.
        """
        left, known = Digest(packets), self._newest
        if known is not None and len(known) <= _FEW_KEYS:
            firsts = []
            for packet in known.packets:
                head = packet[: packet.find(b"\0") + 1]
                first = next((at for at, each in enumerate(packets) if each.startswith(head)), None)
                if first is not None:  # then the newest message of this key is left, too
                    firsts.append((first, packet))
            left._newest = Digest([packet for _, packet in sorted(firsts)])  # in the order of `newest`
        return left

    def prefix(self, fits: Callable[[int, int], bool]) -> tuple[int, int]:
        """Return the number and the bytes of the messages in the longest prefix that fits; the whole list does not fit.

        :param fits: takes a number of messages and their bytes; returns whether they fit. If they do, fewer do, too.
        """
        packets, sizes = self.packets, self._sizes
        last = len(packets) - 1
        if not fits(1, len(packets[0])):
            return 0, 0  # as often as not
        while (known := len(sizes) - 1) < last // STEP and fits(known * STEP, sizes[-1]):
            ends = range(known * STEP, min(max(2 * known, 1), last // STEP) * STEP, STEP)
            sizes.extend(accumulate((total_size(packets[at : at + STEP]) for at in ends), initial=sizes.pop()))
        step = bisect_left(range(1, len(sizes)), True, key=lambda n: not fits(n * STEP, sizes[n]))
        found, size = step * STEP, sizes[step]
        end = min(found + STEP, last + 1)
        while end - found > 1:
            middle = (found + end) // 2
            more = total_size(packets[found:middle])
            if fits(middle, size + more):
                found, size = middle, size + more
            else:
                end = middle
        return found, size

    def smaller(self, size: int, first: int = 0) -> Digest | None:
        """Return the digest of the messages whose packets are smaller than a size; None if there is none.

        :param size: bytes.
        :param first: the number of messages at the beginning that are left out.
        """
        if self._smaller[0] != size:
            self._searches += 1
            self._smaller = size, self._find_smaller(size)
        found = self._smaller[1]
        if found is None or not first:
            return found
        if not found.parts:
            left = found.packets[self._count_smaller(size, first) :]
            return Digest(left) if left else None
        parts = []
        for part in self.parts:
            if first < len(part):
                parts.append(part.smaller(size, first))
            first = max(0, first - len(part))
        return _join(parts)

    def may_search(self, size: int) -> bool:
        """Return whether `smaller` may be asked for a size: it is known, or was not asked for many."""
        if self._smaller[0] == size:
            return True
        return all(part.may_search(size) for part in self.parts) if self.parts else self._searches < MOST_SEARCHES

    def after(self, first: int) -> Digest:
        """Return the digest of what is left when the first messages are gone.

        :param first: their number, below that of all.
        """
        if not self.parts:
            return self.rest(self.packets[first:]) if first else self
        left = []
        for part in self.parts:
            if first < len(part):
                left.append(part.after(first))
            first = max(0, first - len(part))
        return Digest.join(left)

    def _count_smaller(self, size: int, first: int) -> int:
        """Return how many of the first messages are smaller."""
        found = 0
        for part in self.parts:
            if first < len(part):
                return found + part._count_smaller(size, first)
            first -= len(part)
            found += len(part.smaller(size) or ())
        return found + sum(map(size.__gt__, map(len, self.packets[:first])))

    def _find_smaller(self, size: int) -> Digest | None:
        if self.shortest() >= size:
            return None
        if self.parts:
            return _join([part.smaller(size) for part in self.parts])
        return Digest([packet for packet in self.packets if len(packet) < size])

    def shortest(self) -> int:
        """Return the size of the shortest packet, in bytes."""
        if not self._shortest:
            self._shortest = min(part.shortest() for part in self.parts) if self.parts else shortest(self.packets)
        return self._shortest

    def shortest_in_step(self, number: int) -> int:
        """Return the size of the shortest packet of a step, in bytes.

        :param number: the step's; the first is 0.
        """
        if not self._shortest_in:
            packets = self.packets
            self._shortest_in = [shortest(packets[at : at + STEP]) for at in range(0, len(packets), STEP)]
        return self._shortest_in[number]


def _join(parts: list[Digest | None]) -> Digest | None:
    """Return the digest of several lists put together; None if all are empty."""
    found = [part for part in parts if part is not None]
    if len(found) < 2:
        return found[0] if found else None
    joined = Digest.join(found)
    return Digest(joined.packets, joined.size) if len(joined) <= _SHORT else joined
