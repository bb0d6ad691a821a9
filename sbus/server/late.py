"""Late receivers: copies of messages wait until the receivers' user has time for them.

.. rubric:: Theory of operation

A copy of a message is work, and the question is whose. If publishers alone paid for it, a user with a thousand silent
subscribers of everything would slow all publishers down; if the receivers' users alone did, a publisher could spend the
time of any user who subscribes to its keys. So both have balances. Each user has one for what its clients send, from
which a publisher pays for the copies that are made at once (`sbus.server.turns`), and another one for the copies that
its receivers get (`sbus.flood.budget.CopyBalance`).

When the balance of copies is spent while clients of other users wait, further messages for that user's receivers wait
at the end of the receivers' queues, undecided: the receivers are *late*. That costs a publisher well below 1 µs for
each run and receiver, whatever the receivers chose. Late receivers of one user wait in a line of turns, as one client.
In the turn, all that has come for a receiver is sent with one call, or flood control decides about it in one step,
which is a small part of the work of doing it message by message. The socket of a *congested* receiver is full, so
nothing is gained by an early decision: it gets a turn when `WORTH_DECIDING` messages wait, after `LONGEST_WAIT`, or as
soon as it has read its queue.

While no other user's client sends anything, a spent balance is topped up on the spot, and no receiver is late.

The same way bounds the flush of a message with very many receivers: `FLUSHED_AT_ONCE` of them are flushed at once, and
the others are late.

.. rubric:: Invariants

* The undecided messages are the last in the receiver's queue, and later ones go behind them. So the order is the one
  without lateness, for each receiver and over all publishers.
* A message is never lost because it was late.
* A receiver is not late for a publisher that it may block: flood control decides about these messages at once.
* What looks at the queue is preceded by `Late.catch_up`: a reply, a change of the client's strategies or order, the end
  of the connection. So a fence counts what was published before it.
* At most `MOST_PACKETS` messages wait undecided for one receiver, and `MOST_BYTES` for all, less on a bus with little
  memory. Beyond that the publisher pays for deciding, for some of these receivers in each run, so that this is no long
  piece of work either. A publisher of the receiver's own user has half of that, so what others publish finds room
  behind any flood of that user.
* What waits is charged to the receiver's user, who never lacks memory for anything else because of it.

Rejected: one list of undecided messages for each user. It would cost a publisher the same for any number of silent
receivers, but replies, settings and ends of connections would have to pass through that list, too, and a receiver that
reads would lose its messages to its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable

from sbus.flood import SendQueue
from sbus.flood.budget import CopyBalance, UserShare
from sbus.server.interfaces import Receiver
from sbus.server.turns import Turns

__all__ = ["FLUSHED_AT_ONCE", "LONGEST_WAIT", "MOST_BYTES", "MOST_PACKETS", "WORTH_DECIDING", "Late"]

FLUSHED_AT_ONCE = 512
"""Receivers that are flushed in one go."""
WORTH_DECIDING = 512
"""Messages for a congested receiver with which it wants a turn."""
LONGEST_WAIT = 0.02
"""Seconds after which it wants a turn in any case."""
MOST_PACKETS = 2_048
"""Messages that wait undecided for one receiver."""
MOST_BYTES = 16 << 20
"""Bytes that wait undecided for all receivers together; a packet counts for each of its receivers."""
_MEMORY_PART = 16
"""The part (one over it) of one user's limit of memory that they may be, if that is less."""
_OWN_PART = 2
"""The part (one over it) of these limits that publishers of the receiver's own user may take."""
_BEYOND = 8
"""The limits are exceeded up to this factor while too many receivers are at them at the same time."""


class _Line:
    """The late receivers of one user, which wait for a turn as one client.

    :ivar receivers: those that want a turn, the oldest first.
    :ivar congested: those for which it is too early.
    """

    __slots__ = ("_balance", "_catch_up", "_turns", "congested", "is_waiting", "receivers")

    def __init__(self, balance: CopyBalance, turns: Turns, catch_up: Callable[[Receiver], None]) -> None:
        self._balance = balance
        self._turns = turns
        self._catch_up = catch_up
        self.is_waiting = False
        self.receivers: dict[Receiver, None] = {}
        self.congested: dict[Receiver, None] = {}

    def want_turn(self, receiver: Receiver) -> None:
        self.congested.pop(receiver, None)
        self.receivers[receiver] = None
        self.wait()

    def want_turns(self) -> None:
        """Have all congested receivers want a turn."""
        if self.congested:
            self.receivers.update(self.congested)
            self.congested.clear()
            self.wait()

    def wait(self, is_first: bool = False) -> None:
        if not self.is_waiting:
            self.is_waiting = True
            self._turns.wait(self._balance, self, is_first)

    def take_turn(self) -> None:
        """Decide about the messages of some receivers (`sbus.server.turns`)."""
        self.is_waiting = False
        balance, turns = self._balance, self._turns
        before, began = balance.work_left, turns.cpu()
        while self.receivers and balance.work_left > 0:
            self._catch_up(next(iter(self.receivers)))
            turns.correct(balance, before, began)  # each time: one receiver can take longer than a turn
        if self.receivers:
            self.wait(before <= 0)


class Late:
    """The late receivers of one bus.

    :param turns: the turns of the users.
    :param decide: sends what a receiver's socket takes, and lets flood control decide about the rest; returns the
        price.
    :param user_memory: bytes of memory that one user may hold.
    :ivar bytes: bytes that wait undecided for all receivers.
    """

    __slots__ = ("_decide", "_has_timer", "_lines", "_most_bytes", "_turns", "bytes")

    def __init__(self, turns: Turns, decide: Callable[[Receiver, SendQueue], int], user_memory: int) -> None:
        self._turns = turns
        self._decide = decide
        self._most_bytes = min(MOST_BYTES, user_memory // _MEMORY_PART)
        self._lines: dict[CopyBalance, _Line] = {}
        self._has_timer = False
        self.bytes = 0

    def room(self, is_own: bool, beyond: bool = False) -> tuple[int, int]:
        """Return the messages that may wait undecided for one receiver, and the bytes that may still come for all.

        :param is_own: the publisher and the receiver are of one user.
        :param beyond: go beyond the limits, `_BEYOND` times.
        """
        times = _BEYOND if beyond else 1
        parts = _OWN_PART if is_own else 1
        return times * MOST_PACKETS // parts, times * self._most_bytes // parts - self.bytes

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
        line = self._lines.get(queue.copies)
        if line is None:
            line = self._lines[queue.copies] = _Line(queue.copies, self._turns, self._catch_up)
        if queue.is_congested and len(queue.pending) < WORTH_DECIDING:
            if not queue.is_late:
                line.congested[receiver] = None
                self._set_timer()
        elif receiver not in line.receivers:
            line.want_turn(receiver)
        queue.is_clear, queue.is_late = False, True
        return True

    def hurry(self, receiver: Receiver, queue: SendQueue) -> None:
        """Have a late receiver want a turn: much waits for it, or its socket takes packets again."""
        line = self._lines[queue.copies]
        if receiver in line.congested:
            line.want_turn(receiver)

    def _set_timer(self) -> None:
        if not self._has_timer:
            self._has_timer = True
            self._turns.call_later(LONGEST_WAIT, self._time_is_up)

    def _time_is_up(self) -> None:
        self._has_timer = False
        for line in self._lines.values():
            line.want_turns()

    def catch_up(self, receiver: Receiver, queue: SendQueue) -> int:
        """Decide about what waits for a late receiver.

        :returns: the price.
        """
        self.forget(receiver, queue)
        return self._decide(receiver, queue)

    def forget(self, receiver: Receiver, queue: SendQueue) -> None:
        """A receiver is not late any more."""
        if queue.is_late:
            queue.is_late = False
            queue.note_clear()
            self.add(receiver.user, -queue.late_bytes)
            queue.late_bytes = 0
            line = self._lines[queue.copies]
            line.receivers.pop(receiver, None)
            line.congested.pop(receiver, None)
            if not line.receivers and not line.congested:
                del self._lines[queue.copies]
                if line.is_waiting:
                    self._turns.forget(queue.copies, line)

    def _catch_up(self, receiver: Receiver) -> None:
        queue = receiver.queue
        assert queue is not None, "a receiver without a queue is never late"
        queue.copies.work_left -= self.catch_up(receiver, queue)
