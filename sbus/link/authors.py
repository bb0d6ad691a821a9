"""Authors: the publishers that a link names to the other bus, in one direction.

.. rubric:: Theory of operation

To a bus, a link is the publisher of everything that it carries. So the link asks each bus for the true publishers
(``sender/on``), and passes each *notice* on to the other bus (``link/sender``), before the messages that it is about.

=======================================  ==============================================================================
a notice names                           what the link sends to the other bus
=======================================  ==============================================================================
the same publisher as was named last     nothing
a client                                 its number and its credentials; upwards, after the link's name at the master
anybody else                             an empty name: the messages are the link's own
=======================================  ==============================================================================

Upwards, each name begins with the link's own name at the master, as the names of all clients below do once the link is
up. When that name changes, messages are on their way that the bus below has signed before. They are not the link's own,
as receivers would take them for those of root: the link replaces its former name at the beginning of a name by its
present one, and puts its name before any other.

The link never names the program around a bus (``0 -``), which the other bus would take for its own. If the link's name
proves nothing at the master, the IDs of one side mean other users on the other side, and the link names nobody. It also
names nobody to a bus that does not know senders or does not trust the link.

A notice stays in force on its connection until the next one. So the link remembers the last one while it is down, and
passes it on when it is up again: the next message may be from the same publisher.
"""

from __future__ import annotations

from collections import deque

from sbus.protocol import controls
from sbus.protocol.notices import LONGEST_SENDER, SENDER
from sbus.protocol.packets import CMSG, build

__all__ = ["NOTICE", "Authors"]

_FORMER = 16
"""Former names of the link that are known."""
_CREDENTIALS = b"!/cred/"

NOTICE = build(CMSG, SENDER, b"")
"""The beginning of a packet that names a publisher."""


class Authors:
    """The publishers of the messages from one bus, as the link names them to the other bus.

    :ivar may_name: whether anybody is named.
    """

    __slots__ = ("_former", "_last", "_prefix", "_told", "may_name")

    def __init__(self) -> None:
        self.may_name = False
        self._prefix = b""
        self._former: deque[bytes] = deque(maxlen=_FORMER)
        self._last = self._told = b""

    def restart_source(self) -> None:
        """Forget the last notice: the connection on which it was in force is gone."""
        self.may_name = False
        self._last = b""

    def restart_target(self) -> None:
        """Forget the name sent last: on a new connection, all messages count as the link's own."""
        self.may_name = False
        self._told = b""

    def put_behind(self, name: bytes) -> None:
        """Have all names begin with one: that of the link at the other bus."""
        prefix = name + b"/"
        if prefix != self._prefix:
            if prefix in self._former:
                self._former.remove(prefix)
            if self._prefix:
                self._former.append(self._prefix)
            self._prefix = prefix

    def hear(self, notice: bytes) -> list[bytes]:
        """Take a notice; return the packets for the other bus, at most one."""
        self._last = notice[len(NOTICE) :]
        return self.due()

    def due(self) -> list[bytes]:
        """Return the packets to send to the other bus before the next message, at most one."""
        if not self.may_name:
            return []
        number, space, credentials = self._last.partition(b" ")
        author = number + space + self._name(credentials)
        if not credentials.startswith(_CREDENTIALS) or len(author) > LONGEST_SENDER:
            author = b""
        if author == self._told:
            return []
        self._told = author
        return [build(CMSG, controls.LINK_SENDER, author)]

    def _name(self, credentials: bytes) -> bytes:
        """Return what a publisher is called at the other bus."""
        prefix = self._prefix
        if credentials.startswith(prefix + _CREDENTIALS if prefix else b""):
            return credentials
        for former in self._former:
            if credentials.startswith(former + _CREDENTIALS):
                return prefix + credentials[len(former) :]
        return prefix + credentials
