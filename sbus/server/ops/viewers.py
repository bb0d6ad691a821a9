"""The notes of a tap's viewers until they are read: messages, flows between clients, and keys without subscribers.

Each keeps a bounded number of notes. Notes without room are counted: the reader was too slow, or there was too much.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from typing import NamedTuple

from sbus.flood import Signature
from sbus.protocol.keys import Dialect, OpenPattern
from sbus.server.bus.unrouted import is_unrouted
from sbus.server.core.interfaces import Receiver
from sbus.server.core.observers import redact
from sbus.server.ops.tap import Run, Source

__all__ = [
    "DEEPEST",
    "LONGEST_HEAD",
    "LONGEST_KEY",
    "MOST_FLOWS",
    "MOST_KEYS",
    "MOST_NOTES",
    "Flow",
    "MessageViewer",
    "Note",
    "TalkViewer",
    "UnroutedViewer",
]

MOST_NOTES = 1000
"""Messages that wait for one reader."""
LONGEST_HEAD = 4096
"""Bytes of a payload that can be shown."""
LONGEST_KEY = 1024
"""Bytes of a key that are shown."""
DEEPEST = 8
"""Segments of a prefix."""
MOST_FLOWS = 1000
"""Flows that are counted in one second."""
MOST_KEYS = 1000
"""Keys without subscribers that are counted in one second."""


class Note(NamedTuple):
    """A message that was published.

    :ivar number: its number at the tap.
    :ivar key: the beginning of its key; of a secret one the address, up to the PID.
    :ivar size: the bytes of its payload.
    :ivar head: the first bytes of its payload; None if it is secret.
    """

    number: int
    at: float
    key: bytes
    size: int
    head: bytes | None
    publisher: Source
    sender: Signature
    receivers: tuple[Receiver, ...]


class MessageViewer:
    """Keeps messages whose keys match a pattern.

    :param pattern: an open pattern, or one that matches the addresses of secret keys, such as ``!/``.
    :param head: bytes of each payload to keep.
    :ivar missed: messages for which there was no room.
    """

    def __init__(self, dialect: Dialect, pattern: bytes, head: int) -> None:
        self._dialect = dialect
        self._pattern = OpenPattern(pattern, dialect.separator)
        self._head = head
        self._notes: list[Note] = []
        self.missed = 0

    def note(self, run: Run) -> None:
        """See `sbus.server.ops.tap.Viewer`."""
        matches = self._pattern.matches
        notes = self._notes
        for at, packet in enumerate(run.packets, run.first):
            end = packet.index(b"\0", 4)
            key = packet[4:end]
            is_secret = key[:1] == b"!" and self._dialect.is_secret(key)
            if is_secret:
                key = redact(self._dialect, key)
            if not matches(key):
                continue
            if len(notes) >= MOST_NOTES:
                self.missed += 1
                continue
            key, size = key[:LONGEST_KEY], len(packet) - end - 1
            head = None if is_secret else packet[end + 1 : end + 1 + self._head]
            notes.append(Note(at, run.at, key, size, head, run.publisher, run.sender, run.receivers))

    def take(self) -> list[Note]:
        """Return the messages kept so far, the oldest first, and forget them."""
        notes, self._notes = self._notes, []
        return notes


class Flow:
    """Messages of one publisher with one prefix for the same receivers: their number, and the bytes of the packets."""

    __slots__ = ("bytes", "messages")

    def __init__(self) -> None:
        self.messages = self.bytes = 0


class TalkViewer:
    """Counts messages by publisher, prefix of the key and receivers.

    :param depth: segments of a prefix.
    :ivar others: messages of more flows than are counted.
    """

    def __init__(self, dialect: Dialect, depth: int) -> None:
        self._dialect = dialect
        self._depth = depth
        self._flows: dict[tuple[Source, bytes, tuple[Receiver, ...]], Flow] = {}
        self.others = 0

    def note(self, run: Run) -> None:
        """See `sbus.server.ops.tap.Viewer`."""
        last: tuple[bytes, Flow | None] | None = None
        for packet in run.packets:
            prefix = self._prefix(packet[4 : packet.index(b"\0", 4)])
            if last is None or last[0] != prefix:
                place = (run.publisher, prefix, run.receivers)
                flow = self._flows.get(place)
                if flow is None and len(self._flows) < MOST_FLOWS:
                    flow = self._flows[place] = Flow()
                last = prefix, flow
            if last[1] is None:
                self.others += 1
            else:
                last[1].messages += 1
                last[1].bytes += len(packet)

    def _prefix(self, key: bytes) -> bytes:
        if key[:1] == b"!" and self._dialect.is_secret(key):
            return redact(self._dialect, key)
        separator = self._dialect.separator
        end = 0
        for _ in range(self._depth):
            at = key.find(separator, end)
            if at < 0:
                return key[:LONGEST_KEY]
            end = at + 1
        return key[: min(end, LONGEST_KEY)]

    def take(self) -> dict[tuple[Source, bytes, tuple[Receiver, ...]], Flow]:
        """Return the flows counted so far, and begin again."""
        flows, self._flows = self._flows, {}
        return flows


class UnroutedViewer:
    """Counts messages that nobody is subscribed to (`sbus.server.bus.unrouted`).

    :param uncounted: the receivers that do not count.
    :param muted: the receivers that have left.
    :ivar others: messages of more keys than are counted.
    """

    def __init__(self, dialect: Dialect, uncounted: Set[Receiver], muted: Collection[Receiver] = ()) -> None:
        self._dialect = dialect
        self._uncounted = uncounted
        self._muted = muted
        self._keys: dict[bytes, Flow] = {}
        self.others = 0

    def note(self, run: Run) -> None:
        """See `sbus.server.ops.tap.Viewer`."""
        if not is_unrouted(run.receivers, self._uncounted, self._muted):
            return
        for packet in run.packets:
            key = packet[4 : packet.index(b"\0", 4)]
            if key[:1] == b"!":
                key = redact(self._dialect, key)
            key = key[:LONGEST_KEY]
            flow = self._keys.get(key)
            if flow is None:
                if len(self._keys) >= MOST_KEYS:
                    self.others += 1
                    continue
                flow = self._keys[key] = Flow()
            flow.messages += 1
            flow.bytes += len(packet)

    def take(self) -> dict[bytes, Flow]:
        """Return the keys counted so far, and begin again."""
        keys, self._keys = self._keys, {}
        return keys
