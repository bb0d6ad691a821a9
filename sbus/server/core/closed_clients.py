"""The connections that ended last, for an operator who asks why.

Connections that were refused are not among them: anyone can make thousands of these, and they would push out the ones
that matter. The log and the counters have them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from sbus.errors import CloseReason
from sbus.protocol.keys import PeerCredentials

__all__ = ["REMEMBERED", "ClosedClient", "ClosedClients"]

REMEMBERED = 1000
"""Closed connections that a server remembers."""


class ClosedClient(NamedTuple):
    """One connection that has ended.

    :ivar number: the client's number, which counts connections from 1.
    :ivar peer: the client's credentials.
    :ivar user: the UID of the user that its limits counted for.
    :ivar connected_at: seconds since the epoch.
    :ivar closed_at: seconds since the epoch.
    :ivar reason: why the connection ended.
    :ivar lost: messages that were dropped for the client.
    :ivar conflated: messages for the client that newer ones of their keys replaced.
    :ivar listener: the name of the socket that it came through; empty if that has none.
    """

    number: int
    peer: PeerCredentials
    user: int
    connected_at: float
    closed_at: float
    reason: CloseReason
    lost: int
    conflated: int
    listener: str


class ClosedClients:
    """The last `REMEMBERED` closed connections, the newest first."""

    def __init__(self) -> None:
        self._clients: deque[ClosedClient] = deque(maxlen=REMEMBERED)

    def __len__(self) -> int:
        return len(self._clients)

    def __iter__(self) -> Iterator[ClosedClient]:
        return reversed(self._clients)

    def add(self, client: ClosedClient) -> None:
        """Remember a connection that has just ended; the oldest one is forgotten for it."""
        self._clients.append(client)
