"""The scheduler: whose turn it is, and for how long.

.. rubric:: Theory of operation

One thread serves all users, so the time that one takes is time that the others wait. While a single user is active,
nothing is measured. With a second one, the scheduler measures each batch, and deducts its time from the *deficit* of
its user. A user without deficit waits in a ring: in front if nobody there has waited longer since its last turn, else
last. In each turn the first one gets a quantum, and its lines (`sbus.fair.lines`) are served until that is spent.
Between two turns, and within one while few packets come (`SLICE`), the server looks at the sockets, so a user who sends
little needs no turn. This is deficit round robin (Shreedhar and Varghese, 1995), in time.

================================================  ====================================================================
work, while several users are active              the user who is charged
================================================  ====================================================================
a batch (`Scheduler.begin`, `Scheduler.end`)      the one who sent it
an event without a batch (`note_event`): a read   the one whose socket it was
that found nothing, room in a socket
a chore that is done at once (`Scheduler.do`)     the one whose chore it is; the batch that caused it does not pay
                                                  (`Scheduler.shift`)
the look-up of a route that another user changed  the one who changed it, by `shift` as well
room for a new route in the cache                 the one who has it looked up (`Scheduler.add`)
all that is done in a turn                        the one whose turn it is, once, when the turn ends
================================================  ====================================================================

A user is active from its batch until another one has sent `CROWD` in a row, while its lines hold something, and while
its receivers do not keep up (`Scheduler.press`). A turn is long (`ALONE`) only if nobody else is active.

Invariants:

* Of k users with work each gets 1/k of the time, within one step: its time beyond the quantum is a debt.
* A user is forgotten once it has rested (`Lines.has_rested`): reconnecting is no way out.

Rejected: prices (60 constants, wrong on a slow machine); a clock for a user who is alone (two looks at it for each
batch take 1 % of a lone message's time).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from sbus.fair.lines import QUANTUM, Entry, Lines, Reader

__all__ = ["ALONE", "CROWD", "FEW", "LONGEST_CHARGE", "SLICE", "Scheduler"]

ALONE = 4_000_000
"""Nanoseconds of one turn of a user who is alone, or of consecutive turns before the reactor continues, which takes 40
µs. A newcomer waits for one such turn at most, a fifth of the 20 ms that row ``keys`` leaves for a round trip."""
CROWD = 64
"""Batches of one user, without one of another user between them, after which that user is alone. One client with a
message under way (row ``many-small-1-1-3900-silent``) sends more often, so its neighbours' turns are short."""
SLICE = 100_000
"""Nanoseconds of a turn between two looks at the sockets, while few packets of other users come. A single client beside
a user with work has three times as many round trips as with looks between turns alone (row
``many-small-1-1-3900-silent``)."""
FEW = 4
"""Packets of other users, the latest and half of those before, with which looks within a turn still pay. With them in
each turn, a crowd had two thirds of its throughput (row ``many-small-12-1-250-silent``)."""
LONGEST_CHARGE = 5_000_000
"""Nanoseconds that one step is charged at most: beside a program that keeps a CPU busy (row ``receipt-flips``), a step
takes much longer by the clock than it works. Preemption and garbage collections are charged to nobody."""


class _Reactor(Protocol):
    def callLater(self, delay: float, call: Callable[[], None], /) -> object: ...


class Scheduler:
    """Whose turn it is.

    :param reactor: calls the next turn, with ``callLater(0, …)``.
    :param clock: nanoseconds. A look at ``perf_counter_ns`` takes 1/28 of a look at the thread's CPU time.
    :ivar clock: the same.
    :ivar working_time: the CPU time of this thread, in nanoseconds. A look takes longer, so only long runs take one, to
        learn how long their copies take (`Route.learn`).
    :ivar is_busy: whether more than one user is active, or anything waits for a turn. If not, nothing is measured.
    :ivar last: the lines of the user who has sent the last batch; change it with `change`.
    :ivar crowd: batches until that user counts as alone, if nobody else sends.
    :ivar look: called between two turns to serve the ready sockets; returns whether the reactor can wait. None leaves
        that to the reactor.
    :ivar waited: how often a client has had to wait for a turn, since the start.
    :ivar mail_copies: copies of messages that wait in mail now.
    :ivar mail_bytes: the bytes of these.
    """

    __slots__ = (
        "_arrived",
        "_began",
        "_current",
        "_doing",
        "_is_alone",
        "_is_due",
        "_reactor",
        "_reader",
        "_ring",
        "_served",
        "_turn_ended",
        "_turns",
        "_until",
        "clock",
        "crowd",
        "is_busy",
        "last",
        "look",
        "mail_bytes",
        "mail_copies",
        "waited",
        "working_time",
    )

    def __init__(self, reactor: _Reactor, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._reactor = reactor
        self.clock = clock
        self.working_time = time.thread_time_ns
        self._ring: OrderedDict[Lines, None] = OrderedDict()
        self._current: Lines | None = None  # whose turn it is, also between its slices
        self._is_alone = False  # whether nobody else was active when that turn began
        self._arrived = 0  # packets of other users since then; a slice halves those before it
        self._served: Lines | None = None  # whose turn is being served right now
        self._doing: Lines | None = None  # whose chore is done right now, outside of turns
        self._reader: Lines | None = None  # whose batch began before it was read
        self._is_due = False
        self._began = self._until = self._turn_ended = 0
        self.last: Lines | None = None
        self.look: Callable[[], bool] | None = None
        self.crowd = 0
        self.is_busy = False
        self.waited = self._turns = 0
        self.mail_copies = 0
        self.mail_bytes = 0

    # --- who is active -----------------------------------------------------------------------

    def change(self, lines: Lines) -> None:
        """Note that another user than the last has sent a batch."""
        if self.last is not None:
            self.crowd = CROWD
            self.is_busy = True
        self.last = lines

    def press(self) -> None:
        """Note that receivers of another user do not keep up: that user counts as active, though it sends nothing."""
        self.crowd = CROWD
        self.is_busy = True

    def count_batch(self) -> None:
        """Note that the last user has sent one more batch, while there is a crowd."""
        self.crowd -= 1
        if not self.crowd:
            self.is_busy = bool(self._ring)

    def forget(self, lines: Lines) -> None:
        """Forget a user: the next one that sends makes no crowd."""
        if self.last is lines:
            self.last = None

    @property
    def is_contended(self) -> bool:
        """Whether another user waits while one is served."""
        return self.crowd > 0 or len(self._ring) > 1

    @property
    def is_in_turn(self) -> bool:
        """Whether a turn is being served now."""
        return self._served is not None

    # --- batches outside of turns ------------------------------------------------------------

    def may_read(self, lines: Lines) -> bool:
        """Return whether a client of this user may be read now; if not, it has to `wait`.

        The following work counts as the beginning of its batch.
        """
        if self._served is not None:
            return self._served is lines and self.clock() < self._until
        self.note_event(lines)
        return lines.deficit > 0 and not (lines.readers or lines.hung_up or lines.held)

    def note_event(self, lines: Lines) -> None:
        """Note that the following work is for a socket of this user: it is charged when other work follows."""
        now = self.clock()
        if self._reader is not None:
            self._end_read(now)
        self._reader, self._began = lines, now

    def _end_read(self, now: int) -> None:
        """Charge an event without a batch: a read that has found no packet or was refused, room in a socket."""
        lines, self._reader = self._reader, None
        assert lines is not None
        self.charge(lines, now - self._began)

    def may_go_on(self, lines: Lines) -> bool:
        """As `may_read`, for packets that have been read."""
        if self._served is not None:
            return self._served is lines
        return lines.deficit > 0 and not (lines.readers or lines.hung_up or lines.held)

    def begin(self, lines: Lines, packets: int = 1) -> int:
        """Begin a batch of a user; `end` must follow.

        :param packets: the number of packets in the batch.
        :returns: the time until which it may take.
        """
        if self._served is not None:
            return self._until
        if lines is not self._current:
            self._arrived += packets
        now = self.clock()
        if self._reader is not lines:
            if self._reader is not None:
                self._end_read(now)
            self._began = now
        self._reader = None
        return now + (max(lines.deficit, 1) if self.is_busy else ALONE)

    def end(self, lines: Lines) -> None:
        """End a batch of a user, and charge it."""
        if self._served is None and self.is_busy:
            self.charge(lines, self.clock() - self._began)

    def charge(self, lines: Lines, took: int) -> None:
        """Deduct time (nanoseconds) from a user's deficit."""
        lines.deficit -= min(took, LONGEST_CHARGE)

    def shift(self, lines: Lines, took: int) -> None:
        """Charge a user for a part of what is done now for another one, who does not pay for that part."""
        self._began += took
        self.charge(lines, took)

    def add(self, took: int) -> None:
        """Charge time (nanoseconds) that others will need later to the user who is charged for what is done now."""
        self._began -= took

    def is_serving(self, lines: Lines) -> bool:
        """Return whether the time that passes now still has to be charged to a user."""
        return lines is self._served or lines is self._doing

    def do(self, lines: Lines, chore: Entry) -> None:
        """Do a chore of a user now, as far as the user's deficit lasts, and the rest in turns."""
        if self._served is not None:
            if self._served is not lines or lines.chores or not chore.run(self._until):
                self.add_chore(lines, chore)
            return
        is_busy = self.is_busy
        if is_busy and (lines.deficit <= 0 or lines.chores):
            self.add_chore(lines, chore)
            return
        began = self.clock()
        before, self._doing = self._doing, lines
        outer, self._began = self._began, began  # what the chore shifts and adds is its own
        try:
            is_done = chore.run(began + (lines.deficit if is_busy else ALONE))
        finally:
            self._doing = before
            own, self._began = self._began, outer
        if not is_done:
            self.add_chore(lines, chore)
        now = self.clock()
        if is_busy:
            self.charge(lines, now - own)
            self._began += now - began

    # --- waiting -----------------------------------------------------------------------------

    def wait(self, lines: Lines, reader: Reader, has_hung_up: bool = False) -> None:
        """Have a client read in a turn of its user."""
        self.waited += 1
        if lines is not self._current:
            self._arrived += 1
        lines.enter(reader, has_hung_up)
        self.enter(lines)

    def hold(self, lines: Lines, reader: Reader, has_hung_up: bool = False) -> None:
        """Have a client read when there is room in its user's mail."""
        self.waited += 1
        lines.hold(reader, has_hung_up)

    def hang_up(self, lines: Lines, reader: Reader) -> None:
        """Note that the peer of a reader that waits has hung up: it goes before those that have not."""
        if reader in lines.held:
            lines.held[reader] = True
        elif reader in lines.readers:
            lines.enter(reader, True)

    def add_chore(self, lines: Lines, chore: Entry) -> None:
        """Have a chore done in turns of a user."""
        lines.chores[chore] = None
        self.enter(lines)

    def append(self, lines: Lines, entry: Entry) -> None:
        """Put an entry at the end of a user's mail."""
        lines.mail.append(entry)
        self.enter(lines)

    def enter(self, lines: Lines) -> None:
        """Give a user turns until nothing in its lines waits."""
        if lines not in self._ring:
            first = next(iter(self._ring), lines)
            self._ring[lines] = None
            has_waited_longest = 0 < lines.last_turn < first.last_turn  # without 0, new UIDs would always be first
            self._ring.move_to_end(lines, last=not has_waited_longest)
            self.is_busy = True
        if not self._is_due:
            self._is_due = True
            self._reactor.callLater(0, self._call)

    # --- turns -------------------------------------------------------------------------------

    def may_pass(self) -> bool:
        """Return whether the sockets may be looked at once more before the next turn; a look at some has ended."""
        if self._reader is not None:
            self._end_read(self.clock())
        return not self._ring or self.clock() - self._turn_ended < QUANTUM

    def _call(self) -> None:
        """Serve one turn, or several with a poll of the sockets between them, which is faster than the reactor."""
        try:
            self.turn()
            if self.look is not None:
                end = self._turn_ended + ALONE
                while self._ring and self._turn_ended < end and self.look():
                    self.turn()
        finally:
            self._is_due = bool(self._ring)
            if self._is_due:
                self._reactor.callLater(0, self._call)

    def turn(self) -> None:
        """Serve the user whose turn it is, or the next one, for one slice or for the rest of the turn."""
        lines = self._current
        if lines is None or lines.deficit <= 0 or lines.is_empty:
            lines = self._current = self._next()
        if lines is not None:
            self._serve(lines)
        self._turn_ended = self.clock()

    def _next(self) -> Lines | None:
        """Return the first user of the ring with work and without debt; users without work may rest."""
        is_contended = self.is_contended
        for _ in range(len(self._ring)):
            lines = next(iter(self._ring))
            self._ring.move_to_end(lines)
            self._is_alone = not is_contended and self.last in (None, lines)
            quantum = ALONE if self._is_alone else QUANTUM
            lines.deficit = min(quantum, lines.deficit + quantum)
            if not lines.is_empty and lines.deficit <= 0:
                continue
            self._count_turn(lines)  # without work, too: it does not go in front when it comes back
            if not lines.is_empty:
                return lines
            self._let_rest(lines)
        return None

    def _serve(self, lines: Lines) -> None:
        is_whole = self._is_alone or self._arrived > FEW
        self._arrived //= 2
        self._began = self.clock()
        self._served, self._until = lines, self._began + (lines.deficit if is_whole else min(lines.deficit, SLICE))
        try:
            lines.turn(self._began, self._until, self.clock)
        finally:
            self._served = None
            self.charge(lines, self.clock() - self._began)
            self._let_rest(lines)

    def _count_turn(self, lines: Lines) -> None:
        self._turns += 1
        lines.last_turn = self._turns

    def _let_rest(self, lines: Lines) -> None:
        """Take a user out of the ring if nothing is left there; one that is to be forgotten must have rested."""
        may_leave = lines.is_empty if lines.on_rest is None else lines.has_rested
        if may_leave:
            self.finish(lines)
            on_rest, lines.on_rest = lines.on_rest, None
            if on_rest is not None:
                on_rest()

    def finish(self, lines: Lines) -> None:
        """Take a user out of the ring, whatever waits there."""
        self._ring.pop(lines, None)
        if self._current is lines:
            self._current = None
        self.is_busy = self.crowd > 0 or bool(self._ring)
