"""The digest of a list of messages: what flood control asks about it, computed once for all receivers of this list."""

from __future__ import annotations

from sbus.routing.runs import newest, shortest, total_size

__all__ = ["Digest"]


class Digest:
    """A list of messages, and what is known of it.

    :param packets: the messages, at least one; nobody changes the list from now on.
    :param size: their bytes; None to count them.
    :ivar packets: the messages.
    :ivar size: their bytes.
    """

    __slots__ = ("_newest", "_shortest", "packets", "size")

    def __init__(self, packets: list[bytes], size: int | None = None) -> None:
        self.packets = packets
        self.size = total_size(packets) if size is None else size
        self._newest: list[bytes] | None = None
        self._shortest = 0

    def __len__(self) -> int:
        return len(self.packets)

    def newest(self) -> list[bytes]:
        """Return the newest message of each key, in order; the caller must not change it."""
        if self._newest is None:
            self._newest = newest(self.packets)
        return self._newest

    def shortest(self) -> int:
        """Return the size of the shortest packet, in bytes."""
        if not self._shortest:
            self._shortest = shortest(self.packets)
        return self._shortest
