"""From the bus to NATS: the queue, the numbers, and what nats-server has confirmed.

.. rubric:: Theory of operation

Messages wait in one queue, which has a limit in bytes. When it is full, the bridge drops and counts messages, but
continues to read the bus, so that it never blocks a publisher. A message leaves the queue when it is handed to a
connection, and is never sent again: at most once.

A message that was handed over is *unconfirmed* until a fence says that nats-server has handled it. At most `WINDOW`
messages and `WINDOW_BYTES` are unconfirmed. This bounds the library's buffers, and the messages that a dying
nats-server can lose in silence. Messages that are unconfirmed when a connection is lost may have arrived or not, and
are counted as such. The receivers count those that are really missing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from nats.errors import Error as NatsError

from sbus.link.nats.client import Connection
from sbus.link.nats.counters import Counters
from sbus.link.nats.sequence import LONGEST_KEY, Numbering
from sbus.link.subjects import subject

__all__ = ["WINDOW", "Outgoing"]

WINDOW = 8_192
"""Messages that may be unconfirmed."""
WINDOW_BYTES = 4 << 20
"""Bytes of packets that may be unconfirmed."""
_BATCH = 128
"""Messages handed over before the library may write, and others may run."""
_PAUSE = 0.05
"""Seconds between two fences while less than half of `WINDOW` is unconfirmed."""
_SUBJECTS = 65_536
_ENTRY_BYTES = 200
"""Bytes that a queued message costs beside its own."""


class Outgoing:
    """The way out; `run` sends on one connection after the other.

    :param origin: the value of ``Sbus-Origin``.
    :param numbering: gives the numbers of the messages.
    :param limit: bytes that may wait.
    :param note: called when counts have changed.
    :ivar in_flight: messages that were handed over, and that NATS has not confirmed yet.
    """

    def __init__(
        self,
        realm: str,
        origin: str,
        prefix: bytes,
        numbering: Numbering,
        limit: int,
        confirm_time: float,
        counters: Counters,
        note: Callable[[], None],
    ) -> None:
        self._realm = realm
        self._headers = {"Sbus-Origin": origin, "Sbus-Seq": ""}
        self._prefix = prefix + b"/" if prefix else b""
        self._numbering = numbering
        self._limit = limit
        self._confirm_time = confirm_time
        self._counters = counters
        self._note = note
        self._queue: deque[tuple[bytes, bytes]] = deque()  # key and packet
        self._bytes = 0
        self._subjects: dict[bytes, str] = {}
        self._awake = asyncio.Event()  # there is something to send, or more room in the window
        self._sent = asyncio.Event()  # there is something to confirm
        self.in_flight = 0
        self._in_flight_bytes = 0

    @property
    def waiting(self) -> int:
        """Messages in the queue."""
        return len(self._queue)

    def offer(self, messages: Iterable[tuple[bytes, bytes]]) -> None:
        """Take messages from the bus: key and payload each."""
        counters, queue, prefix = self._counters, self._queue, self._prefix
        for key, payload in messages:
            counters.taken += 1
            if prefix:
                key = prefix + key
            packet = b"MSG %b\0%b" % (key, payload)
            size = len(packet) + _ENTRY_BYTES
            if self._bytes + size > self._limit:
                counters.out_full += 1
                continue
            self._bytes += size
            queue.append((key, packet))
        self._note()
        self._awake.set()

    async def run(self, connection: Connection) -> None:
        """Send on this connection until it is lost."""
        self.in_flight = self._in_flight_bytes = 0
        self._awake.set()
        self._sent.clear()
        sending = asyncio.ensure_future(self._send(connection))
        confirming = asyncio.ensure_future(self._confirm(connection))
        tasks = (sending, confirming)
        ends: list[asyncio.Future[Any]] = [*tasks, connection.lost]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            self._counters.unconfirmed += self.in_flight
            self.in_flight = 0
            self._note()
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _send(self, connection: Connection) -> None:
        queue, counters, headers, subjects = self._queue, self._counters, self._headers, self._subjects
        largest = connection.max_packet
        next_number, publish = self._numbering.next, connection.publish
        while True:
            room = min(_BATCH, WINDOW - self.in_flight)
            if not queue or room <= 0 or self._in_flight_bytes >= WINDOW_BYTES:
                self._awake.clear()
                await self._awake.wait()
                continue
            for _ in range(min(room, len(queue))):
                key, packet = queue.popleft()
                size = len(packet)
                self._bytes -= size + _ENTRY_BYTES
                if size > largest:
                    counters.out_too_large += 1
                    continue
                name = subjects.get(key)
                if name is None:
                    name = subject(self._realm, key)
                    if len(key) <= LONGEST_KEY:
                        if len(subjects) >= _SUBJECTS:
                            subjects.clear()
                        subjects[key] = name
                headers["Sbus-Seq"] = next_number(key)
                try:
                    await publish(name, packet, headers=headers)
                except NatsError:  # lost; nothing of it was handed over
                    self._numbering.take_back(key)
                    queue.appendleft((key, packet))
                    self._bytes += size + _ENTRY_BYTES
                    return
                counters.sent += 1
                self.in_flight += 1
                self._in_flight_bytes += size
            self._sent.set()
            await asyncio.sleep(0)

    async def _confirm(self, connection: Connection) -> None:
        while True:
            await self._sent.wait()
            self._sent.clear()
            count, size = self.in_flight, self._in_flight_bytes
            if not count:
                continue
            if not await connection.fence(self._confirm_time):
                return
            self.in_flight -= count
            self._in_flight_bytes -= size
            self._counters.confirmed += count
            self._note()
            self._awake.set()
            if self.in_flight:
                self._sent.set()
            if self.in_flight < WINDOW // 2 and self._in_flight_bytes < WINDOW_BYTES // 2:
                await asyncio.sleep(_PAUSE)
