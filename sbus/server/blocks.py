"""Messages in blocks: lists that thousands of queues can share.

.. rubric:: Theory of operation

The messages for a cohort form one list, and each member has its own *position* in it. If each member got a list of its
own, the server would copy the references and look at every message again for each of them: 10 ns for each message and
member. So the list is kept in *blocks* of about a thousand messages; a closed block never changes. The part between two
positions usually consists of a few whole blocks, which the members' queues share with their digests
(`sbus.flood.digest`), and a piece of one more.

The messages of a run can be for some members only. Then their block has a *mask*: an integer with one bit for each
member, which is set if the member gets them. A block has one mask, so it ends where the mask changes, and such blocks
can be short. Each of them counts as `_MASKED` bytes more.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from sbus.flood.digest import Digest

__all__ = ["Blocks"]

_BLOCK = 1_024, 256 << 10
"""Messages, or bytes, at which a block is closed. While one of its messages is needed, the whole block is kept."""
_LEAST = 512, 64 << 10
"""Messages, or bytes, from which on `Blocks.close` closes it."""
_SHORT = 0, 0
_MASKED = 1_024
"""The price of a block with a mask, beside its messages: bytes of memory. Thousands of members have longer masks, which
blocks often share."""


class Blocks:
    """Messages, each at a position: the number of messages before it, dropped ones included.

    :param start: the position of the first message.
    :ivar size: bytes of the messages that were not dropped, with the price of the masks.
    :ivar masked: the number of blocks with a mask.
    """

    __slots__ = ("_blocks", "_last", "_last_mask", "_last_size", "_last_start", "_masks", "_starts", "masked", "size")

    def __init__(self, start: int = 0) -> None:
        self.size = self.masked = 0
        self._blocks: list[Digest] = []
        self._starts: list[int] = []  # the position of each closed block
        self._masks: list[int | None] = []  # None if it is for all
        self._last: list[bytes] = []  # the block that is not closed yet
        self._last_size = 0
        self._last_start = start
        self._last_mask: int | None = None

    @property
    def start(self) -> int:
        """The position of the first message that was not dropped."""
        return self._starts[0] if self._starts else self._last_start

    @property
    def end(self) -> int:
        """The position behind the last message."""
        return self._last_start + len(self._last)

    def add(self, packets: list[bytes], size: int, mask: int | None = None) -> Digest | None:
        """Add messages at the end.

        :param size: their bytes.
        :param mask: the members that get them; None for all.
        :returns: the long block that was closed, or None if none was.
        """
        if self._last and mask != self._last_mask:
            self._close(_SHORT)
        if not self._last:
            self._last_mask = mask
            if mask is not None:
                self.masked += 1
                self.size += _MASKED
        self._last += packets
        self._last_size += size
        self.size += size
        return self._close(_BLOCK)

    def include(self, place: int) -> None:
        """Add a member to those that get the run that was added last.

        :param place: the number of the member's bit.
        """
        if self._last:
            if self._last_mask is not None:
                self._last_mask |= 1 << place
        elif (mask := self._masks[-1]) is not None:
            self._masks[-1] = mask | 1 << place

    def close(self) -> None:
        """Close the last block if it is long enough, so that parts that end here share it."""
        self._close(_LEAST)

    def _close(self, least: tuple[int, int]) -> Digest | None:
        if len(self._last) < least[0] and self._last_size < least[1]:
            return None
        block = Digest(self._last, self._last_size)
        self._blocks.append(block)
        self._starts.append(self._last_start)
        self._masks.append(self._last_mask)
        self._last_start = self.end
        self._last, self._last_size = [], 0
        return block

    def masks(self, first: int, end: int) -> list[int]:
        """Return the masks between two positions, each of them once, in an order that says nothing."""
        if not self.masked:
            return []
        at, until = self._range(first, end)
        found = dict.fromkeys(self._masks[at:until])
        if self._last and end > self._last_start:
            found[self._last_mask] = None
        found.pop(None, None)
        return sorted(found)  # type: ignore[arg-type]

    def between(self, first: int, end: int, place: int) -> Digest | None:
        """Return the messages for one member between two positions.

        :param first: the position of the first one, which must not have been dropped.
        :param end: the position behind the last one.
        :param place: the number of the member's bit.
        :returns: None if there is none.
        """
        parts = []
        for at in range(*self._range(first, end)):
            mask, block, start = self._masks[at], self._blocks[at], self._starts[at]
            if mask is not None and not mask >> place & 1:
                continue
            if end < start + len(block):
                block = Digest(block.packets[: end - start])
            if first <= start:
                parts.append(block)
            elif first < start + len(block):
                parts.append(block.rest(block.packets[first - start :]))
        start, mask = self._last_start, self._last_mask
        if max(first, start) < min(end, self.end) and (mask is None or mask >> place & 1):
            parts.append(Digest(self._last[max(0, first - start) : end - start]))
        if len(parts) > 1:
            return Digest.join(parts)
        return parts[0] if parts else None

    def _range(self, first: int, end: int) -> tuple[int, int]:
        """Return the closed blocks between two positions: the first one, and the one behind."""
        return max(0, bisect_right(self._starts, first) - 1), bisect_left(self._starts, end)

    def drop(self, end: int) -> int:
        """Drop the blocks that end at or before a position, and all messages if it is the end.

        :returns: the bytes that were dropped.
        """
        before = self.size
        if end == self.end:
            self._last_start, self._last, self._last_size = end, [], 0
            self._blocks, self._starts, self._masks, self.size, self.masked = [], [], [], 0, 0
            return before
        gone = bisect_right(self._starts, end)
        gone -= gone > 0 and self._starts[gone - 1] + len(self._blocks[gone - 1]) > end
        masked = gone - self._masks[:gone].count(None)
        self.masked -= masked
        self.size -= masked * _MASKED + sum(block.size for block in self._blocks[:gone])
        del self._blocks[:gone], self._starts[:gone], self._masks[:gone]
        return before - self.size
