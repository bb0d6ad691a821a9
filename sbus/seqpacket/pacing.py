"""Pacing: the packets that a transport reads, and the connections that a port accepts, in one go. No I/O.

Theory of operation
-------------------

Three parties bound the reading of one socket before other sockets get their turn: the multiplexer looks several times
in one turn of the reactor which sockets are ready (its *passes*); the pacer decides, in each pass, how often one socket
is read and for how many packets; the protocol sets `PacketTransport.read_limit`, when each packet costs it more than a
little. The pacer's rules (``docs/performance.rst``, "Where the time goes"):

================================  ====================================================================================
socket                            read
================================  ====================================================================================
any                               64 packets a batch (`BATCH`)
the last read found one packet    one packet, with recv(2) instead of recvmmsg(2); the next pass asks for a batch. With
                                  the second look left to the multiplexer, a lone message takes 55,800 instructions in
                                  user space in place of 68,600.
accepted just now                 one packet: a first batch of the largest packets took 40 ms
of a peer in ping-pong            one packet in later passes too, for 1, 3, 7 and up to `LONE_RUN` reads
alone ready                       again, until a batch is complete or `READS_PER_PASS` is reached
ready beside others               up to the protocol's read limit; remembered for `CONTENTION_TTL` reads
of a peer that sends bundles      `BUNDLES_PER_READ` packets, once in a pass; without contention again after a `LARGE`
                                  one, until the pass has brought `LARGE_PER_PASS` bytes
a listening one (`AcceptPacer`)   connections for a third of the time that other work has taken since, and 0.1 ms at
                                  least, so that an idle server accepts at full speed
================================  ====================================================================================

The read limit counts under contention alone, because a publisher to 8 subscribers, read 64 packets at a time, makes 512
copies, and a pair of other clients waited for that twice in each round trip. Contention is remembered, because the
sockets of a busy pair are idle for most passes. Accepting has a share, because two processes that connect and leave
took 98 % of everybody else's throughput.

Rejected: waiting for the next message before the reactor has its turn (it needs one epoll set within another). For
accepting: a share of the elapsed time, which grows while the server waits for other processes; a number of connections,
as an admitted one costs ten times a refused one; a rest after refusing (another user's new connection took 80 ms
instead of 15).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sbus.syscalls.batch import BATCH

__all__ = [
    "ACCEPTS_PER_PASS",
    "ACCEPT_SHARE",
    "BUNDLES_PER_READ",
    "CONTENTION_TTL",
    "IN_TURN",
    "LARGE",
    "LARGE_PER_PASS",
    "LONE_RUN",
    "LONGEST_ACCEPT",
    "MAX_BUFFER",
    "READS_PER_PASS",
    "SHORTEST_ACCEPT",
    "WITH_DESCRIPTORS",
    "AcceptPacer",
    "ReadPacer",
    "batch_size",
]

READS_PER_PASS = 8
"""Reads of one socket in one pass of the multiplexer at most, if no other socket is ready. With this bound alone, a
saturating publisher had eight batches, and all their deliveries, before any other socket was served."""
CONTENTION_TTL = 64
"""Reads for which contention is remembered after the last pass in which another socket had packets to be read.

Read limits of 128, 64, 48, 32 and 8 copies gave a round trip (99 %) of 1.5, 0.97, 0.85, 0.66 and 0.43 times the
yardstick's, at 1.03, 1.03, 0.98, 0.87 and 0.61 times its throughput."""
BUNDLES_PER_READ = 16
"""Packets in one read from a peer that sends bundles, at most. With 16 in place of 8, and accounts kept for
batches, 1 to 64 went from 18 to 47 million messages a second."""
LARGE = 16 << 10
"""Bytes of a large packet. A read brings few of them, so that the CPU's cache still holds them when they are sent. With
a pass for each read, the server took 3 µs more for 64 KiB, of 18: the copies have driven its code out of that cache."""
LARGE_PER_PASS = 1 << 20
"""Bytes of large packets in one pass, about: the number that one read brings if its packets are small."""
IN_TURN = -1
"""Stands for the number of a pass if packets are read in no pass, because they waited: they are read in batches."""
LONE_RUN = 8
"""Reads of one packet in later passes, at most, until a batch is asked for again. A round trip on one CPU takes 5 %
less CPU time; a backlog that comes in such a run is sent unbatched, so the run is short."""
WITH_DESCRIPTORS = 8
"""Packets read at once from a peer that may send descriptors: a peer that is paused keeps two for each open, and a user
has 256 connections."""
MAX_BUFFER = 32 << 20
"""Bytes in the buffers of one batch, which all sockets with the same packet size share."""

ACCEPTS_PER_PASS = 64
"""Connections that a port accepts in one pass of the multiplexer at most."""
ACCEPT_SHARE = 1 / 3
"""Seconds of accepting for each second of other work."""
SHORTEST_ACCEPT = 0.0001
"""Seconds that a port may accept in a pass in any case."""
LONGEST_ACCEPT = 0.002
"""Seconds of accepting in one pass at most, whatever the time of the other work."""


def batch_size(max_packet: int) -> int:
    """Return the batch size, 1 to `BATCH`, whose buffers fit in `MAX_BUFFER` bytes.

    :param max_packet: bytes in the longest packet.
    """
    return max(1, min(BATCH, MAX_BUFFER // max_packet))


class ReadPacer:
    """The limits of the reads of one socket.

    `first_limit` begins a pass; `next_limit` follows each read that asked for more than one packet and found any.
    `is_alone` lets a pass of large packets continue.
    """

    __slots__ = ("_contention_ttl", "_last_read_full", "_lone_left", "_lone_run", "_packets_left", "_reads_left")

    def __init__(self) -> None:
        self._contention_ttl = 0
        self._last_read_full = True
        self._lone_run = 0  # reads of one packet that the next batch earns if it holds one packet
        self._lone_left = 0
        self._packets_left = 0
        self._reads_left = 0

    def begin_alone(self) -> None:
        """Ask for one packet at first, as after a packet that came alone."""
        self._last_read_full = False
        self._lone_left = 1

    def first_limit(
        self, read_limit: int, exclusive: bool, contended: bool, pass_number: int, bundle_limit: int
    ) -> int:
        """Return the packets to ask for in the first read of a pass.

        :param read_limit: packets to read in a pass under contention, as the protocol set it.
        :param exclusive: no other socket is ready.
        :param contended: other sockets have packets to be read.
        :param pass_number: passes before this one in the same turn of the reactor, or `IN_TURN`.
        :param bundle_limit: bytes in the largest bundle that the peer sends; 0 if it sends none.
        """
        if contended:
            self._contention_ttl = CONTENTION_TTL
        elif self._contention_ttl:
            self._contention_ttl -= 1
        if not self._last_read_full:
            if not pass_number:
                return 1
            if self._lone_left and pass_number > 0:
                self._lone_left -= 1
                return 1
        if bundle_limit:
            self._reads_left = 1
            return BUNDLES_PER_READ
        self._reads_left = READS_PER_PASS if exclusive else 1
        self._packets_left = limit = read_limit if self._contention_ttl else BATCH
        return limit

    def is_alone(self) -> bool:
        """Return whether no other socket has had packets to be read for a while: nobody waits for a longer pass."""
        return not self._contention_ttl

    def next_limit(self, received: int) -> int:
        """Return the packets to ask for in the next read of this pass; 0 ends the pass.

        :param received: packets that the last read found, at least 1.
        """
        if received == 1:
            self._last_read_full = False
            self._lone_left, self._lone_run = self._lone_run, min(2 * self._lone_run + 1, LONE_RUN)
            return 0
        self._last_read_full = True
        self._lone_run = 0
        self._reads_left -= 1
        self._packets_left -= received
        return self._packets_left if self._reads_left and self._packets_left > 0 else 0


class AcceptPacer:
    """The share of accepting in the work of one thread; all ports of a multiplexer have one together.

    `begin` begins a pass of a port, `may_go_on` follows each connection, `end` ends the pass.

    :param clock: the thread's CPU time, in seconds.
    """

    __slots__ = ("_accepted", "_clock", "_ended", "_until")

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._ended = self._until = clock()
        self._accepted = 0

    def begin(self) -> None:
        """Begin to accept: determine how long that may last."""
        now = self._clock()
        part = (now - self._ended) * ACCEPT_SHARE
        self._until = now + max(SHORTEST_ACCEPT, min(LONGEST_ACCEPT, part))
        self._accepted = 0

    def may_go_on(self) -> bool:
        """Count a connection; return whether another one may be accepted in this pass."""
        self._accepted += 1
        return self._accepted < ACCEPTS_PER_PASS and self._clock() < self._until

    def end(self) -> None:
        """Stop accepting for this pass."""
        self._ended = self._clock()
