"""Authors: the publishers that a link names to the other bus, in one direction.

.. rubric:: Theory of operation

To a bus, a link is the publisher of everything that it carries. So the link asks each bus for the true publishers
(``sender/on``), and passes each *notice* on to the other bus (``link/sender``), before the messages that it is about.

=======================================  ==============================================================================
a notice names                           what the link sends to the other bus
=======================================  ==============================================================================
the same publisher as was named last     nothing
a client that the link may vouch for     its number and its credentials, unchanged
anybody else                             an empty name: the messages are the link's own
=======================================  ==============================================================================

Upwards, the link may vouch for clients whose name begins with the link's own name at the master, as the names of all
clients below do once the link is up. Downwards, it may vouch for every client. It never names the program around a bus
(``0 -``), which the other bus would take for its own. If the link's name proves nothing at the master, the IDs of one
side mean other users on the other side, and the link names nobody. It also names nobody to a bus that does not know
senders or does not trust the link.

A notice stays in force on its connection until the next one. So the link remembers the last one while it is down, and
passes it on when it is up again: the next message may be from the same publisher.
"""

from __future__ import annotations

from sbus.protocol import controls
from sbus.protocol.notices import LONGEST_SENDER, NOBODY, SENDER
from sbus.protocol.packets import CMSG, build

__all__ = ["NOTICE", "Authors"]

NOTICE = build(CMSG, SENDER, b"")
"""The beginning of a packet that names a publisher."""


class Authors:
    """The publishers of the messages from one bus, as the link names them to the other bus.

    :ivar vouched: the prefix of the credentials that the link may name; None if it may name nobody.
    """

    __slots__ = ("_last", "_told", "vouched")

    def __init__(self) -> None:
        self.vouched: bytes | None = None
        self._last = self._told = b""

    def restart_source(self) -> None:
        """Forget the last notice: the connection on which it was in force is gone."""
        self.vouched = None
        self._last = b""

    def restart_target(self) -> None:
        """Forget the name sent last: on a new connection, all messages count as the link's own."""
        self.vouched = None
        self._told = b""

    def hear(self, notice: bytes) -> list[bytes]:
        """Take a notice; return the packets for the other bus, at most one."""
        self._last = notice[len(NOTICE) :]
        return self.due()

    def due(self) -> list[bytes]:
        """Return the packets to send to the other bus before the next message, at most one."""
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
