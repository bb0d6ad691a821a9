"""How packets leave a client's socket: one by one, or, where the server takes bundles, many in one."""

from __future__ import annotations

import errno
import socket

from sbus.protocol.bundles import pack
from sbus.syscalls.batch import BATCH, send_packets

__all__ = ["READ_AT_ONCE", "read_at_once", "send_some", "share"]

READ_AT_ONCE = 8
"""Packets read at once from a server that sends bundles: more messages than one in each of a batch."""
_BUNDLES = 8
"""Bundles sent with one call at most."""
_SHARE = 2048
"""Packets to put into these."""


def read_at_once(limit: int) -> int:
    """Packets to read at once, if `limit` is the length of a bundle (0: there are none)."""
    return READ_AT_ONCE if limit else BATCH


def share(limit: int) -> int:
    """Packets to offer to `send_some` at once."""
    return _SHARE if limit else BATCH


def send_some(sock: socket.socket, packets: list[bytes], limit: int) -> int:
    """Send what the socket takes of some packets, with one system call and without waiting.

    :param limit: bytes in the longest bundle that may be sent; 0 if none may.
    :returns: how many of the packets, from the front, were sent.
    :raises OSError: as sendmsg(2), if the first cannot be sent; but not EAGAIN.
    """
    if not limit or len(packets) < 2:
        return send_packets(sock, packets)
    bundles, counts = pack(packets, limit, _BUNDLES)
    try:
        return sum(counts[: send_packets(sock, bundles)])
    except OSError as e:
        if e.errno != errno.EMSGSIZE or counts[0] == 1:
            raise
        return send_packets(sock, packets)  # somebody has made the socket's buffer smaller than a bundle
