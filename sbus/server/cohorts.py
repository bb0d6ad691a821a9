"""Cohorts: late receivers of one user for which the same messages wait, kept once for all.

.. rubric:: Theory of operation

A publisher should not pay for the silent receivers of another user, however many there are. To append each run to the
queue of each late receiver costs 0.2 µs a receiver. But most late receivers of a user are alike: they subscribe to the
same keys, and none of them reads. Such receivers form a *cohort*. It has one list of messages (`sbus.server.blocks`),
and each member has a position in it: the messages from there on wait for that member. So a run is added in one step,
whatever the number of members.

Flood control decides about each member by itself, in the turns of the member's user, the oldest position first. Every
member moves to the same position, `Cohort.due`. So flood control decides about the same list for all members with the
same old position, and computes what it has to know of that list only once (`sbus.flood.digest`).

A run is for all members of a cohort or for none. If a route contains only some of them, the cohort is split
(`sbus.server.cohort_plans`).

.. rubric:: Invariants

* All that waits undecided for a member is in its cohort, unless the cohort is *closed*. The member leaves the cohort
  before anything else looks at its queue, and takes a copy of what waits with it.
* A member is late. Its socket was full when it was last tried, or the member wants a turn in which it is tried. All
  members have the same user; either all of them can block publishers or none can, and either all keep only the newest
  message of each key or none does.
* A user has at most `MOST_COHORTS`. A cohort that would have to be split beyond that is closed: nothing is added to it
  any more, and new messages for its members wait in their own queues, behind what waits in the cohort.

Rejected: to decide about the members that cannot be split off. That took 13 to 33 µs for each of up to 16,384
receivers before one message could be delivered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Set
from operator import itemgetter

from sbus.flood.budget import UserShare
from sbus.flood.digest import Digest
from sbus.server.blocks import Blocks
from sbus.server.interfaces import Publisher, Receiver

__all__ = ["MOST_COHORTS", "Change", "Cohort", "Cohorts"]

MOST_COHORTS = 64
"""Maximum number of cohorts of one user."""
_MOST_CHANGES = 4_096
"""Maximum number of changes of cohorts that are kept."""

Change = tuple["Receiver | None", "Cohort | None", "Cohort | None", bool]
"""A receiver has left a cohort or joined one: the receiver, the cohort that it has left, the one that it has joined,
and whether it was the only member there. For a split: None, the old cohort, the new one, False."""


class Cohort:
    """Receivers that wait for the same messages, each from its own position on.

    :param user: the user of all members.
    :param can_block: whether the members can block publishers.
    :param replaces: whether the members keep only the newest message of each key.
    :param start: the position of the first message.
    :ivar members: the receivers, with the position of the first message that waits for each; the oldest position first.
    :ivar blockable: whether a member may block a publisher, where this was asked; kept by the delivery.
    :ivar unasked: the members that have joined since.
    :ivar is_closed: whether nothing is added any more.
    :ivar variety: the share of the messages decided about last that was left when only the newest of each key was kept.
    :ivar due: a position, never behind the end: members with an older one want a turn, which takes them there.
    :ivar blocks: the messages that wait for any member.
    :ivar run: the run that was added last, if all of it is still there and it waits for all members.
    """

    __slots__ = (
        "_digest",
        "_digested",
        "blockable",
        "blocks",
        "can_block",
        "due",
        "is_closed",
        "members",
        "replaces",
        "run",
        "unasked",
        "user",
        "variety",
    )

    def __init__(self, user: UserShare, can_block: bool, replaces: bool, start: int = 0) -> None:
        self.user = user
        self.can_block = can_block
        self.replaces = replaces
        self.members: OrderedDict[Receiver, int] = OrderedDict()  # a dict looks for its first key past all that went
        self.is_closed = False
        self.blockable: dict[Publisher, bool] = {}
        self.unasked: list[Receiver] = []
        self.variety = 1.0
        self.due = start
        self.blocks = Blocks(start)
        self.run: list[bytes] | None = None
        self._digest: Digest | None = None
        self._digested = 0, 0

    @property
    def end(self) -> int:
        """The position behind the last message."""
        return self.blocks.end

    def add_member(self, receiver: Receiver, waiting: int = 0) -> None:
        """Add a receiver.

        :param waiting: how many of the last messages wait for it.
        """
        position = self.members[receiver] = self.end - waiting
        self.due = max(self.due, position)  # a member that is due is moved behind this one
        if self.blockable:  # what is known there has to be asked of the new member
            self.unasked.append(receiver)
            if len(self.unasked) > len(self.members):
                self.blockable.clear()
                self.unasked.clear()

    def copy(self) -> Cohort:
        """Return a cohort with the same messages and without members."""
        new = Cohort(self.user, self.can_block, self.replaces)
        new.blocks, new.due, new.variety = self.blocks.copy(), self.due, self.variety
        return new

    def oldest(self) -> int:
        """Return the oldest position of a member."""
        return next(iter(self.members.values()), self.end)

    def waiting(self) -> int:
        """Return the number of messages that wait for the member with the oldest position."""
        return self.end - self.oldest()

    def waiting_for(self, receiver: Receiver) -> Digest:
        """Return the messages that wait for a member.

        Members with the same position get the same object.
        """
        return self._between(self.members[receiver], self.end)

    def want_turns(self) -> None:
        """Have all members want a turn, unless some still do: those get the same list as the others before them."""
        if self.oldest() >= self.due:
            self.blocks.close()
            self.due = self.end

    def wants_turn(self) -> bool:
        """Return whether a member wants a turn; the one with the oldest position is the next."""
        return self.is_closed or self.oldest() < self.due

    def advance(self, receiver: Receiver) -> Digest:
        """Move a member with an older position to `due`.

        :returns: the messages in between; the same object for all members with the same old position.
        """
        self.run = None
        position = self.members[receiver]
        self.members[receiver] = self.due
        self.members.move_to_end(receiver)
        return self._between(position, self.due)

    def _between(self, first: int, end: int) -> Digest:
        digest = self._digest
        if digest is None or self._digested != (first, end):
            digest = self._digest = self.blocks.between(first, end)
            self._digested = first, end
        return digest

    def forget_digest(self, oldest: int) -> None:
        """Free the last digest, if it begins before the oldest position of a member."""
        if self._digested[0] < oldest:
            self._digest = None

    def clear(self) -> int:
        """Free all messages and publishers, as plans and changes may know the cohort still; return the bytes freed."""
        self._digest = None
        self.run = None
        self.blockable.clear()
        self.unasked.clear()
        return self.blocks.drop(self.end)


class Cohorts:
    """The cohorts of all users.

    :param on_closed: called when a cohort is closed.
    :ivar of: the cohort of each receiver that is in one.
    :ivar version: the number of changes so far.
    :ivar changes: the last of them; closing a cohort empties the list.
    :ivar bytes: bytes that wait for all cohorts; a packet counts for each cohort, and is charged to its user.
    """

    __slots__ = ("_by_user", "_on_closed", "bytes", "changes", "of", "version")

    def __init__(self, on_closed: Callable[[], None]) -> None:
        self._on_closed = on_closed
        self.version = 0
        self.changes: list[Change] = []
        self.of: dict[Receiver, Cohort] = {}
        self.bytes = 0
        self._by_user: dict[UserShare, dict[Cohort, None]] = {}

    def of_user(self, user: UserShare) -> dict[Cohort, None]:
        """Return the cohorts of a user, the oldest first."""
        return self._by_user.get(user, {})

    def join(self, receiver: Receiver, can_block: bool, replaces: bool, home: Cohort | None = None) -> bool:
        """Put a receiver, for which nothing waits, into a cohort.

        :param can_block: as for `Cohort`.
        :param replaces: as for `Cohort`.
        :param home: the cohort that it was in before, which suits it best; else the newest one of its kind does.
        :returns: False if none suits it, and there may be no more.
        """
        cohorts = self._by_user.setdefault(receiver.user, {})
        for cohort in ((home,) if home in cohorts else ()) + tuple(reversed(cohorts)):
            if (
                not cohort.is_closed
                and cohort.can_block is can_block
                and cohort.replaces is replaces
            ):
                break
        else:
            if len(cohorts) >= MOST_COHORTS:
                return False
            cohort = Cohort(receiver.user, can_block, replaces)
            cohorts[cohort] = None
        cohort.add_member(receiver)
        cohort.run = None
        self.of[receiver] = cohort
        self._note(receiver, None, cohort, len(cohort.members) == 1)
        return True

    def join_with(
        self, receiver: Receiver, packets: list[bytes], size: int, room: int, *, can_block: bool, replaces: bool
    ) -> Cohort | None:
        """Put a receiver, for which a run is the first that waits, into a cohort.

        :param packets: the run; the cohort has it already, or is new.
        :param size: its bytes.
        :param room: bytes that may wait in a new cohort.
        :param can_block: as for `Cohort`.
        :param replaces: as for `Cohort`.
        :returns: the cohort; None if none suits it, and there may be no more.
        """
        cohorts = self._by_user.get(receiver.user, {})
        for cohort in reversed(cohorts):
            if (
                cohort.run is packets
                and not cohort.is_closed
                and cohort.can_block is can_block
                and cohort.replaces is replaces
            ):
                break
        else:
            if size > room or len(cohorts) >= MOST_COHORTS:
                return None
            cohort = Cohort(receiver.user, can_block, replaces)
            self._by_user.setdefault(receiver.user, cohorts)[cohort] = None
            self.add(cohort, packets, size)
        cohort.add_member(receiver, len(packets))
        self.of[receiver] = cohort
        self._note(receiver, None, cohort, len(cohort.members) == 1)
        return cohort

    def leave(self, receiver: Receiver) -> None:
        """Take a receiver out of its cohort, if it is in one."""
        cohort = self.of.pop(receiver, None)
        if cohort is not None:
            del cohort.members[receiver]
            if not cohort.members:
                self._remove(cohort)
            else:
                self.trim(cohort)
            self._note(receiver, cohort, None, not cohort.members)

    def trim(self, cohort: Cohort) -> None:
        """Drop the blocks that wait for no member, and a digest that begins before those that do."""
        oldest = cohort.oldest()
        cohort.forget_digest(oldest)
        if gone := cohort.blocks.drop(oldest):
            cohort.run = None
            self._count(cohort, -gone)

    def add(self, cohort: Cohort, packets: list[bytes], size: int) -> None:
        """Have messages wait for a cohort.

        :param size: their bytes.
        """
        cohort.run = packets
        block = cohort.blocks.add(packets, size)
        if block is not None and cohort.replaces:
            block.newest()  # now, block by block: for all of them, the first decision would take 10 ms
        self._count(cohort, size)

    def split(self, cohort: Cohort, members: Set[Receiver]) -> Cohort:
        """Move some members of a cohort into one of their own.

        :returns: the new cohort; the old one, closed, if there may be no more.
        """
        cohorts = self._by_user[cohort.user]
        if len(cohorts) >= MOST_COHORTS:
            cohort.is_closed = True
            self.version += 1
            self.changes.clear()
            self._on_closed()
            return cohort
        new = cohort.copy()
        self._count(new, new.blocks.size)
        # Not a look at all members: a few are often parted from thousands.
        new.members.update(sorted(((each, cohort.members.pop(each)) for each in members), key=itemgetter(1)))
        self.of.update(dict.fromkeys(new.members, new))
        self._note(None, cohort, new, False)
        # Beside the old one: the oldest cohorts have their turns first.
        self._by_user[cohort.user] = {
            each: None for old in cohorts for each in ((old, new) if old is cohort else (old,))
        }
        return new

    def forget_changes(self) -> None:
        """Forget the changes so far: no plan from before them is left. They keep receivers in memory."""
        self.changes.clear()

    def _note(self, *change: *Change) -> None:
        self.version += 1
        self.changes.append(change)
        if len(self.changes) > _MOST_CHANGES:
            del self.changes[: _MOST_CHANGES // 2]

    def _count(self, cohort: Cohort, size: int) -> None:
        self.bytes += size
        cohort.user.charge_memory(size)

    def _remove(self, cohort: Cohort) -> None:
        self._count(cohort, -cohort.clear())
        cohorts = self._by_user[cohort.user]
        del cohorts[cohort]
        if not cohorts:
            del self._by_user[cohort.user]
