"""Late receivers: copies of messages wait until the receivers' user has time for them.

.. rubric:: Theory of operation

A copy of a message is work, and the question is whose. If publishers alone paid for it, a user with a thousand silent
subscribers of everything would slow all publishers down; if the receivers' users alone did, a publisher could spend the
time of any user who subscribes to its keys. So both have balances. Each user has one for what its clients send, from
which a publisher pays for the copies that are made at once (`sbus.server.core.turns`), and another one for the copies
that its receivers get (`sbus.flood.budget.CopyBalance`).

When the balance of copies is spent while clients of other users wait, further messages for that user's receivers wait
at the end of the receivers' queues, undecided: the receivers are *late*. That costs a publisher well below 1 µs for
each run and receiver, whatever the receivers chose. Late receivers of one user wait in a line of turns, as one client,
apart from those whose sockets have room again (`sbus.server.bus.draining`). In the turn, the server sends batches to a
receiver until its socket is full, or for 0.1 ms while other users send as well and 4 ms otherwise. Flood control
decides about the rest in one step, which is a small part of the work of doing it message by message. If more than one
batch waits and the queue has room for all of it, the decision comes first: the queue keeps all, and the server sends
from there.

The socket of a *congested* receiver is full, so nothing is gained by an early decision: it gets a turn when
`WORTH_DECIDING` messages wait, after `LONGEST_WAIT`, or as soon as it has read its queue.

While no other user's client sends anything, a spent balance is topped up on the spot, and only congested receivers of
a run with `MANY` receivers are late.

The late receivers of a user form *cohorts* (`sbus.server.bus.cohorts`). A receiver joins one when a run with `MANY`
receivers has to wait for it, or when its socket is full and either `MANY` receivers are served with it or its user has
a cohort already. In a turn, flood control decides about a member as about any late receiver; if its socket is full, or
more waits for it, it stays in its cohort. While `Cohort.waiting` is at least `_MUCH`, three of four choices prefer its
members to receivers whose sockets may have room, and from `_TOO_MUCH` on decisions do not send: their sockets count as
full.

Lateness also bounds the flush of a message with very many receivers. `FLUSHED_AT_ONCE` of them are flushed, or fewer
if these take the time of a long turn (`sbus.server.core.turns`). The others are late, save those that can block
publishers.

.. rubric:: Invariants

* The undecided messages are the last in the receiver's queue, and later ones go behind them. So the order is the one
  without lateness, for each receiver and over all publishers.
* Lateness loses a message in only two cases: the time to send was up, and the receiver's strategies drop
  the message; or there is no room for undecided messages, and it has many receivers or its run has paid for as many
  decisions as one run may.
* A receiver is not late for a publisher that it may block: flood control decides about these messages at once.
* `Late.catch_up` comes before anything that looks at the queue: a reply, a change of the client's strategies or order,
  the end of the connection. So a fence counts what was published before it.
* The room for undecided messages is bounded, in messages for each receiver and in bytes for all (`Late.room`). Where it
  is taken, each run decides about some receivers at its publisher's expense, and the others wait beyond the room
  meanwhile: so no run is a long piece of work. For publishers of the receiver's own user the room is small, so what
  others publish finds room behind any flood of that user. Cohorts have limits of their own
  (`sbus.server.bus.cohort_delivery`).
* Where a run decides because too much waits for `MANY` receivers, a publisher of another user does not pay for sending,
  which costs ten times a decision: their sockets count as full. Otherwise, readers that drain their sockets again and
  again take nine tenths of everybody's throughput.
* What waits is charged to the receiver's user, who never lacks memory for anything else because of it.

Rejected: one list of undecided messages for each user, also for receivers that get different messages. Replies,
settings and ends of connections would have to pass through that list, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from sbus.flood import SendQueue, Verdict
from sbus.flood.budget import UserShare
from sbus.flood.digest import Digest
from sbus.server.bus.cohorts import Cohort, Cohorts
from sbus.server.core.interfaces import Publisher, Receiver
from sbus.server.core.turns import Turns

__all__ = [
    "CATCH_UP_WORK",
    "FLUSHED_AT_ONCE",
    "LONGEST_WAIT",
    "MANY",
    "MOST_BYTES",
    "MOST_PACKETS",
    "OWN_PART",
    "WORTH_DECIDING",
    "Late",
    "catch_ups",
    "is_own_user",
]

FLUSHED_AT_ONCE = 512
"""Receivers that are flushed in one go."""
MANY = 16
"""From this number of receivers on, the congested receivers of a run are late even while no other user sends, and late
receivers form cohorts."""
WORTH_DECIDING = 512
"""A congested receiver wants a turn when this number of messages waits for it."""
LONGEST_WAIT = 0.02
"""Seconds after which a congested receiver wants a turn, however little waits for it."""
MOST_PACKETS = 2_048
"""Messages that wait undecided for one receiver; the unit of the limits below."""
MOST_BYTES = 16 << 20
"""Bytes that wait undecided for all receivers together; a packet counts for each of its receivers, or cohorts. The unit
of the limits below, too."""
_COHORTS = 2
"""All cohorts together have this many times the room."""
_MEMORY_PART = 32
"""`Late.most_bytes` is at most this part (one over it) of one user's limit of memory."""
OWN_PART = 2
"""Publishers of the receiver's own user have this part (one over it) of the room."""
_OTHERS = 8
"""Publishers of other users have this many times the room: a flood of the receivers' own user leaves them enough."""
_BEYOND = 16
"""Once a run has paid for as many decisions as one run may, it has this many times the room, whoever publishes."""
_CATCH_UPS = 16
"""Late receivers about which one run decides because too much waits for them."""
_RECEIVERS_PER_CATCH_UP = 32
"""For each such number of receivers, a run decides about one more of them."""
CATCH_UP_WORK = 64
"""A decision counts as one more for each such amount of work that it takes."""
_MUCH = 2_048
"""From this number of messages waiting for a cohort on, its members mostly come before receivers whose sockets may have
room. Serving those takes much longer, and meanwhile publishers would have to decide about the members."""
_TOO_MUCH = 32_768
"""From this number of messages waiting for a cohort on, decisions about its members do not send. Sending takes twice as
long as deciding, and the kernel says again that their sockets have room (`sbus.server.bus.draining`)."""
_LINE_PART = 4
"""Even then, one choice in this number falls on a receiver in line."""
_MEASURED = 4
"""Receivers about which a turn decides between two looks at the clock, each of which costs as much as a cheap decision.
The first look comes after the first receiver."""


def catch_ups(receivers: int) -> int:
    """Return the number of late receivers about which a run decides at its publisher's expense.

    :param receivers: the receivers of the run.
    """
    return _CATCH_UPS + receivers // _RECEIVERS_PER_CATCH_UP


def is_own_user(publisher: Publisher | None, user: UserShare) -> bool:
    """Return whether a user's receivers and a publisher are of one user; the program around the bus has none."""
    return publisher is not None and publisher.user is user


class _LateLine:
    """The late receivers of one user, which wait for a turn as one client.

    :param find: returns the next receiver of the line that wants a turn.
    :param decide: decides about that receiver.
    :ivar user: the user.
    :ivar receivers: those that want a turn, the oldest first; members of cohorts only if their sockets may have room.
    :ivar choices: the number of calls of `find` so far.
    :ivar congested: those that are in no cohort and will want one later, as their sockets are full.
    """

    __slots__ = ("_decide", "_find", "_turns", "choices", "congested", "is_waiting", "receivers", "user")

    def __init__(
        self,
        user: UserShare,
        turns: Turns,
        find: Callable[[_LateLine], Receiver | None],
        decide: Callable[[_LateLine, Receiver], None],
    ) -> None:
        self.user = user
        self._turns = turns
        self._find = find
        self._decide = decide
        self.is_waiting = False
        self.choices = 0
        self.receivers: OrderedDict[Receiver, None] = OrderedDict()
        self.congested: dict[Receiver, None] = {}

    def want_turn(self, receiver: Receiver) -> None:
        self.congested.pop(receiver, None)
        self.receivers[receiver] = None
        self.wait()

    def wait(self) -> None:
        if not self.is_waiting:
            self.is_waiting = True
            self._turns.wait(self.user.copies, self, is_apart=True)

    def take_turn(self) -> None:
        """Decide about the messages of some receivers (`sbus.server.core.turns`)."""
        self.is_waiting = False
        balance, turns = self.user.copies, self._turns
        before, began = balance.work_left, turns.cpu()
        decided = 0
        while (receiver := self._find(self)) is not None and balance.work_left > 0:
            self._decide(self, receiver)
            if not decided % _MEASURED:
                turns.correct(balance, before, began)  # one receiver can take longer than a turn
            decided += 1
        turns.correct(balance, before, began)
        if receiver is not None:
            self.wait()


class Late:
    """The late receivers of one bus.

    :param turns: the turns of the users.
    :param decide: sends what a receiver's socket takes, if that is wanted (see `serve`), and lets flood control decide
        about the rest; returns the price. The digest has the messages if queues share them; None if they are pending.
    :param user_memory: bytes of memory that one user may hold.
    :ivar most_bytes: `MOST_BYTES`, or less if memory is short.
    :ivar bytes: bytes that wait undecided for all receivers that are in no cohort; a packet counts for each of them.
    :ivar cohorts: the cohorts.
    """

    __slots__ = ("_decide", "_has_timer", "_lines", "_turns", "bytes", "cohorts", "most_bytes")

    def __init__(
        self,
        turns: Turns,
        decide: Callable[[Receiver, SendQueue, bool, Digest | None], int],
        user_memory: int,
    ) -> None:
        self._turns = turns
        self._decide = decide
        self.most_bytes = min(MOST_BYTES, user_memory // _MEMORY_PART)
        self._lines: dict[UserShare, _LateLine] = {}
        self._has_timer = False
        self.cohorts = Cohorts()
        self.bytes = 0

    def room(self, is_own: bool, beyond: bool = False) -> tuple[int, int]:
        """Return the messages that may wait undecided for one receiver, and the bytes that may still come for all.

        :param is_own: the publisher and the receiver are of one user.
        :param beyond: the run has paid for enough decisions.
        """
        times = _BEYOND if beyond else 1 if is_own else _OTHERS
        part = OWN_PART if is_own and not beyond else 1
        return times * MOST_PACKETS // part, times * self.most_bytes // part - self.bytes

    @property
    def most_cohort_bytes(self) -> int:
        """The bytes that wait undecided for all cohorts together."""
        return _COHORTS * self.most_bytes

    def cpu(self) -> int:
        """Return the CPU time of this thread, in nanoseconds."""
        return self._turns.cpu()

    @property
    def is_contended(self) -> bool:
        """Whether clients of several users send."""
        return self._turns.crowd > 0

    def add(self, user: UserShare, size: int) -> None:
        """Count bytes that were put behind those of late receivers of one user, within `room`."""
        self.bytes += size
        user.charge_memory(size)

    def postpone(
        self,
        receiver: Receiver,
        queue: SendQueue,
        packets: list[bytes],
        size: int,
        *,
        is_own: bool = False,
        beyond: bool = False,
    ) -> bool:
        """Have messages wait undecided at the end of a queue, if there is room; see `room`.

        :param size: their bytes.
        """
        if queue.is_deaf:
            return False  # it takes nothing
        most, left = self.room(is_own, beyond)
        if size > left or len(queue.pending) + len(packets) > most:
            return False
        queue.pending += packets
        queue.late_bytes += size
        self.add(receiver.user, size)
        line = self._line(receiver.user)
        if queue.is_congested and len(queue.pending) < WORTH_DECIDING:
            if not queue.is_late:
                line.congested[receiver] = None
                self.set_timer()
        elif receiver not in line.receivers:
            line.want_turn(receiver)
        queue.is_clear, queue.is_late = False, True
        return True

    def join_with(
        self, receiver: Receiver, queue: SendQueue, packets: list[bytes], size: int, *, is_own: bool = False
    ) -> bool:
        """Put a receiver, for which a run is the first that waits, into a cohort; return whether there is one.

        A cohort that has not got the run is no place if all cohorts together have no room for it.

        :param is_own: as for `room`.
        """
        if queue.is_late or queue.is_deaf or queue.pending:
            return False
        replaces = queue.settings.soft.always is Verdict.REPLACE
        can_block = queue.can_block
        room = self.most_cohort_bytes // (OWN_PART if is_own else 1) - self.cohorts.bytes
        if not self.cohorts.join_with(receiver, packets, size, room, can_block=can_block, replaces=replaces):
            return False
        line = self._line(receiver.user)
        if not queue.is_congested:
            line.want_turn(receiver)
        self.set_timer()
        queue.is_clear, queue.is_late = False, True
        return True

    def call(self, cohort: Cohort) -> None:
        """Have the members of a cohort want turns: much waits for them."""
        cohort.want_turns()
        self._line(cohort.user).wait()

    def join(self, receiver: Receiver, queue: SendQueue) -> None:
        """Put a receiver whose socket was full just now into a cohort, unless something waits undecided for it."""
        if queue.is_late or queue.is_deaf or queue.pending:
            return
        self.cohorts.join(receiver, queue.can_block, queue.settings.soft.always is Verdict.REPLACE)
        queue.is_clear, queue.is_late = False, True
        self._line(receiver.user)

    def hurry(self, receiver: Receiver, queue: SendQueue) -> None:
        """Have a late receiver want a turn: much waits for it, or its socket takes packets again."""
        line = self._lines[receiver.user]
        cohort = self.cohorts.of.get(receiver)
        if cohort is not None and cohort.can_block is not queue.can_block:  # a snapshot has ended, which changes that
            self.set_apart(receiver, queue)
        elif cohort is not None or receiver in line.congested:
            line.want_turn(receiver)

    def catch_up(self, receiver: Receiver, queue: SendQueue, sends: bool = True) -> int:
        """Decide about all that waits for a late receiver, which is not late any more.

        :param sends: as for `serve`.
        :returns: the price.
        """
        cohort = self.cohorts.of.get(receiver)
        if cohort is not None and (digest := cohort.waiting_for(receiver)) is not None:
            queue.pending = queue.pending + digest.packets  # behind what is just being sent, if an observer publishes
        self._end(receiver, queue)
        return self._decide(receiver, queue, sends, None)

    def serve(self, receiver: Receiver, are_many: bool, sends: bool = True) -> int:
        """Decide about what is due for a late receiver: for a member of a cohort, the messages up to `Cohort.due`.

        :param are_many: it is one of many, so if its socket is full, it joins a cohort.
        :param sends: send what the socket takes; else count it as full.
        :returns: the price.
        """
        queue = receiver.queue
        assert queue is not None, "a receiver without a queue is never late"
        lost, cohort = queue.lost, self.cohorts.of.get(receiver)
        if cohort is None or queue.pending or cohort.members[receiver] >= cohort.due:
            work = self.catch_up(receiver, queue, sends)
            if are_many and (queue.is_congested or queue.lost > lost):
                self.join(receiver, queue)
            return work
        sends = sends and cohort.waiting() < _TOO_MUCH
        digest = cohort.advance(receiver)
        self.cohorts.trim(cohort)
        has_something = digest is not None or not queue.is_congested
        work = self._decide(receiver, queue, sends, digest) if has_something else 1
        if cohort.replaces and digest is not None:
            cohort.variety = len(digest.newest()) / len(digest)
        is_full = queue.is_congested or queue.lost > lost
        if self.cohorts.of.get(receiver) is cohort:
            if queue.pending or queue.is_deaf:
                self.set_apart(receiver, queue)
            elif not is_full:
                if cohort.members[receiver] == cohort.end:
                    self._end(receiver, queue)
                else:
                    self._lines[receiver.user].want_turn(receiver)
        return work

    def forget(self, receiver: Receiver, queue: SendQueue) -> None:
        """Stop treating a receiver as late, as its connection ends; what waits is at the end of its queue."""
        if receiver in self.cohorts.of:
            self.set_apart(receiver, queue)
        self._end(receiver, queue)

    def set_apart(self, receiver: Receiver, queue: SendQueue) -> None:
        """Take a member out of its cohort; it is late by itself, and wants a turn."""
        waiting = self.cohorts.of[receiver].waiting_for(receiver)
        self.cohorts.leave(receiver)
        if waiting is not None:
            queue.pending = queue.pending + waiting.packets
            queue.late_bytes += waiting.size
            self.add(receiver.user, waiting.size)
        self._lines[receiver.user].want_turn(receiver)

    def set_timer(self) -> None:
        """Have the receivers for which something waits want turns, after `LONGEST_WAIT` at the latest."""
        if not self._has_timer:
            self._has_timer = True
            self._turns.call_later(LONGEST_WAIT, self._time_is_up)

    def _end(self, receiver: Receiver, queue: SendQueue) -> None:
        """Stop treating a receiver as late."""
        if queue.is_late:
            queue.is_late = False
            queue.note_clear()
            self.cohorts.leave(receiver)
            self.add(receiver.user, -queue.late_bytes)
            queue.late_bytes = 0
            line = self._lines[receiver.user]
            line.receivers.pop(receiver, None)
            line.congested.pop(receiver, None)
            if not line.receivers and not line.congested and not self.cohorts.of_user(receiver.user):
                del self._lines[receiver.user]
                if line.is_waiting:
                    self._turns.forget(queue.copies, line)

    def _line(self, user: UserShare) -> _LateLine:
        line = self._lines.get(user)
        if line is None:
            line = self._lines[user] = _LateLine(user, self._turns, self._next, self._serve)
        return line

    def _time_is_up(self) -> None:
        self._has_timer = False
        for user, line in self._lines.items():
            line.receivers.update(line.congested)
            line.congested.clear()
            has_due = False
            for cohort in self.cohorts.of_user(user):
                cohort.want_turns()
                has_due = has_due or cohort.wants_turn()
                if cohort.waiting():  # what comes until all of them have had this turn waits for the next one
                    self.set_timer()
            if has_due or line.receivers:
                line.wait()

    def _next(self, line: _LateLine) -> Receiver | None:
        """Return the next receiver of a line that wants a turn."""
        receiver = next(iter(line.receivers), None)
        line.choices += 1
        if receiver is None or line.choices % _LINE_PART:
            for cohort in self.cohorts.of_user(line.user):
                if receiver is None or cohort.waiting() >= _MUCH:
                    cohort.skip()
                    self.cohorts.trim(cohort)  # if all have moved on, no decision follows
                    if cohort.wants_turn():
                        return next(iter(cohort.members))
        return receiver

    def _serve(self, line: _LateLine, receiver: Receiver) -> None:
        """Decide about a receiver of a line."""
        are_many = len(line.receivers) >= MANY or bool(self.cohorts.of_user(line.user))
        line.receivers.pop(receiver, None)  # a member that stays in its cohort has had its turn
        line.user.copies.work_left -= self.serve(receiver, are_many)
