"""Packets that a client has yet to send, and the system calls that send them."""

from __future__ import annotations

import errno
import socket
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice, takewhile
from operator import attrgetter

from sbus.client.dispatch import Waiter
from sbus.errors import BufferFull
from sbus.protocol.bundles import pack
from sbus.protocol.packets import MSG
from sbus.routing.runs import total_size
from sbus.syscalls.batch import BATCH, send_packets

__all__ = ["NO_ROOM", "Outbox", "Pending", "send_limit", "send_some"]

_MAX_BUNDLES = 8
"""Bundles sent with one system call."""
_MAX_BUNDLED = 2048
"""Packets offered at once to fill these bundles."""
_MOST_HOLES = 1024
"""Packets that were taken back, beside as many as there are others, that may be left in the queue."""
_MOST_PLACES = 1024
"""Places that may be remembered, beside twice as many as there are packets."""
NO_ROOM = (errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS)
"""The errors of a kernel that has no room now, for bytes or for descriptors under way: try again."""
_MESSAGE = MSG + b" "


class Pending:
    """Packets that somebody waits for to be sent.

    :ivar end: the position after the last one.
    :ivar count: how many of them can be taken back together; 0 if some have been sent.
    """

    __slots__ = ("count", "end", "waiter")

    def __init__(self, end: int, count: int, waiter: Waiter) -> None:
        self.end = end
        self.count = count
        self.waiter = waiter

    def complete(self) -> None:
        """Complete the waiter: they have been sent."""
        self.count = 0
        self.waiter.set_result(b"")


class Outbox:
    """A queue of packets that survives a lost connection (an `IPacketQueue`).

    Waiters are completed when the packets added before them have been handed to the kernel. Positions count packets
    since the connection was made, so a waiter is due once `_sent` reaches its position.

    A packet that is taken back leaves a hole, the empty packet, so that no position changes. The holes are removed
    before packets are taken to be sent, and when nothing else is left.

    :ivar is_held: whether the messages, and all packets after them, wait until the limits of the server are known.
    :ivar packets: the packets, and holes among them; empty if nothing waits, which costs less to ask than `len`.
    """

    __slots__ = (
        "_added",
        "_holes",
        "_measured",
        "_placed",
        "_places",
        "_sent",
        "_size",
        "_waiters",
        "is_held",
        "packets",
    )

    def __init__(self) -> None:
        self.packets: deque[bytes] = deque()
        self.is_held = False
        self._added = 0
        self._sent = 0
        self._holes = 0
        self._waiters: deque[Pending] = deque()
        self._places: dict[int, int] = {}  # the positions of packets by their id(), up to the position `_placed`
        self._placed = 0
        self._size = 0  # bytes of messages, as of the positions `_measured`
        self._measured = (0, 0)

    def __len__(self) -> int:
        return len(self.packets) - self._holes

    def write(self, packet: bytes) -> None:
        """Add a packet."""
        self._added += 1
        self.packets.append(packet)

    def extend(self, packets: list[bytes]) -> None:
        """Add packets."""
        self._added += len(packets)  # counted first: a signal handler can raise when a call returns
        self.packets.extend(packets)

    def extend_within(self, packets: list[bytes], limit: int) -> None:
        """Add messages while there is no connection.

        :param limit: bytes of messages that may wait.
        :raises BufferFull: if they would be more; nothing is added then.
        """
        if self._measured != (self._sent, self._added):
            self._size = sum(len(packet) for packet in self.packets if packet.startswith(_MESSAGE))
        size = self._size + total_size(packets)
        if size > limit:
            raise BufferFull(
                f"not sent: there is no connection to the bus, and {self._size} bytes wait for one "
                f"(reconnect_buffer={limit}): wait until it is back (on_gap), or connect with a larger reconnect_buffer"
            )
        self.extend(packets)
        self._size, self._measured = size, (self._sent, self._added)

    def wait(self, waiter: Waiter, count: int = 0) -> Pending:
        """Complete `waiter` once every packet added so far has been handed to the kernel.

        :param count: how many packets, the last ones, `cancel` takes back if none of them was sent.
        """
        pending = Pending(self._added, count, waiter)
        if len(self):
            self._waiters.append(pending)
        else:
            pending.complete()
        return pending

    def cancel(self, pending: Pending) -> None:
        """Wait no more, and take the packets back unless some of them have been sent."""
        start = pending.end - pending.count
        if start >= self._sent:
            for at in range(start - self._sent, pending.end - self._sent):
                self._make_hole(at)
        pending.count = 0
        at = bisect_left(self._waiters, pending.end, key=attrgetter("end"))
        while at < len(self._waiters) and self._waiters[at].end == pending.end:
            if self._waiters[at] is pending:
                del self._waiters[at]
                break
            at += 1
        self._tidy()

    def take_back(self, packet: bytes) -> None:
        """Take a packet back, unless it has been sent."""
        at = self._find(packet)
        if packet and at >= 0 and self.packets[at] is packet:
            self._make_hole(at)
        self._tidy()

    def _find(self, packet: bytes) -> int:
        """Return the index of a packet, if it is here.

        Thousands of calls can be given up in one turn, so each packet is looked at once for all of them.
        """
        if len(self._places) > 2 * len(self.packets) + _MOST_PLACES:
            self._places, self._placed = {}, 0
        start = max(self._placed, self._sent)
        new = list(islice(reversed(self.packets), self._added - start))
        self._places.update((id(each), place) for place, each in enumerate(reversed(new), start))
        self._placed = self._added
        return self._places.get(id(packet), -1) - self._sent

    def _make_hole(self, at: int) -> None:
        self._size -= len(self.packets[at])
        self.packets[at] = b""
        self._holes += 1

    def _tidy(self) -> None:
        """Remove the holes if they outnumber the packets by `_MOST_HOLES`, or if no packet is left."""
        if self._holes > len(self) + _MOST_HOLES or not len(self):
            self._rebuild([], bytes)

    def take(self, count: int) -> list[bytes]:
        """Return the next packets, at most `count`, up to the first that is kept back; they stay here until `ack`."""
        if self._holes:
            self._rebuild([], bytes)
        packets = self.packets
        taken = list(packets if len(packets) <= count else islice(packets, count))
        return list(takewhile(lambda packet: not packet.startswith(_MESSAGE), taken)) if self.is_held else taken

    def refuse(self, refusal: Callable[[bytes], Exception | None]) -> list[Exception]:
        """Drop the messages that the server does not take, and fail the calls that wait for one of them.

        Of messages that were published together none is sent, unless some have left already.

        :param refusal: returns the error for such a packet.
        :returns: the errors of those that no call waits for.
        """
        errors = {place: error for place, each in enumerate(self.packets, self._sent) if (error := refusal(each))}
        failed: list[tuple[Waiter, Exception]] = []
        dropped = set(errors)
        waiters, self._waiters = self._waiters, deque()
        for pending in waiters:
            own = range(pending.end - pending.count, pending.end)
            if refused := [errors.pop(place) for place in own if place in errors]:
                failed.append((pending.waiter, refused[0]))
                dropped.update(own if own.start >= self._sent else ())
                pending.count = 0
            else:
                self._waiters.append(pending)
        for place in dropped:
            if self.packets[place - self._sent]:
                self._make_hole(place - self._sent)
        self._tidy()
        for waiter, error in failed:
            waiter.set_exception(error)
        return list(errors.values())

    def ack(self, taken: list[bytes], sent: int) -> None:
        """Remove the first `sent` packets, which the kernel has accepted."""
        if sent == len(self.packets):
            self.packets.clear()
        else:
            pop = self.packets.popleft
            for _ in range(sent):
                pop()
        self._sent += sent
        self._complete_waiters()

    def restart(self, resync: list[bytes], *, hold: bool) -> None:
        """Prepare for a new connection: `resync` first, then the unsent messages.

        :param hold: see `is_held`.

        Other packets (subscriptions, settings, questions) were meant for the lost connection; `resync` contains what
        is still in force of them.
        """
        if self._holes:
            self._rebuild([], bytes)  # a call that waits for nothing else must not wait for `resync`
        self.is_held = hold
        self._rebuild(resync, lambda packet: packet.startswith(_MESSAGE))

    def _rebuild(self, first: list[bytes], is_kept: Callable[[bytes], object]) -> None:
        """Start counting anew, with `first` and then the packets that are kept.

        If a signal handler raises meanwhile, no packet is lost.
        """
        kept, waiters = deque(first), iter(self._waiters)
        pending = next(waiters, None)
        for position, packet in enumerate(self.packets, self._sent):
            while pending is not None and pending.end <= position:
                self._move(pending, len(kept))
                pending = next(waiters, None)
            if is_kept(packet):
                kept.append(packet)
        while pending is not None:
            self._move(pending, len(kept))
            pending = next(waiters, None)
        count = len(kept)
        self.packets, self._sent, self._added, self._holes, self._measured = kept, 0, count, 0, (-1, -1)
        self._places, self._placed = {}, 0
        self._complete_waiters()

    def _move(self, pending: Pending, end: int) -> None:
        """Make a waiter wait for the packets up to another position."""
        if pending.end - pending.count < self._sent:
            pending.count = 0  # the others of its packets have left
        pending.end = end

    def _complete_waiters(self) -> None:
        """Complete the waiters that are due, which may add packets and wait again."""
        while self._waiters and self._waiters[0].end <= self._sent:
            self._waiters.popleft().complete()

    def reject_oversized(self, taken: list[bytes], at: int) -> bool:
        """Let the transport close: the core has checked sizes, so this is a bug."""
        return False

    def discard_all(self, taken: Sequence[bytes] = ()) -> None:
        """Keep the packets: the connection is gone, and they wait for the next one."""

    def set_exception(self, error: Exception) -> None:
        """Discard the packets and fail the waiters: there will be no further connection."""
        self.packets.clear()
        self._sent, self._holes, self._places = self._added, 0, {}
        waiters, self._waiters = self._waiters, deque()
        for pending in waiters:
            pending.count = 0
            pending.waiter.set_exception(error)


def send_limit(bundle_limit: int) -> int:
    """Return how many packets to offer to `send_some` at once.

    :param bundle_limit: bytes in the longest bundle; 0 if the server takes none.
    """
    return _MAX_BUNDLED if bundle_limit else BATCH


def send_some(sock: socket.socket, packets: list[bytes], bundle_limit: int) -> int:
    """Send what the socket takes, with one system call and without waiting.

    :param bundle_limit: bytes in the longest bundle; 0 if the server takes none.
    :returns: how many of the packets, from the front, were sent.
    :raises OSError: from sendmsg(2) if the first packet cannot be sent, except EAGAIN.
    """
    if not bundle_limit or len(packets) < 2:
        return send_packets(sock, packets)
    bundles, counts = pack(packets, bundle_limit, _MAX_BUNDLES)
    try:
        return sum(counts[: send_packets(sock, bundles)])
    except OSError as e:
        if e.errno != errno.EMSGSIZE or counts[0] == 1:
            raise
        return send_packets(sock, packets)  # the application has shrunk the send buffer below one bundle
