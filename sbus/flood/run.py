"""A run: messages that go to the same receivers together, with the properties that each receiver's queue asks for."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal, cast

from sbus.flood.naming import Signed, sign_each
from sbus.routing.runs import find_type, newest, shortest, total_size

__all__ = ["NamedRun", "Run"]


class Run:
    """Messages on their way to one receiver or to many; each property is computed once.

    :param packets: the messages, at least one; nobody may change the list afterwards.
    :ivar count: the number of messages.
    :ivar size: their bytes.
    """

    __slots__ = ("_newest", "_shortest", "count", "packets", "size")

    def __init__(self, packets: list[bytes]) -> None:
        self.packets = packets
        self.count = len(packets)
        self.size = total_size(packets)
        self._shortest = -1
        self._newest: Run | Literal[True] | None = None  # True for this one: a reference to itself would be garbage

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
            self._newest = len(found) == self.count or Run(found)
        return self if self._newest is True else self._newest


class NamedRun(Run):
    """A run for receivers that have asked for senders: signed copies of its messages.

    The copies are made on first use. If no queue has room for them, or each keeps the run in the order of arrival, they
    are never made.

    :param packets: the messages; the first of each publisher in a row is signed.
    :ivar leading: the messages as given in `packets`.
    """

    __slots__ = ("_parts", "_signed", "leading")

    def __init__(self, packets: list[bytes]) -> None:
        self.leading = packets
        self.count = len(packets)
        self.size = total_size(packets)
        self._signed: list[bytes] | None = None
        self._parts: list[NamedRun] = []
        self._shortest = -1
        self._newest = None

    @property
    def packets(self) -> list[bytes]:  # type: ignore[override]
        """The messages, all of them signed."""
        if self._signed is None:
            self._signed = sign_each(self.leading, None)
        return self._signed

    @property
    def shortest(self) -> int:
        """See `Run`."""
        if self._shortest < 0:
            self._shortest = shortest(self.leading)
        return self._shortest

    @property
    def user(self) -> Hashable:
        """The user of the first publisher; see `Signature`."""
        return cast(Signed, self.leading[0]).user

    @property
    def parts(self) -> list[NamedRun]:
        """This run, split into runs of one publisher each."""
        if not self._parts:
            packets, end = self.leading, 0
            while end >= 0:
                start, end = end, find_type(packets, Signed, end + 1)
                self._parts.append(NamedRun(packets[start:] if end < 0 else packets[start:end]))
        return self._parts
