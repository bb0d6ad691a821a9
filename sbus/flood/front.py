"""A snapshot on its way to a receiver, between the packets that waited before it and those that come after it.

.. rubric:: Theory of operation

A receiver that asks for last values (``CMSG last``) gets, in this order: the packets that waited for it, the snapshot,
and then every message from the moment of the request on. A `Front` stands between two queues and the transport:

============  =========================================================================================================
part          what is in it
============  =========================================================================================================
`front`       the queue that the receiver had; it gets no more messages
snapshot      packets from a generator, pulled only as the socket takes them: at most one more than the transport asks
              for
`live`        a new queue for later messages; it is *held*: each goes through flood control, and nothing leaves it
============  =========================================================================================================

So a receiver that does not read costs the references to the packets and no copies, and the generator decides how much
work is done at a time: it yields None to pause. When it has ended and everything before it was sent, the live queue is
released.

Invariants:

* The order on the wire is front, snapshot, live. It holds under every order of a queue and every strategy.
* `take` returns fewer packets than requested only if there are no more, or if the generator pauses: a transport that
  gets fewer does not ask again by itself. So the end of the snapshot is found with its last packet; the generator must
  not pause between the two.
* A packet of the snapshot is sent once, unless the connection ends or the socket can never take it; then its receipt
  takes its place. It is no message: flood control does not drop it.

Rejected: putting the snapshot into the queue as replies. They would be copied at once, and under another order the
messages that waited before would come after it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from zope.interface import implementer

from sbus.flood.interfaces import IPacketQueue, Loss
from sbus.flood.naming import Mark
from sbus.flood.outgoing import QueueOwner
from sbus.flood.send_queue import SendQueue
from sbus.protocol.notices import LossReason, lost

__all__ = ["Front"]


@implementer(IPacketQueue)
class Front:
    """The source of a transport's packets while a snapshot is on its way.

    :param front: the receiver's queue so far.
    :param packets: the packets of the snapshot; None to send no more for now. The caller has the transport flush when
        there is more.
    :param live: an empty queue for everything that comes from now on.
    :param owner: the owner of both queues.
    :param on_over: called when all of the snapshot has left, and the live queue is released.
    """

    def __init__(
        self,
        front: SendQueue,
        packets: Generator[bytes | None, None, None],
        live: SendQueue,
        owner: QueueOwner,
        on_over: Callable[[], None],
    ) -> None:
        self._front = front
        self._packets: Generator[bytes | None, None, None] | None = packets
        self._live = live
        self._owner = owner
        self._on_over = on_over
        self._pulled: list[bytes] = []
        self._is_over = False
        self._taken = (0, 0)
        front.owner = self
        live.hold(front)

    def __len__(self) -> int:
        return len(self._front) + len(self._pulled) + (self._packets is not None) + len(self._live)

    def write(self, packet: bytes) -> None:
        """See `IPacketQueue`."""
        self._live.write(packet)

    def put_in_order(self, most: int) -> bool:
        """Put some messages into the receiver's order; see `SendQueue.put_in_order`."""
        return self._front.put_in_order(most) and (self._packets is not None or self._live.put_in_order(most))

    def take(self, count: int) -> list[bytes]:
        """See `IPacketQueue`."""
        taken = self._front.take(count) if len(self._front) else []
        first = len(taken)
        if first < count:
            self._pull(count - first)
            taken = taken + self._pulled[: count - first]
        second = len(taken) - first
        if len(taken) < count and self._packets is None:
            self._live.follow(self._front)
            taken = taken + self._live.take(count - len(taken))
        self._taken = first, second
        return taken

    def put_back(self, taken: list[bytes], kept: int) -> None:
        """See `SendQueue.put_back`; every source here keeps the packets that `ack` does not report."""

    def sign_rest(self, last: Mark | None) -> None:
        """See `SendQueue.sign_rest`; everything here is signed already where needed."""

    def ack(self, taken: list[bytes], sent: int) -> None:
        """See `IPacketQueue`."""
        first, second = self._taken
        self._taken = 0, 0
        behind = first + second
        if first:
            self._front.ack(taken[:first], min(sent, first))
            if self._front.pending and self._front.is_congested:
                outcome = self._front.settle(False)  # it was not flushed before the snapshot began
                if outcome is not None and outcome.losses:
                    self._owner.on_lost(outcome.losses)
        gone = min(max(sent - first, 0), second)
        if gone:
            if self._live.on_sent is not None:
                self._live.on_sent(self._pulled[:gone])
            del self._pulled[:gone]
            self._owner.on_drained(False, False)
        if behind < len(taken):
            self._live.ack(taken[behind:], max(sent - behind, 0))
        self._finish()

    def reject_oversized(self, taken: list[bytes], at: int) -> bool:
        """See `IPacketQueue`."""
        first, second = self._taken
        behind = first + second
        live = taken[behind:]
        if at >= behind:
            may_go_on = self._live.reject_oversized(live, at - behind)
        elif at < first:
            may_go_on = self._front.reject_oversized(taken, at)
        else:
            may_go_on = True
            self._reject_value(taken, at)
        self._live.follow(self._front)
        self._live.stamp(live)
        taken[behind:] = live
        return may_go_on

    def _reject_value(self, taken: list[bytes], at: int) -> None:
        """Drop a packet of the snapshot that the socket can never take; its receipt takes its place."""
        size = len(taken[at])
        self._front.lost += 1
        if self._live.settings.receipts:
            receipt = lost(1, size, self._front.lost, LossReason.TOO_LARGE)
            taken[at] = self._pulled[at - self._taken[0]] = receipt
        self._owner.on_lost((Loss(LossReason.TOO_LARGE, 1, size),))

    def discard_all(self, taken: Sequence[bytes] = ()) -> None:
        """See `IPacketQueue`."""
        first, second = self._taken
        self._taken = 0, 0
        self._front.discard_all(taken[:first])
        self._front.deafen()
        self._front.discard_all()
        behind = taken[first + second :]
        self.close()
        self._pulled = []
        self._end()
        self._live.discard_all(behind)

    def close(self) -> None:
        """Pull no more."""
        packets, self._packets = self._packets, None
        if packets is not None:
            packets.close()

    # --- the front queue's owner -------------------------------------------------------------

    def on_drained(self, has_room: bool, is_empty: bool) -> None:
        """See `sbus.flood.QueueOwner`: it is progress, but publishers wait for the live queue."""
        self._owner.on_drained(False, False)

    def on_lost(self, losses: tuple[Loss, ...]) -> None:
        """See `sbus.flood.QueueOwner`."""
        self._owner.on_lost(losses)

    # --- inside ------------------------------------------------------------------------------

    def _pull(self, count: int) -> None:
        """Pull some packets, and one more: otherwise nobody would learn that the last of them was the last of all."""
        while self._packets is not None and len(self._pulled) <= count:
            try:
                packet = next(self._packets)
            except StopIteration:
                self.close()
                return
            if packet is None:
                return
            self._pulled.append(packet)

    def _finish(self) -> None:
        """Release the live queue if nothing stands before it."""
        if self._packets is None and not self._pulled and not len(self._front):
            self._end()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._live.release(self._front)
            self._front.owner = self._owner  # else this object and the queue would wait for the garbage collector
            self._on_over()
