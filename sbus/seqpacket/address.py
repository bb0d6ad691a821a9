"""The address of a SEQPACKET socket, as a Twisted address."""

from __future__ import annotations

import os

from twisted.internet.interfaces import IAddress
from zope.interface import implementer

__all__ = ["PacketAddress"]


@implementer(IAddress)
class PacketAddress:
    """A Unix-domain SEQPACKET address.

    :ivar name: the path, or the abstract name (which begins with a NUL), in bytes; empty if it has none.
    """

    __slots__ = ("name",)

    def __init__(self, name: bytes | str | None) -> None:
        self.name = os.fsencode(name or b"")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PacketAddress) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"PacketAddress({self.name!r})"
