"""The users of a bus: the server's resources that each one's connections hold.

There is one `User` for each UID with a connection. Fair shares of the queues are counted by user.
"""

from __future__ import annotations

from sbus.flood import SharedBudget, UserShare

__all__ = ["User", "Users"]


class User(UserShare):
    """One UID, with all its connections.

    :ivar uid: the UID.
    :ivar connections: open connections, those that are about to be refused included.
    :ivar patterns: different patterns of these connections.
    :ivar pattern_bytes: the cost of these patterns, by `sbus.server.limits.pattern_cost`.
    """

    __slots__ = ("connections", "pattern_bytes", "patterns", "uid")

    def __init__(self, uid: int, budget: SharedBudget) -> None:
        super().__init__(budget)
        self.uid = uid
        self.connections = 0
        self.patterns = 0
        self.pattern_bytes = 0

    def charge(self, patterns: int, pattern_bytes: int) -> None:
        """Count more patterns of this user."""
        self.patterns += patterns
        self.pattern_bytes += pattern_bytes

    def release(self, patterns: int, pattern_bytes: int) -> None:
        """Count fewer patterns of this user."""
        self.patterns -= patterns
        self.pattern_bytes -= pattern_bytes


class Users:
    """All users with a connection, by UID.

    :param limit: bytes of packets in all queues together.
    """

    def __init__(self, limit: int) -> None:
        self.budget = SharedBudget(limit)
        self._users: dict[int, User] = {}

    def __len__(self) -> int:
        return len(self._users)

    def __getitem__(self, uid: int) -> User:
        return self._users[uid]

    def connect(self, uid: int) -> User:
        """Count a connection of this user; return the user."""
        user = self._users.get(uid)
        if user is None:
            user = self._users[uid] = User(uid, self.budget)
        user.connections += 1
        return user

    def disconnect(self, user: User) -> None:
        """Count a connection less; a user without connections is forgotten."""
        user.connections -= 1
        if not user.connections:
            del self._users[user.uid]
