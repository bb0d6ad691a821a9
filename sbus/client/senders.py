"""Senders: who published each message.

Theory of operation
-------------------

After ``sender/on``, the server sends a notice (``CMSG sender``) whenever the publisher of the messages changes. The
dispatcher has a *kind*: the class of the messages that it makes now. The kind is `Message` until a notice names a
publisher. Then it is a class for that publisher, derived from `Message`, with the sender as an attribute. So a message
costs the same time and memory with a sender and without.

Rejected: the sender as an attribute of each message. Parsing a run would take 75 % longer, and each message would have
a dictionary. Rejected: a third item of the tuple. It would break ``key, payload = message``.

Notices count from the answer to ``sender/on`` on. The server may send one earlier, for a message that replaces an older
one in its place; it stays in force for the messages after the answer. A notice that cannot be parsed names nobody, so
no message has the sender of another one. `RESET` stands between the packets of two connections, because the blocking
client may still have packets of the old connection to process when the new one begins.

A client that relies on senders must not accept messages without one because the server does not know senders. So
``whoami`` follows the question. If its reply comes before the answer, the connection ends with an error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from weakref import WeakValueDictionary

from sbus.client.dispatch import Dispatcher, Message
from sbus.client.identity import Sender
from sbus.errors import UsageError
from sbus.protocol.controls import SENDER_OFF
from sbus.protocol.notices import LONGEST_SENDER
from sbus.protocol.packets import CMSG, build

__all__ = ["RESET", "Senders", "kind_of"]

RESET = build(CMSG, SENDER_OFF, b"")
"""The answer to ``sender/off``. The library puts it before the first packets of a connection."""

_MOST_KNOWN = 256
"""The number of senders whose classes are kept, 1.5 KiB each. If more publishers take turns, each turn costs 13 µs."""
_in_use: WeakValueDictionary[bytes, type[Message]] = WeakValueDictionary()
"""The classes of waiting messages, too: else, past that number, each of these messages would have its own class."""


def kind_of(payload: bytes) -> type[Message]:
    """Return the class of the messages after a notice.

    :param payload: the notice's payload.
    """
    return Message if len(payload) > LONGEST_SENDER else _kind_of(payload)


@lru_cache(_MOST_KNOWN)
def _kind_of(payload: bytes) -> type[Message]:
    """Return the same for a payload that is short enough to be remembered."""
    kind = _in_use.get(payload)
    if kind is None:
        sender = Sender.parse(payload)
        if sender is None:
            return Message
        kind = _in_use[payload] = type("Message", (_Sent,), {"__slots__": (), "sender": sender})
    return kind


class _Sent(Message):
    """A message with a sender, which it keeps when it is copied or pickled."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Callable[..., Message], tuple[Sender | None, bytes, bytes]]:
        return _restored, (self.sender, *self)


def _restored(sender: Sender, key: bytes, payload: bytes) -> Message:
    return kind_of(b"%d %b" % (sender.number, str(sender).encode()))(key, payload)


class Senders:
    """The answers and early notices about senders on one connection.

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
