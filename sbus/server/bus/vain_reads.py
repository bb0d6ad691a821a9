"""Vain reads: the part of the server's time that reading tiny pieces of packets may take, for each user.

.. rubric:: Theory of operation

A client on a stream socket can send single bytes. The kernel keeps a buffer for each of them and frees it as the server
reads, so the work grows with what the client sends, whatever the server reads at a time. Turns bound it to a fair part
of the server's time (`sbus.server.core.turns`), but a server that is never idle also takes the processor from the
clients of others: beside 500 such clients, another user had half of its throughput on a machine with two processors.

So a read is *vain* as far as it takes longer than its bytes are worth (`sbus.seqpacket.framing`), and each user has a
twentieth of the time for that. Once it has spent this, and a second's worth at once, a client rests before the server
reads from it again. A client that sends its packets whole, or in large pieces, does not notice.
"""

from __future__ import annotations

from collections.abc import Callable

from sbus.server.bus.buckets import Buckets

__all__ = ["VainReads"]

_RATE = 50_000
"""Microseconds of vain reads that each user has in a second, and at once."""
_LONGEST = 10
"""Seconds that a client rests at most."""


class VainReads:
    """What the vain reads of each user have taken.

    :param clock: seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._buckets = Buckets(_RATE, _RATE, clock, debt=_RATE * _LONGEST)

    def rest_after(self, uid: int, took: int) -> float:
        """Count a vain read of a user.

        :param took: its CPU time, in microseconds.
        :returns: seconds that the client has to rest, mostly 0.
        """
        return max(0.0, -self._buckets.take(uid, took) / _RATE)
