"""Losses: what the server reports as lost, and its place among the messages.

Theory of operation
-------------------

A *receipt* (``CMSG lost``) stands among the messages where messages are missing. The library passes it to ``on_lost``
as a `Lost`, and keeps two promises about its place:

* nobody gets a message after the gap before ``on_lost`` was called;
* ``on_lost`` is not called while every reader still has messages from before the gap to read.

A subscription with a callback, or without unread messages, has got everything that came before: then ``on_lost`` is
called at once. Otherwise a `LossMark` goes into every queue. The first reader that reaches one reports the loss, and
the marks in the other queues are skipped. A list of messages ends at a mark, so the messages of one list never lie on
both sides of a gap.

Rejected: losses as items of a subscription. A loss concerns the connection and not a pattern, and every loop over
messages would have to tell the two apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from sbus.client.dispatch import Message
from sbus.client.payloads import Missing
from sbus.protocol.notices import LOST
from sbus.protocol.packets import CMSG, Truncated, build

__all__ = [
    "GAP",
    "PAYLOAD",
    "LossKeeper",
    "LossMark",
    "Lost",
    "MessageQueue",
    "format_lost",
    "lost_of",
    "parse_lost",
    "place_loss",
]

GAP = build(CMSG, LOST, b"? ? ? reconnect")
"""The receipt for the time without a connection. The library puts it before the first packets of the next one."""

PAYLOAD = "payload"
"""The cause of a loss: the memory of a large message did not arrive, or is not sealed."""
_MAX_DIGITS = 18
"""Digits of the largest number that is believed."""


class Lost(NamedTuple):
    """Messages that this client has not received and will not receive.

    A number is None if nobody can know it.

    :ivar messages: how many messages.
    :ivar bytes: the bytes in their packets.
    :ivar total: messages lost since the connection began, these included.
    :ivar why: the cause, for example ``queue-full`` (see "Receipts" in the protocol); ``reconnect`` for the time
        without a connection; ``payload`` for a large message whose memory did not arrive, or is not sealed.
    """

    messages: int | None
    bytes: int | None
    total: int | None
    why: str


class LossMark(Message):
    """The place of a loss in a queue of messages.

    :ivar lost: the loss.
    :ivar is_reported: whether ``on_lost`` has been called for it, perhaps by the reader of another queue.
    """

    lost: Lost
    is_reported: bool

    @classmethod
    def of(cls, lost: Lost) -> LossMark:
        """Return the mark of a loss."""
        mark = cls(b"", b"")
        mark.lost, mark.is_reported = lost, False
        return mark

    def report(self, on_lost: Callable[[Lost], object]) -> None:
        """Call ``on_lost``, unless the reader of another queue has done so."""
        if not self.is_reported:
            self.is_reported = True
            on_lost(self.lost)


class MessageQueue(deque[Message]):
    """Unread messages, and the marks of losses among them.

    :ivar marks: how many of the items are marks.
    """

    __slots__ = ("marks",)

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        super().__init__(messages)
        self.marks = _count_marks(self)

    def keep(self, mark: LossMark) -> None:
        """Put a mark at the end, unless it is there already."""
        if not self or self[-1] is not mark:
            self.append(mark)
            self.marks += 1

    def refill(self, messages: Iterable[Message]) -> None:
        """Put other messages and marks in the place of all that is here."""
        self.clear()
        self.extend(messages)
        self.marks = _count_marks(self)

    def settle(self, on_lost: Callable[[Lost], object]) -> None:
        """Report the losses that no unread message precedes any longer; call this before reading."""
        while self.marks and self and isinstance(mark := self[0], LossMark):
            self.popleft()
            self.marks -= 1
            mark.report(on_lost)

    def take(self) -> list[Message]:
        """Remove and return the messages up to the next mark."""
        if not self.marks:
            messages = list(self)
            self.clear()
            return messages
        messages = []
        while self and not isinstance(self[0], LossMark):
            messages.append(self.popleft())
        return messages


def _count_marks(messages: Iterable[Message]) -> int:
    return sum(isinstance(message, LossMark) for message in messages)


class LossKeeper(Protocol):
    """A subscription, as a loss sees it."""

    def has_unread(self) -> bool:
        """Return whether it keeps messages that nobody has read yet."""

    def keep(self, mark: LossMark) -> None:
        """Put a mark after the unread messages."""


def place_loss(lost: Lost, keepers: Iterable[LossKeeper], on_lost: Callable[[Lost], object]) -> None:
    """Report a loss now, or mark its place in the queues of the subscriptions."""
    keepers = list(keepers)
    if not keepers or not all(keeper.has_unread() for keeper in keepers):
        on_lost(lost)
        return
    mark = LossMark.of(lost)
    for keeper in keepers:
        keeper.keep(mark)


def lost_of(packet: Truncated) -> Lost:
    """Return the loss of a packet that was longer than this end's buffer, or whose memory is missing."""
    why = PAYLOAD if isinstance(packet, Missing) else "too-large"
    return Lost(1 if packet.is_message else None, packet.size, None, why)


def format_lost(lost: Lost) -> bytes:
    """Return the payload of a receipt; the inverse of `parse_lost`."""
    numbers = ("?" if number is None else str(number) for number in lost[:3])
    return " ".join((*numbers, lost.why)).encode()


def parse_lost(payload: bytes) -> Lost | None:
    """Return the loss that the payload of a receipt reports; None if it is malformed."""
    fields = payload.split(b" ")
    if len(fields) != 4:
        return None
    *numbers, why = fields
    if not all(number == b"?" or (number.isdigit() and len(number) <= _MAX_DIGITS) for number in numbers):
        return None
    messages, size, total = (None if number == b"?" else int(number) for number in numbers)
    return Lost(messages, size, total, why.decode("ascii", "backslashreplace"))
