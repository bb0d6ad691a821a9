"""The chore of sending packets that waited until their socket had room."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Drain"]


class _Client(Protocol):
    number: int

    def drain(self, until: int) -> bool: ...


class Drain:
    """Packets that wait for a socket that has room again, to be sent: a chore of the receiver's user.

    :param client: the receiver.
    """

    __slots__ = ("_client",)

    def __init__(self, client: _Client) -> None:
        self._client = client

    def run(self, until: int) -> bool:
        """See `sbus.fair.Entry`."""
        return self._client.drain(until)

    def describe(self) -> dict[str, Any]:
        """See `sbus.fair.Entry`."""
        return {"client": self._client.number}
