"""Sequence numbers: how a bridge counts exactly the messages that it never received.

.. rubric:: Theory of operation

A receiver subscribes to some of the messages that an origin sends. In one sequence for all messages of an origin, it
would therefore miss numbers that mean nothing. So each *key* has a sequence: ``Sbus-Seq: <run>.<number>``. The number
counts the messages of that key from 1. The run says which count it is: it grows whenever an origin begins to count
again.

`Numbering` gives the numbers. Beyond `MAX_KEYS` keys it forgets all of them and begins a new run.

`Ledger` compares them. Per origin and key it has the last number; the next one must be the one after it. Numbers
between the two were missed. A number that is not above the last is a double (NATS sends one copy for each of two
subscriptions that match), or late (it took another way through a cluster and was overtaken). Such a message is dropped,
so no message is doubled, and each key keeps its order. A late one was counted as missed before, so the sums stay right.

A key that was not subscribed to for a while misses numbers without a loss. The ledger therefore remembers which
patterns were given up (`Ledger.gave_up`): the last `_REMEMBERED` of them, or `_REMEMBERED_BYTES`.

Not counted: messages of a key before the first one that arrived, and the last ones of a key until another one of that
key arrives.
"""

from __future__ import annotations

import hashlib
from collections import deque

from sbus.protocol.keys import matches_open

__all__ = ["LONGEST_KEY", "MAX_ENTRIES", "MAX_KEYS", "Ledger", "Numbering"]

MAX_KEYS = 65_536
"""Keys that an origin numbers at a time: 10 MB."""
MAX_ENTRIES = 262_144
"""Pairs of origin and key that a receiver remembers: 60 MB. When there are more, it begins again with the next ones."""
LONGEST_KEY = 128
"""Bytes of the longest key that is remembered itself; of a longer one the SHA-256 is."""
_REMEMBERED = 4_096
_REMEMBERED_BYTES = 1 << 20


def _short(key: bytes) -> bytes:
    """Return the text that stands for a key: no key of a bus has a NUL."""
    return key if len(key) <= LONGEST_KEY else b"\0" + hashlib.sha256(key).digest()


class Numbering:
    """The numbers of the messages of one origin.

    :param run: the first run: larger than all runs of this origin before, such as the time in ns.
    :param most: keys that it numbers at a time.
    """

    def __init__(self, run: int, most: int = MAX_KEYS) -> None:
        self.run = run
        self._most = most
        self._counts: dict[bytes, int] = {}

    def next(self, key: bytes) -> str:
        """Return the value of ``Sbus-Seq`` for the next message with this key."""
        counts, key = self._counts, _short(key)
        number = counts.get(key, 0) + 1
        if number == 1 and len(counts) >= self._most:
            counts.clear()
            self.run += 1
        counts[key] = number
        return f"{self.run}.{number}"

    def take_back(self, key: bytes) -> None:
        """Take back the last number of a key: its message was not sent."""
        key = _short(key)
        if key in self._counts:
            self._counts[key] -= 1


class Ledger:
    """The last numbers of the keys of all origins.

    :param most: pairs of origin and key that it remembers.
    """

    def __init__(self, most: int = MAX_ENTRIES) -> None:
        self._most = most
        self._last: dict[tuple[bytes, bytes], tuple[int, int, int]] = {}
        self._given_up: deque[bytes] = deque()
        self._given_up_bytes = 0
        self._generation = 0

    def gave_up(self, pattern: bytes) -> None:
        """Note that this pattern is no longer subscribed to."""
        self._given_up.append(pattern)
        self._given_up_bytes += len(pattern)
        while len(self._given_up) > _REMEMBERED or self._given_up_bytes > _REMEMBERED_BYTES:
            self._given_up_bytes -= len(self._given_up.popleft())
        self._generation += 1

    def enter(self, origin: bytes, key: bytes, run: int, number: int) -> int:
        """Enter a message.

        :returns: how many messages before it were missed; -1 if it is a double, or late.
        """
        entry = (origin, _short(key))
        last = self._last.get(entry)
        missed = 0
        if last is None:
            if len(self._last) >= self._most:
                self._last.clear()
        elif run == last[0]:
            missed = number - last[1] - 1
            if missed < 0:
                return -1
        elif run < last[0]:
            return -1
        else:
            missed = number - 1
        self._last[entry] = (run, number, self._generation)
        if missed and last is not None and self._has_lapsed(key, last[2]):
            return 0
        return missed

    def _has_lapsed(self, key: bytes, generation: int) -> bool:
        """Return whether a pattern that matches the key was given up since."""
        since = self._generation - generation
        if since > len(self._given_up):
            return True
        return any(matches_open(self._given_up[-1 - at], key) for at in range(since))
