"""Mail: plain objects that wait for the receivers of one user, in the order in which the server handled them.

.. rubric:: Theory of operation

While several users are active, a message for many receivers of another user is one entry in that user's mail
(`sbus.fair.lines`): one step for the publisher, for any number of receivers. The receivers' user works it off in its
turns.

==========  =====================================================  ================================================
entry       what it stands for                                     what it does when it is reached
==========  =====================================================  ================================================
`Mail`      messages for one group of receivers                    hands them over, some receivers at a time
`Gap`       messages that found no room, by group; those of the    each receiver counts its loss, at its place
            oldest of more than `GAP_GROUPS` groups by receiver
`Letter`    a reply, choice, loss, snapshot, or the end, for one   does that
==========  =====================================================  ================================================

Invariants: an entry can stop after any receiver, and waits for nothing but time; so mail alone always empties, and a
server that stops can account for all of it (`drop`). Messages of any publisher for the same group join the last entry
until it begins: a receiver gets them with one system call. A publisher that a receiver may block is paused until its
entry is done (`Mail.waiter`), so a queue overruns its limit by one entry at most.

Rejected: an entry for each receiver (the publisher would pay for all of them); one list of messages for each user
(receivers differ, and replies have a place among the messages).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable
from typing import Any

from twisted.logger import Logger

from sbus.errors import CloseReason
from sbus.fair import Lines
from sbus.flood import NamedRun, PayloadMessage, Signature, sign_from
from sbus.protocol.bundles import BundleCache
from sbus.protocol.notices import LossReason
from sbus.routing.route import Group
from sbus.server.bus.handover import Handover
from sbus.server.core.interfaces import Publisher, Receiver
from sbus.server.core.users import User

__all__ = [
    "ENTRY_MEMORY",
    "GAP_GROUPS",
    "JOINED",
    "LETTER_MEMORY",
    "LOOK",
    "LOOK_BYTES",
    "LOSS_MEMORY",
    "RUN_MEMORY",
    "Gap",
    "Letter",
    "Mail",
    "drop",
]

JOINED = 1_024
"""Messages of one entry, and copies between two looks at the clock, at most: less than a millisecond (row
``eager-groups``, whose entries gather messages for 64 groups)."""
LOOK = 16
"""Receivers between two looks at the clock (row ``eager-most``: a step of all 3,900 would take several ms)."""
LOOK_BYTES = 256 << 10
"""Bytes of copies between two looks at the clock, but at least one receiver (row ``max-packets``)."""
GAP_GROUPS = 16
"""Groups in one gap; beyond, the oldest one's losses are counted by receiver. With 256, a gap that began while 3,900
readers connected took their user 8 s, and the server as long to stop (row ``eager-most``)."""
_NEVER = 1 << 62
ENTRY_MEMORY = 400
"""Bytes of memory that an entry takes in addition to its messages or losses."""
LETTER_MEMORY = 700
"""Bytes of memory that a letter takes, including a client's settings; the packet of a reply is extra."""
LOSS_MEMORY = 120
"""Bytes of memory of one group, or one receiver, in a gap."""
RUN_MEMORY = 96
"""Bytes of memory that an entry takes for each run that joins it, in addition to the run's packets."""

_log = Logger(namespace="sbus.bus")


class Mail:
    """Messages for a group of receivers.

    :param group: the receivers, all of one user.
    :param skip: a publisher without echo, which does not get its own messages.
    :param waiter: a publisher that is paused until the entry is done.
    :param payload: the only message, if its payload is in sealed memory.
    """

    __slots__ = (
        "_at",
        "_handover",
        "_named",
        "_number",
        "_packed",
        "_shares",
        "_size",
        "_took",
        "group",
        "packets",
        "payload",
        "skip",
        "waiter",
    )

    def __init__(
        self,
        handover: Handover,
        group: Group[Receiver],
        skip: Receiver | None,
        waiter: Publisher | None,
        payload: PayloadMessage | None = None,
    ) -> None:
        self.group = group
        self.payload = payload
        self.packets: list[bytes] = []
        self.skip = skip
        self.waiter = waiter
        self._handover = handover
        self._number = 0  # the last message's, by which a tap finds it
        self._at = 0
        self._took = 0
        self._size = 0
        self._packed: BundleCache = {}
        self._named: NamedRun | None = None
        self._shares: list[tuple[Hashable, int, int, int, Signature]] = []
        lines: Lines = group.user.lines
        lines.expect(group)
        group.user.charge_memory(ENTRY_MEMORY)

    def takes(self, group: Group[Receiver], skip: Receiver | None, messages: int) -> bool:
        """Return whether more messages can join."""
        return (
            self.group is group
            and not self._at
            and self.waiter is None
            and self.payload is None
            and self.skip is skip
            and len(self.packets) + messages <= JOINED
        )

    def add(
        self, packets: list[bytes], size: int, memory: int, work: int, account: Hashable, signature: Signature
    ) -> None:
        """Add messages.

        :param size: their bytes.
        :param memory: the bytes of memory that they occupy.
        :param work: the nanoseconds that they will take.
        :param account: the key of the part of the mailbox to charge; None for the program around the bus.
        :param signature: the publisher's signature.
        """
        handover, user = self._handover, self.group.user
        scheduler, count, receivers = handover.scheduler, len(packets), len(self.group.receivers)
        self.packets += packets
        self._number = handover.handled()
        self._size += size
        self._shares.append((account, work, memory, count, signature))
        user.lines.add(account, work, memory)
        user.charge_memory(memory)
        scheduler.mail_copies += count * receivers
        scheduler.mail_bytes += size * receivers

    def run(self, until: int) -> bool:
        """See `sbus.fair.Entry`."""
        handover, packets, size, group = self._handover, self.packets, self._size, self.group
        scheduler, receivers, askers = handover.scheduler, group.receivers, group.user.askers
        clock, count, total = scheduler.clock, len(packets), len(receivers)
        began = now = clock()
        step = max(1, min(LOOK, JOINED // count, LOOK_BYTES // size))
        while self._at < total:
            some = receivers[self._at : self._at + step]
            self._at += len(some)
            scheduler.mail_copies -= len(some) * count
            scheduler.mail_bytes -= len(some) * size
            if self.skip in some:
                some = tuple(receiver for receiver in some if receiver is not self.skip)
            handover.number = self._number
            if self.payload is not None:
                handover.hand_payload(self.payload, some, self.waiter)
            else:
                if askers:
                    some = self._hand_named(some, askers)
                handover.hand(packets, some, self.waiter, True, self._packed)
            handover.flush()
            handover.number = None
            now = clock()
            if now >= until and self._at < total:
                self._took += now - began
                return False
        self._end(self._took + now - began)
        return True

    def _hand_named(self, receivers: tuple[Receiver, ...], askers: Container[Receiver]) -> tuple[Receiver, ...]:
        """Hand the messages to the receivers that have asked for senders; return the other receivers."""
        asking = tuple(receiver for receiver in receivers if receiver in askers)
        if not asking:
            return receivers
        if self._named is None:
            packets: list[bytes] = []
            for _, _, _, count, signature in self._shares:
                at = len(packets)
                packets += sign_from(self.packets[at : at + count], 0, signature)
            self._named = NamedRun(packets)
        self._handover.hand_named(self._named, asking, self.waiter)
        return tuple(receiver for receiver in receivers if receiver not in askers)

    def _end(self, took: int) -> None:
        """Give back all that the entry was charged, and let its publisher continue."""
        group = self.group
        user = group.user
        lines: Lines = user.lines
        lines.learn(len(self.packets) * len(group.receivers), took)
        lines.settle(group)
        charges: dict[Hashable, tuple[int, int, int]] = {}
        taken = ENTRY_MEMORY
        for account, work, memory, _, _ in self._shares:
            taken += memory
            of_work, of_bytes, times = charges.get(account, (0, 0, 0))
            charges[account] = of_work + work, of_bytes + memory, times + 1
        for account, charge in charges.items():
            lines.remove(account, *charge)
        user.charge_memory(-taken)
        if self.waiter is not None:
            self.waiter.mail_delivered()

    def drop(self, gap: Gap) -> None:
        """Move the messages that were not handed over into a gap."""
        left = self.group.receivers[self._at :]
        copies = len(left) * len(self.packets)
        if self._at:
            for receiver in left:
                if receiver is not self.skip:
                    gap.add_for(receiver, len(self.packets), self._size)
        else:
            gap.add(self.group, self.skip, len(self.packets), self._size, False)
        self._handover.scheduler.mail_copies -= copies
        self._handover.scheduler.mail_bytes -= len(left) * self._size
        self._end(0)

    def describe(self) -> dict[str, Any]:
        """See `sbus.fair.Entry`."""
        left = self.group.receivers[self._at :]
        return {"packets": list(self.packets), "receivers": [_number(each) for each in left if each is not self.skip]}


class Gap:
    """Messages that found no room in the mail; each receiver learns of them at their place.

    :param user: the receivers' user.
    :param why: the cause.
    """

    __slots__ = (
        "_begun",
        "_copied_bytes",
        "_copies",
        "_groups",
        "_handover",
        "_lines",
        "_memory",
        "_number",
        "_receivers",
        "_user",
        "why",
    )

    def __init__(self, handover: Handover, user: User, why: LossReason = LossReason.SHARE) -> None:
        self.why = why
        self._handover = handover
        self._user = user
        self._lines: Lines = user.lines
        self._memory = ENTRY_MEMORY
        self._copies = self._copied_bytes = self._number = 0
        self._groups: dict[tuple[Group[Receiver], Receiver | None], tuple[int, int]] = {}
        self._receivers: dict[Receiver, tuple[int, int]] = {}
        self._begun = False
        user.charge_memory(ENTRY_MEMORY)

    def takes(self) -> bool:
        """Return whether more losses can join."""
        return not self._begun

    def add(
        self, group: Group[Receiver], skip: Receiver | None, messages: int, size: int, is_waiting: bool = True
    ) -> None:
        """Note messages that are lost for a group.

        :param skip: see `Mail`.
        :param size: their bytes.
        :param is_waiting: their copies count as waiting until the gap is reached.
        """
        self._number = self._handover.handled()
        found = self._groups.get((group, skip))
        if found is not None:
            self._groups[group, skip] = found[0] + messages, found[1] + size
        else:
            if len(self._groups) >= GAP_GROUPS:
                scheduler = self._handover.scheduler
                began = scheduler.clock()
                self._spread(*next(iter(self._groups)))
                scheduler.shift(self._lines, scheduler.clock() - began)
            self._groups[group, skip] = messages, size
            self._lines.expect(group)
            memory = ENTRY_MEMORY + LOSS_MEMORY * (len(self._groups) + len(self._receivers))
            self._user.charge_memory(memory - self._memory)
            self._memory = memory
        if is_waiting:
            copies = messages * len(group.receivers)
            self._copies += copies
            self._copied_bytes += size * len(group.receivers)
            self._handover.scheduler.mail_copies += copies
            self._handover.scheduler.mail_bytes += size * len(group.receivers)

    def add_for(self, receiver: Receiver, messages: int, size: int) -> None:
        """Note messages that are lost for one receiver."""
        found = self._receivers.get(receiver)
        if found is None:
            self._receivers[receiver] = messages, size
            self._lines.letters[receiver] = self._lines.letters.get(receiver, 0) + 1
        else:
            self._receivers[receiver] = found[0] + messages, found[1] + size

    def _spread(self, group: Group[Receiver], skip: Receiver | None) -> None:
        """Count the losses of a group by receiver."""
        messages, size = self._groups.pop((group, skip))
        for receiver in group.receivers:
            if receiver is not skip:
                self.add_for(receiver, messages, size)
        self._lines.settle(group)

    def _begin(self) -> None:
        """Let no more losses join; the copies no longer count as waiting."""
        if not self._begun:
            self._begun = True
            self._handover.scheduler.mail_copies -= self._copies
            self._handover.scheduler.mail_bytes -= self._copied_bytes

    def run(self, until: int) -> bool:
        """See `sbus.fair.Entry`."""
        clock = self._handover.scheduler.clock
        self._begin()
        while self._groups:
            self._spread(*next(iter(self._groups)))
            if clock() >= until:
                return False
        left = self._receivers
        while left:
            for _ in range(min(LOOK, len(left))):
                receiver, (messages, size) = left.popitem()
                _forget_letter(self._lines, receiver)
                self._handover.lose(receiver, messages, size, self.why, self._number)
            if left and clock() >= until:
                self._handover.flush()
                return False
        self._user.charge_memory(-self._memory)
        self._handover.flush()
        return True

    def drop(self, gap: Gap) -> None:
        """Move losses that are not accounted for into another gap, whatever the cause."""
        self._begin()
        for (group, skip), (messages, size) in self._groups.items():
            gap.add(group, skip, messages, size, False)
            self._lines.settle(group)
        for receiver, (messages, size) in self._receivers.items():
            gap.add_for(receiver, messages, size)
            _forget_letter(self._lines, receiver)
        self._user.charge_memory(-self._memory)

    def describe(self) -> dict[str, Any]:
        """See `sbus.fair.Entry`."""
        return {
            "lost": [
                (_number(receiver), messages)
                for (group, skip), (messages, _) in self._groups.items()
                for receiver in group.receivers
                if receiver is not skip
            ]
            + [(_number(receiver), messages) for receiver, (messages, _) in self._receivers.items()]
        }


class Letter:
    """An entry of mail for one client, at its place in the client's stream.

    :param open_letter: does it.
    :param kind: its kind, for people: ``reply``, ``choice``, ``snapshot``, ``service``, ``loss`` or ``end``.
    """

    __slots__ = ("_handover", "_lines", "_open", "client", "kind")

    def __init__(
        self, handover: Handover, lines: Lines, client: Receiver, kind: str, open_letter: Callable[[], object]
    ) -> None:
        self.client = client
        self.kind = kind
        self._handover = handover
        self._lines = lines
        self._open = open_letter
        lines.letters[client] = lines.letters.get(client, 0) + 1

    def run(self, until: int) -> bool:
        """See `sbus.fair.Entry`."""
        _forget_letter(self._lines, self.client)
        try:
            self._open()
        except Exception:
            _log.failure("Error in a letter for client {number}", number=_number(self.client))
            self.client.close(CloseReason.SERVER_ERROR)
        self._handover.flush()
        return True

    def describe(self) -> dict[str, Any]:
        """See `sbus.fair.Entry`."""
        return {"client": _number(self.client), "kind": self.kind}


def _forget_letter(lines: Lines, receiver: Receiver) -> None:
    left = lines.letters[receiver] - 1
    if left:
        lines.letters[receiver] = left
    else:
        del lines.letters[receiver]


def _number(receiver: Receiver) -> int:
    return getattr(receiver, "number", 0)


def drop(handover: Handover, user: User) -> None:
    """Account for the mail of a user whose receivers are all about to be disconnected, in one pass."""
    mail = tuple(user.lines.mail)
    user.lines.mail.clear()
    gap = Gap(handover, user, LossReason.DISCONNECT)
    letters = []
    for entry in mail:
        if isinstance(entry, Letter):
            letters.append(entry)
        elif isinstance(entry, Mail | Gap):
            entry.drop(gap)
    gap.run(_NEVER)
    for letter in letters:
        letter.run(_NEVER)
