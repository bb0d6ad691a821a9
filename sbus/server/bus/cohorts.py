"""Cohorts: one list of waiting messages for many late receivers of one user.

.. rubric:: Theory of operation

A publisher should not pay for another user's silent receivers, however many there are. Appending a run to each late
receiver's queue takes 0.2 µs a receiver. So the late receivers of one user with the same `can_block` and `replaces`
form a *cohort*. It has one list of messages (`sbus.server.bus.blocks`). Each member has a position in the list; the
messages from there on wait for that member. The server adds a run in one step, whatever the number of members.

Flood control decides about each member by itself, in the turns of the member's user, the oldest position first. Every
member moves to the same position, `Cohort.due`. So flood control decides about the same list for all members with the
same old position, and computes what it has to know of that list only once (`sbus.flood.digest`).

A run can be for some members only. Then it has a *mask* (`sbus.server.bus.masks`), with one bit for each member, at the
member's *column*. Members whose bits are set in the same masks share one list. If nothing is due for a member, only its
position moves. A receiver keeps its column until it has left all routes or its cohort has no members, so the masks of a
route stay the same when members leave and join again.

.. rubric:: Invariants

* A member's undecided messages are all in its cohort. Before anything else looks at its queue, the member leaves the
  cohort, and its messages move to the end of its queue.
* Each member is late: its socket was full at the last attempt, or it waits for a turn in which the server tries it. All
  members have the same user, `can_block` and `replaces`, so a user has at most four cohorts.
* A column passes to another receiver once its owner is in no route any more, which can be long after it has
  disconnected (`sbus.server.bus.leaving`): a mask may have the bit of an owner that has left the cohort. Older bits in
  that column do no harm: the new owner's position is behind them.

Rejected: one cohort for each set of receivers with the same routes. A user whose readers get different messages would
have thousands. Each costs every publisher 1 µs a run, and each counts its waiting bytes again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from sbus.flood.budget import UserShare
from sbus.flood.digest import Digest
from sbus.server.bus.blocks import Blocks, Window
from sbus.server.core.interfaces import Publisher, Receiver

__all__ = ["Change", "Cohort", "Cohorts"]

_MOST_CHANGES = 4_096
"""Maximum number of changes of cohorts that are kept."""

_MOST_WINDOWS = 4
"""Parts of the list, each between two positions, that are kept for the next members that wait for the same part."""
_SKIPPED = 64
"""The most members that one `Cohort.skip` moves."""
_SKIPPED_MASKS = 65_536
"""The most masks that it looks at, or those of one member: 0.4 ms."""
_MASK_WEIGHT = 16
"""Messages that one mask counts as: members in different masks need lists of their own, so decisions take longer."""


class Change(NamedTuple):
    """A receiver has joined a cohort or left it.

    :ivar receiver: the receiver.
    :ivar cohort: the cohort.
    :ivar column: its column there.
    :ivar has_joined: whether it has joined.
    :ivar is_alone: whether the cohort has, or had, no other member.
    """

    receiver: Receiver
    cohort: Cohort
    column: int
    has_joined: bool
    is_alone: bool


class Cohort:
    """Receivers that wait for the same list of messages, each from its own position on.

    :param user: the user of all members.
    :param can_block: whether the members can block publishers.
    :param replaces: whether the members keep only the newest message of each key.
    :param start: the position of the first message.
    :ivar members: the receivers, with the position of the first message that waits for each; the oldest position first.
    :ivar columns: the column of each member, and of each former member that is still connected.
    :ivar blockable: whether any member may block a publisher, for the publishers asked about so far.
    :ivar unasked: members that have joined since and are not in those answers.
    :ivar variety: distinct keys per message in the last list that flood control decided about, 0 to 1.
    :ivar due: the position to which a member's next turn takes it; at most `end`.
    :ivar blocks: the messages that wait for any member.
    :ivar trimmed: the oldest position of a member when `blocks` was trimmed last.
    :ivar run: the run that was added last, if all of it is still there and no member has a position behind it.
    """

    __slots__ = (
        "_free",
        "_windows",
        "blockable",
        "blocks",
        "can_block",
        "columns",
        "due",
        "members",
        "replaces",
        "run",
        "trimmed",
        "unasked",
        "user",
        "variety",
    )

    def __init__(self, user: UserShare, can_block: bool, replaces: bool, start: int = 0) -> None:
        self.user = user
        self.can_block = can_block
        self.replaces = replaces
        self.members: OrderedDict[Receiver, int] = OrderedDict()  # a dict looks for its first key past all that went
        self.columns: dict[Receiver, int] = {}
        self._free: list[int] = []
        self.blockable: dict[Publisher, bool] = {}
        self.unasked: list[Receiver] = []
        self.variety = 1.0
        self.due = self.trimmed = start
        self.blocks = Blocks(start)
        self.run: list[bytes] | None = None
        self._windows: OrderedDict[tuple[int, int], Window] = OrderedDict()  # by the positions; used last, the last

    @property
    def end(self) -> int:
        """The position behind the last message."""
        return self.blocks.end

    def add_member(self, receiver: Receiver, waiting: int = 0) -> int:
        """Add a receiver; return its column.

        :param waiting: how many of the last messages wait for it: all of the run that was added last, or none.
        """
        position = self.members[receiver] = self.end - waiting
        column = self.columns.get(receiver)
        if column is None:
            column = self.columns[receiver] = self._free.pop() if self._free else len(self.columns)
        if waiting:
            self.blocks.include(column)
        else:
            self.run = None
        self.due = max(self.due, position)  # a member that is due is moved behind this one
        if self.blockable:  # what is known there has to be asked of the new member
            self.unasked.append(receiver)
            if len(self.unasked) > len(self.members):
                self.blockable.clear()
                self.unasked.clear()
        return column

    def forget(self, receiver: Receiver) -> None:
        """Give up the column of a receiver that is no member, and in no route: masks of its routes have its bit."""
        if receiver in self.columns:
            self._free.append(self.columns.pop(receiver))

    def mask(self, receivers: Iterable[Receiver]) -> int:
        """Return the mask for some of the members."""
        digits = bytearray(b"0") * (len(self.columns) + len(self._free))
        for receiver in receivers:
            digits[~self.columns[receiver]] = 0x31  # the last digit is for column 0
        return int(digits, 2)

    def members_in(self, mask: int | None) -> list[Receiver]:
        """Return the members that get the messages with a mask, the oldest position first."""
        if mask is None:
            return list(self.members)
        return [receiver for receiver in self.members if mask >> self.columns[receiver] & 1]

    def oldest(self) -> int:
        """Return the oldest position of a member."""
        return next(iter(self.members.values()), self.end)

    def waiting(self) -> int:
        """Return the number of messages from the oldest position on, plus `_MASK_WEIGHT` for each mask."""
        return self.end - self.oldest() + _MASK_WEIGHT * self.blocks.mask_count

    def waiting_for(self, receiver: Receiver) -> Digest | None:
        """Return the messages that wait for a member, or None.

        Members with the same position that are in the same masks usually get the same object.
        """
        return self._between(receiver, self.members[receiver], self.end)

    def want_turns(self) -> None:
        """Set `due` to the end, unless a member has yet to reach the old `due`.

        Members that are left then share the list of those before them.
        """
        if self.oldest() >= self.due:
            self.blocks.close()
            self.due = self.end

    def wants_turn(self) -> bool:
        """Return whether a member wants a turn; the one with the oldest position is the next."""
        return self.oldest() < self.due

    def skip(self) -> None:
        """Move members for which nothing is due to `due`."""
        masks = self.blocks.mask_count
        for _ in range(min(_SKIPPED, 1 + _SKIPPED_MASKS // masks) if masks else 0):
            receiver, position = next(iter(self.members.items()))
            if position >= self.due or self._between(receiver, position, self.due) is not None:
                break
            self.advance(receiver)

    def advance(self, receiver: Receiver) -> Digest | None:
        """Move a member with an older position to `due`.

        :returns: the messages between the two positions; None if it gets none.
        """
        self.run = None
        position = self.members[receiver]
        self.members[receiver] = self.due
        self.members.move_to_end(receiver)
        return self._between(receiver, position, self.due)

    def _between(self, receiver: Receiver, first: int, end: int) -> Digest | None:
        windows, window = self._windows, self._windows.get((first, end))
        if window is None:
            if len(windows) >= _MOST_WINDOWS:
                windows.popitem(last=False)
            window = windows[first, end] = self.blocks.window(first, end)
        windows.move_to_end((first, end))
        return window.digest_for(self.columns[receiver])

    def forget_windows(self, oldest: int) -> None:
        """Free the windows that begin before the oldest position of a member."""
        for window in [window for window in self._windows if window[0] < oldest]:
            del self._windows[window]

    def clear(self) -> int:
        """Free all messages and publishers: plans and changes may still refer to the cohort.

        :returns: the bytes freed.
        """
        self._windows.clear()
        self.run = None
        self.blockable.clear()
        self.unasked.clear()
        return self.blocks.drop(self.end)


class Cohorts:
    """The cohorts of all users.

    :ivar of: the cohort of each receiver that is in one.
    :ivar version: the number of changes so far.
    :ivar changes: the last of them.
    :ivar bytes: bytes that wait for all cohorts; a packet counts for each cohort, and is charged to its user.
    """

    __slots__ = ("_by_user", "bytes", "changes", "of", "version")

    def __init__(self) -> None:
        self.version = 0
        self.changes: list[Change] = []
        self.of: dict[Receiver, Cohort] = {}
        self.bytes = 0
        self._by_user: dict[UserShare, dict[tuple[bool, bool], Cohort]] = {}

    def of_user(self, user: UserShare) -> list[Cohort]:
        """Return the cohorts of a user, the oldest first."""
        return list(self._by_user.get(user, {}).values())

    def join(self, receiver: Receiver, can_block: bool, replaces: bool) -> None:
        """Put a receiver, for which nothing waits, into a cohort.

        :param can_block: as for `Cohort`.
        :param replaces: as for `Cohort`.
        """
        self._join(receiver, self._find(receiver.user, can_block, replaces), 0)

    def join_with(
        self, receiver: Receiver, packets: list[bytes], size: int, room: int, *, can_block: bool, replaces: bool
    ) -> bool:
        """Put a receiver, for which a run is the first that waits, into a cohort.

        :param packets: the run; the cohort may have it already.
        :param size: its bytes.
        :param room: bytes that may be added to a cohort that has not.
        :param can_block: as for `Cohort`.
        :param replaces: as for `Cohort`.
        :returns: False if there is not enough room.
        """
        cohort = self._by_user.get(receiver.user, {}).get((can_block, replaces))
        if cohort is None or cohort.run is not packets:
            if size > room:
                return False
            cohort = self._find(receiver.user, can_block, replaces)
            self.add(cohort, packets, size, 0 if cohort.members else None)
        self._join(receiver, cohort, len(packets))
        return True

    def leave(self, receiver: Receiver) -> None:
        """Take a receiver out of its cohort, if it is in one."""
        cohort = self.of.pop(receiver, None)
        if cohort is not None:
            del cohort.members[receiver]
            if not cohort.members:
                self._remove(cohort)
            else:
                self.trim(cohort)
            self._note(Change(receiver, cohort, cohort.columns[receiver], False, not cohort.members))

    def forget(self, receiver: Receiver) -> None:
        """Forget a receiver that is in no cohort, and in no route any more."""
        for cohort in self.of_user(receiver.user):
            cohort.forget(receiver)

    def trim(self, cohort: Cohort) -> None:
        """Drop blocks that wait for no member, and the windows that begin before the oldest position."""
        oldest = cohort.oldest()
        if oldest == cohort.trimmed:
            return  # as nearly always: many members have the same position
        cohort.trimmed = oldest
        cohort.forget_windows(oldest)
        if gone := cohort.blocks.drop(oldest):
            cohort.run = None
            self._count(cohort, -gone)

    def add(self, cohort: Cohort, packets: list[bytes], size: int, mask: int | None = None) -> None:
        """Add messages that wait for a cohort.

        :param size: their bytes.
        :param mask: the members that get them; None for all.
        """
        cohort.run, before = packets, cohort.blocks.size
        block = cohort.blocks.add(packets, size, mask)
        if block is not None and cohort.replaces and not block.mask_count:
            block.digest.newest()  # now, block by block: for all of them, the first decision would take 10 ms
        self._count(cohort, cohort.blocks.size - before)

    def forget_changes(self) -> None:
        """Forget all changes, which keep receivers in memory; only when no older plan is left."""
        self.changes.clear()

    def _find(self, user: UserShare, can_block: bool, replaces: bool) -> Cohort:
        """Return the cohort for such receivers, which may be a new one."""
        cohorts = self._by_user.setdefault(user, {})
        cohort = cohorts.get((can_block, replaces))
        if cohort is None:
            cohort = cohorts[can_block, replaces] = Cohort(user, can_block, replaces)
        return cohort

    def _join(self, receiver: Receiver, cohort: Cohort, waiting: int) -> None:
        before = cohort.blocks.size
        column = cohort.add_member(receiver, waiting)
        self._count(cohort, cohort.blocks.size - before)
        self.of[receiver] = cohort
        self._note(Change(receiver, cohort, column, True, len(cohort.members) == 1))

    def _note(self, change: Change) -> None:
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
        del cohorts[cohort.can_block, cohort.replaces]
        if not cohorts:
            del self._by_user[cohort.user]
