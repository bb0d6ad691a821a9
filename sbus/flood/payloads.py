"""Messages whose payload is in sealed memory, and the limits of that memory while they wait.

.. rubric:: Theory of operation

A `PayloadMessage` is a packet like any other, an object with a length (`sbus.syscalls.memfd.InMemory`). So queues,
orders, strategies, limits and counters need not know its kind. Only the transport sends it in another way.

The server holds the memory of a message, and a descriptor, as long as the message waits. That is bounded by publisher:

==================  ===================================================================================================
a message           what it holds
==================  ===================================================================================================
is being handled    its memfd, until it is sent. Nothing waits if the socket accepts it at once, so a receiver that
                    does not read never stops one that does
begins to wait      a `_Hold` of its memfd for the receiver's user, if there is room (`PayloadMessage.held`); else
                    flood control treats the queue as full
stops waiting       nothing: the hold ends with the last message that refers to it
==================  ===================================================================================================

A memfd counts once for its publisher's user, with its size in bytes, whatever the number of receivers. One that comes
with several packets counts with each, as each brings the server another descriptor of it. The receivers of one user get
at most a part of the memfds and of the bytes: (rest + own) / (n + 1), where n is the number of users whose receivers
hold some. So a receiver that never reads leaves room for the receivers of all other users.

Rejected: counting descriptors at each way out of a queue. There are a dozen, and CPython counts references already.
"""

from __future__ import annotations

from typing import Self
from weakref import ref

from sbus.flood.budget import UserShare
from sbus.flood.naming import Mark, Signature, Signed, sign
from sbus.syscalls.memfd import InMemory, Memfd

__all__ = ["PayloadMessage", "SharedMemory"]


class SharedMemory:
    """A memfd that came with a packet or a bundle, and the holds on it.

    :param memfd: the sealed memory.
    :param publisher: the user for whom it counts while it waits.
    :param is_batch: whether it came with a bundle.
    """

    __slots__ = ("_holds", "is_batch", "memfd", "publisher")

    def __init__(self, memfd: Memfd, publisher: UserShare, is_batch: bool = False) -> None:
        self.memfd = memfd
        self.publisher = publisher
        self.is_batch = is_batch
        self._holds: dict[UserShare, ref[_Hold]] = {}  # by the users of receivers

    def hold(self, receiver: UserShare, is_forced: bool) -> _Hold | None:
        """Return the hold of this memory for a user's receivers; None if there is no room.

        :param is_forced: hold it even if there is no room.
        """
        found = self._holds.get(receiver)
        if found is not None:
            return found()
        if not is_forced and not self._has_room(receiver):
            return None
        hold = _Hold(self, receiver)
        self._charge(receiver)
        self._holds[receiver] = ref(hold)
        return hold

    def _has_room(self, receiver: UserShare) -> bool:
        publisher, size = self.publisher, self.memfd.size
        share = publisher.payloads
        # Half: slow receivers of other users must not take all of the publisher's memory.
        rest, rest_bytes = publisher.budget.user_payloads - share.files, publisher.memory_limit // 2 - share.bytes
        if not self._holds and (rest < 1 or size > rest_bytes or not publisher.has_memory(size)):
            return False
        own, own_bytes = share.receivers.get(receiver, (0, 0))
        parts = len(share.receivers) + 1
        return not own or (own < (rest + own) // parts and own_bytes + size <= (rest_bytes + own_bytes) // parts)

    def _charge(self, receiver: UserShare) -> None:
        """Count a new hold."""
        publisher = self.publisher
        share = publisher.payloads
        if not self._holds:
            share.files += 1
            share.bytes += self.memfd.size
            publisher.budget.payload_files += 1
            publisher.charge_memory(self.memfd.size)
        files, size = share.receivers.get(receiver, (0, 0))
        share.receivers[receiver] = files + 1, size + self.memfd.size

    def discharge(self, receiver: UserShare) -> None:
        """Stop counting a hold."""
        del self._holds[receiver]
        publisher = self.publisher
        share = publisher.payloads
        files, size = share.receivers.pop(receiver)
        if files > 1:
            share.receivers[receiver] = files - 1, size - self.memfd.size
        if not self._holds:
            share.files -= 1
            share.bytes -= self.memfd.size
            publisher.budget.payload_files -= 1
            publisher.charge_memory(-self.memfd.size)


class _Hold:
    """The claim of one user's receivers on a memory; it ends with the last reference."""

    __slots__ = ("__weakref__", "_memory", "_receiver")

    def __init__(self, memory: SharedMemory, receiver: UserShare) -> None:
        self._memory = memory
        self._receiver = receiver

    def __del__(self) -> None:
        self._memory.discharge(self._receiver)


class PayloadMessage(InMemory, Signed):
    """A message whose payload is in sealed memory; see the theory of operation. It is always signed.

    :ivar memory: where the payload is, and who pays for it.
    :ivar mark: the attributes of other messages of its publisher.
    :ivar hold: the claim of a waiting message on the memory.
    """

    memory: SharedMemory
    mark: Mark
    hold: _Hold | None

    @classmethod
    def published(cls, key: bytes, memory: SharedMemory, offset: int, length: int, signature: Signature) -> Self:
        """Return a message that was just published."""
        message = cls.of(key, memory.memfd, offset, length)
        mark = signature.mark
        message.__dict__.update(mark, mark=mark, memory=memory, hold=None)
        return message

    def held(self, receiver: UserShare, is_forced: bool = False) -> Self | None:
        """Return this message with a hold for a user's receivers; None if there is no room.

        :param is_forced: hold it even if there is no room.
        """
        hold = self.memory.hold(receiver, is_forced)
        if hold is None or hold is self.hold:
            return None if hold is None else self
        message = type(self)(self)
        message.__dict__.update(self.__dict__, hold=hold)
        return message

    def plain(self) -> Signed:
        """Return the message with a copy of its payload.

        :raises OSError: as `Memfd.read`.
        """
        return sign(super().plain(), self.mark)

    def copied(self, most: int) -> Signed | None:
        """Return the message with a copy of its payload; None if there is no memory for that.

        :param most: bytes of the longest copy; None for a longer message, too.
        """
        if len(self) > most:
            return None
        try:
            return self.plain()
        except (OSError, MemoryError):
            return None
