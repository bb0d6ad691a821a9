"""The agreement of a client and its server on messages: the longest packet, and the use of sealed memory.

*Packets.* A server states its limit in the answer to ``bye/on`` if it is not the usual one. Up to that answer the usual
limit counts. On the first connection nothing is known yet, and the server's limit may be lower. So a call with a
message longer than 64 KiB waits for the answer (`PacketLimit.is_open`). Shorter messages do not wait: hardly any server
has a lower limit, and a program that publishes one of them and ends needs no round trip. Without a connection the limit
is that of the last server, and the next server may have a lower one. So the outbox keeps the waiting messages until the
answer. The client sends ``whoami`` after the question: a reply to that alone shows that no answer comes.

*Sealed memory.* A client that wants payloads asks ``payload/on``, and ``whoami`` after it. The answer to the first has
the agreement; the answer to the second without one shows that the server takes no payloads. Up to that answer the
connection is not *settled*. The agreement of the last connection still counts then, for messages that are made without
a connection. On the first connection nothing is known yet: a call with a large payload waits for the answer
(`Agreement.is_open`).
"""

from __future__ import annotations

from collections.abc import Callable

from sbus.errors import PacketTooLong, ViolationReason
from sbus.protocol.bundles import MAX_BUNDLE
from sbus.syscalls.sockets import LONGEST_PACKET

__all__ = ["Agreement", "PacketLimit", "is_limit"]

_MAX_DIGITS = 18
"""Digits of the largest number that is believed."""
_MAX_LIMIT_DIGITS = 9
"""Digits of the largest limit of packets that is believed (just under 1 GB)."""


def is_limit(payload: bytes) -> bool:
    """Return whether a server's answer is a number of bytes in a packet."""
    return payload.isdigit() and len(payload) <= _MAX_LIMIT_DIGITS


class PacketLimit:
    """The longest packet that can be sent.

    :param usual: bytes in the longest packet that a server takes, unless it says so itself.
    :ivar said: the bytes that the server has stated, on this connection or the one before; 0 for the usual limit; None
        before the first answer.
    :ivar is_known: whether it stated them on this connection, or on the last one if there is none.
    :ivar sendable: bytes in the longest packet that the socket takes.
    """

    def __init__(self, usual: int) -> None:
        self._usual = self.sendable = usual
        self.said: int | None = None
        self.is_known = False

    @property
    def is_open(self) -> bool:
        """Whether neither this server nor the one before has answered."""
        return self.said is None

    @property
    def longest(self) -> int:
        """Bytes in the longest packet that can be sent, as far as is known."""
        said = self.said or self._usual
        return min(said if self.is_known else min(said, self._usual), self.sendable)

    def restart(self, sendable: int) -> None:
        """Note a new connection."""
        self.sendable = sendable
        self.is_known = False

    def learn(self, answer: bytes) -> None:
        """Note the answer to ``bye/on``."""
        self.said, self.is_known = int(answer) if is_limit(answer) else 0, True

    def error(self, size: int, remedy: str, *, is_asked: bool) -> PacketTooLong:
        """Return the error for a packet that is too long.

        :param size: bytes in the packet.
        :param remedy: what to do, ahead of what permits longer packets; it ends in a comma and a blank.
        :param is_asked: whether this client asks the server for its limit.
        """
        limit = self.longest
        if limit >= LONGEST_PACKET:
            permit = "put a file's path in it: no socket takes more"
        elif limit == self.sendable:
            permit = "raise the kernel's limit of send buffers (net.core.wmem_max)"
        elif self.said or not is_asked:
            permit = "have the operator raise the limit of the bus (--max-packet)"
        else:
            permit = "raise the limit at the server, and here if it does not say it (max_packet, --max-packet)"
        reason = ViolationReason.PACKET_TOO_LONG.value
        return PacketTooLong(f"{reason}: {size} bytes, and the limit is {limit}; {remedy}send it in parts, or {permit}")


class Agreement:
    """The agreement about payloads; without the wish for them, none is ever made.

    :param is_wanted: see the attribute.
    :param on_settled: called once on each connection, when it is known whether the server takes them.
    :ivar is_wanted: whether this client asks for payloads.
    :ivar least: bytes of the shortest payload that travels in sealed memory; None if none does.
    :ivar most: bytes of the longest payload that the server takes.
    :ivar is_settled: whether that is known for this connection.
    """

    def __init__(self, is_wanted: bool, on_settled: Callable[[], object]) -> None:
        self.is_wanted = is_wanted
        self._on_settled = on_settled
        self.least: int | None = None
        self.most = 0
        self.is_settled = not is_wanted

    @property
    def is_open(self) -> bool:
        """Whether nothing is known of this server or the one before."""
        return self.least is None and not self.is_settled

    @property
    def threshold(self) -> int | None:
        """Bytes of a payload from which on it is not sent in a packet before the agreement is looked at."""
        return MAX_BUNDLE if self.is_open else self.least

    def restart(self) -> None:
        """Note a new connection."""
        self.is_settled = not self.is_wanted

    def receive(self, answer: bytes) -> bool:
        """Note the answer to ``payload/on``; return whether it was asked for and is well-formed."""
        least, _, most = answer.partition(b" ")
        if self.is_settled or not all(each.isdigit() and len(each) <= _MAX_DIGITS for each in (least, most)):
            return False
        self.least, self.most = max(1, int(least)), int(most)
        self._settle()
        return True

    def settle(self) -> None:
        """Note the answer to ``whoami``: without an agreement by now, there is none."""
        if not self.is_settled:
            self.least, self.most = None, 0
            self._settle()

    def _settle(self) -> None:
        self.is_settled = True
        self._on_settled()
