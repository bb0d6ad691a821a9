"""The interfaces of flood control: strategies, orders, and the queue that a transport sends from."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from zope.interface import Attribute, Interface

__all__ = [
    "IHardStrategy",
    "IPacketQueue",
    "IQueueOrder",
    "ISoftStrategy",
    "Verdict",
]


class Verdict(enum.Enum):
    """What a strategy says of a message that cannot be sent at once."""

    KEEP = "keep it in the queue, as far as there is room"
    DROP = "drop it for this receiver"
    BLOCK = "keep it in any case, and hold its publisher back"
    CLOSE = "disconnect the receiver"


class ISoftStrategy(Interface):
    """What happens to a message whose receiver's socket is full."""

    selector: bytes = Attribute("The control message that selects it, as ``b'blocking/soft/queue'``.")
    always: Verdict | None = Attribute("The verdict if it is always the same one, which is quick; else None.")

    def decide(queue: Any, packet: bytes) -> Verdict:
        """The verdict on this packet, which waits for this queue's receiver (asked only if `always` is None)."""


class IHardStrategy(Interface):
    """What happens to a message whose receiver's queue is at its limit."""

    selector: bytes = Attribute("The control message that selects it, as ``b'blocking/hard/discard'``.")
    always: Verdict | None = Attribute("The verdict if it is always the same one, which is quick; else None.")

    def decide(queue: Any, packet: bytes) -> Verdict:
        """The verdict on this packet, for which there is no room (asked only if `always` is None)."""


class IQueueOrder(Interface):
    """In which order a queue is sent."""

    selector: bytes = Attribute("The control message that selects it, as ``b'order/queue'``.")
    newestFirst: bool | None = Attribute("What `rank` is told from now on; None leaves what was chosen before.")
    arrival: bool = Attribute("Whether this is the order of arrival, replies included; then `rank` is not asked.")

    def rank(arrival: int, size: int, newest_first: bool) -> Any:
        """A sort key for a packet of `size` bytes that arrived as number `arrival`: the lowest is sent first."""


class IPacketQueue(Interface):
    """What a packet transport sends from. `sbus.flood.SendQueue` is one."""

    def __len__() -> int:
        """How many packets wait."""

    def write(packet: bytes) -> None:
        """Add a packet that must be sent."""

    def take(count: int) -> list[bytes]:
        """The next packets to send, at most `count`; they are out of the queue until `ack`."""

    def ack(taken: list[bytes], sent: int) -> None:
        """Of what was taken, so many packets (from the front) were sent; the others are to be kept."""

    def reject_oversized(packet: bytes) -> bool:
        """The kernel will never take this packet, as it is too long for the socket's buffer.

        If the connection goes on, the packet is reported to `ack` as if it were sent, to be out of the way.

        :returns: whether the connection may go on without it.
        """

    def discard_all(taken: Sequence[bytes] = ()) -> None:
        """Nothing can be sent any more, neither what waits nor what was taken and not reported to `ack`."""
