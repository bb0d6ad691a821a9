"""A run: messages that go to the same receivers together, and what each receiver's queue asks about them."""

from __future__ import annotations

from typing import Literal

from sbus.flood.naming import Signature, sign
from sbus.routing.runs import newest, shortest, total_size

__all__ = ["NamedRun", "Run"]


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
            self._named = NamedRun(self, signature)
        return self._named


class NamedRun(Run):
    """A run of one publisher, for receivers that have asked: signed copies of its messages.

    They are made when they are first looked at. If none has room, that is never.

    :param plain: the run.
    :ivar signature: the publisher's.
    """

    __slots__ = ("_plain", "_signed", "signature")

    def __init__(self, plain: Run, signature: Signature) -> None:
        self.signature = signature
        self.size = plain.size
        self._plain = plain
        self._signed: list[bytes] | None = None
        self._shortest = -1
        self._newest = self._named = None

    def __len__(self) -> int:
        return len(self._plain)

    @property
    def packets(self) -> list[bytes]:  # type: ignore[override]
        """Signed copies of the messages."""
        if self._signed is None:
            mark = self.signature.mark
            self._signed = [sign(packet, mark) for packet in self._plain.packets]
        return self._signed

    @property
    def shortest(self) -> int:
        """See `Run`."""
        return self._plain.shortest
