"""The three lines of one user: mail, chores and readers.

.. rubric:: Theory of operation

Everything that waits for a user's turn stands in one of three lines:

=============  ==========================================================================  =====================
line           what stands in it                                                           who leaves it
=============  ==========================================================================  =====================
*mail*         messages for the user's receivers, gaps, and letters for single clients     the first entry
*chores*       sockets with room, walks, patterns to drop, connections to close            each after one step
*readers*      clients that have sent something; those that have hung up go first          each after one read
=============  ==========================================================================  =====================

Mail keeps its entries in the order in which the server handled them. A receiver *waits* while an entry is for it:
everything that comes later for it goes into the mail, too. An entry for many receivers names their `Group`, so one
count says that all of them wait.

Mail is bounded twice, in the time that it will take and in memory, and the users who publish share both bounds: the
share of one is at most (rest + own) / (n + 1), where n users have mail there. So a user that floods a mailbox always
leaves room for the next one, and an empty share takes one run of any size. The time is an estimate: copies, times the
nanoseconds that a copy took in the entries finished last (`Lines.ns`).

Rejected: a line for each receiver (a message to 4,000 receivers would cost its publisher 4,000 steps); one line for
everything (a user's own backlog would keep its clients from being read).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable
from typing import Any, Protocol

from sbus.routing.route import FIRST_NS, Group, learned

__all__ = ["MAIL_NS", "MEMBERSHIPS", "MOST_BYTES", "QUANTUM", "Entry", "Lines", "Reader"]

MAIL_NS = 400_000_000
"""Nanoseconds of work in one mailbox; one publisher alone gets half. With 100 ms, the readers of row ``eager-discard``
lost messages that they had time for."""
MOST_BYTES = 16 << 20
"""Bytes of memory of one mailbox, at most; see `Lines.most_bytes` (row ``max-packets``: 40 packets)."""
MEMBERSHIPS = 80
"""The most groups of waiting mail in which to look a receiver up; past it, every receiver counts as waiting (row
``eager-groups``: 65). When a user's mail was for 256 groups, each message to two of its receivers cost the publisher
48 µs instead of 8."""
QUANTUM = 500_000
"""Nanoseconds of one turn while several users are active. With 4 ms, a bystander with 256 messages under way had a
tenth of its throughput beside a flood (row ``stopped``); with 0.15 or 2 ms, a crowd had half as much as with 0.5 or 1
(row ``many-small-12-1-250-silent``). A turn itself takes 40 µs. Waiting 40 µs for the next message of a user who has
time left would take a fifth of that crowd's throughput."""


class Entry(Protocol):
    """Work that stands in the mail or among the chores, and can stop after any step."""

    def run(self, until: int) -> bool:
        """Do what can be done until the clock shows `until` (nanoseconds), one step at least.

        :returns: whether all is done.
        """

    def describe(self) -> dict[str, Any]:
        """Return the entry as plain values."""


class Reader(Protocol):
    """A client that waits to be read."""

    def read_on(self, until: int) -> None:
        """Handle what the client has sent, about until the clock shows `until` (nanoseconds).

        It is in no line meanwhile, and enters the line again if there is more.
        """


class _Share:
    """The part of one user's publishers in a mailbox: nanoseconds of work, and bytes of memory."""

    __slots__ = ("bytes", "entries", "ns")

    def __init__(self) -> None:
        self.ns = self.bytes = self.entries = 0


class Lines:
    """The lines of one user, and the time that the user may take.

    :ivar deficit: nanoseconds that are left of the user's turns; below 0 it is a debt.
    :ivar mail: entries, in the order in which the server handled them.
    :ivar chores: work that concerns no other user, each in it once.
    :ivar readers: clients that wait to be read.
    :ivar hung_up: those whose peer has hung up; they go first.
    :ivar held: readers that wait because their messages have no room in this mail, and whether they have hung up; they
        come back to their lines with the next room. One that has hung up keeps all readers after it waiting.
    :ivar most_bytes: the most bytes of memory that the mail may occupy.
    :ivar work: nanoseconds that the mail is estimated to take.
    :ivar bytes: bytes of memory that the mail occupies.
    :ivar ns: nanoseconds that a copy has taken lately.
    :ivar last_turn: the number of the user's last turn; 0 if it has had none.
    :ivar on_rest: called once, when the user `has_rested`.
    """

    __slots__ = (
        "_first",
        "_shares",
        "bytes",
        "chores",
        "deficit",
        "held",
        "hung_up",
        "last_turn",
        "letters",
        "mail",
        "most_bytes",
        "ns",
        "on_rest",
        "readers",
        "waiting",
        "work",
    )

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.deficit = QUANTUM
        self.mail: deque[Entry] = deque()
        self.chores: OrderedDict[Entry, None] = OrderedDict()
        self.readers: OrderedDict[Reader, None] = OrderedDict()
        self.hung_up: OrderedDict[Reader, None] = OrderedDict()
        self.held: OrderedDict[Reader, bool] = OrderedDict()
        self.most_bytes = most_bytes
        self.work = self.bytes = self.last_turn = 0
        self.ns = FIRST_NS
        self.waiting: dict[Group[Any], int] = {}
        self.letters: dict[Any, int] = {}
        self.on_rest: Callable[[], None] | None = None
        self._shares: dict[Hashable, _Share] = {}
        self._first = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing stands in any of the lines."""
        return not (self.mail or self.chores or self.readers or self.hung_up)

    @property
    def has_rested(self) -> bool:
        """Whether nothing stands in any of the lines, and the user has the time of a whole turn, as a new one has.

        Then it may be forgotten. If less time were enough, reconnecting in each turn would double its time.
        """
        return self.is_empty and self.deficit >= QUANTUM

    # --- mail --------------------------------------------------------------------------------

    def waits(self, receivers: Collection[Any]) -> bool:
        """Return whether mail may wait for one of these receivers: new packets for them must then follow that mail.

        :param receivers: a set, if there are many: of two sets, the smaller one is walked.
        """
        if not self.mail:
            return False
        if len(self.waiting) > MEMBERSHIPS or not self.letters.keys().isdisjoint(receivers):
            return True
        return not all(group.members.isdisjoint(receivers) for group in self.waiting)

    def has_room(self, account: Hashable, work: int, size: int, after_gap: bool = False) -> bool:
        """Return whether a publisher's user may add to the mail.

        :param account: the key of the part to charge: that user's UID, or an author that a link has named; None for the
            program around the bus, whose mail is bounded only in memory.
        :param work: nanoseconds that the messages will take.
        :param size: the bytes of memory that they occupy.
        :param after_gap: whether the last messages were lost. Then there is room only when half of the work is done: a
            mailbox with a gap after each entry would take several times as long.
        """
        share = self._shares.get(account)
        if share is None:
            return True
        parts = len(self._shares) + 1
        if share.bytes + size > (self.most_bytes - self.bytes + share.bytes) // parts:
            return False
        most = MAIL_NS // 2 if after_gap else MAIL_NS
        return account is None or share.ns + work <= (most - self.work + share.ns) // parts

    def add(self, account: Hashable, work: int, size: int) -> None:
        """Count messages that were put into the mail; `remove` takes them back."""
        share = self._shares.get(account)
        if share is None:
            share = self._shares[account] = _Share()
        share.entries += 1
        share.ns += work
        share.bytes += size
        self.work += work
        self.bytes += size

    def remove(self, account: Hashable, work: int, size: int, times: int = 1) -> None:
        """Take back as many calls of `add`, given their sums: these messages have left the mail."""
        share = self._shares[account]
        share.entries -= times
        share.ns -= work
        share.bytes -= size
        self.work -= work
        self.bytes -= size
        if not share.entries:
            del self._shares[account]
        if self.held:
            self._let_go()

    def hold(self, reader: Reader, has_hung_up: bool) -> None:
        """Have a reader wait until something leaves the mail; its user has mail here, so something will."""
        self.held[reader] = has_hung_up

    def _let_go(self) -> None:
        """Bring the readers that wait for room back to their lines, in front: they have waited longest."""
        while self.held:
            reader, has_hung_up = self.held.popitem()
            line = self.hung_up if has_hung_up else self.readers
            line[reader] = None
            line.move_to_end(reader, last=False)

    def expect(self, group: Group[Any]) -> None:
        """Note that an entry is for a group."""
        self.waiting[group] = self.waiting.get(group, 0) + 1

    def settle(self, group: Group[Any]) -> None:
        """Take back an `expect`."""
        left = self.waiting[group] - 1
        if left:
            self.waiting[group] = left
        else:
            del self.waiting[group]

    def learn(self, copies: int, took: int) -> None:
        """Learn from a finished entry how long a copy takes (nanoseconds)."""
        if copies:
            self.ns = learned(self.ns, copies, took)

    # --- readers -----------------------------------------------------------------------------

    def enter(self, reader: Reader, has_hung_up: bool) -> None:
        """Put a reader at the end of its line; one that has hung up leaves the line of the others."""
        if has_hung_up:
            self.readers.pop(reader, None)
            self.hung_up.setdefault(reader)
        else:
            self.readers.setdefault(reader)

    def leave(self, reader: Reader) -> None:
        """Forget a reader."""
        self.readers.pop(reader, None)
        self.hung_up.pop(reader, None)
        self.held.pop(reader, None)

    # --- turns -------------------------------------------------------------------------------

    def turn(self, now: int, until: int, clock: Callable[[], int]) -> None:
        """Do what stands in the lines until the clock shows `until`, each time beginning with another line.

        Work that raises an exception is dropped.

        :param now: the time that the clock showed last; before `until`, at least one step is done.
        """
        first, self._first = self._first, (self._first + 1) % 3
        serve = (self._serve_mail, self._serve_chores, self._serve_readers)
        for at in (first, first + 1, first + 2):
            now = serve[at % 3](until, clock, now)

    def _serve_mail(self, until: int, clock: Callable[[], int], now: int) -> int:
        mail = self.mail
        while mail and now < until:
            is_done = True  # also if it raises: it would do so in each turn
            try:
                is_done = mail[0].run(until)
            finally:
                if is_done:
                    mail.popleft()
            now = clock()
        return now

    def _serve_chores(self, until: int, clock: Callable[[], int], now: int) -> int:
        chores = self.chores
        while chores and now < until:
            chore, _ = chores.popitem(last=False)
            if not chore.run(until):
                chores[chore] = None
            now = clock()
        return now

    def _serve_readers(self, until: int, clock: Callable[[], int], now: int) -> int:
        while now < until and not (self.held and any(self.held.values())):
            if self.hung_up:
                reader = next(iter(self.hung_up))
                del self.hung_up[reader]
                reader.read_on(until)
                if reader in self.hung_up:  # its last packets come before those sent since it closed
                    self.hung_up.move_to_end(reader, last=False)
                now = clock()
                continue
            if self.readers:
                reader, _ = self.readers.popitem(last=False)
            else:
                break
            reader.read_on(until)
            now = clock()
        return now
