"""The limits of queues: of one receiver, and of all receivers together.

All queues share one limit in bytes (`SharedBudget`), so that slow receivers cannot take all of the server's memory. At
that limit a receiver keeps new messages only up to its *fair share*: the limit, divided by the number of users that
have a queue, then by the number of queues of the receiver's user. Shares go by user first, because a user can open
as many connections as it likes: with shares by connection, ten connections would get ten times the memory.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["QueueLimits", "SharedBudget", "UserShare"]


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The limits of one receiver's queue.

    :ivar messages: messages in the queue.
    :ivar bytes: bytes of packets in the queue.
    """

    messages: int = 65_536
    bytes: int = 64 << 20


class SharedBudget:
    """The limit of all queues together.

    :ivar limit: bytes of packets.
    :ivar bytes: bytes of packets in all queues now.
    :ivar users: the number of users that have a queue now.
    """

    __slots__ = ("bytes", "limit", "users")

    def __init__(self, limit: int = 256 << 20) -> None:
        self.limit = limit
        self.bytes = 0
        self.users = 0


class CopyBalance:
    """The copies that may be made for one user's receivers now, as work in units of about 1 µs.

    :ivar work_left: the balance; below 0 it is a debt.
    """

    __slots__ = ("work_left",)

    def __init__(self) -> None:
        self.work_left = 0


class UserShare:
    """One user's part in a `SharedBudget`.

    The queues of all the user's receivers count in it.

    :ivar budget: the budget that all users share.
    :ivar copies: the balance of copies, which the server keeps.
    :ivar queues: the number of this user's queues that hold something now.
    :ivar queued_bytes: bytes of packets in these queues.
    """

    __slots__ = ("budget", "copies", "queued_bytes", "queues")

    def __init__(self, budget: SharedBudget) -> None:
        self.budget = budget
        self.copies = CopyBalance()
        self.queues = 0
        self.queued_bytes = 0

    def add_queue(self) -> None:
        """Count one more queue of this user."""
        self.queues += 1
        if self.queues == 1:
            self.budget.users += 1

    def remove_queue(self) -> None:
        """Count one queue less."""
        self.queues -= 1
        if not self.queues:
            self.budget.users -= 1

    def fair_share(self) -> int:
        """Return the bytes that one queue of this user may hold if the budget is spent."""
        return self.budget.limit // (max(self.budget.users, 1) * max(self.queues, 1))
