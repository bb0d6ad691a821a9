"""The interfaces of flood control: strategies, orders and the transport's queue."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

from zope.interface import Attribute, Interface

from sbus.errors import CloseReason
from sbus.protocol.notices import LossReason

__all__ = [
    "IHardStrategy",
    "IPacketQueue",
    "IQueueOrder",
    "ISoftStrategy",
    "Loss",
    "Outcome",
    "Until",
    "Verdict",
]


class Verdict(enum.Enum):
    """The decision of a strategy about one message that cannot be sent at once."""

    KEEP = "keep it in the queue if there is room"
    DROP = "drop it for this receiver"
    BLOCK = "keep it even past the limits, and block its publisher"
    CLOSE = "disconnect the receiver"
    REPLACE = "put it in the place of the waiting message of the same key, else as KEEP; only as an `always`"


class Until(enum.Enum):
    """The state of a receiver's queue that ends the blocking of a publisher."""

    ROOM = "the queue is at its low-water mark"
    EMPTY = "the queue is empty"


class Loss(NamedTuple):
    """Messages that were dropped for one receiver.

    :ivar why: the cause.
    :ivar messages: the number of messages.
    :ivar size: the bytes of their packets.
    """

    why: LossReason
    messages: int
    size: int


class Outcome(NamedTuple):
    """The result for one receiver if the queue did not simply keep every message.

    :ivar dropped: the number of messages that were dropped for the receiver, older ones included.
    :ivar dropped_bytes: the bytes of these messages' packets.
    :ivar close: why the receiver must be disconnected, by its own choice of strategies; else None.
    :ivar block: the state up to which the publisher must be blocked; else None.
    :ivar losses: the messages that were dropped, by cause; empty counts as `LossReason.DISCARD`.
    :ivar conflated: the number of waiting messages that newer ones have replaced.
    """

    dropped: int = 0
    dropped_bytes: int = 0
    close: CloseReason | None = None
    block: Until | None = None
    losses: tuple[Loss, ...] = ()
    conflated: int = 0


class ISoftStrategy(Interface):
    """Decides about a message when its receiver's socket is full."""

    selector: bytes = Attribute("The control message that selects it, as ``b'blocking/soft/queue'``.")
    always: Verdict | None = Attribute("The verdict if it is always the same one, which is quick; else None.")

    def decide(queue: Any, packet: bytes) -> Verdict:
        """Return the verdict on a message for the receiver of `queue`.

        Called only if `always` is None.
        """


class IHardStrategy(Interface):
    """Decides about a message when its receiver's queue is at its limit."""

    selector: bytes = Attribute("The control message that selects it, as ``b'blocking/hard/discard'``.")
    always: Verdict | None = Attribute("The verdict if it is always the same one, which is quick; else None.")

    def decide(queue: Any, packet: bytes) -> Verdict:
        """Return the verdict on a message that has no room in the queue.

        Called only if `always` is None.
        """


class IQueueOrder(Interface):
    """The order in which a queue is sent."""

    selector: bytes = Attribute("The control message that selects it, as ``b'order/queue'``.")
    newestFirst: bool | None = Attribute(
        "The `newest_first` that `rank` gets from now on; None keeps the earlier choice."
    )
    arrival: bool = Attribute("Whether this is the order of arrival, replies included; `rank` is not called then.")

    def rank(arrival: int, size: int, newest_first: bool) -> Any:
        """Return the sort key of a packet: the packet with the lowest key is sent first.

        :param arrival: counts the packets as they arrive.
        :param size: bytes of the packet.
        :param newest_first: whether ``order/stack`` was chosen after ``order/queue``.
        """


class IPacketQueue(Interface):
    """The queue that a packet transport sends from; `sbus.flood.SendQueue` is one."""

    def __len__() -> int:
        """Return the number of packets in the queue."""

    def write(packet: bytes) -> None:
        """Add a packet that must be sent."""

    def take(count: int) -> list[bytes]:
        """Take at most `count` packets to send; they leave the queue until `ack`."""

    def ack(taken: list[bytes], sent: int) -> None:
        """Report that the first `sent` of the `taken` packets were sent.

        The queue keeps the others.
        """

    def reject_oversized(taken: list[bytes], at: int) -> bool:
        """Report that ``taken[at]`` is longer than the socket's send buffer can ever be.

        The queue may put another packet in its place, which the transport sends instead, and others in the place of
        those after it. If the queue leaves it there, the transport reports it to `ack` as sent.

        :param taken: the packets that `take` returned last.
        :returns: whether the connection may continue without the packet.
        """

    def discard_all(taken: Sequence[bytes] = ()) -> None:
        """Drop every packet, including those `taken` but not yet passed to `ack`.

        Nothing more can be sent.
        """
