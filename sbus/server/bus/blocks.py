"""Messages in blocks: lists that thousands of queues can share.

.. rubric:: Theory of operation

The messages for a cohort form one list, and each member has its own *position* in it. If each member got a list of its
own, the server would copy the references and look at every message again for each of them: 10 ns for each message and
member. So the list is kept in *blocks* of about a thousand messages; the messages of a closed block never change. What
waits between two positions (a *window*) usually consists of a few whole blocks, which the members' queues share with
their digests (`sbus.flood.digest`), and a piece of one more.

A run can be for some members only. Then it has a mask (`sbus.server.bus.masks`). Consecutive messages with the same
mask form a *stretch*. Members in the same masks of a block share its messages, so members that get few messages of
their own share most blocks with all others. For the other blocks, flood control needs only the number of messages,
their bytes and the shortest packet, which are computed stretch by stretch. The server joins the messages only when a
queue has room for some of them, or when members conflate and the newest message of each key is needed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import chain, compress, pairwise

from sbus.flood.digest import MOST_SEARCHES, Digest
from sbus.routing.runs import newest, shortest, total_size
from sbus.server.bus.masks import Masks

__all__ = ["Block", "Blocks", "Window"]

_BLOCK = 1_024, 256 << 10
"""Messages, or bytes, at which a block is closed. While one of its messages is needed, the whole block is kept."""
_LEAST = 512, 64 << 10
"""Messages, or bytes, from which on `Blocks.close` closes it."""
_STRETCH = 96
"""Bytes of memory that a stretch takes, beside its messages and its mask."""
_MOST_DIGESTS = 64
"""Maximum number of digests kept for one block, and for one window. Members in the same masks share one."""


class _PartialDigest(Digest):
    """The messages of a block for members that are in some of its masks only.

    :param block: the block.
    :param flags: for each stretch of the block, 1 if they get it, else 0.
    """

    __slots__ = ("_block", "_flags")

    def __init__(self, block: Block, flags: bytes) -> None:
        super().__init__([], sum(compress(block.sizes, flags)))
        self._block = block
        self._flags = flags
        self._count = sum(compress(block.counts, flags))

    @property
    def packets(self) -> list[bytes]:
        if not self._packets:
            self._packets = self._chosen(self._block.stretches())
        return self._packets

    def newest(self) -> Digest:
        if self._newest is None:
            self._newest = Digest(newest(self._chosen(self._block.newest_in_stretches())))
        return self._newest

    def shortest(self) -> int:
        if not self._shortest:
            self._shortest = min(compress(self._block.shortest_in_stretches(), self._flags))
        return self._shortest

    def _find_smaller(self, size: int) -> Digest | None:
        if self.shortest() >= size:
            return None
        return Digest(self._chosen(self._block.smaller_in_stretches(size)))

    def may_search(self, size: int) -> bool:
        return self._smaller[0] == size or self._block.may_search(size)

    def _chosen(self, stretches: list[list[bytes]]) -> list[bytes]:
        """Return the messages of the stretches that the members get."""
        return list(chain.from_iterable(compress(stretches, self._flags)))


class Block:
    """A list of messages that does not change.

    :param packets: the messages, at least one.
    :param ends: where each stretch ends, if some are for some members only; else empty.
    :param row: the number of the first stretch's mask.
    :ivar digest: all messages.
    :ivar row: the number of the first stretch's mask.
    :ivar counts: the number of messages in each stretch.
    :ivar sizes: the bytes in each stretch.
    """

    __slots__ = (
        "_digests",
        "_ends",
        "_newest",
        "_searches",
        "_shortest",
        "_smaller",
        "counts",
        "digest",
        "row",
        "sizes",
    )

    def __init__(self, packets: list[bytes], ends: list[int], row: int) -> None:
        self.digest = Digest(packets)
        self.row = row
        self._ends = ends
        self._digests: dict[bytes, Digest | None] = {}
        self._shortest: list[int] = []
        self._newest: list[list[bytes]] = []
        self._smaller: tuple[int, list[list[bytes]]] = 0, []  # than which size, as last asked for
        self._searches = 0
        self.counts = [end - start for start, end in pairwise((0, *ends))] if ends else []
        self.sizes = list(map(total_size, self.stretches())) if ends else []

    def __len__(self) -> int:
        return len(self.digest)

    @property
    def mask_count(self) -> int:
        """The number of masks."""
        return len(self._ends)

    def stretches(self) -> list[list[bytes]]:
        """Return the messages of each stretch."""
        packets = self.digest.packets
        return [packets[start:end] for start, end in pairwise((0, *self._ends))]

    def shortest_in_stretches(self) -> list[int]:
        """Return the size of the shortest packet of each stretch, in bytes."""
        if not self._shortest:
            self._shortest = list(map(shortest, self.stretches()))
        return self._shortest

    def newest_in_stretches(self) -> list[list[bytes]]:
        """Return the newest message of each key in each stretch."""
        if not self._newest:
            self._newest = list(map(newest, self.stretches()))
        return self._newest

    def may_search(self, size: int) -> bool:
        """See `Digest.may_search`."""
        return self._smaller[0] == size or self._searches < MOST_SEARCHES

    def smaller_in_stretches(self, size: int) -> list[list[bytes]]:
        """Return the messages of each stretch whose packets are smaller than a size.

        :param size: bytes.
        """
        if self._smaller[0] != size:
            self._searches += 1
            self._smaller = (
                size,
                [[packet for packet in stretch if len(packet) < size] for stretch in self.stretches()],
            )
        return self._smaller[1]

    def digest_for(self, flags: bytes) -> Digest | None:
        """Return the messages for a member; None if there is none.

        :param flags: for each stretch, 1 if the member gets it, else 0; empty for a block without masks.
        """
        if 0 not in flags:
            return self.digest
        if 1 not in flags:
            return None
        found = self._digests.get(flags)
        if found is None:
            if len(self._digests) >= _MOST_DIGESTS:
                self._digests.clear()
            found = self._digests[flags] = _PartialDigest(self, flags)
        return found

    def part(self, first: int, end: int) -> Block:
        """Return a part of the block.

        :param first: the index of its first message; below 0 counts as 0.
        :param end: the index behind the last one; at most the block's end is used.
        """
        if first <= 0 and end >= len(self):
            return self
        return _part(self.digest.packets, self._ends, self.row, max(0, first), end)


def _part(packets: list[bytes], ends: list[int], row: int, first: int, end: int) -> Block:
    """Return a part of what is to be, or is, a block; see `Block` and `Block.part`."""
    at, until = bisect_right(ends, first), bisect_left(ends, end)
    return Block(packets[first:end], [min(each, end) - first for each in ends[at : until + 1]], row + at)


class Window:
    """The messages between two positions, for each member.

    :param blocks: the messages.
    :param masks: their masks.
    """

    __slots__ = ("_blocks", "_digests", "_end", "_first", "_masks")

    def __init__(self, blocks: list[Block], masks: Masks) -> None:
        rows = [(block.row, block.row + block.mask_count) for block in blocks if block.mask_count]
        self._blocks = blocks
        self._masks = masks
        self._first, self._end = (rows[0][0], rows[-1][1]) if rows else (0, 0)
        self._digests: dict[bytes, Digest | None] = {}

    def digest_for(self, column: int) -> Digest | None:
        """Return the messages for a member; None if there is none.

        :param column: the number of the member's column.
        """
        flags = self._masks.flags(self._first, self._end, column) if self._end else b""
        digests = self._digests
        if flags not in digests:
            if len(digests) >= _MOST_DIGESTS:
                digests.clear()
            digests[flags] = self._join(flags)
        return digests[flags]

    def _join(self, flags: bytes) -> Digest | None:
        parts, at = [], 0
        for block in self._blocks:
            until = at + block.mask_count
            part = block.digest_for(flags[at:until])
            at = until
            if part is not None:
                parts.append(part)
        if len(parts) > 1:
            return Digest.join(parts)
        return parts[0] if parts else None


class Blocks:
    """Messages, each at a position: the number of messages before it, dropped ones included.

    :param start: the position of the first message.
    """

    __slots__ = (
        "_blocks",
        "_bytes",
        "_last",
        "_last_ends",
        "_last_mask",
        "_last_row",
        "_last_size",
        "_last_start",
        "_masks",
        "_starts",
    )

    def __init__(self, start: int = 0) -> None:
        self._bytes = 0  # of the messages that were not dropped
        self._blocks: list[Block] = []
        self._starts: list[int] = []  # the position of each closed block
        self._masks = Masks()
        self._last: list[bytes] = []  # the block that is not closed yet
        self._last_size = 0
        self._last_start = start
        self._last_ends: list[int] = []
        self._last_row = 0
        self._last_mask: int | None = None

    @property
    def size(self) -> int:
        """Bytes of the messages that were not dropped, with the memory of their masks."""
        masks = self._masks
        return self._bytes + len(masks) * (masks.width + _STRETCH)

    @property
    def mask_count(self) -> int:
        """The number of masks."""
        return len(self._masks)

    @property
    def start(self) -> int:
        """The position of the first message that was not dropped."""
        return self._starts[0] if self._starts else self._last_start

    @property
    def end(self) -> int:
        """The position behind the last message."""
        return self._last_start + len(self._last)

    def add(self, packets: list[bytes], size: int, mask: int | None = None) -> Block | None:
        """Add messages at the end.

        :param size: their bytes.
        :param mask: the members that get them (`Masks.add`); None for all.
        :returns: the block that was closed, or None if none was.
        """
        if mask is not None or self._last_ends:
            self._note_mask(mask)
        self._last += packets
        if self._last_ends:
            self._last_ends[-1] = len(self._last)
        self._last_size += size
        self._bytes += size
        return self._close(_BLOCK)

    def _note_mask(self, mask: int | None) -> None:
        """Begin a stretch, unless the last one has the same mask."""
        ends = self._last_ends
        if not ends:
            self._last_row = self._masks.end
            if self._last:
                self._begin(None)
                ends[-1] = len(self._last)
        if not ends or mask != self._last_mask:
            self._begin(mask)

    def _begin(self, mask: int | None) -> None:
        self._masks.add(mask)
        self._last_ends.append(0)
        self._last_mask = mask

    def include(self, column: int) -> None:
        """Add a member to the mask of the last stretch.

        Earlier runs of the stretch are not affected: the member's position is behind them.

        :param column: the number of the member's column.
        """
        if not (self._last_ends if self._last else self._blocks[-1].mask_count):
            return  # it is for all
        self._masks.include(column)
        if self._last and self._last_mask is not None:
            self._last_mask |= 1 << column

    def close(self) -> None:
        """Close the last block if it is long enough, so that windows that end here share it."""
        self._close(_LEAST)

    def _close(self, least: tuple[int, int]) -> Block | None:
        if len(self._last) < least[0] and self._last_size < least[1]:
            return None
        block = Block(self._last, self._last_ends, self._last_row)
        self._blocks.append(block)
        self._starts.append(self._last_start)
        self._last_start = self.end
        self._last, self._last_size, self._last_ends = [], 0, []
        return block

    def window(self, first: int, end: int) -> Window:
        """Return the messages between two positions.

        :param first: the position of the first one, which must not have been dropped.
        :param end: the position behind the last one.
        """
        found = []
        for at in range(max(0, bisect_right(self._starts, first) - 1), bisect_left(self._starts, end)):
            start, block = self._starts[at], self._blocks[at]
            if max(first, start) < min(end, start + len(block)):
                found.append(block.part(first - start, end - start))
        start = self._last_start
        if max(first, start) < min(end, self.end):
            found.append(_part(self._last, self._last_ends, self._last_row, max(0, first - start), end - start))
        return Window(found, self._masks)

    def drop(self, end: int) -> int:
        """Drop the blocks that end at or before a position, and all messages if it is the end.

        :param end: the position.
        :returns: the decrease of `size`, in bytes: messages and masks.
        """
        before = self.size
        if end == self.end:
            self._last_start, self._last, self._last_size, self._last_ends = end, [], 0, []
            self._blocks, self._starts, self._bytes = [], [], 0
            self._masks.drop(self._masks.end)
            return before
        gone = bisect_right(self._starts, end)
        gone -= gone > 0 and self._starts[gone - 1] + len(self._blocks[gone - 1]) > end
        for block in self._blocks[:gone]:
            self._bytes -= block.digest.size
            if block.mask_count:
                self._masks.drop(block.row + block.mask_count)
        del self._blocks[:gone], self._starts[:gone]
        return before - self.size
