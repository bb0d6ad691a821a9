"""The members of a bus: the connected clients and their numbers.

Callers can wait here for the last client to leave.
"""

from __future__ import annotations

from collections import Counter

from twisted.internet import defer

from sbus.protocol.keys import PeerCredentials
from sbus.server.bus.admission import reserve
from sbus.server.core.interfaces import Client
from sbus.server.core.listeners import MAIN, Listener
from sbus.server.core.users import User, is_exempt

__all__ = ["Members"]


class Members:
    """The connected clients.

    :param limit: connections at one time, sidecars aside; a `sbus.server.core.listeners.Listener` can have another.
    :ivar clients: the clients by their numbers.
    :ivar sidecars: the UID that each sidecar counts as, by its PID. Sidecars do not count toward the limit or for
        `when_empty`.
    """

    def __init__(self, limit: int) -> None:
        self.clients: dict[int, Client] = {}
        self.sidecars: dict[int, int] = {}
        self._limit = limit
        self._last_number = 0
        self._sidecar_numbers: set[int] = set()
        self._at: Counter[str] = Counter()
        self._of_user_at: Counter[tuple[str, int]] = Counter()
        self._when_empty: list[defer.Deferred[None]] = []
        self._when_gone: list[defer.Deferred[None]] = []

    @property
    def count(self) -> int:
        """The number of clients, sidecars aside."""
        return len(self.clients) - len(self._sidecar_numbers)

    def is_attached(self, uid: int) -> bool:
        """Return whether the sidecar that counts as this UID is connected."""
        return any(self.sidecars.get(self.clients[number].peer.pid) == uid for number in self._sidecar_numbers)

    def has_room(self, peer: PeerCredentials, listener: Listener = MAIN) -> bool:
        """Return whether one more client may come at this socket."""
        if self.is_sidecar(peer):
            return True
        return self.count < self._limit and (
            listener.max_clients is None or self._at[listener.name] < listener.max_clients
        )

    def keeps(self, listener: Listener, uid: int) -> bool:
        """Return whether the places that are left at a socket are kept for users other than this one.

        Those that `sbus.server.bus.admission.reserve` keeps of a socket's own limit are for users without a client at
        it, unless the socket is that of one user.

        :param uid: the UID that the user counts for.
        """
        most = listener.max_clients
        if most is None or (listener.users is not None and len(listener.users) == 1):
            return False
        return most - self._at[listener.name] <= reserve(most) and self._of_user_at[listener.name, uid] > 0

    def is_sidecar(self, peer: PeerCredentials) -> bool:
        """Return whether this is a sidecar, and no client of another user that had its PID before, and has waited."""
        return peer.pid in self.sidecars and is_exempt(peer.uid)

    def add(self, client: Client) -> None:
        """Add a client and give it its number."""
        self._last_number += 1
        client.number = self._last_number
        self.clients[client.number] = client
        client.user.clients[client] = None
        if self.is_sidecar(client.peer):
            self._sidecar_numbers.add(client.number)
        else:
            self._at[client.listener.name] += 1
            self._count(client, client.user, 1)

    def recount(self, client: Client, before: User) -> None:
        """Count a client, which is no sidecar, for the user that it belongs to now."""
        del before.clients[client]
        client.user.clients[client] = None
        self._count(client, before, -1)
        self._count(client, client.user, 1)

    def _count(self, client: Client, user: User, more: int) -> None:
        """Count the clients of a user at a socket that has a separate limit."""
        if client.listener.max_clients is not None:
            key = client.listener.name, user.uid
            self._of_user_at[key] += more
            if not self._of_user_at[key]:
                del self._of_user_at[key]

    def __contains__(self, client: Client) -> bool:
        return client.number in self.clients

    def remove(self, client: Client) -> list[defer.Deferred[None]]:
        """Remove a client.

        :returns: the Deferreds to fire once the caller's own state is consistent.
        """
        del self.clients[client.number]
        del client.user.clients[client]
        fired: list[defer.Deferred[None]] = []
        if client.number in self._sidecar_numbers:
            self._sidecar_numbers.discard(client.number)
            is_last = False
        else:
            self._at[client.listener.name] -= 1
            self._count(client, client.user, -1)
            is_last = len(self.clients) == len(self._sidecar_numbers)
        if is_last:
            fired, self._when_empty = self._when_empty, []
        if not self.clients:
            fired += self._when_gone
            self._when_gone = []
        return fired

    def when_empty(self) -> defer.Deferred[None]:
        """Return a Deferred that fires when the last client, sidecars aside, leaves next."""
        deferred: defer.Deferred[None] = defer.Deferred()
        self._when_empty.append(deferred)
        return deferred

    def when_gone(self) -> defer.Deferred[None]:
        """Return a Deferred that fires when no client is left, sidecars included."""
        if not self.clients:
            return defer.succeed(None)
        deferred: defer.Deferred[None] = defer.Deferred()
        self._when_gone.append(deferred)
        return deferred

    def all(self, *, sidecars: bool) -> list[Client]:
        """Return all clients.

        :param sidecars: the sidecars, too.
        """
        return [client for client in self.clients.values() if sidecars or client.number not in self._sidecar_numbers]
