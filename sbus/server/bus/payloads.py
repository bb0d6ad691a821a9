"""Delivering large messages: with a descriptor, as bytes, or not at all.

.. rubric:: Theory of operation

`PayloadPosting.deliver_payload` delivers one large message, as `sbus.server.bus.delivery` delivers a run of others:

======================  ============================================================================================
a receiver              gets
======================  ============================================================================================
that has asked          the message itself, which its transport sends with the descriptor; past the queue, if that is
                        empty and the message is not from a bundle: a bundle is sent on as a bundle
any other, if it fits   a plain message; the payload is read once for all receivers that get it now
any other, or without   a loss, ``too-large``
memory for the copy
======================  ============================================================================================

A large message that goes by mail has a separate entry, and holds its memory as in a queue (`sbus.flood.payloads`). If
there is no room for it, the group loses the message.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence, Set

from sbus.fair import Scheduler
from sbus.flood import Loss, NamedRun, Outcome, PayloadMessage, Run, State
from sbus.protocol.notices import LossReason
from sbus.routing.route import Group, Route
from sbus.server.asks.last_values import LastValues
from sbus.server.bus.posting import AT_ONCE, AT_ONCE_KIB, Posting
from sbus.server.bus.unrouted import is_unrouted
from sbus.server.core.counters import Counters
from sbus.server.core.interfaces import ICredentials, Publisher, Receiver

__all__ = ["PayloadPosting", "without"]


class PayloadPosting(Posting):
    """Delivers large messages.

    :param max_packet: bytes in the longest plain message.
    """

    __slots__ = ("_counters", "_keeper", "_max_packet", "_muted", "_publisher", "touched", "uncounted")

    def __init__(
        self,
        credentials: ICredentials,
        scheduler: Scheduler,
        counters: Counters,
        muted: Set[Receiver],
        max_packet: int,
    ) -> None:
        super().__init__(credentials, scheduler)
        self._counters = counters
        self._muted = muted
        self._max_packet = max_packet
        self._keeper: LastValues | None = None
        self._publisher: Publisher | None = None
        self.uncounted: Set[Receiver] = frozenset()
        self.touched: list[Receiver] = []

    @abstractmethod
    def dropped(self, receiver: Receiver, losses: tuple[Loss, ...]) -> None:
        """Count messages that were dropped for a receiver, by cause."""

    @abstractmethod
    def touch_also(self, receiver: Receiver) -> None:
        """Mark a receiver for `flush`."""

    @abstractmethod
    def _send_alone(self, receiver: Receiver, message: PayloadMessage) -> bool:
        """Send a message past a receiver's queue, if nothing is in the way; return whether the socket took it."""

    @abstractmethod
    def _act(self, receiver: Receiver, outcome: Outcome, publisher: Publisher | None) -> None:
        """Act on the outcome for a receiver."""

    def _copied(self, packet: bytes) -> int:
        """Return the bytes that a plain copy of a message takes; without the payload, if it fits no packet."""
        size = len(packet)
        return bytes.__len__(packet) if size > self._max_packet and isinstance(packet, PayloadMessage) else size

    def deliver_payload(
        self, message: PayloadMessage, route: Route[Receiver], publisher: Publisher | None, has_echo: bool, /
    ) -> int:
        """Hand a message to its receivers, or to their mail; see `Delivery.deliver`.

        :returns: 1, or 0 if the mail of the publisher's own user has no room.
        """
        if self.touched and publisher is not self._publisher:
            self.flush()
        now: Sequence[Receiver] = route.receivers
        later: list[Group[Receiver]] = []
        many, size = len(now), self._copied(message)
        if self.scheduler.is_busy or many > AT_ONCE or many * size > AT_ONCE_KIB << 10:
            now, later = self._split(size, route, publisher)
        if later and not self._has_own_room(later, 1, len(message), publisher):
            return 0
        everybody = route.receivers if has_echo else without(route.receivers, publisher)
        counters = self._counters
        counters.tally.add([message], len(everybody))
        counters.payloads += 1
        counters.payload_bytes += message.length
        counters.unrouted += is_unrouted(everybody, self.uncounted, self._muted)
        if later:
            self._post(later, [message], len(message), publisher, has_echo, message)
        self.hand_payload(message, tuple(now) if has_echo else without(now, publisher), publisher)
        return 1

    def hand_payload(
        self, message: PayloadMessage, receivers: tuple[Receiver, ...], publisher: Publisher | None
    ) -> None:
        """Put a message into the queues of receivers, in the form that each has asked for."""
        asking: list[Receiver] = []
        others: list[Receiver] = []
        is_alone = not message.memory.is_batch
        for receiver in receivers:
            queue = receiver.queue
            if queue is None or not queue.settings.payloads:
                others.append(receiver)
            elif not (is_alone and self._send_alone(receiver, message)):
                asking.append(receiver)
        if asking:
            self._hand(message, asking, publisher)
        if not others:
            return
        copy = message.copied(self._max_packet)
        if copy is not None:
            self._hand(copy, others, publisher)
        else:
            for receiver in others:
                self._lose_payload(receiver, message)

    def _hand(self, packet: bytes, receivers: list[Receiver], publisher: Publisher | None) -> None:
        """Put a signed message into the queues of receivers."""
        named = tuple(each for each in receivers if each.queue is not None and each.direct is None)
        if named:
            self.hand_named(NamedRun([packet]), named, publisher)
        if len(named) < len(receivers):
            self.hand([packet], tuple(each for each in receivers if each not in named), publisher, False)

    def _lose_payload(self, receiver: Receiver, message: PayloadMessage) -> None:
        """Count a message that cannot be copied for a receiver that has not asked for payloads."""
        queue = receiver.queue
        if receiver is self._keeper and self._keeper is not None:
            self._keeper.forget(bytes(message)[4:-1])
            self._counters.no_copy(1, len(message))
        elif receiver in self._muted or (queue is not None and queue.state is State.DEAF):
            self._counters.no_copy(1, len(message))
        elif queue is None:
            self.dropped(receiver, (Loss(LossReason.TOO_LARGE, 1, len(message)),))
        else:
            if queue.pending:
                self.flush()  # the messages before it
            outcome = queue.lose_run(Run([message]), LossReason.TOO_LARGE)
            if outcome is not None:
                self._act(receiver, outcome, None)
            if queue.head is not None:
                self.touch_also(receiver)


def without(receivers: Sequence[Receiver], publisher: object) -> tuple[Receiver, ...]:
    """Return the receivers but the publisher."""
    return tuple(receiver for receiver in receivers if receiver is not publisher)
