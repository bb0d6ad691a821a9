"""Authors: whom the other bus is told of as the publisher of what a link carries, in one direction.

.. rubric:: Theory of operation

To a bus, a link is the publisher of all that it carries. So it asks each bus for the true one (``sender/on``), and
passes every *notice* on to the other bus (``link/sender``), in front of the messages that it names there.

=======================================  ==============================================================================
a notice names                           what the link says to the other bus
=======================================  ==============================================================================
the same publisher as the last one told  nothing
a client that the link may vouch for     its number and its credentials, as they came
anybody else                             that the messages are the link's own
=======================================  ==============================================================================

Whom it may vouch for: upwards, those whose name begins with the link's own name at the master, as the names of all
clients below do once the link is up; downwards, every client. The program around a bus (``0 -``) is not the program
around the other one. If the link's name proves nothing at the master, IDs of one side mean other users on the other
side, and nobody is named. The same goes for a bus that does not know senders, or does not trust the link.

A notice stays in force on its connection until the next one. So the last one is remembered while the link is down, and
is told when it is up again, in case its publisher is the first to go on.
"""

from __future__ import annotations

from sbus.protocol import controls
from sbus.protocol.notices import LONGEST_SENDER, NOBODY, SENDER
from sbus.protocol.packets import CMSG, build

__all__ = ["NOTICE", "Authors"]

NOTICE = build(CMSG, SENDER, b"")
"""What a packet begins with that names a publisher."""


class Authors:
    """The publishers of what comes from one bus, as the other bus is told of them.

    :ivar vouched: what the credentials of those begin with that are named; None if nobody is.
    """

    __slots__ = ("_last", "_told", "vouched")

    def __init__(self) -> None:
        self.vouched: bytes | None = None
        self._last = self._told = b""

    def restart_source(self) -> None:
        """Forget the last notice: there is no connection any more on which it was in force."""
        self.vouched = None
        self._last = b""

    def restart_target(self) -> None:
        """Forget what was told: a new connection takes all messages for the link's own."""
        self.vouched = None
        self._told = b""

    def hear(self, notice: bytes) -> list[bytes]:
        """Take a notice; return what to tell the other bus, at most one packet."""
        self._last = notice[len(NOTICE) :]
        return self.due()

    def due(self) -> list[bytes]:
        """Return what the other bus has to be told before the next message, at most one packet."""
        if self.vouched is None:
            return []
        author = self._last
        credentials = author[author.find(b" ") + 1 :]
        if credentials == NOBODY or len(author) > LONGEST_SENDER or not credentials.startswith(self.vouched):
            author = b""
        if author == self._told:
            return []
        self._told = author
        return [build(CMSG, controls.LINK_SENDER, author)]
