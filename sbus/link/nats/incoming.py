"""From NATS to the bus: checks, missed messages, and the queue.

.. rubric:: Theory of operation

A client that may publish in the realm can send anything, so nothing of a message is trusted. In this order: the headers
are those of a bridge; the origin is not this bus; the packet is a message, its key is allowed and open (nothing under
``!`` crosses), and its mapped key is the subject; a pattern that is asked for matches the key; it is no double. A
message that fails is dropped and counted. One that passes is published on the bus byte for byte.

The verdict on a key (its subject, and whether it is wanted) is kept until the requested patterns change, so that the
next message with that key costs one look-up.

Messages wait in one queue with a limit in bytes. The pump hands the client of the bus as much as its socket takes; what
comes when the queue is full is dropped and counted. The bridge never stops reading NATS: nats-server would drop more,
and count nothing for anybody.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, deque
from collections.abc import Callable

from sbus.client.aio import Bus
from sbus.client.core import ClientCore
from sbus.errors import Closed, Disconnected, Violation
from sbus.link.nats.counters import Counters
from sbus.link.nats.sequence import LONGEST_KEY, Ledger
from sbus.link.subjects import subject
from sbus.protocol.keys import CURRENT, PeerCredentials
from sbus.routing.trie import PatternIndex

__all__ = ["Incoming", "parse_headers"]

_HEADERS = re.compile(rb"NATS/1\.0\r\nSbus-Origin: ([0-9a-f]{32}) [!-~]+\r\nSbus-Seq: ([0-9]{1,20})\.([0-9]{1,18})\r\n")
_ORIGIN = re.compile(rb"\r\nSbus-Origin:[ \t]*([0-9a-f]{32}) [!-~]+[ \t]*\r\n")
_SEQ = re.compile(rb"\r\nSbus-Seq:[ \t]*([0-9]{1,20})\.([0-9]{1,18})[ \t]*\r\n")
_KEYS = 65_536
_BATCH = 512
_ENTRY_BYTES = 100
_FENCE_PAUSE = 0.25
"""Seconds between two questions to the bus whether it has handled the messages published there."""


def parse_headers(headers: bytes) -> tuple[bytes, int, int] | None:
    """Return the origin, the run and the number of a message; None if they are not there."""
    found = _HEADERS.match(headers)
    if found is not None:
        return found[1], int(found[2]), int(found[3])
    origin, sequence = _ORIGIN.search(headers), _SEQ.search(headers)
    return None if origin is None or sequence is None else (origin[1], int(sequence[1]), int(sequence[2]))


class _Wanted:
    """The one receiver of the index of patterns."""


_NO_CREDENTIALS = PeerCredentials(0, 0, 0)


class Incoming:
    """The way in.

    :param own_id: the identity of this bus, 32 hexadecimal digits.
    :param limit: bytes that may wait.
    :param max_packet: length of the longest packet that the bus takes, unless it says so itself.
    :param note: called when counts have changed.
    :ivar unhandled: messages that were published, and that the bus has not confirmed yet.
    """

    def __init__(
        self,
        realm: str,
        own_id: bytes,
        limit: int,
        max_packet: int,
        counters: Counters,
        note: Callable[[], None],
    ) -> None:
        self._realm = realm
        self._own_id = own_id
        self._limit = limit
        self._max_packet = max_packet
        self._core: ClientCore | None = None  # of the bus: it knows the limit, once there is one
        self._counters = counters
        self._note = note
        self._ledger = Ledger()
        self._asked: Counter[bytes] = Counter()
        self._index: PatternIndex[_Wanted] = PatternIndex(CURRENT)
        self._receiver = _Wanted()
        self._verdicts: dict[bytes, bytes] = {}  # the subject of each key that is wanted
        self._queue: deque[bytes] = deque()
        self._bytes = 0
        self._awake = asyncio.Event()
        self._published = asyncio.Event()
        self.unhandled = 0

    @property
    def waiting(self) -> int:
        """Messages in the queue."""
        return len(self._queue)

    def asked_for(self, pattern: bytes) -> None:
        """Note that NATS was asked for this pattern."""
        self._index.subscribe(self._receiver, pattern, None, _NO_CREDENTIALS)
        self._asked[pattern] += 1
        self._verdicts.clear()

    def gave_up(self, pattern: bytes) -> None:
        """Note that NATS is no longer asked for this pattern."""
        if not self._asked[pattern]:
            return
        self._asked[pattern] -= 1
        if not self._asked[pattern]:
            del self._asked[pattern]
        self._index.unsubscribe(self._receiver, pattern, None, _NO_CREDENTIALS)
        self._verdicts.clear()
        self._ledger.gave_up(pattern)

    def receive(self, name: bytes, packet: bytes, headers: bytes) -> None:
        """Take a message from NATS.

        :param name: its subject.
        :param headers: its headers, as they came.
        """
        counters = self._counters
        counters.received += 1
        parsed = parse_headers(headers)
        if parsed is None:
            counters.forged += 1
            return
        origin, run, number = parsed
        if origin == self._own_id:
            counters.own += 1
            return
        end = packet.find(b"\0")
        if end < 0 or packet[:4] != b"MSG ":
            counters.forged += 1
            return
        key = packet[4:end]
        if self._verdicts.get(key) != name and not self._is_wanted(key, name):
            return
        missed = self._ledger.enter(origin, key, run, number)
        if missed < 0:
            counters.doubled += 1
            return
        counters.missed += missed
        size = len(packet)
        if size > (self._max_packet if self._core is None else self._core.max_packet):
            counters.in_too_large += 1
            return
        if self._bytes + size + _ENTRY_BYTES > self._limit:
            counters.in_full += 1
            return
        self._bytes += size + _ENTRY_BYTES
        self._queue.append(packet)
        if not self._awake.is_set():
            self._awake.set()

    def _is_wanted(self, key: bytes, name: bytes) -> bool:
        """Judge a key for the first time; count a bad one."""
        try:
            CURRENT.check(key)
        except Violation:
            self._counters.forged += 1
            return False
        if CURRENT.is_secret(key) or subject(self._realm, key).encode() != name:
            self._counters.forged += 1
            return False
        if not self._index.route(key, None):
            self._counters.unlisted += 1
            return False
        if len(key) <= LONGEST_KEY:
            if len(self._verdicts) >= _KEYS:
                self._verdicts.clear()
            self._verdicts[key] = name
        return True

    async def run(self, bus: Bus) -> None:
        """Publish incoming messages on the bus, until the bus is closed."""
        self._core = bus.core
        fencing = asyncio.ensure_future(self._confirm(bus))
        try:
            await self._pump(bus)
        finally:
            fencing.cancel()
            await asyncio.gather(fencing, return_exceptions=True)

    async def _pump(self, bus: Bus) -> None:
        queue = self._queue
        while True:
            if not queue:
                self._note()
                self._awake.clear()
                await self._awake.wait()
            batch = [queue.popleft() for _ in range(min(_BATCH, len(queue)))]
            self._bytes -= sum(map(len, batch)) + _ENTRY_BYTES * len(batch)
            bus.send(batch)
            self._counters.published += len(batch)
            self.unhandled += len(batch)
            self._published.set()
            while len(bus.outbox):
                try:
                    await bus.wait_drained()
                except Closed:
                    raise
                except Disconnected:
                    await asyncio.sleep(0)  # it reconnects; the outbox is kept
            await asyncio.sleep(0)  # NATS is read meanwhile

    async def _confirm(self, bus: Bus) -> None:
        while True:
            await self._published.wait()
            self._published.clear()
            count = self.unhandled
            try:
                await bus.fence()
            except Closed:
                raise
            except Disconnected:
                continue
            self.unhandled = max(0, self.unhandled - count)
            self._note()
            await asyncio.sleep(_FENCE_PAUSE)

    def bus_lost(self) -> None:
        """Count what the bus had not confirmed when its connection was lost."""
        self._counters.in_unconfirmed += self.unhandled
        self.unhandled = 0
