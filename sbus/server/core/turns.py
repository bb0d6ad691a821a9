"""Turns: users take turns, and a turn has a budget of work.

Theory of operation
-------------------

One thread serves all clients, so the work for one client is a wait for all others. The cost of a packet differs by a
factor of a thousand: a message with a known route takes 1 µs, a subscription 15 µs, and the messages of one bundle can
reach a thousand receivers. So work is counted, not packets, in units of about a microsecond
(`sbus.server.core.prices`).

Turns are short while other users send too (`CONTENDED_BUDGET`): a client with 256 messages under way gets them
through once between two turns, so with turns of 4 ms it had a tenth of its throughput, and with 0.5 ms it has most of
it. After `_ALONE` turns in a row without a batch of another user between them, turns are long: each one costs the
server 40 µs, and a batch that a turn takes apart is sent to each of its receivers twice.

While no other user sends, a run needs no turn if a budget pays for a whole batch of such messages: the balance is
topped up on the spot (`Turns.top_up`), once in a pass over the sockets. So the sockets of all others are looked at
between two budgets, as between two turns. Clients and receivers that wait have their turns only when the passes are
over, so no sender is topped up while another user waits. For one publisher to 64 receivers, turns took 5 % of the
server's CPU time.

Each user has a balance. The work of each of the user's clients is deducted from it (``user.work_left -= price``). A
client whose user has no balance left stops in the middle of its batch. The transport keeps the rest, and the client
waits here (`Turns.wait`). In the next turn of the reactor each user with waiting clients gets a new budget, and up to
16 of these clients go on, in the order in which they began to wait: about as many as the budget is enough for. Between
two turns the reactor serves all others, who have balances of their own.

Invariants:

* The clients of one user share that user's balance: a thousand connections get no more than one.
* A user has two balances, one for what its clients send and one for what its receivers get. Clients wait for each in a
  line, and some wait in another line *apart* from the others: decisions about late receivers, on which the publishers
  of all users depend, would otherwise come after thousands of sockets with room. The lines of a user share its turns:
  each turn is for one of them, one after the other.
* A price that is more than the rest of a balance is a debt, which the following turns pay off. One piece of work that
  is larger than a turn makes a turn long, but it does not make long turns more frequent.
* A user without connections is known until its debt is paid (`Turns.pay_off`): to reconnect is no way out of it.
* Each waiting client of a user gets a turn in which it can do something. One that went on a moment after its turn, when
  others had already spent the new budget, comes first in the next turn.
* A balance is topped up only when it is spent, or does not pay for the next run. Afterwards it is at most one budget;
  what is left of it does not expire.

As long as balances last, almost nothing runs here. Turns cost the server a comparison and a subtraction for each batch,
and about 40 µs for each turn.

The prices are estimates: they bound a turn in advance, and some clients find work that is dearer than its price, on a
slow machine or in plain Python. So what is done in a turn is also measured, as the CPU time of the thread, and work
that took longer than was paid for is a debt (`Turns.correct`). A client that has waited for a turn pays by the
clock, and one that never waits is not measured. Full garbage collections are left out (`sbus.server.bus.work_clock`). A
publisher whose messages have to wait for late receivers of another user does not pay for the time that this takes:
that user has spent its balance (`sbus.server.bus.delivery.Delivery.unpaid`).

Rejected: a budget of packets (a bundle of subscriptions costs a hundred bundles of messages); a balance of time alone,
read from a clock for each batch (0.3 µs for each look at the thread's CPU time; wall-clock time would charge a client
for what the kernel does meanwhile); the elapsed time between two turns as the sign that others are served (the
receivers of a user's own messages drain then, and the kernel interrupts the server: turns of a user who was alone were
short, for 1.3 times the CPU time); turns by client (a user with a thousand connections would get a thousand turns).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

__all__ = ["CONTENDED_BUDGET", "CROWD", "TURN_BUDGET", "Balance", "Turns"]

TURN_BUDGET = 4_000
"""Work of one user's turn at most, in units of about 1 µs."""
CONTENDED_BUDGET = 500
"""Work of one user's turn while other users send as well."""
_ALONE = 16
"""Turns in a row without a batch of another user after which turns are long."""
CROWD = 64
"""Batches of one user, without one of another user between them, after which nobody else counts as waiting."""
_RESUMED = 16
"""Clients of one user that go on in one turn at most: each costs two system calls, whatever it has to do."""


class Balance(Protocol):
    """The balance of a user, which has one for what its clients send, and another one for what its receivers get.

    :ivar work_left: the balance; below 0 it is a debt.
    """

    work_left: int

    @property
    def owner(self) -> object:
        """The object that identifies the user: the same one for both balances of a user."""


class _Reactor(Protocol):
    def callLater(self, delay: float, call: Callable[[], None], /) -> object: ...


class _Client(Protocol):
    def take_turn(self) -> None: ...


class _Line:
    """Clients that wait for one balance, in one line.

    :ivar first: those that went on and could do nothing, since others had spent the balance.
    :ivar others: all others.
    """

    __slots__ = ("_most", "first", "others")

    def __init__(self) -> None:
        self._most = _RESUMED
        self.first: OrderedDict[_Client, None] = OrderedDict()
        self.others: OrderedDict[_Client, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.first) + len(self.others)

    def resumed(self) -> int:
        """Return the clients that go on in this turn: fewer, if some of those in the last one could do nothing."""
        self._most = max(1, self._most - len(self.first)) if self.first else min(_RESUMED, 2 * self._most)
        return min(self._most, len(self))

    def pop(self) -> _Client:
        return (self.first or self.others).popitem(last=False)[0]


class _Debt:
    """A debt that is paid off in the turns of its user, as a client that waits and has nothing to do."""

    __slots__ = ("_balance", "_call", "_debts")

    def __init__(self, debts: set[Balance], balance: Balance, call: Callable[[], object]) -> None:
        self._debts = debts
        self._balance = balance
        self._call = call

    def take_turn(self) -> None:
        self._debts.discard(self._balance)
        self._call()


class Turns:
    """The clients that wait for their users' next turns.

    :param reactor: calls the next turn, with ``callLater(0, …)``.
    :param cpu: returns the CPU time of this thread, in nanoseconds.
    :ivar cpu: the same.
    :ivar last: the user of the last batch; None if there was none since the last turn. Change it with `change`.
    :ivar given: the work that `top_up` has added to the balances of senders, since the start.
    :ivar waited: how often a client has had to wait, since the start.
    :ivar crowd: batches until the server counts as one user's, if none comes from another user than the last.
    """

    __slots__ = (
        "_alone",
        "_debts",
        "_is_due",
        "_previous",
        "_reactor",
        "_senders",
        "_topped_up_in",
        "_waiting",
        "cpu",
        "crowd",
        "given",
        "last",
        "waited",
    )

    def __init__(self, reactor: _Reactor, cpu: Callable[[], int] = time.thread_time_ns) -> None:
        self._reactor = reactor
        self.cpu = cpu
        self._waiting: dict[tuple[Balance, bool], _Line] = {}  # by balance and `is_apart`
        self._is_due = False
        self._alone = _ALONE
        self._senders: set[object] = set()  # since the last turn
        self._previous: Balance | None = None  # as `last`, but turns do not change it
        self._debts: set[Balance] = set()
        self._topped_up_in: int | None = None
        self.last: Balance | None = None
        self.crowd = 0
        self.given = 0
        self.waited = 0

    def change(self, balance: Balance) -> None:
        """Note that a client of another user than the last has sent a batch, or the first one since a turn."""
        self.last = balance
        if len(self._senders) < 2:  # more make no difference, and without a turn they would pile up
            self._senders.add(balance.owner)
        if balance is not self._previous:
            if self._previous is not None:
                self.crowd = CROWD
            self._previous = balance

    def wait(self, balance: Balance, client: _Client, is_first: bool = False, is_apart: bool = False) -> None:
        """Have a client go on in a later turn, when its balance is above 0: its ``take_turn`` is called, once.

        :param is_first: before the others. That is for a client that took a turn and could do nothing, since others of
            its user had spent the balance; they would leave it nothing in the next turn either.
        :param is_apart: in a second line for this balance; the lines of a user have its turns one after the other.
        """
        self.waited += 1
        key = balance, is_apart
        line = self._waiting.get(key)
        if line is None:
            line = self._waiting[key] = _Line()
        (line.first if is_first else line.others)[client] = None
        self._schedule()

    def top_up(self, balance: Balance, price: int = 0, in_pass: int | None = None) -> bool:
        """Give a user the budget of a turn on the spot, if no other user sends.

        :param price: the price of what is to be done; the new balance has to be more than that.
        :param in_pass: for what a client sends, the number of the pass over the sockets: there is one such budget in
            each, and none while another user waits. None for copies.
        :returns: whether the balance was topped up.
        """
        work_left = min(TURN_BUDGET, balance.work_left + TURN_BUDGET)
        if self.crowd or work_left <= price:
            return False
        if in_pass is not None:
            if in_pass == self._topped_up_in or any(other.owner is not balance.owner for other, _ in self._waiting):
                return False
            self._topped_up_in = in_pass
            self.given += work_left - balance.work_left
        balance.work_left = work_left
        return True

    def correct(self, balance: Balance, before: int, began: int, free: int = 0) -> int:
        """Charge the time that was taken in a turn, if it is more than was paid.

        :param before: the balance when it began.
        :param began: the CPU time when it began, in nanoseconds.
        :param free: work that was done and is not the user's to pay.
        :returns: the time that the user has to pay for, in microseconds.
        """
        took = (self.cpu() - began) // 1_000 - free
        balance.work_left = min(balance.work_left, before - took)
        return took

    def forget(self, balance: Balance, client: _Client) -> None:
        """Forget a client that has disconnected, if it waits."""
        for key in ((balance, False), (balance, True)):
            line = self._waiting.get(key)
            if line is not None:
                line.first.pop(client, None)
                line.others.pop(client, None)
                if not line:
                    del self._waiting[key]

    def forget_user(self, balance: Balance) -> None:
        """Forget a user who has gone, if that one sent the last batch: the next user that sends makes no crowd."""
        if self._previous is balance:
            self._previous = self.last = None

    def call_later(self, delay: float, call: Callable[[], None]) -> None:
        """Call after `delay` seconds, as part of no turn."""
        self._reactor.callLater(delay, call)

    def pay_off(self, balance: Balance, call: Callable[[], object]) -> bool:
        """Have a balance paid off that nobody waits for.

        :param call: called when it is paid; not called for a balance that is being paid off already.
        :returns: whether there is a debt.
        """
        if balance.work_left > 0:
            return False
        if balance not in self._debts:
            self._debts.add(balance)
            self.wait(balance, _Debt(self._debts, balance, call))
        return True

    def _turn(self) -> None:
        """Give each user that waits a new budget, and let some of its clients go on."""
        self._is_due = False
        budget = self._budget()
        served: set[object] = set()
        for key, line in tuple(self._waiting.items()):
            balance = key[0]
            if balance.owner in served:
                continue  # another line of the user has had the turn
            served.add(balance.owner)
            if key in self._waiting:
                self._waiting[key] = self._waiting.pop(key)  # the other ones come first in the next turn
            if balance.work_left < budget:
                balance.work_left = min(budget, balance.work_left + budget)
            if balance.work_left <= 0:
                continue  # still in debt
            for _ in range(line.resumed()):
                line.pop().take_turn()
                if not line or balance.work_left <= 0:
                    break  # the last ones may have been forgotten meanwhile; those that are left stay in their order
            if not line and self._waiting.get(key) is line:
                del self._waiting[key]
        if self._waiting:
            self._schedule()

    def _schedule(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._reactor.callLater(0, self._turn)

    def _budget(self) -> int:
        """Return the work of each user's turn: it depends on how many users have sent since the last one, or wait."""
        users = self._senders.union(balance.owner for balance, _ in self._waiting)
        self._alone = 0 if len(users) > 1 else self._alone + 1
        self._senders.clear()
        self.last = None
        return CONTENDED_BUDGET if self._alone < _ALONE else TURN_BUDGET
