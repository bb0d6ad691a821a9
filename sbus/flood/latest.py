"""The places of waiting messages by their keys, for ``blocking/soft/latest``.

.. rubric:: Theory of operation

A `KeyIndex` knows where in a backlog the newest message of each key stands. It is brought up to date when it is asked:
then it reads what was added to the backlog since the last time, so each message is read once, however often its
receiver chooses another strategy in between. Places of messages that were sent stay in the index until they outnumber
the waiting ones; so its memory is bounded by the number of waiting messages, and under ``latest`` that is the number
of keys.
"""

from __future__ import annotations

from sbus.flood.orders import FifoBacklog

__all__ = ["KeyIndex"]

_SPARE = 64
"""Places of sent messages that an index may have in any case."""


class KeyIndex:
    """The place of each key's newest message in one backlog."""

    __slots__ = ("_backlog", "_places", "_until")

    def __init__(self, backlog: FifoBacklog) -> None:
        self._backlog = backlog
        self._places: dict[bytes, int] = {}
        self._until = backlog.start

    def find(self, packet: bytes) -> int | None:
        """Return the place of the waiting message that has the key of this one; None if there is none."""
        backlog, places = self._backlog, self._places
        if self._until < backlog.end:
            for at, waiting in backlog.since(self._until):
                if type(waiting) is bytes:
                    places[waiting[: waiting.find(b"\0") + 1]] = at
            self._until = backlog.end
            if len(places) > 2 * len(backlog) + _SPARE:
                start = backlog.start
                self._places = places = {key: place for key, place in places.items() if place >= start}
        key = packet[: packet.find(b"\0") + 1]
        place = places.get(key)
        if place is None or place < backlog.start:
            return None
        waiting = backlog[place]  # a strategy that drops the next message moves the replies before it
        return place if type(waiting) is bytes and waiting.startswith(key) else None
