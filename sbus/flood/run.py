"""A run: messages that go to the same receivers together, and what each receiver's queue asks about them."""

from __future__ import annotations

from typing import Literal

from sbus.flood.naming import NamedRun, Signature
from sbus.routing.runs import newest, shortest, total_size

__all__ = ["Run"]


class Run:
    """Messages on their way to one receiver or to many; what it says of them is found out once.

    :param packets: the messages, at least one; nobody may change the list afterwards.
    """

    __slots__ = ("_named", "_newest", "_shortest", "packets", "size")

    def __init__(self, packets: list[bytes]) -> None:
        self.packets = packets
        self.size = total_size(packets)
        self._shortest = -1
        self._newest: Run | Literal[True] | None = None  # True for this one: a reference to itself would be garbage
        self._named: NamedRun | None = None

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
        if self._newest is None:
            found = newest(self.packets)
            self._newest = len(found) == len(self.packets) or Run(found)
        return self if self._newest is True else self._newest

    def by(self, signature: Signature) -> NamedRun:
        """Return the run as one publisher's, for receivers that have asked who publishes."""
        if self._named is None or self._named.signature is not signature:
            self._named = NamedRun(self.packets, signature)
        return self._named
