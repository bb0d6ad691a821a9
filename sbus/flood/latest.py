"""The places of waiting messages by their keys, for ``blocking/soft/latest``.

.. rubric:: Theory of operation

A `KeyIndex` holds the place of each key's newest message in a backlog. When its receiver chooses ``latest``, and at
each look-up, the index first reads the messages added to the backlog since the last time, so it never reads a message
twice, however often the receiver changes its strategy in between. It reads only the last `_READ` of them: no client can
stall the bus by filling backlogs and then choosing ``latest``. The places of sent messages stay in the index until they
outnumber those of waiting messages, or until the keys take twice the memory that they took after the last sweep. The
queue charges the receiver's user for that memory.
"""

from __future__ import annotations

from collections.abc import Callable

from sbus.flood.backlogs import FifoBacklog
from sbus.flood.naming import Signed

__all__ = ["KeyIndex"]

_READ = 4096
"""The most messages that are read at once: 2 ms. All 65,536 took 50 ms, and again after each change of the order."""
_PLACE = 140
"""Bytes of memory that a place takes besides its key."""
_SWEPT_FROM = 64 << 10
"""Bytes of memory below which an index is not swept for its keys' sake."""
_SPARE = 64
"""Places of sent messages that an index may have in any case."""


class KeyIndex:
    """The place of each key's newest message in one backlog.

    :ivar memory: bytes of memory that the index takes, about.
    """

    __slots__ = ("_backlog", "_places", "_sweep_at", "_until", "memory")

    def __init__(self, backlog: FifoBacklog) -> None:
        self._backlog = backlog
        self._places: dict[bytes, int] = {}
        self._until = backlog.start
        self._sweep_at = _SWEPT_FROM
        self.memory = 0

    def replace(self, packets: list[bytes], may_grow: Callable[[int], bool]) -> tuple[list[bytes], int]:
        """Put messages in the places of the waiting ones of their keys.

        :param may_grow: asked about each message that is longer than the waiting one, with the difference in bytes.
        :returns: the messages of keys that do not wait, and those that may not grow; and the bytes by which the backlog
            has shrunk, the growth aside.
        """
        self._update()
        return self._backlog.replace(packets, self._places, may_grow)

    def _update(self) -> None:
        """Read the messages that were added to the backlog since the last time."""
        backlog, places, memory = self._backlog, self._places, self.memory
        if self._until == backlog.end:
            return
        if self._until < backlog.end - _READ:
            self._until = backlog.end - _READ
            places.clear()  # their messages may no longer be the newest of their keys
            memory = 0
        for at, waiting in backlog.since(self._until):
            if type(waiting) is bytes or isinstance(waiting, Signed):
                key = waiting[: waiting.find(b"\0") + 1]
                if key not in places:
                    memory += _PLACE + len(key)
                places[key] = at
        self._until = backlog.end
        if len(places) > 2 * len(backlog) + _SPARE or memory > self._sweep_at:
            start = backlog.start
            self._places = places = {key: place for key, place in places.items() if place >= start}
            memory = _PLACE * len(places) + sum(map(len, places))
            self._sweep_at = max(_SWEPT_FROM, 2 * memory)
        self.memory = memory
