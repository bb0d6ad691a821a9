"""Departure: the end of a client, in four steps.

.. rubric:: Theory of operation

====================  =============================================================================================
step                  what happens
====================  =============================================================================================
1 input stops         a client that has closed has been read to its end. Of one that is disconnected, nothing more is
                      handled (`begin`); its publishers are unblocked
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
it is disconnected    `_farewell`: waiting packets are lost
it shuts down         `drain`: it gets its queue as long as it reads; then its connection is closed
writing
its connection is     `lose`: waiting packets are lost, also if one of the other ways has begun. The fourth
lost                  step follows at the same place
====================  =============================================================================================

A client that shuts down reading ends as a receiver only (`deafen`): it takes the third step, and is still
read.

Invariant: after the fourth step nothing of the client is charged, routed or referred to.
"""

from __future__ import annotations

from functools import partial

from sbus.errors import CloseReason
from sbus.protocol.notices import bye
from sbus.server.bus.receiving import ReceivingHalf

__all__ = ["begin", "deafen", "drain", "lose"]

_BYE_PATIENCE = 1.0
"""Seconds for which the last packets of a connection are tried if they do not fit the socket."""
_DISCARDED, _LEAST_DISCARDED = 262_144, 64
"""Packets to discard of all clients together, about a tenth of a second, and of each one at least."""


def _discardable(clients: int) -> int:
    """Return the packets to discard of one client that is disconnected, in case all of them are."""
    return max(_LEAST_DISCARDED, _DISCARDED // max(1, clients))


def begin(client: ReceivingHalf, reason: CloseReason | None, detail: str = "") -> None:
    """Disconnect a client: stop its input now, and say farewell at its place in the mail.

    :param reason: the reason to give to the client; None to give none.
    :param detail: more about the reason.
    """
    client.is_ending = True
    client.pause()
    client.user.lines.leave(client)
    client.user.blockers.pop(client, None)
    client.registry.delivery.forget(client)
    client.in_order("end", partial(_close, client, reason, detail))


def _close(client: ReceivingHalf, reason: CloseReason | None, detail: str) -> None:
    if client.transport is None:  # the connection was lost meanwhile; the end still belongs here
        client.registry.drop(client)
        return
    patience = 0.0 if reason is None or reason is CloseReason.SERVER_STOPPED else _BYE_PATIENCE
    most = _discardable(len(client.registry.clients))
    client.transport.close_gracefully(lambda: _farewell(client, reason, detail), patience, most)


def _farewell(client: ReceivingHalf, reason: CloseReason | None, detail: str) -> list[bytes]:
    """Drop a client's waiting packets, and return its last ones: a receipt, and the reason."""
    client.registry.drop(client)
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


def drain(client: ReceivingHalf) -> None:
    """Send a client, which has shut down writing, its queue as long as it reads; then close."""
    client.user.blockers.pop(client, None)
    client.in_order("end", partial(_send_rest, client))


def _send_rest(client: ReceivingHalf) -> None:
    client.registry.upstream.stop_waiting(client)
    client.registry.drop(client)
    if client.transport is not None:
        if len(client.queue):
            client.stall = client.registry.stall_timer(partial(_progress, client), partial(begin, client, None))
        client.transport.loseConnection()


def _progress(client: ReceivingHalf) -> tuple[int, int]:
    """Return a value that changes when a client reads."""
    return len(client.queue), 0 if client.transport is None else client.transport.unread_bytes()


def deafen(client: ReceivingHalf) -> None:
    """Send nothing more to a client, which has shut down reading."""
    client.in_order("end", partial(_deafen, client))


def _deafen(client: ReceivingHalf) -> None:
    client.is_write_closed = True
    client.user.blockers.pop(client, None)
    client.registry.drop(client)
    client.queue.discard_all()  # packets that came after the transport discarded the others
    client.forget_replies()


def lose(client: ReceivingHalf) -> None:
    """Free the place of a client, whose connection is lost; the last steps follow at its place in the mail."""
    if client.stall is not None:
        client.stall.cancel()
        client.stall = None
    client.user.lines.leave(client)
    client.registry.release(client)
    client.release()
    client.in_order("end", partial(_forget, client))


def _forget(client: ReceivingHalf) -> None:
    """Remove a client from all tables: its waiting packets are lost."""
    client.registry.drop(client)
    client.queue.discard_all()
    client.registry.forget(client)
    client.detach()
