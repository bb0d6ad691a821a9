"""A client's connection: the user who pays for it, and the reasons why it is not read.

`Connection` is the base of the receiving half (`sbus.server.bus.receiving`), and through that of the whole connection
(`sbus.server.bus.protocol`). The server reads from a client unless there is a reason not to. When the last reason goes,
the transport resumes:

======================  ===========================================================================================
it is not read while    until
======================  ===========================================================================================
a receiver blocks it    that receiver has room (`Connection.resume_publishing`)
mail from it must be    the last such entry is done (`Connection.mail_delivered`)
delivered first
it waits for a turn     its user has one, or room in the mail (`sbus.fair`)
its pace is too high    its user has tokens again (`sbus.server.bus.pace`)
a snapshot is loading   the last packet of it has been queued
too many replies wait   it has read some: `MAX_REPLIES`, counting replies held back and its letters in the mail
======================  ===========================================================================================

The memory that the client holds, here and in the kernel, is charged to its user (`Connection.memory`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from sbus.errors import CloseReason
from sbus.flood import SendQueue
from sbus.seqpacket.interfaces import IPacketTransport
from sbus.server.bus.memory import CLIENT_MEMORY
from sbus.server.bus.pace import Pace
from sbus.server.bus.registry import SubscriptionRegistry
from sbus.server.core.limits import MAX_REPLIES
from sbus.server.core.users import User

__all__ = ["Connection"]


class _Hot:
    """The fields that loops over thousands of receivers read, first in the object.

    Elsewhere in it, they reduce row ``flip`` to a third.
    """

    __slots__ = ("direct", "queue", "transport", "user")

    direct: SendQueue | None
    queue: SendQueue
    transport: IPacketTransport | None
    user: User


class Connection(_Hot, ABC):
    """The part of a connection that charges its user, and that decides whether the client is read.

    :ivar registry: the bus.
    :ivar pattern_memory: the memory of its subscriptions (`sbus.server.bus.memory.pattern_memory`).
    :ivar reason: why the connection is to be closed, or was; else None.
    :ivar is_paused: whether the client is not read from.
    """

    __slots__ = (
        "_buffer",
        "_held",
        "_in_kernel",
        "_is_blocked",
        "_is_loading",
        "_is_waiting",
        "_kept",
        "_letters",
        "_mail",
        "_pace",
        "_unsent",
        "is_paused",
        "pattern_memory",
        "reason",
        "registry",
    )

    def __init__(self, registry: SubscriptionRegistry) -> None:
        self.registry = registry
        self.transport = None
        self.reason: CloseReason | None = None
        # Why it is not read
        self.is_paused = False
        self._is_blocked = False
        self._is_waiting = False  # for its user's turn
        self._is_loading = False
        self._mail = 0  # entries that have to be delivered first
        self._letters = 0  # in the mail
        self._held: list[bytes | None] = []
        self._pace: Pace | None = None
        # The charges for it
        self.pattern_memory = 0
        self._buffer = self._in_kernel = 0
        self._kept = 0  # packets that were read, and wait to be handled
        self._unsent = 0  # for letters in the mail and for replies that are held back

    # --- the user who pays -------------------------------------------------------------------

    def memory(self) -> int:
        """See `sbus.server.core.interfaces.Client`."""
        return CLIENT_MEMORY + self.queue.memory + self.pattern_memory + self._kept + self._in_kernel + self._unsent

    def sample_kernel(self) -> None:
        """See `sbus.server.core.interfaces.Client`."""
        if self.transport is not None:
            held = self.transport.unread_bytes() + self.transport.partial_bytes()
            self.user.charge_memory(held - self._in_kernel)
            self._in_kernel = held

    def _may_grow(self, size: int) -> bool:
        """Decide whether the send buffer grows."""
        grows = self.registry.memory.may_grow(self.user, size)
        if grows:
            self._buffer += size
        return grows

    # --- reading -----------------------------------------------------------------------------

    @abstractmethod
    def read_on(self, until: int) -> None:
        """See `sbus.fair.Reader`."""

    def pause_publishing(self) -> None:
        """See `sbus.server.core.interfaces.Publisher`."""
        self._is_blocked = True
        self.pause()

    def resume_publishing(self) -> None:
        """See `sbus.server.core.interfaces.Publisher`."""
        self._is_blocked = False
        self._maybe_resume()

    def wait_for_mail(self) -> None:
        """See `sbus.server.core.interfaces.Publisher`."""
        self._mail += 1
        self.pause()

    def mail_delivered(self) -> None:
        """See `sbus.server.core.interfaces.Publisher`."""
        self._mail -= 1
        self._maybe_resume()

    def pause(self) -> None:
        """Do not read from the client."""
        if not self.is_paused and self.transport is not None:
            self.is_paused = True
            self.transport.pauseProducing()

    def _is_readable(self) -> bool:
        """Return whether nothing keeps the client from being read, its user's turn aside."""
        return not (
            self._is_blocked
            or self._mail
            or self._is_loading
            or self.reason is not None
            or (self._pace is not None and self._pace.is_waiting)
            or self._has_replies()
        )

    def _has_replies(self) -> bool:
        """Return whether replies and letters must leave first: too many wait, or the user may hold no more memory."""
        replies = self.queue.replies + self._letters + len(self._held)
        return replies > MAX_REPLIES or (replies > 0 and not self.user.may_hold(0))

    def _maybe_resume(self) -> None:
        """Read from the client again, unless a reason not to is left."""
        if self.is_paused and not self._is_waiting and self._is_readable():
            self.is_paused = False
            if self.transport is not None:
                self.transport.resumeProducing()
