"""Connections in a forked child: they are the parent's, so every call there raises `sbus.errors.Forked`.

Parent and child would share one socket: each would read packets that the other one waits for, and the server knows the
parent's process ID alone. The child closes its copy of the descriptor, which the parent does not notice.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

from sbus.errors import Forked

__all__ = ["leave_to_parent"]


class _Connection(Protocol):
    def forked(self, error: Forked) -> None:
        """Give the connection up in this child; nothing of the parent's may change."""


_connections: WeakSet[_Connection] = WeakSet()


def leave_to_parent(connection: _Connection) -> None:
    """Have each child that is forked from now on give this connection up."""
    _connections.add(connection)


def _in_child() -> None:
    error = Forked(
        f"this connection to the bus is that of process {os.getppid()}, from which this one was forked: "
        "connect in each process, after the fork"
    )
    for connection in tuple(_connections):
        connection.forked(error)
    _connections.clear()


os.register_at_fork(after_in_child=_in_child)
