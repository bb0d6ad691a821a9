"""The two sides of a link, the steps of a connection, and the interface between a link's core and its shell."""

from __future__ import annotations

import enum
from typing import Protocol

__all__ = ["Side", "Stage", "Wire"]


class Side(enum.IntEnum):
    """One of the two buses."""

    BELOW = 0
    ABOVE = 1

    @property
    def other(self) -> Side:
        """The other bus."""
        return _OTHER[self]


_OTHER = (Side.ABOVE, Side.BELOW)
"""The other side of each side; looking a member up by its number takes ten times as long."""


class Stage(enum.Enum):
    """How far a connection has come."""

    CLOSED = "not connected"
    GREETING = "asked for what there is to know"
    KNOWN = "answered"
    OPEN = "subscribed"


class Wire(Protocol):
    """The shell, as the core of a link uses it."""

    def send(self, side: Side, packets: list[bytes]) -> None:
        """Send packets to one of the buses."""

    def bundle(self, side: Side, limit: int) -> None:
        """Bundle packets to a bus from now on, and accept bundles from it.

        :param limit: bytes in the largest bundle that the bus takes.
        """

    def limit(self, side: Side, size: int) -> None:
        """Note the length of the longest packet to and from a bus.

        :param size: bytes; 0 if the bus does not say.
        """

    def disconnect(self, side: Side, reason: str, retry: float | None) -> None:
        """End a connection, and try again.

        :param retry: seconds until then; None for the usual pause.
        """

    def is_up(self, up: bool, master: str) -> None:
        """Note whether the link now carries messages.

        :param master: the name of the bus above.
        """

    def log(self, text: str) -> None:
        """Log a line for the operator."""
