"""Naming: notices of the publisher of each message, for a receiver that has asked.

.. rubric:: Theory of operation

A receiver that has asked (``CMSG sender/on``) gets a *notice* before each message whose publisher is not the one named
last. Waiting messages change places, replace each other and get lost, so the place of a notice is known only when its
message leaves:

====================  =============================================================================================
a message             what happens
====================  =============================================================================================
goes past the queue   `Naming.send` sends the notice of its run first, if it differs from the last one
waits                 it is `Signed`: bytes with a reference to their publisher's notice. If flood control keeps a run
                      together, it signs only the first message; the others have the publisher of the one before
may leave its place   all waiting messages are signed first: before ``latest`` and orders other than that of arrival,
                      and before flood control decides about messages one by one
leaves the queue      `Naming.take` puts the notices between the messages, and `Naming.ack` does not count them
====================  =============================================================================================

`Naming` stands between the transport and its source, a queue or a `sbus.flood.front.Front`. So the sources, strategies
and orders know nothing of notices. A receiver that has not asked has no `Naming`.

Invariant: the last notice sent before a message names the publisher of that message. A notice without its message does
no harm, because a message of another publisher gets its own notice.

Rejected: notices in the queue (each order, each loss and ``latest`` would have to move them); a table of names by the
places of waiting messages (the same); a separate name for each `Signed` message (three times the memory).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Protocol, Self, cast

from zope.interface import implementer

from sbus.flood.interfaces import IPacketQueue
from sbus.protocol.bundles import BundleCache
from sbus.protocol.keys import PeerCredentials
from sbus.protocol.notices import NOBODY, sender
from sbus.routing.runs import find_type

__all__ = ["PROGRAM", "SIGNED", "Mark", "Naming", "Signature", "Signed", "mark_of", "sign", "sign_each", "sign_from"]

SIGNED = 120
"""The extra memory of a signed message, in bytes: 40 for the object, and up to 270 for a separate signature, if its
publisher has left. In runs a message takes less, so this is a mean."""

Mark = dict[str, Any]
"""The attributes of `Signed` messages. Those of one publisher share one `__dict__`: one for each message would take 190
bytes, most of the memory of a message."""


_UNKNOWN = PeerCredentials(0, 0, 0)


class Signature:
    """One publisher, as receivers see it.

    :param number: the number of its connection.
    :param peer: its credentials.
    :param prefix: the name of the link to the bus's master; empty without one.
    :ivar is_vouched: whether a link has named the publisher.
    :ivar user: the user to charge where users share something: a UID, or a name without GID and PID if a link has named
        the publisher.
    """

    __slots__ = ("_mark", "_number", "_peer", "_prefix", "is_vouched", "user")

    def __init__(
        self, number: int, peer: PeerCredentials, prefix: bytes = b"", user: int | bytes | None = None
    ) -> None:
        self.user = peer.uid if user is None else user
        self._number = number
        self._peer = peer
        self._prefix = prefix
        self._mark: Mark | None = None
        self.is_vouched = peer is _UNKNOWN

    @classmethod
    def vouched(cls, number: int, credentials: bytes, owner_of: Callable[[int], int] | None = None) -> Self:
        """Return the signature of a publisher that a link names.

        :param owner_of: returns the UID that a UID counts as.
        """
        chain, _, uid, _ = (b"/// " + credentials).rsplit(b"/", 3)
        if owner_of is not None and uid.isdigit():
            uid = b"%d" % owner_of(int(uid))
        signature = cls(number, _UNKNOWN, user=chain + b"/" + uid)
        signature._mark = {"notice": sender(number, credentials), "user": signature.user}
        return signature

    @property
    def notice(self) -> bytes:
        """The packet that names the publisher."""
        return cast(bytes, self.mark["notice"])

    @property
    def mark(self) -> Mark:
        """The attributes of the messages that it signs; do not change them."""
        if self._mark is None:
            pid, uid, gid = self._peer
            own = b"!/cred/%d/%d/%d" % (gid, uid, pid)
            notice = sender(self._number, b"%b/%b" % (self._prefix, own) if self._prefix else own)
            self._mark = {"notice": notice, "user": self.user}
        return self._mark


PROGRAM = Signature.vouched(0, NOBODY)
"""The signature of the program around the bus."""


class Signed(bytes):
    """A message for a receiver that has asked for senders, with its publisher.

    :ivar notice: the packet that names its publisher.
    :ivar user: see `Signature`.
    """

    notice: bytes
    user: Hashable


def sign(packet: bytes, mark: Mark) -> Signed:
    """Return a signed copy of a message."""
    signed = Signed(packet)
    signed.__dict__ = mark
    return signed


def mark_of(packet: Signed) -> Mark:
    """Return the mark of a signed message: a payload has more attributes, which nothing else may keep."""
    own = packet.__dict__
    return cast(Mark, own.get("mark", own))


def sign_from(packets: list[bytes], at: int, signature: Signature) -> list[bytes]:
    """Return the messages of a run from index `at` on, the first one signed."""
    return [sign(packets[at], signature.mark), *packets[at + 1 :]]


def sign_each(packets: Iterable[Any], last: Mark | None) -> list[Any]:
    """Give each unsigned message the mark of the one before it; leave other packets as they are.

    :param last: the mark of the messages before the first signed one; None if it is not known.
    """
    signed = []
    for packet in packets:
        if isinstance(packet, Signed):
            last = mark_of(packet)
        elif type(packet) is bytes and last is not None:
            packet = sign(packet, last)
        signed.append(packet)
    return signed


def _is_same(last: Mark | None, mark: Mark) -> bool:
    """Return whether a mark names the publisher that was named last."""
    return last is mark or (last is not None and last["notice"] == mark["notice"])


class Sender(Protocol):
    """The part of a packet transport that sends past the queue."""

    def try_send(self, packets: list[bytes], cache: BundleCache | None = None) -> int: ...


class Source(Protocol):
    """The source of a transport's packets, without notices."""

    def __len__(self) -> int: ...
    def write(self, packet: bytes) -> None: ...
    def take(self, count: int) -> list[bytes]: ...
    def put_back(self, taken: list[bytes], kept: int) -> None: ...
    def sign_rest(self, last: Mark | None) -> None: ...
    def ack(self, taken: list[bytes], sent: int) -> None: ...
    def reject_oversized(self, taken: list[bytes], at: int) -> bool: ...
    def discard_all(self, taken: Sequence[bytes] = ()) -> None: ...


@implementer(IPacketQueue)
class Naming:
    """Names the publishers of the messages that a transport sends.

    :ivar source: the queue or front that it sends from.
    :ivar last: the mark of the publisher that was named last; None before the first.
    """

    __slots__ = ("_notices", "_taken", "last", "source")

    def __init__(self, source: Source) -> None:
        self.source = source
        self.last: Mark | None = None
        self._taken: list[bytes] = []
        self._notices: list[tuple[int, Mark]] = []  # among the packets that `take` returned, by index

    def send(self, packets: list[bytes], signature: Signature, transport: Sender, packed: BundleCache) -> int:
        """Send messages of one publisher past an empty queue.

        :param packed: the messages as bundles, by limit, which receivers share.
        :returns: the number of them that the socket took.
        """
        mark = signature.mark
        if _is_same(self.last, mark):
            return transport.try_send(packets, packed)
        sent = transport.try_send([mark["notice"], *packets])
        if not sent:
            return 0
        self.last = mark
        return sent - 1

    # --- the transport's queue ---------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.source)

    def write(self, packet: bytes) -> None:
        """See `IPacketQueue`."""
        self.source.write(packet)

    def take(self, count: int) -> list[bytes]:
        """See `IPacketQueue`; `count` is at least 3, for a receipt, a notice and its message."""
        taken = self._taken = self.source.take(count)
        self._notices = []
        last, done = self.last, 0
        named: list[bytes] = []
        at = find_type(taken, Signed, 0)
        while at >= 0:
            mark = taken[at].__dict__
            if "mark" in mark:
                mark = mark["mark"]
            if not _is_same(last, mark):
                named += taken[done:at]
                self._notices.append((len(named), mark))
                named.append(mark["notice"])
                last, done = mark, at
            at = find_type(taken, Signed, at + 1)
        if not named:
            return taken
        named += taken[done:]
        if len(named) > count:
            del named[count:]
            self.source.put_back(taken, count - sum(at < count for at, _ in self._notices))
        return named

    def ack(self, taken: list[bytes], sent: int) -> None:
        """See `IPacketQueue`."""
        notices, inner = self._notices, self._taken
        self._notices, self._taken = [], []
        messages = sent
        for at, mark in notices:
            if at >= sent:
                break
            self.last = mark
            messages -= 1
        self.source.ack(inner, messages)
        if messages < len(inner):
            self.source.sign_rest(self.last)  # flood control decides about them, perhaps one by one

    def reject_oversized(self, taken: list[bytes], at: int) -> bool:
        """See `IPacketQueue`."""
        places = {place for place, _ in self._notices}
        if at in places:
            return True
        inner = self._taken
        may_go_on = self.source.reject_oversized(inner, at - sum(place < at for place in places))
        messages = iter(inner)
        taken[:] = [packet if place in places else next(messages) for place, packet in enumerate(taken)]
        return may_go_on

    def discard_all(self, taken: Sequence[bytes] = ()) -> None:
        """See `IPacketQueue`."""
        inner = self._taken if taken else ()
        self._notices, self._taken = [], []
        self.source.discard_all(inner)
