"""Messages that arrive before the bus has confirmed the recorder's patterns, in bounded memory.

They belong to the gap that ends with the confirmation, because some of the patterns may not be in force yet. So the
oldest of them may be dropped without breaking a promise of the journal: those that are kept have no hole between them
and the first message after the confirmation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from sbus.recorder.buffer import memory_of

__all__ = ["Unconfirmed"]


class Unconfirmed:
    """The newest messages, as far as a bound of memory goes.

    :param limit: bytes of memory, as `sbus.recorder.buffer.memory_of` counts them.
    :ivar dropped: the number of messages that were dropped, the oldest first.
    """

    def __init__(self, limit: int) -> None:
        self.dropped = 0
        self._limit = limit
        self._messages: deque[tuple[bytes, bytes]] = deque()
        self._memory = 0

    def add(self, messages: Sequence[tuple[bytes, bytes]]) -> None:
        """Keep messages that have just arrived; drop old ones if that is too much."""
        self._messages += messages
        self._memory += sum(map(_memory, messages))
        while self._memory > self._limit:
            self._memory -= _memory(self._messages.popleft())
            self.dropped += 1

    def take(self) -> list[tuple[bytes, bytes]]:
        """Return the messages that are left, in their order, and forget them."""
        messages = list(self._messages)
        self._messages.clear()
        self._memory = 0
        return messages


def _memory(message: tuple[bytes, bytes]) -> int:
    key, payload = message
    return memory_of(1, len(key) + len(payload))
