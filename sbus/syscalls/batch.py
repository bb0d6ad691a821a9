"""Packets by the batch, in and out: the compiled helper where there is one, else its plain twin.

``SBUS_PURE=1`` in the environment forces the plain one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbus.speedups import is_wanted

__all__ = ["BATCH", "COMPILED", "PacketReader", "send_packets"]

BATCH = 64
"""Packets in one batch: enough that the cost of a system call is shared, few enough that nobody waits long."""

COMPILED = False
"""Whether the compiled helper is in use."""

if TYPE_CHECKING or not is_wanted():
    from sbus.syscalls._pure import PacketReader, send_packets
else:
    try:
        from sbus.syscalls._batch import PacketReader, send_packets

        COMPILED = True
    except ImportError:
        from sbus.syscalls._pure import PacketReader, send_packets
