"""Vain reads: the part of the server's time that reading tiny pieces of packets of one user's stream clients may take.

.. rubric:: Theory of operation

A client on a stream socket can send single bytes. The kernel keeps a buffer for each of them and frees it as the server
reads, so the work grows with what the client sends, whatever the server reads at a time. Turns bound it to a fair part
of the server's time (`sbus.server.turns`), but a server that is never idle also takes the processor from the clients of
others: beside 500 such clients, another user had half of its throughput on a machine with two processors.

So each user has a twentieth of the time for reads that complete no packet. Once it has spent this, and `_BURST` more, a
client rests before the server reads from it again. A client that sends a large packet in large pieces does not notice:
the time that its bytes are worth is not counted (`sbus.seqpacket.framing`).
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["rest_after"]

_PART = 20
"""Reads that complete no packet take this part (one over it) of the time."""
_BURST = 1.0
"""Seconds that a user may be ahead before its clients rest."""
_LONGEST = 10.0
"""Seconds that a client rests at most."""


class _User(Protocol):
    """A user (`sbus.server.users.User`)."""

    vain_until: float


def rest_after(user: _User, took: int, now: float) -> float:
    """Count a read that has completed no packet.

    :param took: its CPU time, in microseconds.
    :param now: seconds of a monotonic clock.
    :returns: seconds that the client has to rest, mostly 0.
    """
    until = max(now, user.vain_until) + took * _PART / 1e6
    user.vain_until = min(until, now + _BURST + _LONGEST)
    return max(0.0, user.vain_until - now - _BURST)
