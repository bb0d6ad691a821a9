"""Collects messages into batches for the journal: by number, by size, or by time.

Each batch costs the journal a record, a checksum and two writes, so a batch should have many messages. But a message
that arrives alone must not wait for others, so a timer bounds its wait.

Messages go straight from received packets into the columns of a batch (`sbus.protocol.columns`). Messages that were
read together share one time, and consecutive messages of one publisher share one name. A payload in sealed memory is a
batch of its own (`sbus.recorder.payloads`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from twisted.internet.interfaces import IDelayedCall, IReactorTime

from sbus.journal import clock
from sbus.journal.senders import Senders
from sbus.protocol.columns import Columns
from sbus.recorder.payloads import MAX_HELD, Payload, find_memory, is_payload

if TYPE_CHECKING:
    from sbus.journal.writer import JournalWriter

__all__ = ["Batch", "BatchBuffer"]

_MEMORY_OF_TIME = 96
"""Bytes of memory for a time and its place, besides which a list may have room for more."""


class Batch(NamedTuple):
    """Messages that are appended to the journal in one call.

    :ivar keys: the key of each message.
    :ivar payloads: the payload of each message.
    :ivar times: when they arrived, in µs since the epoch.
    :ivar ends: for each time, the number of messages up to the last one with that time.
    :ivar senders: the publishers of the messages.
    """

    keys: pa.BinaryArray
    payloads: pa.BinaryArray
    times: list[int]
    ends: list[int]
    senders: Senders

    @property
    def rows(self) -> int:
        """The number of messages."""
        return len(self.keys)

    @property
    def size(self) -> int:
        """The bytes in all keys and payloads."""
        return int(self.keys.total_values_length + self.payloads.total_values_length)

    @property
    def memory(self) -> int:
        """The bytes of memory that the batch takes."""
        return _memory(self.rows, self.size, len(self.times), self.senders.names.nbytes + self.senders.ends.nbytes)

    def append(self, journal: JournalWriter) -> None:
        """Append the messages; see `sbus.journal.writer.JournalWriter.append_columns`."""
        journal.append_columns(*self)


def _memory(rows: int, size: int, times: int, senders: int) -> int:
    data = size + 8 * rows + senders
    return data + data // 8 + times * _MEMORY_OF_TIME  # a buffer that grows has an eighth to spare


def _ignore(packet: bytes) -> None:
    pass


class BatchBuffer:
    """Collects messages into batches.

    :param reactor: provides the timer.
    :param send: called with each batch.
    :param rows: the number of messages that completes a batch.
    :param size: the number of bytes, in keys and payloads, that completes a batch; the last message may exceed it.
    :param seconds: the longest time that a message waits for others.
    :param max_payload: the bytes in the longest payload of sealed memory that is kept.
    :param capacity: the bytes of memory that messages may take until they are written.
    :param now: returns the time, in µs since the epoch.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        send: Callable[[Batch | Payload], object],
        *,
        rows: int,
        size: int,
        seconds: float,
        max_payload: int = 0,
        capacity: int = 0,
        now: Callable[[], int] = clock.now,
    ) -> None:
        self._reactor = reactor
        self._send = send
        self._max_rows = rows
        self._max_bytes = size
        self._max_seconds = seconds
        self._max_payload = max_payload
        self._least = capacity // MAX_HELD
        self._now = now
        self._columns = Columns()
        self._times: list[int] = []
        self._ends: list[int] = []
        self._timer: IDelayedCall | None = None

    @property
    def rows(self) -> int:
        """The number of messages in the buffer."""
        return self._columns.rows

    @property
    def memory(self) -> int:
        """The bytes of memory that they take."""
        columns = self._columns
        senders = len(columns.senders) + len(columns.sender_ends) + len(columns.run_starts)
        return _memory(columns.rows, columns.size, len(self._times), senders)

    @property
    def oldest(self) -> int | None:
        """When the first of them arrived, in µs since the epoch; None if there is none."""
        return self._times[0] if self._times else None

    def add(self, packets: list[bytes], handle: Callable[[bytes], object] = _ignore) -> bool:
        """Add the messages of packets that have just arrived; send each batch that they complete.

        :param packets: packets and bundles.
        :param handle: called with each packet that is no message, when those before it have been added.
        :returns: whether there was a message.
        :raises UnusablePayload: if a payload in sealed memory cannot be recorded.
        """
        now = self._now()
        at = offset = 0
        found = False
        while at < len(packets):
            columns = self._columns
            at, offset, other = columns.add(packets, at, offset, max_rows=self._max_rows, max_bytes=self._max_bytes)
            rows = columns.rows
            if rows > (self._ends[-1] if self._ends else 0):
                found = True
                if self._times and self._times[-1] == now:
                    self._ends[-1] = rows
                else:
                    self._times.append(now)
                    self._ends.append(rows)
                if rows >= self._max_rows or columns.size >= self._max_bytes:
                    self.flush()
                elif self._timer is None:
                    self._timer = self._reactor.callLater(self._max_seconds, self.flush)
            if len(columns.senders) + len(columns.run_starts) >= self._max_bytes:
                self._drop_names(columns)
            if other is None:
                continue
            if is_payload(other):
                found = True
                self._add_payload(other, packets[at if offset else at - 1], now)
            else:
                handle(other)
        return found

    def _add_payload(self, packet: bytes, source: bytes, now: int) -> None:
        """Send a message whose payload is in the memory that came with `source`, the packet or its bundle."""
        self.flush()
        memory = find_memory(source)
        sender = self._columns.sender
        self._send(Payload(packet, memory, now, sender, max_payload=self._max_payload, least=self._least))

    def _drop_names(self, columns: Columns) -> None:
        """Forget the names that nobody published under: a bus that sends nothing else must not fill the memory."""
        self.flush()
        if columns is self._columns:
            self._columns = Columns(columns.sender)

    def restart(self) -> None:
        """Send the messages in the buffer; the next ones are from a new connection, without a known publisher."""
        self.flush()
        self._columns = Columns()

    def flush(self) -> None:
        """Send the messages in the buffer, if there are any."""
        if self._timer is not None:
            if self._timer.active():
                self._timer.cancel()
            self._timer = None
        if self._times:
            columns, times, ends = self._columns, self._times, self._ends
            self._columns, self._times, self._ends = Columns(columns.sender), [], []
            keys, payloads = _array(columns.keys, columns.key_ends), _array(columns.payloads, columns.payload_ends)
            self._send(Batch(keys, payloads, times, ends, _senders(columns)))


def _array(values: bytearray, ends: bytearray) -> pa.BinaryArray:
    """Return a column as an array of Arrow; nothing is copied."""
    return pa.Array.from_buffers(pa.binary(), len(ends) // 4 - 1, [None, pa.py_buffer(ends), pa.py_buffer(values)])


def _senders(columns: Columns) -> Senders:
    names = _array(columns.senders, columns.sender_ends)
    starts = pa.Array.from_buffers(pa.int32(), len(names), [None, pa.py_buffer(columns.run_starts)])
    ends = pa.concat_arrays([starts[1:], pa.array([columns.rows], pa.int32())])
    is_run = pc.less(starts, ends)
    if is_run.true_count < len(is_run):  # no message between two names, or none yet after the last one
        names, ends = names.filter(is_run), ends.filter(is_run)
    return Senders(names, ends)
