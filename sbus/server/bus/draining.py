"""Draining: what waits for a full socket goes out at the expense of its receiver's user, in turns if need be.

.. rubric:: Theory of operation

A receiver that reads makes room in its socket, and the kernel says so. To fill a socket again costs 50 to 100 µs, and
a thousand receivers of one user can make room at the same time, again and again: they read a socketful and pause. So
this is work of that user, as the first copies are (`sbus.server.core.turns`): it is measured, and deducted from the
balance of what the user's receivers get. Once that is spent, the transport stops looking for room, and the receiver
waits for a turn of its user.

The time is measured and not estimated, as it depends on bundles, sizes, orders and snapshots. That costs 0.6 µs for
each socketful.

While others wait to be read, one batch is sent at a time. If no other user has sent anything for a while, as much is
sent as the socket takes: with batches, eight publishers to one subscriber cost 1.1 times the CPU time.

Before anything is sent, what waits is put into the order that the receiver has chosen. That takes 1 µs for each message
with a rank, of which 65,536 can wait: so it is done in pieces, of which the user has as many in a turn as its balance
pays for, and nothing is sent until it is done.
"""

from __future__ import annotations

from sbus.flood import SendQueue
from sbus.flood.snapshot import Snapshot
from sbus.seqpacket.interfaces import IPacketTransport
from sbus.server.core.turns import Balance, Turns

__all__ = ["ARRANGED_AT_ONCE", "Draining"]

ARRANGED_AT_ONCE = 2_048
"""Messages that are put in order at a time: about 2 ms."""


class Draining:
    """Sends what waits for one receiver, in its order, when its socket has room again.

    :param turns: the turns of the users.
    :param balance: that of what the receiver's user gets.
    :param transport: the receiver's; its ``on_writable`` is set.
    """

    __slots__ = ("_balance", "_is_waiting", "_transport", "_turns")

    def __init__(self, turns: Turns, balance: Balance, transport: IPacketTransport) -> None:
        self._turns = turns
        self._balance = balance
        self._transport = transport
        self._is_waiting = False
        transport.on_writable = self._writable

    def take_turn(self) -> None:
        """Send what waits: the user has work left again (`sbus.server.core.turns`)."""
        self._is_waiting = False
        if not self._send(not self._turns.crowd):
            self._wait()

    def stop(self) -> None:
        """Wait for no turn any more: the connection is lost."""
        self._transport.on_writable = None
        if self._is_waiting:
            self._is_waiting = False
            self._turns.forget(self._balance, self)

    def _writable(self, exclusive: bool) -> bool:
        if not self._is_waiting:
            if self._balance.work_left > 0 and self._send(exclusive or not self._turns.crowd):
                return True
            self._wait()
        return False

    def _wait(self) -> None:
        self._is_waiting = True
        self._turns.wait(self._balance, self)

    def _send(self, exclusive: bool) -> bool:
        """Send what waits; return False if it is not in order yet, and the balance is spent."""
        turns, balance = self._turns, self._balance
        before, began = balance.work_left, turns.cpu()
        is_arranged = self._put_in_order()
        while not is_arranged and balance.work_left > 0:
            is_arranged = self._put_in_order()
            turns.correct(balance, before, began)
        if is_arranged:
            self._transport.send_on(exclusive)
        turns.correct(balance, before, began)
        return is_arranged

    def _put_in_order(self) -> bool:
        """Put some messages in order; return whether that is done."""
        queue = self._transport.queue
        try:
            return not isinstance(queue, SendQueue | Snapshot) or queue.put_in_order(ARRANGED_AT_ONCE)
        except Exception:  # of a plugged-in order: to send meets it again, which ends this connection and no turn
            return True
