"""Messages in blocks: lists that thousands of queues can share.

.. rubric:: Theory of operation

The messages for a cohort form one list, and each member has its own *position* in it. If each member got a list of its
own, the server would copy the references and look at every message again for each of them: 10 ns for each message and
member. So the list is kept in *blocks* of about a thousand messages; a closed block never changes. The part between two
positions usually consists of a few whole blocks, which the members' queues share with their digests
(`sbus.flood.digest`), and a piece of one more.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from sbus.flood.digest import Digest

__all__ = ["Blocks"]

_BLOCK = 1_024, 256 << 10
"""Messages, or bytes, at which a block is closed. While one of its messages is needed, the whole block is kept."""
_LEAST = 512, 64 << 10
"""Messages, or bytes, from which on `Blocks.close` closes it."""


class Blocks:
    """Messages, each at a position: the number of messages before it, dropped ones included.

    :param start: the position of the first message.
    :ivar size: bytes of the messages that were not dropped.
    """

    __slots__ = ("_blocks", "_last", "_last_size", "_last_start", "_starts", "size")

    def __init__(self, start: int = 0) -> None:
        self.size = 0
        self._blocks: list[Digest] = []
        self._starts: list[int] = []  # the position of each closed block
        self._last: list[bytes] = []  # the block that is not closed yet
        self._last_size = 0
        self._last_start = start

    @property
    def start(self) -> int:
        """The position of the first message that was not dropped."""
        return self._starts[0] if self._starts else self._last_start

    @property
    def end(self) -> int:
        """The position behind the last message."""
        return self._last_start + len(self._last)

    def copy(self) -> Blocks:
        """Return the same messages, at the same positions."""
        new = Blocks(self._last_start)
        new._blocks, new._starts, new._last = self._blocks.copy(), self._starts.copy(), self._last.copy()
        new.size, new._last_size = self.size, self._last_size
        return new

    def add(self, packets: list[bytes], size: int) -> Digest | None:
        """Add messages at the end.

        :param size: their bytes.
        :returns: the block that was closed, or None if none was.
        """
        self._last += packets
        self._last_size += size
        self.size += size
        return self._close(_BLOCK)

    def close(self) -> None:
        """Close the last block if it is long enough, so that parts that end here share it."""
        self._close(_LEAST)

    def _close(self, least: tuple[int, int]) -> Digest | None:
        if len(self._last) < least[0] and self._last_size < least[1]:
            return None
        block = Digest(self._last, self._last_size)
        self._blocks.append(block)
        self._starts.append(self._last_start)
        self._last_start = self.end
        self._last, self._last_size = [], 0
        return block

    def between(self, first: int, end: int) -> Digest:
        """Return the messages between two positions.

        :param first: the position of the first one, which must not have been dropped.
        :param end: the position behind the last one.
        """
        blocks, starts = self._blocks, self._starts
        at = bisect_right(starts, first) - 1  # the block with this position, if it is in one
        until = bisect_left(starts, end)  # the block behind
        parts = blocks[max(at, 0) : until]
        if parts and (over := starts[until - 1] + len(parts[-1]) - end) > 0:
            parts[-1] = Digest(parts[-1].packets[:-over])
        if parts and at >= 0 and (before := first - starts[at]):
            if before < len(parts[0]):
                parts[0] = parts[0].rest(parts[0].packets[before:])
            else:
                del parts[0]
        start = self._last_start
        if max(first, start) < end:
            parts.append(Digest(self._last[max(0, first - start) : end - start]))
        return parts[0] if len(parts) == 1 else Digest.join(parts)

    def drop(self, end: int) -> int:
        """Drop the blocks that end at or before a position, and all messages if it is the end.

        :returns: the bytes that were dropped.
        """
        before = self.size
        if end == self.end:
            self._last_start, self._last, self._last_size = end, [], 0
            self._blocks, self._starts, self.size = [], [], 0
            return before
        gone = bisect_right(self._starts, end)
        gone -= gone > 0 and self._starts[gone - 1] + len(self._blocks[gone - 1]) > end
        self.size -= sum(block.size for block in self._blocks[:gone])
        del self._blocks[:gone], self._starts[:gone]
        return before - self.size
