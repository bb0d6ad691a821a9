"""The users of a bus: the server's resources that each one's connections hold.

There is one `User` for each UID with a connection. Fair shares of the queues are counted by user. Programs that serve
the bus itself, such as its recorder, are users with a negative UID, which no process has: they run as root or as the
server's user, and are not exempt as these are. The server knows those that it has started; others say what they are
(`sbus.server.bus.services`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

from sbus.fair import Lines
from sbus.fair.lines import MOST_BYTES
from sbus.flood import UNLIMITED, USER_PAYLOADS, MemoryAccount, PayloadShare, SharedBudget, UserShare
from sbus.policy.rules import UserLimits
from sbus.routing.cost import MatchCost
from sbus.server.core.denied import Denied
from sbus.server.core.limits import Limits
from sbus.server.core.shares import Share, Shares
from sbus.syscalls.users import is_owner

__all__ = ["LINK", "RECORDER", "SERVICES", "User", "Users", "is_exempt"]

RECORDER = -1
"""The UID of the user that the recorder of a bus is."""
LINK = -2
"""The UID of the user that the link of a bus to its master is, at that bus."""
_MAIL_PART = 32
"""The mail of one user takes this part (one over it) of the memory that the user may take (row ``max-packets``)."""
SERVICES = -3
"""The UID of the user that all other links, bridges, recorders and monitors of root and the server's user are."""


def is_exempt(uid: int) -> bool:
    """Return whether the limits of one user do not apply: to root, and to the server's own user."""
    return is_owner(uid)


class User(UserShare):
    """One UID, with all its connections.

    :ivar uid: the UID.
    :ivar share: its limits, and where they come from; `is_exempt` says whether they apply.
    :ivar connections: open connections, those that are about to be refused included.
    :ivar patterns: different patterns of these connections.
    :ivar match_cost: the steps that these patterns can add to the look-up of a key, those of secrets aside.
    :ivar secret_match_cost: the steps that its secret patterns can add to the look-up of a secret key, by their
        ``<rest>``.
    :ivar lines: the work that waits for the user's turns (`sbus.fair`).
    :ivar clients: its admitted clients, until their connections are lost.
    :ivar askers: receivers of this user that have asked for senders.
    :ivar blockers: receivers of this user whose strategies can block a publisher.
    """

    __slots__ = (
        "askers",
        "blockers",
        "clients",
        "connections",
        "lines",
        "match_cost",
        "patterns",
        "secret_match_cost",
        "share",
        "uid",
    )

    def __init__(self, uid: int, budget: SharedBudget, separator: bytes, share: Share) -> None:
        super().__init__(budget)
        self.uid = uid
        self.connections = 0
        self.patterns = 0
        self.askers: dict[Any, None] = {}
        self.blockers: dict[Any, None] = {}
        self.clients: dict[Any, None] = {}
        self.match_cost = MatchCost(separator)
        self.secret_match_cost = MatchCost(separator)
        self.lines = Lines()
        self.take_share(share)

    def take_share(self, share: Share) -> None:
        """Take these limits from now on; memory and places already held stay, even above them."""
        self.share = share
        self.memory_limit = UNLIMITED if self.is_exempt else share.memory.most
        self.lines.most_bytes = min(MOST_BYTES, self.memory_limit // _MAIL_PART)

    @property
    def is_exempt(self) -> bool:
        """Whether the limits of one user do not apply to this one."""
        return is_exempt(self.uid)

    @property
    def has_pattern_limits(self) -> bool:
        """Whether the limits of patterns apply to this user: services subscribe on behalf of others."""
        return self.uid != SERVICES and not self.is_exempt


class Users:
    """All users with a connection, by UID.

    :param limit: bytes of packets in all queues together.
    :param separator: the byte between two segments of a pattern.
    :param memory: the account of the memory of all users.
    :param shares: the limits of each user; by default those of `Limits`.
    :param payloads: memfds with large messages of one publisher's user that may wait.
    :ivar shares: the limits of each user.
    :ivar denied: the refusals of users.
    :ivar connections: open connections of all users, those that are about to be refused included.
    """

    def __init__(
        self,
        limit: int,
        separator: bytes = b"/",
        memory: MemoryAccount | None = None,
        shares: Shares | None = None,
        payloads: int = USER_PAYLOADS,
    ) -> None:
        self.budget = SharedBudget(limit, memory, payloads)
        # A user who leaves and comes back must not get more payloads to wait meanwhile.
        self._payloads: WeakValueDictionary[int, PayloadShare] = WeakValueDictionary()
        self.shares = shares or Shares(Limits(), self.budget.memory.user_limit)
        self.denied = Denied()
        self.connections = 0
        self._separator = separator
        self._users: dict[int, User] = {}

    def __len__(self) -> int:
        return len(self._users)

    def all(self) -> list[User]:
        """Return all users."""
        return list(self._users.values())

    def __getitem__(self, uid: int) -> User:
        return self._users[uid]

    def connections_of(self, uid: int) -> int:
        """Return the number of connections of a user."""
        user = self._users.get(uid)
        return 0 if user is None else user.connections

    def set_limits(self, tables: Iterable[UserLimits]) -> None:
        """Let tables of a policy override the limits of the users whom they name, also of those with a connection."""
        self.shares.override(tables)
        for user in self._users.values():
            user.take_share(self.shares.of(user.uid))

    def connect(self, uid: int) -> User:
        """Count a connection of this user; return the user."""
        user = self._users.get(uid)
        if user is None:
            user = self._users[uid] = User(uid, self.budget, self._separator, self.shares.of(uid))
            user.payloads = self._payloads.setdefault(uid, user.payloads)
            self.budget.memory.users = len(self._users)
        user.connections += 1
        self.connections += 1
        return user

    def disconnect(self, user: User) -> None:
        """Count one connection less; `forget` must follow, once no work for the user is left."""
        user.connections -= 1
        self.connections -= 1

    def forget(self, user: User) -> None:
        """Forget a user that has rested, and has no connections or patterns left."""
        has_nothing = not user.connections and not user.patterns and user.lines.has_rested
        if has_nothing and self._users.get(user.uid) is user:
            del self._users[user.uid]
            self.budget.memory.users = len(self._users)
