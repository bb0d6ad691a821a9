"""Batches of packets, in and out: the compiled helper, or its plain Python twin.

Theory of operation
-------------------

A system call costs more than all of the bus's work on a small message. So one call reads up to 64 packets
(recvmmsg(2)), and one sends as many (sendmmsg(2)). Neither waits.

* *A packet is one bytes object* from the read to the send; nothing copies it. Large ones that are only sent on to
  another socket are not even objects: `PacketReader.forward` sends each from the buffer that has received it.
* *Buffers belong to the reader*, which all sockets of a reactor share for each packet size. They reserve no memory, and
  the kernel gets back the memory used by a batch of more than 4 MiB.
* *The edges stay.* A packet that is too long for its buffer becomes an empty one that knows its length
  (`sbus.protocol.packets.Truncated`); no peer can send one. A reset is reported once, before the packets that still
  wait, so both twins read on after it.
* *The kernel closes descriptors that peers send along*, unless a reader leaves room for them: then the packet is
  `sbus.syscalls.memfd.Attached`.
* *Many sockets, one list.* `send_to_each` prepares the kernel's structures once for all sockets.
* *One packet goes alone*: recv(2) and send(2) copy no headers.
* *The GIL is kept*, so no other thread changes the list or closes the socket meanwhile.

The twins are `sbus.syscalls._batch` (Cython) and `sbus.syscalls._pure`, which makes one system call for each packet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbus.speedups import is_wanted

__all__ = ["BATCH", "COMPILED", "PacketReader", "send_packets", "send_split", "send_to_each"]

BATCH = 64
"""Packets in one batch: enough to share the cost of a system call, few enough to keep the wait of others short."""

COMPILED = False
"""Whether the compiled helper is in use."""

if TYPE_CHECKING or not is_wanted():
    from sbus.syscalls._pure import PacketReader, send_packets, send_split, send_to_each
else:
    try:
        from sbus.syscalls._batch import PacketReader, send_packets, send_split, send_to_each

        COMPILED = True
    except ImportError:
        from sbus.syscalls._pure import PacketReader, send_packets, send_split, send_to_each
