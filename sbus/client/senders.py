"""Senders of messages: which message was published by whom.

Theory of operation
-------------------

After ``sender/on`` the server names the publisher of the messages that follow, whenever it is another one
(``CMSG sender``). The dispatcher has the *kind* of the messages at hand: the class that it makes them of. It is
`Message` until a publisher is named, and then a class of that publisher's own, derived from `Message`, with the sender
as an attribute. So a message costs the same with a sender and without, in time and in memory.

Rejected: the sender as an attribute of each message. It adds three quarters to the time in which a run is taken apart,
and a dictionary to each message. A third item of the tuple would break ``key, payload = message``.

Notices count from the answer to ``sender/on`` on. The server may send one earlier, for a message that replaces an older
one in its place; it stays in force for the messages behind the answer. A notice that cannot be parsed names nobody, so
that no message has the sender of another one. `RESET` stands between the packets of two connections, since the blocking
client still has packets of the old one to process when the new one is there.

A client that relies on senders must not take a message for unnamed because the server knows no senders. So ``whoami``
follows the question, and if the answer has not come by its reply, the connection ends with an error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from sbus.client.dispatch import Dispatcher, Message
from sbus.client.identity import Sender
from sbus.errors import UsageError
from sbus.protocol.controls import SENDER_OFF
from sbus.protocol.packets import CMSG, build

__all__ = ["RESET", "Senders", "kind_of"]

RESET = build(CMSG, SENDER_OFF, b"")
"""What the server would send after ``sender/off``. The library puts it before the first packets of a connection."""

_MOST_KNOWN = 256
"""Senders whose classes are kept, 1.5 KiB each. If more publishers take turns, each turn costs 13 µs for a class."""


@lru_cache(_MOST_KNOWN)
def kind_of(payload: bytes) -> type[Message]:
    """Return the class of the messages behind a notice.

    :param payload: the notice's payload.
    """
    sender = Sender.parse(payload)
    return Message if sender is None else type("Message", (_Sent,), {"__slots__": (), "sender": sender})


class _Sent(Message):
    """A message with a sender, which it keeps when it is copied or pickled."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Callable[..., Message], tuple[Sender | None, bytes, bytes]]:
        return _restored, (self.sender, *self)


def _restored(sender: Sender, key: bytes, payload: bytes) -> Message:
    return kind_of(b"%d %b" % (sender.number, str(sender).encode()))(key, payload)


class Senders:
    """What the server has said of senders on one connection.

    :param dispatcher: makes the messages; from the answer on it handles the notices itself.
    :param give_up: called with the error if the server does not name senders.
    """

    def __init__(self, dispatcher: Dispatcher, give_up: Callable[[UsageError], object]) -> None:
        self._dispatcher = dispatcher
        self._give_up = give_up
        self._early: type[Message] = Message

    def notice(self, payload: bytes) -> bool:
        """Handle a notice that comes before the answer."""
        self._early = kind_of(payload)
        return True

    def on(self, payload: bytes) -> bool:
        """Handle the answer to ``sender/on``."""
        if self._dispatcher.find_kind is None:
            self._dispatcher.find_kind, self._dispatcher.kind = kind_of, self._early
        return True

    def off(self, payload: bytes) -> bool:
        """Handle `RESET`."""
        self._dispatcher.find_kind, self._dispatcher.kind = None, Message
        self._early = Message
        return True

    def check(self) -> None:
        """Note that the answer to ``sender/on`` must have come by now."""
        if self._dispatcher.find_kind is None:
            self._give_up(
                UsageError(
                    "this server does not say who sends a message: it is an older one, or runs with --no-sender; "
                    "update it, ask as root or as the bus's own user, or do without sender=True (--sender)"
                )
            )
