"""Sending packets with descriptors, and bounding the descriptors that a peer leaves unread.

Theory of operation
-------------------

In the transport of a peer that has asked for payloads, a `PayloadSender` replaces `sbus.syscalls.batch.send_packets`.
It sends each `sbus.flood.PayloadMessage` as an ``FMSG`` with its descriptor, and all other packets as usual. A batch
can end early for three reasons. To the queue each looks like a full socket, so it keeps the rest.

====================  ==============================================================================================
reason                when sending continues
====================  ==============================================================================================
the socket is full    when it is writable, as usual
`MOST` are unread,    when the peer has read some. The socket may be writable all the time, so the multiplexer watches
or the peer's part    for *changes* (`Multiplexer.watch_reads`)
of `USER_MOST`
``ETOOMANYREFS``      with the bytes, if they fit a packet; else after 50 ms. The server's user has as many
                      descriptors under way as it may open: users who do not read may hold all of them
``EMFILE``            after 50 ms: the first of such waits opens a few descriptors
====================  ==============================================================================================

The kernel does not report the number of descriptors that a peer has not read. It reports the memory of the unread
packets (SIOCOUTQ), and each packet takes at least `least_charge` bytes. Memory divided by `least_charge` is therefore
an upper bound. The sender asks for it once in `MOST` descriptors.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

from sbus.flood import PayloadMessage, PayloadShare
from sbus.routing.runs import find_type
from sbus.seqpacket.multiplexer import Multiplexer
from sbus.seqpacket.pacing import WITH_DESCRIPTORS
from sbus.seqpacket.unread import close, close_when_read
from sbus.syscalls.batch import BATCH, send_packets
from sbus.syscalls.descriptors import descriptor_limit, room_for
from sbus.syscalls.memfd import join, receive_from
from sbus.syscalls.sockets import MOST_PASSED, brings_descriptors, least_charge, send_with, unread_bytes

__all__ = ["MOST", "MOST_ENDED", "USER_MOST", "PayloadSender", "may_join"]

MOST = 16
"""Descriptors that a peer may leave unread. Those of all receivers together count against the server's limit of open
files: without a bound, 15 receivers that did not read used up a limit of 20,000 (278 descriptors fit a socket)."""
USER_MOST = 1024
"""Descriptors that all connections of one user together may leave unread, if there are no more connections than that:
otherwise one user with 1,250 connections took all that a server which is not root may have under way. Descriptors sent
while there were fewer connections stay unread: 256 that come one after another leave 2,348, and 2,537 with 63 more that
have ended (a connection that has ended counts until its descriptors are read)."""
_USERS = 4
"""Users whose receivers may leave that number unread, whatever the limit of open files: the kernel lets a server that
is not root have as many descriptors under way as it may open."""
MOST_ENDED = USER_MOST // MOST
"""Connections of one user that have ended with descriptors unread. At that number, its new ones get no descriptors:
else root, whom no limit of connections stops, could have any number of them."""

_FEW_DESCRIPTORS = (
    f"fewer than {MOST_PASSED} descriptors are free: large messages wait for more, and those of a client that hangs up "
    "meanwhile are lost; raise LimitNOFILE (ulimit -n), or have fewer clients"
)


def may_join(share: PayloadShare) -> bool:
    """Return whether one more connection of a user may have descriptors.

    Not while too many that have ended are kept, each a socket of this process, or too much waits to be closed.
    """
    return share.ended < MOST_ENDED and not share.is_overrun()


class PayloadSender:
    """Sends the packets of one socket, large messages with their descriptors, and bounds those that are read from it.

    :param max_packet: bytes in the longest plain message.
    :param fit: raises the send buffer to hold a packet of a size in bytes; returns whether the buffer has grown.
    :param share: the part of all descriptors that the peer's user has; None if nobody shares them with this peer.
    :ivar share: the same; a separate one if there was none.
    :ivar is_kept: whether the socket is kept after its end until the peer has read its descriptors.
    :ivar is_wanted: whether the peer takes descriptors; else it gets large messages as plain ones.
    :ivar bundle_limit: bytes in the longest bundle of large messages in one memfd; 0 for no bundles.
    :ivar is_waiting: whether the sender waits for the peer to read.
    """

    __slots__ = (
        "_fit",
        "_in_flight",
        "_max_packet",
        "_multiplexer",
        "_sock",
        "_user_most",
        "bundle_limit",
        "is_kept",
        "is_waiting",
        "is_wanted",
        "share",
    )

    def __init__(
        self,
        sock: socket.socket,
        multiplexer: Multiplexer,
        max_packet: int,
        fit: Callable[[int], bool],
        share: PayloadShare | None,
    ) -> None:
        self._sock = sock
        self._multiplexer = multiplexer
        self._max_packet = max_packet
        self._fit = fit
        self.is_kept = share is not None
        self.share = PayloadShare() if share is None else share
        self.share.connections += 1
        self._in_flight = 0  # an upper bound
        self._user_most = min(USER_MOST, descriptor_limit() // _USERS)
        self.is_wanted = True
        self.bundle_limit = 0
        self.is_waiting = False

    def send(self, packets: list[bytes]) -> int:
        """Send packets, as `sbus.syscalls.batch.send_packets` does, but not only one batch."""
        sent, total = 0, len(packets)
        while sent < total:
            at = find_type(packets, PayloadMessage, sent)
            part = packets[sent : at if at >= 0 else total]
            try:
                done = send_packets(self._sock, part) if part else self._send_payload(packets, at)
            except OSError:
                if sent:
                    break
                raise
            sent += done
            if done < min(len(part), BATCH) or not done:
                break
        return sent

    def _send_payload(self, packets: list[bytes], at: int) -> int:
        """Send the large message at an index, and in one bundle those after it in the same memory.

        :returns: the number of messages that were sent.
        :raises OSError: as sendmsg(2), but not EAGAIN; and as `_may_send`.
        """
        message = packets[at]
        assert isinstance(message, PayloadMessage)
        if not self.is_wanted:
            if len(message) > self._max_packet:
                raise OSError(errno.EMSGSIZE, "the payload is longer than a packet")
            return self._send_plain(message)
        if not self._may_send():
            return 0
        is_last = at + 1 == len(packets)
        packet, count = (message.packet, 1) if is_last else join(packets, at, self.bundle_limit)
        try:
            if not self._send_with(packet, message.memfd.fileno()):
                return 0
        except OSError as e:
            if e.errno != errno.ETOOMANYREFS or len(message) > self._max_packet:
                raise
            return self._send_plain(message)
        self._in_flight += 1
        return count

    def _send_plain(self, message: PayloadMessage) -> int:
        try:
            plain = message.plain()
        except MemoryError as e:
            raise OSError(errno.ENOMEM, "no memory to copy the payload") from e
        return send_packets(self._sock, [plain])

    def _send_with(self, packet: bytes, descriptor: int) -> bool:
        try:
            return send_with(self._sock, packet, descriptor)
        except OSError as e:
            if e.errno != errno.EMSGSIZE or not self._fit(len(packet)):
                raise
            return send_with(self._sock, packet, descriptor)

    def _may_send(self) -> bool:
        """Return whether the peer has read enough for one more descriptor; if not, wait until it has.

        :raises OSError: EMFILE, if the server has no descriptor left to find out, or to wait.
        """
        in_flight = self._in_flight
        if in_flight and (in_flight >= MOST or (in_flight + 1) * self.share.connections > self._user_most):
            most = max(1, min(MOST, self._user_most // self.share.connections))
            unread = min(in_flight, unread_bytes(self._sock) // least_charge())
            # Half: each wait costs several system calls, so it should be worth it.
            if unread > (most // 2 if self.is_waiting else most - 1):
                if not self.is_waiting:
                    self._multiplexer.watch_reads(self._sock.fileno())
                    self.is_waiting = True
                return False
            self._in_flight = unread
        if self.is_waiting:
            self.stop_waiting()
        return True

    def readable(self) -> int:
        """Return the number of packets that may be read now, and have their descriptors count for the peer's user.

        A server reads a packet with descriptors only while it has room for as many as one can have: the kernel closes
        those without room, which may take long (`sbus.syscalls.elsewhere`).
        """
        if self.share.is_overrun():
            return 0
        receive_from(self.share)
        if not self.is_kept:
            return WITH_DESCRIPTORS
        room = room_for(WITH_DESCRIPTORS * MOST_PASSED, self._sock.fileno()) // MOST_PASSED
        if not room:
            self._multiplexer.warn_rarely(_FEW_DESCRIPTORS)
            return 0 if brings_descriptors(self._sock) else 1
        return room

    def close(self, limit: int) -> None:
        """Close the socket; one that is kept, once its peer has read its descriptors.

        :param limit: packets of the peer to discard at most.
        """
        self.share.connections -= 1
        has_unread = self.is_kept and self._in_flight > 0 and unread_bytes(self._sock) > 0
        sock = socket.socket(fileno=self._sock.detach())
        if has_unread:
            close_when_read(sock, self.share, limit, self._multiplexer)
        else:
            close(sock, self.share, limit)

    def stop_waiting(self) -> None:
        """Stop waiting for the peer to read."""
        if self.is_waiting:
            self.is_waiting = False
            self._multiplexer.unwatch_reads(self._sock.fileno())
