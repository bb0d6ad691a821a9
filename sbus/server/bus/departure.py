"""Departure: the end of a client, in four steps.

.. rubric:: Theory of operation

====================  =============================================================================================
step                  what happens
====================  =============================================================================================
1 input stops         a client that has closed has been read to its end. Of one that is disconnected, nothing more is
                      handled (`Departure.begin`); its publishers are unblocked
2 farewell            at its place in the mail, if anything waits there for the client: it gets no message from here
                      on. A client that is disconnected gets its last receipt and the reason
3 drop                its patterns go, as a chore of its user (`sbus.server.bus.subscriptions`), and everything that it
                      has asked for; its publishers are unblocked at the latest
4 forget              no table contains the client now, and observers are notified
====================  =============================================================================================

A client ends in one of three ways, which differ in the second step:

====================  =============================================================================================
what happens          the farewell
====================  =============================================================================================
it is disconnected    `Departure.farewell`: waiting packets are lost
it shuts down         `Departure.drain`: it gets its queue as long as it reads; then its connection is closed
writing
its connection is     `Departure.lose`: waiting packets are lost, also if one of the other ways has begun. The fourth
lost                  step follows at the same place
====================  =============================================================================================

A client that shuts down reading ends as a receiver only (`Departure.deafen`): it takes the third step, and is still
read.

Invariant: after the fourth step nothing of the client is charged, routed or referred to.
"""

from __future__ import annotations

from functools import partial

from sbus.errors import CloseReason
from sbus.protocol.notices import bye
from sbus.server.bus.receiving import ReceivingHalf
from sbus.server.bus.stall import StallTimer

__all__ = ["Departure"]

_BYE_PATIENCE = 1.0
"""Seconds for which the last packets of a connection are tried if they do not fit the socket."""
_DISCARDED, _LEAST_DISCARDED = 262_144, 64
"""Packets to discard: of all clients together, which takes about a tenth of a second, and the least of one client."""


def _discardable(clients: int) -> int:
    """Return the number of packets to discard of one client, small enough for disconnecting all clients at once."""
    return max(_LEAST_DISCARDED, _DISCARDED // max(1, clients))


class Departure:
    """The end of one client.

    :param client: the client; its `reason` says why it ends.
    """

    __slots__ = ("_client", "_stall")

    def __init__(self, client: ReceivingHalf) -> None:
        self._client = client
        self._stall: StallTimer | None = None

    # --- step 1 ------------------------------------------------------------------------------

    def begin(self, reason: CloseReason | None, detail: str = "") -> None:
        """Disconnect the client: stop its input now, and say farewell at its place in the mail.

        :param reason: the reason to give to the client; None to give none.
        :param detail: more about the reason.
        """
        client = self._client
        client.is_ending = True
        client.pause()
        client.user.lines.leave(client)
        client.user.blockers.pop(client, None)
        client.registry.delivery.forget(client)
        client.in_order("end", partial(self._close, reason, detail))

    # --- step 2 ------------------------------------------------------------------------------

    def _close(self, reason: CloseReason | None, detail: str) -> None:
        client = self._client
        if client.transport is None:  # the connection was lost meanwhile; the end still belongs here
            self.drop()
            return
        patience = 0.0 if reason is None or reason is CloseReason.SERVER_STOPPED else _BYE_PATIENCE
        most = _discardable(len(client.registry.clients))
        client.transport.close_gracefully(lambda: self.farewell(reason, detail), patience, most)

    def farewell(self, reason: CloseReason | None, detail: str) -> list[bytes]:
        """Drop the client's waiting packets, and return its last ones: a receipt, and the reason."""
        client = self._client
        self.drop()
        packets = []
        if client.front is not None:
            client.front.discard_all()
        last = client.queue.last_receipt()
        if last is not None and client.settings.receipts:
            packets.append(last)
        if reason is not None and client.settings.bye:
            text = f"{reason.value}: {detail}" if detail else reason.value
            packets.append(bye(reason.name, text, client.registry.limits.max_packet))
        return packets

    def drain(self) -> None:
        """Send the client, which has shut down writing, its queue as long as it reads; then close."""
        self._client.user.blockers.pop(self._client, None)
        self._client.in_order("end", self._send_rest)

    def _send_rest(self) -> None:
        client = self._client
        client.registry.upstream.stop_waiting(client)
        self.drop()
        if client.transport is not None:
            if len(client.queue):
                self._stall = client.registry.stall_timer(self._progress, lambda: self.begin(None))
            client.transport.loseConnection()

    def _progress(self) -> tuple[int, int]:
        """Return a value that changes when the client reads."""
        client = self._client
        return len(client.queue), 0 if client.transport is None else client.transport.unread_bytes()

    def deafen(self) -> None:
        """Send nothing more to the client, which has shut down reading."""
        self._client.in_order("end", self._deafen)

    def _deafen(self) -> None:
        self._client.is_write_closed = True
        self._client.user.blockers.pop(self._client, None)
        self.drop()
        self._client.queue.discard_all()  # packets that came after the transport discarded the others
        self._client.forget_replies()

    def lose(self) -> None:
        """Free the place of the client, whose connection is lost; the last steps follow at its place in the mail."""
        client = self._client
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        client.user.lines.leave(client)
        client.registry.release(client)
        client.release()
        client.in_order("end", self.forget)

    # --- step 3 ------------------------------------------------------------------------------

    def drop(self) -> None:
        """Have the client get nothing from here on; see `SubscriptionRegistry.drop`."""
        self._client.registry.drop(self._client)

    # --- step 4 ------------------------------------------------------------------------------

    def forget(self) -> None:
        """Remove the client from all tables: its waiting packets are lost."""
        self.drop()
        self._client.queue.discard_all()
        self._client.registry.forget(self._client)
        self._client.detach()
