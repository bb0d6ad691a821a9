"""What a client and its server have agreed about messages in sealed memory: which of them travel so.

A client that wants payloads asks ``payload/on``, and ``whoami`` behind it. The answer to the first has the agreement;
the answer to the second without one shows that the server takes no payloads. Up to that answer the connection is not
*settled*. The agreement of the last connection still counts then, for messages that are made without a connection.
On the first connection nothing is known yet: a call with a large payload waits for the answer (`Agreement.is_open`).
"""

from __future__ import annotations

from collections.abc import Callable

from sbus.protocol.bundles import MAX_BUNDLE

__all__ = ["Agreement"]

_MAX_DIGITS = 18
"""Digits of the largest number that is believed."""


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
