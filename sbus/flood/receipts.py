"""Receipts: the messages that a queue has dropped, and their places.

.. rubric:: Theory of operation

A receiver that has asked for receipts (``CMSG receipts/on``) learns of each loss at its place in the stream. A
`Receipt` is an object that can still grow while it waits; `SendQueue.take` turns it into a packet, `SendQueue.ack`
learns whether it was sent.

=============================================  ========================================================================
a receipt waits                                when
=============================================  ========================================================================
in front of the queue (`SendQueue.head`)       nothing waits before it, or the order knows no places (``order/stack``,
                                               ``order/random``): there is one, with the sum of all losses
in a backlog, as a mark between two messages   under ``order/queue`` (`sbus.flood.backlogs.FifoBacklog`)
on the way to the socket                       the socket can never take a message: the receipt replaces it, since the
                                               packets after it leave with the same flush
=============================================  ========================================================================

Invariants:

* A receipt that waits takes up further losses while fewer than `MERGE` messages stand after it. Then the next loss
  begins a new one, after everything that waits. So a receipt stands at its gap or at most ``MERGE - 1`` messages before
  it, a receiver sees no gap before its receipt, and receipts lengthen a queue by 1 in `MERGE` at most.
* A receipt is never dropped. It does not count as a message or as a reply. A queue in which only receipts wait is not
  congested: each flush offers its receipt first and then the new messages.
* Published to a receiver = delivered + waiting + conflated + messages in receipts, from the reply to ``receipts/on``
  on.

A receiver without receipts pays one comparison for each flush, and nothing for each message.

Rejected: building the packet at each loss. A flood in which every second message is dropped would build one for each.
"""

from __future__ import annotations

from sbus.protocol.notices import LossReason, lost

__all__ = ["KEYS", "LONGEST_KEY", "MERGE", "Receipt"]

MERGE = 64
"""Messages after a waiting receipt from which on the next loss begins a new one."""

KEYS = 64
"""The maximal number of keys in a link's receipt; for losses of further keys, it has only the total number."""
LONGEST_KEY = 256
"""Bytes of the longest key in a link's receipt."""


class Receipt:
    """The losses at one place of a queue.

    :ivar messages: messages that were dropped here.
    :ivar size: bytes of their packets.
    :ivar why: the common cause, or `LossReason.SEVERAL`.
    :ivar replies: replies that stand after it.
    :ivar stamped: the messages in the packet that was made last.
    :ivar keys: in a link's receipt, keys of these messages, each with its number of messages and their bytes.
    """

    __slots__ = ("_packet", "_stamped_size", "_total", "keys", "messages", "replies", "size", "stamped", "why")

    def __init__(self, messages: int, size: int, why: LossReason) -> None:
        self.messages = messages
        self.size = size
        self.why = why
        self.replies = 0
        self.stamped = 0
        self._stamped_size = 0
        self._total = 0
        self._packet = b""
        self.keys: dict[bytes, tuple[int, int]] = {}

    def add(self, messages: int, size: int, why: LossReason) -> None:
        """Take up further losses."""
        self.messages += messages
        self.size += size
        if why is not self.why:
            self.why = LossReason.SEVERAL

    def note_keys(self, packets: list[bytes]) -> None:
        """Note the keys of added messages, up to `KEYS` of them."""
        keys = self.keys
        for packet in packets:
            key = packet[4 : packet.find(b"\0", 4)]
            found = keys.get(key)
            if found is not None:
                keys[key] = found[0] + 1, found[1] + len(packet)
            elif len(keys) < KEYS and len(key) <= LONGEST_KEY:
                keys[key] = 1, len(packet)

    def packet(self, total: int) -> bytes:
        """Return the packet to send now.

        :param total: messages that were dropped since the connection began, those of this receipt included.
        """
        if self.stamped != self.messages or total != self._total:
            self.stamped, self._stamped_size, self._total = self.messages, self.size, total
            self._packet = lost(self.messages, self.size, total, self.why, self.keys)
        return self._packet

    def rest(self) -> Receipt | None:
        """Return the losses that came after the packet was made, if there are any."""
        if self.messages == self.stamped:
            return None
        return Receipt(self.messages - self.stamped, self.size - self._stamped_size, self.why)
