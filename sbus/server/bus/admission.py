"""Admission: which connections of which users a bus takes.

Theory of operation
-------------------

No user may take all places of a bus. `Admission` judges each accepted connection by the user whom the kernel names:

=============  ========================================================================================================
bound          rule
=============  ========================================================================================================
rate           Each user has a bucket of connections (`sbus.server.bus.buckets`), filled by its accepts a second
               (``--user-accepts``), with five seconds' worth; a connection that finds it empty is refused.
one user       its clients (``--user-clients``); by default 256: each client takes a place, and is a receiver for its
               patterns; thousands cost everybody else
reserves       The last 64 places (or a quarter) and the last 317 descriptors (or a third), whichever is less, are for
               users without a connection. A newcomer is refused only when 64 users have taken the reserve, with one
               connection each; the 253 descriptors left then are needed to read packets with descriptors.
=============  ========================================================================================================

Accepting and closing a connection costs about 15 µs. Leaving it in the backlog would lock everybody out: the kernel
shows its user only once it is accepted. A refused connection gets no bytes, and none of its bytes are read: the port
asks before it makes anything for a connection (`sbus.seqpacket.interfaces.IPeerGate`). For a connection that comes
another way, only `room` is asked.

Users may have their own limits (`sbus.server.core.shares`). Root and the server's own user are exempt: they can stop
the bus anyway, and repair it. The recorder runs as one of them, but counts as a separate user
(`sbus.server.core.users.RECORDER`).

The buckets outlive the connections: a range of 65,536 subordinate UIDs has 13 MB of them for at most 5 s. The
descriptors of connections are known; while the reserve is near, the server looks up the number of the others at most
once a second.

Rejected: a rate for all users together (one user would spend it); refusing by the descriptor's number, which is the
lowest free one (numbers become free in the middle while the reserve is in use).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sbus.errors import CloseReason
from sbus.server.bus.buckets import Buckets
from sbus.server.core.limits import Limits
from sbus.server.core.users import Users, is_exempt
from sbus.syscalls.descriptors import descriptor_limit, open_descriptors
from sbus.syscalls.sockets import MOST_PASSED

__all__ = [
    "BURST_SECONDS",
    "DESCRIPTOR_RESERVE",
    "RESERVE",
    "AcceptRates",
    "Admission",
    "descriptor_reserve",
    "reserve",
]

RESERVE = 64
"""Places of clients that are kept for users without a connection."""
DESCRIPTOR_RESERVE = RESERVE + MOST_PASSED
"""Descriptors that are kept for these users, and for descriptors that arrive with a packet: with fewer, all clients
that take large messages would wait."""
_DESCRIPTOR_PART = 3
"""They are at most this part (one over it) of the limit: with a quarter of 1,024, too few were left for large messages
when three users had 256 clients each, and four newcomers had come."""
BURST_SECONDS = 5
"""Seconds' worth of connections that a user who has not connected for a while may make at once."""

_LOOK_NEAR, _LOOK_FAR = 1.0, 60.0
"""Seconds between two looks at the open descriptors while the reserve is near, and while it is far."""
_NEAR = 2 * DESCRIPTOR_RESERVE
"""Free descriptors below which the reserve is near."""


def reserve(places: int) -> int:
    """Return how many of these places are kept for users without a connection."""
    return min(RESERVE, places // 4)


def descriptor_reserve(limit: int) -> int:
    """Return how many of the descriptors that the process may have are kept for these users, and to read packets."""
    return min(DESCRIPTOR_RESERVE, limit // _DESCRIPTOR_PART)


class AcceptRates:
    """How often users may connect.

    :param rate_of: returns the connections a second of a user.
    :param clock: seconds of the monotonic clock.
    """

    def __init__(self, rate_of: Callable[[int], float], clock: Callable[[], float] = time.monotonic) -> None:
        self._buckets = Buckets(lambda uid: (rate := rate_of(uid), rate * BURST_SECONDS), clock)

    def __len__(self) -> int:
        return len(self._buckets)

    def left(self, uid: int) -> int:
        """Return how often a user may connect at once now."""
        return int(self._buckets.level(uid))

    def take(self, uid: int) -> bool:
        """Count a connection of a user; return whether the user may make it."""
        if self._buckets.level(uid) < 1:
            return False
        self._buckets.take(uid, 1)
        return True


class Admission:
    """Decides about connections.

    :param users: the users with a connection, and the limits of all.
    :param clock: seconds of the monotonic clock.
    :param count_open: returns the number of open descriptors.
    :param limit: returns the number of descriptors that the process may have.
    :ivar rates: how often users may connect.
    """

    def __init__(
        self,
        limits: Limits,
        users: Users,
        *,
        clock: Callable[[], float] = time.monotonic,
        count_open: Callable[[], int] = open_descriptors,
        limit: Callable[[], int] = descriptor_limit,
    ) -> None:
        self._users = users
        self._shares = users.shares
        self._max_clients = limits.max_clients
        self._client_reserve = reserve(limits.max_clients)
        self.rates = AcceptRates(lambda uid: users.shares.of(uid).accepts.most, clock)
        self._clock = clock
        self._count_open = count_open
        self._limit = limit
        self._other_descriptors = 0
        self._look_at = self._look_near_at = float("-inf")

    def refusal(self, uid: int, clients: int) -> CloseReason | None:
        """Return why a connection that was just accepted must be refused, or None if it need not.

        :param uid: the UID that it counts for, as `sbus.server.core.users.Users` knows it.
        :param clients: the clients that are connected, sidecars aside.
        """
        if is_exempt(uid):
            return None
        if not self.rates.take(uid):
            return CloseReason.TOO_MANY_USER_CONNECTS
        connections = self._users.connections_of(uid)
        if connections and not self._has_descriptors():
            return CloseReason.KEPT_FOR_OTHERS
        return self.room(uid, connections, clients)

    def room(self, uid: int, connections: int, clients: int) -> CloseReason | None:
        """Return why one more connection of a user has no room on the bus, or None if it has.

        :param connections: the user's connections, without this one.
        :param clients: as for `refusal`.
        """
        if is_exempt(uid):
            return None
        if connections >= self._shares.of(uid).clients.most:
            return CloseReason.TOO_MANY_USER_CLIENTS
        if connections and self._max_clients - clients <= self._client_reserve:
            return CloseReason.KEPT_FOR_OTHERS
        return None

    def _has_descriptors(self) -> bool:
        """Return whether more descriptors than the reserve were free before the one that was just accepted."""
        limit, connections = self._limit(), self._users.connections
        now = self._clock()
        free = limit - connections - self._other_descriptors
        if now >= self._look_at or (free < _NEAR and now >= self._look_near_at):
            self._other_descriptors = max(0, self._count_open() - connections - 1)
            self._look_at, self._look_near_at = now + _LOOK_FAR, now + _LOOK_NEAR
            free = limit - connections - self._other_descriptors
        return free > descriptor_reserve(limit)
