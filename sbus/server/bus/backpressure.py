"""Back-pressure: which receivers block which publishers, and for how long.

.. rubric:: Theory of operation

A receiver that has chosen to block, and cannot take a message, blocks its publisher: the server stops reading the
publisher's socket. The kernel's buffer then fills up, and the publisher's ``send()`` waits.

One object keeps the blocks of a whole bus: the publishers that a receiver blocks, each until the receiver's queue is
empty or has room, and the receivers that block a publisher. The first receiver that blocks a publisher pauses it, and
the last one that unblocks it resumes it. Other clients take no memory here.

=====================================================  ================================================================
a receiver's socket gets full                          it takes packets again
=====================================================  ================================================================
``Handover`` gets an ``Outcome`` with a block          the receiver's transport sends, and calls ``SendQueue.ack``
`Backpressure.block`                                   ``on_drained``, then ``Handover.drained``
``publisher.pause_publishing``                         `Backpressure.drained`
the publisher's transport pauses                       ``publisher.resume_publishing``: its transport resumes
=====================================================  ================================================================

*The block time-out.* Each receiver that blocks has one timer, from the first publisher on. When it ends, the receiver
must have read something within the time-out, or it is disconnected and its publishers continue. Its reading shows in
packets that leave its queue, or in fewer unread bytes in the kernel (`sbus.server.bus.stall`). The time of the last
packet is noted, and a timer that ends too early runs again for the rest. The time-out also ends clients that block each
other or themselves. Another choice of strategies unblocks the publishers, but the timer continues.

*Publishers blocked by a full queue.* At its hard limit, a queue blocks only publishers of users with more than a fair
part of it (`sbus.server.bus.queue_shares`), and keeps the others' messages meanwhile. Soft blocking concerns the
publisher of the message at hand.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Protocol

from twisted.internet.interfaces import IReactorTime

from sbus.errors import CloseReason
from sbus.flood import QueueLimits, Until
from sbus.seqpacket.interfaces import IPacketTransport
from sbus.server.bus.queue_shares import QueueShares
from sbus.server.bus.stall import StallTimer

__all__ = ["Backpressure"]


class _Publisher(Protocol):
    @property
    def user(self) -> Hashable: ...
    def pause_publishing(self) -> None: ...
    def resume_publishing(self) -> None: ...


class _Receiver(Protocol):
    @property
    def transport(self) -> IPacketTransport | None: ...
    def close(self, reason: CloseReason) -> None: ...


def _unread(receiver: _Receiver) -> int:
    return 0 if receiver.transport is None else receiver.transport.unread_bytes()


class _Blocking:
    """The publishers that one receiver blocks.

    :ivar until: the state of the receiver's queue that each of them waits for.
    :ivar timer: the running time-out.
    """

    __slots__ = ("timer", "until")

    def __init__(self, timer: StallTimer) -> None:
        self.until: dict[_Publisher, Until] = {}
        self.timer = timer


class Backpressure:
    """The blocked publishers of one bus, and the receivers that block them.

    :param clock: for the time-outs.
    :param timeout: seconds that a receiver may block without reading anything.
    :param limits: the limits of a receiver's queue.
    """

    def __init__(self, clock: IReactorTime, timeout: float, limits: QueueLimits) -> None:
        self._limits = limits
        self._clock = clock
        self._timeout = timeout
        self._held_seconds = 0.0
        self._held_since: dict[_Publisher, float] = {}
        self._since_sum = 0.0
        self._blocking: dict[_Receiver, _Blocking] = {}
        self._blocked: dict[_Publisher, set[_Receiver]] = {}
        self._shares: dict[_Receiver, QueueShares] = {}

    def kept(self, publisher: _Publisher, receiver: _Receiver, messages: int, size: int, queued: int) -> None:
        """Note that a congested receiver, which may block the publisher, has kept messages.

        :param size: the bytes in them.
        :param queued: the messages in the receiver's queue, these included.
        """
        shares = self._shares.get(receiver)
        if shares is None:
            shares = self._shares[receiver] = QueueShares(self._limits)
        shares.add(publisher.user, messages, size, queued)

    @property
    def held(self) -> int:
        """The publishers that are blocked now."""
        return len(self._held_since)

    @property
    def held_seconds(self) -> float:
        """The time that publishers were blocked since the start, in seconds, summed over all of them."""
        return self._held_seconds + self._clock.seconds() * len(self._held_since) - self._since_sum

    def _hold(self, publisher: _Publisher) -> None:
        now = self._held_since[publisher] = self._clock.seconds()
        self._since_sum += now

    def _let_go(self, publisher: _Publisher) -> None:
        since = self._held_since.pop(publisher)
        self._since_sum = self._since_sum - since if self._held_since else 0.0
        self._held_seconds += self._clock.seconds() - since

    def receivers_blocking(self, publisher: _Publisher) -> tuple[_Receiver, ...]:
        """Return the receivers that block a publisher."""
        return tuple(self._blocked.get(publisher, ()))

    def block(self, publisher: _Publisher, receiver: _Receiver, until: Until) -> None:
        """Block a publisher until the receiver's queue has room or is empty.

        *Empty* outlasts *room*. A publisher of a user with a fair part of the queue at most is not blocked for room.
        """
        shares = self._shares.get(receiver)
        if until is Until.ROOM and shares is not None and not shares.has_more_than_fair(publisher.user):
            return
        blocking = self._blocking.get(receiver)
        if blocking is None:
            timer = StallTimer(
                self._clock, self._timeout, lambda: _unread(receiver), lambda: self._time_is_up(receiver)
            )
            blocking = self._blocking[receiver] = _Blocking(timer)
        if blocking.until.get(publisher) is not Until.EMPTY:
            blocking.until[publisher] = until
        receivers = self._blocked.get(publisher)
        if receivers is None:
            self._blocked[publisher] = {receiver}
            self._hold(publisher)
            publisher.pause_publishing()
        else:
            receivers.add(receiver)

    def drained(self, receiver: _Receiver, has_room: bool, is_empty: bool) -> None:
        """Unblock the publishers that waited for this state of a receiver's queue.

        Packets have just left that queue.
        """
        if is_empty:
            self._shares.pop(receiver, None)
        blocking = self._blocking.get(receiver)
        if blocking is None:
            return
        blocking.timer.progressed()
        if is_empty:
            self.release(receiver)
        elif has_room:
            self._unblock(receiver, [p for p, until in blocking.until.items() if until is Until.ROOM])

    def release(self, receiver: _Receiver) -> None:
        """Unblock all publishers of a receiver and stop its time-out."""
        self._shares.pop(receiver, None)
        blocking = self._blocking.pop(receiver, None)
        if blocking is not None:
            blocking.timer.cancel()
            self._resume(receiver, blocking.until)

    def reconsider(self, receiver: _Receiver) -> None:
        """Unblock all publishers of a receiver that has chosen other strategies.

        Its time-out continues.
        """
        blocking = self._blocking.get(receiver)
        if blocking is not None:
            self._unblock(receiver, list(blocking.until))

    def forget(self, publisher: _Publisher) -> None:
        """Forget a publisher that has disconnected."""
        if publisher in self._blocked:
            self._let_go(publisher)
        for receiver in self._blocked.pop(publisher, ()):
            del self._blocking[receiver].until[publisher]

    def _unblock(self, receiver: _Receiver, publishers: list[_Publisher]) -> None:
        until = self._blocking[receiver].until
        for publisher in publishers:
            del until[publisher]
        self._resume(receiver, publishers)

    def _resume(self, receiver: _Receiver, publishers: Iterable[_Publisher]) -> None:
        unblocked = []
        for publisher in publishers:
            receivers = self._blocked[publisher]
            receivers.discard(receiver)
            if not receivers:
                del self._blocked[publisher]
                self._let_go(publisher)
                unblocked.append(publisher)
        for publisher in unblocked:
            if publisher not in self._blocked:  # unless one that continued has had it blocked again
                publisher.resume_publishing()

    def _time_is_up(self, receiver: _Receiver) -> None:
        if not self._blocking[receiver].until:
            del self._blocking[receiver]
        else:
            receiver.close(CloseReason.BLOCKED_TOO_LONG)
            self.release(receiver)
