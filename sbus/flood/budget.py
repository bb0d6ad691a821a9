"""The limits of queues and of memory: of one receiver, of one user, and of all together.

.. rubric:: Queues, in bytes of packets

All queues share one limit (`SharedBudget`), so that slow receivers cannot take all memory. An eighth of it is kept for
users who have nothing in a queue yet: when the other seven eighths are taken, a receiver keeps new messages only up to
its *fair share* of them, that is, these seven eighths divided by the number of users that have a queue, then by the
number of queues of the receiver's user. Shares go by user first, because a user can open any number of connections.
When the eighth is taken too, a user is left with its *minimum*, the smaller of 4 MiB and the fair share.

.. rubric:: Memory, in bytes of memory

A small packet takes more memory than it has bytes: a message of 100 bytes takes 160, and 340 once it has a rank under
``order/random``. `MemoryAccount` counts the real weight of packets, patterns and connections, at fixed prices that are
upper bounds within a factor of two (docs/server.rst has the measurements).

A message that waits in several queues is one object, but each queue is charged for all of it: parts would change for
all other queues whenever one of them drops the message.

Messages that have passed the queues of receivers without congestion are charged to nobody: the fast path costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sbus.syscalls.elsewhere import Closing

__all__ = [
    "MINIMUM",
    "UNLIMITED",
    "USER_PAYLOADS",
    "MemoryAccount",
    "PayloadShare",
    "QueueLimits",
    "SharedBudget",
    "UserShare",
]

MINIMUM = 4 << 20
"""Bytes of memory, and of packets in queues, that a user may have in any case, if the fair share is not less."""
UNLIMITED = 1 << 62
"""A limit, in bytes, that is never reached."""
USER_PAYLOADS = 64
"""Memory files of payloads that one user has published and that may wait: 16 users take 1,024 descriptors."""
_RESERVED = 8
"""The fraction (one over it) of all queues that is kept for users without a queue."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The limits of one receiver's queue.

    :ivar messages: messages in the queue.
    :ivar bytes: bytes of packets in the queue.
    """

    messages: int = 65_536
    bytes: int = 64 << 20


class MemoryAccount:
    """The memory that all clients make the server hold, in its own process and in the kernel.

    :ivar limit: bytes.
    :ivar user_limit: bytes of one user.
    :ivar held: bytes that are charged now.
    :ivar users: the number of users with something to charge.
    :ivar on_full: called whenever the limit is found to be reached; it must change nothing before it returns.
    """

    __slots__ = ("held", "limit", "on_full", "user_limit", "users")

    def __init__(self, limit: int = UNLIMITED, user_limit: int = UNLIMITED) -> None:
        self.limit = limit
        self.user_limit = user_limit
        self.held = 0
        self.users = 0
        self.on_full: Callable[[], None] | None = None

    def minimum(self) -> int:
        """Return the bytes that a user may have even if the account is full."""
        return min(MINIMUM, self.limit // max(self.users, 1))

    def charge(self, size: int) -> None:
        """Charge memory that belongs to no connection, or give it back.

        :param size: bytes; below 0 to give back.
        """
        self.held += size
        if self.held > self.limit:
            self.full()

    def full(self) -> None:
        """Report that the limit is reached."""
        if self.on_full is not None:
            self.on_full()


class SharedBudget:
    """The limit of all queues together.

    :ivar limit: bytes of packets.
    :ivar bytes: bytes of packets in all queues now.
    :ivar messages: messages in all queues now.
    :ivar queues: the number of queues that hold something now.
    :ivar users: the number of users that have a queue now.
    :ivar unreserved: the part of the limit, in bytes, that users who have a queue may take.
    :ivar user_payloads: memfds with large messages of one publisher's user that may wait.
    :ivar payload_files: memfds with large messages that wait.
    :ivar memory: the account of memory.
    """

    __slots__ = (
        "bytes",
        "limit",
        "memory",
        "messages",
        "payload_files",
        "queues",
        "unreserved",
        "user_payloads",
        "users",
    )

    def __init__(
        self, limit: int = 256 << 20, memory: MemoryAccount | None = None, user_payloads: int = USER_PAYLOADS
    ) -> None:
        self.limit = limit
        self.user_payloads = user_payloads
        self.payload_files = 0
        self.unreserved = limit - limit // _RESERVED
        self.bytes = 0
        self.messages = 0
        self.queues = 0
        self.users = 0
        self.memory = memory or MemoryAccount()


class PayloadShare(Closing):
    """The memory and descriptors that one user's large messages take, even after its connections, also in the kernel.

    :ivar files: memfds that the user has published, and that wait (`sbus.flood.payloads`).
    :ivar bytes: the bytes of these.
    :ivar receivers: the files and their bytes, by the users of their receivers.
    :ivar connections: connections that take descriptors (`sbus.seqpacket.payload_sender`).
    :ivar ended: those of them that have ended, and are kept until their peers have read the descriptors.
    """

    __slots__ = ("__weakref__", "bytes", "connections", "ended", "files", "receivers")

    def __init__(self) -> None:
        super().__init__()
        self.files = self.bytes = 0
        self.receivers: dict[UserShare, tuple[int, int]] = {}
        self.connections = self.ended = 0


class UserShare:
    """One user's part in a `SharedBudget`, and in its `MemoryAccount`.

    The queues of all the user's receivers count in it.

    :ivar budget: the budget that all users share.
    :ivar queues: the number of this user's queues that hold something now.
    :ivar queued_bytes: bytes of packets in these queues.
    :ivar memory: bytes of memory that are charged to this user.
    :ivar memory_limit: the limit of these; `UNLIMITED` for a user that is exempt.
    :ivar payloads: the waiting payloads that this user has published.
    :ivar buffers: bytes that the send buffers of this user's connections could hold, full.
    """

    __slots__ = ("budget", "buffers", "memory", "memory_limit", "payloads", "queued_bytes", "queues")

    def __init__(self, budget: SharedBudget) -> None:
        self.budget = budget
        self.queues = 0
        self.queued_bytes = 0
        self.buffers = 0
        self.payloads = PayloadShare()
        self.memory = 0
        self.memory_limit = budget.memory.user_limit

    def add_queue(self) -> None:
        """Count one more queue of this user."""
        self.queues += 1
        self.budget.queues += 1
        if self.queues == 1:
            self.budget.users += 1

    def remove_queue(self) -> None:
        """Count one queue less."""
        self.queues -= 1
        self.budget.queues -= 1
        if not self.queues:
            self.budget.users -= 1

    def fair_share(self, size: int = 0) -> int:
        """Return the bytes that one queue of this user may hold when the part for all users is taken.

        :param size: bytes that are about to be added; beyond the limit of all queues only the user's minimum is left.
        """
        budget = self.budget
        share = budget.unreserved // max(budget.users, 1)
        if budget.bytes + size > budget.limit:
            share = min(share, MINIMUM)
        return share // max(self.queues, 1)

    def charge_memory(self, size: int) -> None:
        """Charge memory to this user, or give it back.

        :param size: bytes; below 0 to give back.
        """
        self.memory += size
        self.budget.memory.charge(size)

    def may_hold(self, size: int) -> bool:
        """Return whether `size` more bytes of memory are within the limit of this user."""
        return self.memory + size <= self.memory_limit

    def has_memory(self, size: int) -> bool:
        """Return whether this user may take `size` more bytes of memory: also if all users together have no more."""
        account = self.budget.memory
        after = self.memory + size
        if after > self.memory_limit:
            return False
        if account.held + size <= account.limit:
            return True
        account.full()
        return after <= account.minimum()
