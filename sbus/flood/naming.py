"""Names: who published each message, for a receiver that has asked.

.. rubric:: Theory of operation

A receiver that has asked (``CMSG sender/on``) gets a *notice* in front of each message whose publisher is not the one
that was named last. Messages that wait change places, replace each other and get lost, so the place of a notice is
known only when its message leaves:

====================  =============================================================================================
a message             what happens
====================  =============================================================================================
goes past the queue   `Naming.send` sends the notice of its run first, if it differs from the last one
waits                 it is `Signed`: bytes that know the notice of their publisher. Where flood control keeps a run
                      together, only its first message is: the others are of the publisher of the one before them
may leave its place   all that waits is signed first: before ``latest`` and other orders, and before flood control
                      decides about messages one by one
leaves the queue      `Naming.take` puts the notices between the messages, and `Naming.ack` counts without them
====================  =============================================================================================

`Naming` stands between the transport and what it sends from, a queue or a `sbus.flood.front.Front`. So neither they nor
strategies and orders know of notices, and a receiver that has not asked has no `Naming`.

Invariants: the last notice that was sent before a message names its publisher. A notice whose message was not sent
after it does no harm, as the next message is named again if it has another publisher.

Rejected: notices in the queue (each order, each loss and ``latest`` would have to move them); a name in each message
that waits, by its place (the same); a name of its own for each `Signed` message (three times the memory).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Protocol, Self, cast

from zope.interface import implementer

from sbus.flood.interfaces import IPacketQueue
from sbus.protocol.bundles import BundleCache
from sbus.protocol.keys import PeerCredentials
from sbus.protocol.notices import NOBODY, sender
from sbus.routing.runs import find_type

__all__ = ["PROGRAM", "SIGNED", "Mark", "Naming", "Signature", "Signed", "sign", "sign_each", "sign_from"]

SIGNED = 120
"""Bytes of memory that a message takes more when it is signed: 40 for the object, and as much as 270 for a signature of
its own, if its publisher has left. In runs it takes less, so this is the middle."""

Mark = dict[str, Any]
"""The attributes of `Signed` messages: those of one publisher share one `__dict__`, as 190 bytes for each of them would
be most of what they take."""


_UNKNOWN = PeerCredentials(0, 0, 0)


class Signature:
    """What receivers are told of one publisher.

    :param number: its connection.
    :param peer: its credentials.
    :param prefix: the name of the link to the bus's master; empty without one.
    :ivar is_vouched: whether a link has named the publisher.
    :ivar user: the user that it counts as where users share something: a UID, or a name without GID and PID if a link
        has named the publisher.
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
    def vouched(cls, number: int, credentials: bytes) -> Self:
        """Return the signature of a publisher that a link names."""
        chain, _, uid, _ = (b"/// " + credentials).rsplit(b"/", 3)
        signature = cls(number, _UNKNOWN, user=chain + b"/" + uid)
        signature._mark = {"notice": sender(number, credentials), "user": signature.user}
        return signature

    @property
    def notice(self) -> bytes:
        """The packet that names the publisher."""
        return cast(bytes, self.mark["notice"])

    @property
    def mark(self) -> Mark:
        """The attributes of the messages that it signs; nobody may change them."""
        if self._mark is None:
            pid, uid, gid = self._peer
            own = b"!/cred/%d/%d/%d" % (gid, uid, pid)
            notice = sender(self._number, b"%b/%b" % (self._prefix, own) if self._prefix else own)
            self._mark = {"notice": notice, "user": self.user}
        return self._mark


PROGRAM = Signature.vouched(0, NOBODY)
"""The signature of the program around the bus."""


class Signed(bytes):
    """A message that waits for a receiver that has asked who publishes.

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


def sign_from(packets: list[bytes], at: int, signature: Signature) -> list[bytes]:
    """Return the messages of a run from one on, of which the first is signed."""
    return [sign(packets[at], signature.mark), *packets[at + 1 :]]


def sign_each(packets: Iterable[Any], last: Mark | None) -> list[Any]:
    """Sign each message that is not signed, as the one before it is; leave everything else as it is.

    :param last: the mark of those in front of the first one that is signed; None if nobody knows it.
    """
    signed = []
    for packet in packets:
        if type(packet) is Signed:
            last = packet.__dict__
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
    """What a transport sends from, before notices are put in."""

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
    """Names the publishers of what a transport sends.

    :ivar source: what it sends from.
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
        :returns: how many of them the socket took.
        """
        mark = signature.mark
        if _is_same(self.last, mark):
            return transport.try_send(packets, packed)
        sent = transport.try_send([mark["notice"], *packets])
        if not sent:
            return 0
        self.last = mark
        return sent - 1

    # --- as the transport's queue ------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.source)

    def write(self, packet: bytes) -> None:
        """See `IPacketQueue`."""
        self.source.write(packet)

    def take(self, count: int) -> list[bytes]:
        """See `IPacketQueue`; `count` is 3 at least, for a receipt, a notice and its message."""
        taken = self._taken = self.source.take(count)
        self._notices = []
        last, done = self.last, 0
        named: list[bytes] = []
        at = find_type(taken, Signed, 0)
        while at >= 0:
            mark = taken[at].__dict__
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
            self.source.sign_rest(self.last)  # flood control decides about them, one by one perhaps

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
