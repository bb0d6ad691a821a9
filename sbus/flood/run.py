"""A run: messages that go to the same receivers together, and what each receiver's queue asks about them."""

from __future__ import annotations

from sbus.routing.runs import newest, shortest, total_size

__all__ = ["Run"]


class Run:
    """Messages on their way to one receiver or to many; what it says of them is found out once.

    :param packets: the messages, at least one; nobody may change the list afterwards.
    """

    __slots__ = ("_is_distinct", "_newest", "_shortest", "packets", "size")

    def __init__(self, packets: list[bytes]) -> None:
        self.packets = packets
        self.size = total_size(packets)
        self._shortest = -1
        self._newest: Run | None = None
        self._is_distinct = False  # whether it is known that no key comes twice

    def __len__(self) -> int:
        return len(self.packets)

    @property
    def shortest(self) -> int:
        """The bytes of the shortest packet."""
        if self._shortest < 0:
            self._shortest = shortest(self.packets)
        return self._shortest

    @property
    def newest(self) -> Run:
        """The last message of each key, in the order in which the keys came first."""
        if self._is_distinct:
            return self
        if self._newest is None:
            found = newest(self.packets)
            if len(found) == len(self.packets):
                self._is_distinct = True  # a reference to itself would be garbage for the collector
                return self
            self._newest = Run(found)
        return self._newest
