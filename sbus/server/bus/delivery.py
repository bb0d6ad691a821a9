"""Delivery: which receivers get a message at once, and which by mail.

.. rubric:: Theory of operation

A batch is handled run by run. A run is a list of consecutive messages with the same receivers (`sbus.routing.route`),
and `Delivery.deliver` takes it one of two ways:

===========================  ==================================================================================
who is active                what happens
===========================  ==================================================================================
one user                     every receiver gets it at once, as far as `AT_ONCE` and `AT_ONCE_KIB` allow
several users                the publisher's own receivers get it at once, and those of any other user if they are at
                             most `OF_OTHERS` and none of them waits; all others have one entry of mail
                             (`sbus.server.bus.mail`)
===========================  ==================================================================================

Both ways end in the same function (`sbus.server.bus.handover`).

A receiver that can block the publisher may do so at any message of a run, and handling must stop there. If each such
receiver certainly has room for the whole run, as is nearly always the case, the run goes as one. Otherwise it is halved
until a half has room or is a single message.

If the mail has no room, a publisher of the same user waits: `deliver` handles nothing and returns 0. Messages from
other users are lost for that user, and leave a `Gap`. Messages that observers publish during an event are handled when
the batch, or the entry, is over (`SubscriptionRegistry.publish`).

A message with its payload in sealed memory has a separate entry of mail, and holds its memory as in a queue
(`sbus.flood.payloads`). If there is no room for it, the group loses the message.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import islice
from typing import Any, cast

from sbus.fair import Lines
from sbus.flood import PROGRAM, PayloadMessage
from sbus.flood.backlogs import PRICE
from sbus.routing.route import Group, Route
from sbus.routing.runs import total_size
from sbus.server.bus.handover import AT_ONCE, OF_OTHERS, Handover
from sbus.server.bus.mail import RUN_MEMORY, Gap, Letter, Mail
from sbus.server.bus.unrouted import is_unrouted
from sbus.server.core.interfaces import Client, Publisher, Receiver

__all__ = ["AT_ONCE_KIB", "Delivery", "account_of", "without"]

AT_ONCE_KIB = 4 << 10
"""The maximal size in KiB of copies made at once, beyond the first KiB of each message (row ``max-packets``)."""
_ASKED = 16
"""The number of a user's receivers for which the policy decides whether they may block a publisher. As a rule, the
answer is the same for all of them, and asking for all would cost 3,900 steps in row ``eager-most``."""


class Delivery(Handover):
    """Delivers messages to their receivers, at once or by mail."""

    __slots__ = ()

    def deliver(
        self,
        packets: list[bytes],
        route: Route[Receiver],
        publisher: Publisher | None,
        at_once: bool = False,
        has_echo: bool = True,
        /,
    ) -> int:
        """Hand a run of messages to its receivers, or to their mail; `flush` sends those handed over.

        :param packets: the messages.
        :param publisher: the client that published them; None for the program around the bus.
        :param at_once: these packets are all that is to be sent now, so receivers with an empty queue may get them
            past it.
        :param has_echo: whether the publisher gets its own messages if it is among the receivers.
        :returns: the number of packets, from the front, that were dealt with. It is less than all if a receiver has
            blocked the publisher, and 0 also if the mail of the publisher's own user has no room.
        """
        if self.touched and publisher is not self._publisher:
            self.flush()
        receivers = route.receivers
        copies = len(receivers)
        if self.scheduler.is_busy or copies > AT_ONCE:
            return self._deliver_by_user(packets, route, publisher, at_once, has_echo)
        if not has_echo:
            receivers = without(receivers, publisher)
            copies = len(receivers)
        count = len(packets)
        if self._blocking and count > 1 and not self._has_room(packets, receivers, publisher):
            return self._deliver_halves(packets, route, publisher, has_echo)
        weight = self._count(packets, copies)
        if not copies or ((self.uncounted or self._muted) and is_unrouted(receivers, self.uncounted, self._muted)):
            self._counters.unrouted += count
        if weight and weight * copies > AT_ONCE_KIB:  # nobody else is active, so there is room in every mailbox
            size = total_size(packets)
            now, later = self._split(size, route, publisher)
            self._post(later, packets, size, publisher, has_echo)
            receivers = tuple(now) if has_echo else without(now, publisher)
        self.hand(packets, receivers, publisher, at_once)
        return count

    def _deliver_by_user(
        self,
        packets: list[bytes],
        route: Route[Receiver],
        publisher: Publisher | None,
        at_once: bool,
        has_echo: bool,
    ) -> int:
        """As `deliver`, group by group."""
        count, size = len(packets), total_size(packets)
        now, later = self._split(size, route, publisher)
        if later and not self._has_own_room(later, count, size, publisher):
            return 0
        receivers, copies, skip = tuple(now), len(route.receivers), None
        if not has_echo:
            receivers, copies, skip = without(receivers, publisher), copies - _is_on(route, publisher), publisher
        if self._blocking and count > 1 and not self._has_room(packets, receivers, publisher):
            return self._deliver_halves(packets, route, publisher, has_echo)
        self._count(packets, copies)
        if is_unrouted(route.receivers, self.uncounted, self._muted, skip):
            self._counters.unrouted += count
        if later:
            self._post(later, packets, size, publisher, has_echo)
        self.hand(packets, receivers, publisher, at_once)
        return count

    def _deliver_halves(
        self, packets: list[bytes], route: Route[Receiver], publisher: Publisher | None, has_echo: bool
    ) -> int:
        """Deliver two halves: somewhere in the middle a receiver may block the publisher, and this finds out where."""
        half = len(packets) // 2
        done = self.deliver(packets[:half], route, publisher, False, has_echo)
        if done < half or (publisher is not None and publisher.is_paused):
            return done
        return done + self.deliver(packets[half:], route, publisher, False, has_echo)

    def _has_room(self, packets: list[bytes], receivers: tuple[Receiver, ...], publisher: Publisher | None) -> bool:
        """Return whether surely no receiver blocks the publisher for any of these packets."""
        blocking = [
            receiver for receiver in self._blocking.intersection(receivers) if self._may_block(receiver, publisher)
        ]
        if not blocking:
            return True
        messages, size = len(packets), total_size(packets)
        copies = size * len(receivers)
        return all(
            receiver.queue is not None and receiver.queue.has_room(messages, size, copies) for receiver in blocking
        )

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
        skip = None if has_echo else publisher
        counters = self._counters
        counters.tally.add([message], len(route.receivers) - _is_on(route, skip))
        counters.payloads += 1
        counters.payload_bytes += message.length
        counters.unrouted += is_unrouted(route.receivers, self.uncounted, self._muted, skip)
        if later:
            self._post(later, [message], len(message), publisher, has_echo, message)
        self.hand_payload(message, tuple(now) if has_echo else without(now, publisher), publisher)
        return 1

    def _copied(self, packet: bytes) -> int:
        """Return the bytes that a plain copy of a message takes; without the payload, if it fits no packet."""
        size = len(packet)
        return bytes.__len__(packet) if size > self._max_packet and isinstance(packet, PayloadMessage) else size

    # --- by mail -----------------------------------------------------------------------------

    def has_room_for(self, packet: bytes, route: Route[Receiver], publisher: Publisher) -> bool:
        """Return whether `deliver` would handle a message of this publisher."""
        if not self.scheduler.is_busy:
            return True
        _, later = self._split(self._copied(packet), route, publisher)
        return self._has_own_room(later, 1, len(packet), publisher)

    def _split(
        self, size: int, route: Route[Receiver], publisher: Publisher | None
    ) -> tuple[list[Receiver], list[Group[Receiver]]]:
        """Return the receivers that get a run at once, and the groups that get it by mail.

        :param size: the bytes of a copy of the run.
        """
        now: list[Receiver] = []
        later: list[Group[Receiver]] = []
        own = None if publisher is None else publisher.user
        for group in route.groups:
            receivers, user = group.receivers, group.user
            if user is not None:
                many = len(receivers)
                if many > (AT_ONCE if user is own else OF_OTHERS) or many * size > AT_ONCE_KIB << 10:
                    later.append(group)
                    continue
                lines = user.lines
                if lines.mail and lines.waits(receivers if many <= OF_OTHERS else group.members):
                    later.append(group)
                    continue
            now += receivers
        return now, later

    def copies_at_once(self, packets: list[bytes], route: Route[Receiver], publisher: Publisher) -> int:
        """Return how many copies of each message of a run `deliver` would make at once; the others go into the mail."""
        many, size = len(route.receivers), total_size(packets)
        if not self.scheduler.is_busy and many <= AT_ONCE and many * (size // 1024 - len(packets)) <= AT_ONCE_KIB:
            return many
        return len(self._split(size, route, publisher)[0])

    def _has_own_room(self, later: list[Group[Receiver]], count: int, size: int, publisher: Publisher | None) -> bool:
        """Return whether there is room for a run in the mail of the publisher's own user; see `_split`.

        :param count: the messages of the run.
        :param size: their bytes.
        """
        if publisher is not None:
            own = publisher.user
            for group in later:
                if group.user is own:
                    work = count * len(group.receivers) * own.lines.ns
                    if not own.lines.has_room(account_of(publisher), work, size + count * PRICE + RUN_MEMORY):
                        return False
        return True

    def _post(
        self,
        groups: list[Group[Receiver]],
        packets: list[bytes],
        size: int,
        publisher: Publisher | None,
        has_echo: bool,
        payload: PayloadMessage | None = None,
    ) -> None:
        """Put a run into the mail of these groups' users; a group without room there loses it.

        :param size: the bytes of the run.
        :param payload: the only message of the run, if its payload is in sealed memory.
        """
        count = len(packets)
        memory = size + count * PRICE + RUN_MEMORY
        sender: Lines | None = None
        account: Hashable = None
        signature = PROGRAM
        if publisher is not None:
            sender, signature, account = publisher.user.lines, publisher.signature, account_of(publisher)
        for group in groups:
            lines: Lines = group.user.lines
            last = lines.mail[-1] if lines.mail else None
            gap = last if type(last) is Gap and last.takes() else None
            kept = None if payload is None else payload.held(group.user)
            work = count * len(group.receivers) * lines.ns
            has_room = lines is sender or lines.has_room(account, work, memory, gap is not None)
            skip = publisher if lines is sender and not has_echo else None
            if not has_room or (payload is not None and kept is None):
                if gap is None:
                    gap = Gap(self, group.user)
                    self.scheduler.append(lines, gap)
                gap.add(group, skip, count, size)  # type: ignore[arg-type]
                continue
            waiter = publisher if group.user.blockers and self._may_be_blocked(publisher, group) else None
            if kept is not None or waiter is not None or type(last) is not Mail or not last.takes(group, skip, count):  # type: ignore[arg-type]
                last = Mail(self, group, skip, waiter, kept)  # type: ignore[arg-type]
                self.scheduler.append(lines, last)
            last.add(packets if kept is None else [kept], size, memory, work, account, signature)
            if waiter is not None:
                waiter.wait_for_mail()

    def _may_be_blocked(self, publisher: Publisher | None, group: Group[Receiver]) -> bool:
        """Return whether a receiver of the group's user may block a publisher."""
        return any(self._may_block(each, publisher) for each in islice(group.user.blockers, _ASKED))

    def post(self, client: Receiver, kind: str, open_letter: Callable[[], object]) -> bool:
        """Put a letter for a client into its user's mail, if anything waits there for the client.

        :returns: False if nothing waits; then the caller must act at once, without the letter.
        """
        lines = client.user.lines
        if not lines.waits((client,)):
            return False
        self.scheduler.append(lines, Letter(self, lines, client, kind, open_letter))
        return True

    def miss(self, receivers: Sequence[Receiver], link: object, messages: int, size: int) -> None:
        """Give receivers a receipt for messages that were lost on their way to this bus.

        :param link: the link, which gets none.
        """
        self.flush()  # earlier messages
        for receiver in receivers:
            queue = receiver.queue
            if queue is None or receiver.transport is None or receiver is link:
                continue
            if not queue.settings.receipts and receiver not in receiver.user.lines.letters:
                continue  # a letter in the mail may be its choice of receipts
            client = cast("Client", receiver)  # it has a connection
            client.in_order("loss", partial(self._miss, client, messages, size))

    def _miss(self, receiver: Receiver, messages: int, size: int) -> None:
        queue = receiver.queue
        if queue is not None:
            queue.miss(messages, size)
            if queue.head is not None:
                self.touch_also(receiver)


def account_of(publisher: Publisher) -> Hashable:
    """Return the key of the mailbox part that messages take: the publisher's user, or the author named by a link.

    A user counts by its UID: one that leaves and returns is another object, while its messages still wait.
    """
    signature = publisher.signature
    return signature.user if signature.is_vouched else publisher.user.uid


def _is_on(route: Route[Receiver], client: Any) -> bool:
    """Return whether a client is on a route: it is looked for among the receivers of its user."""
    return client is not None and any(group.user is client.user and client in group.members for group in route.groups)


def without(receivers: Sequence[Receiver], publisher: object) -> tuple[Receiver, ...]:
    """Return the receivers but the publisher."""
    return tuple(receiver for receiver in receivers if receiver is not publisher)
