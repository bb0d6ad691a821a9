"""Sockets that a bus finds or inherits."""

from __future__ import annotations

import socket
from pathlib import Path


def seqpacket(name: str | Path | bytes | None = None, *, listening: bool = False) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if name is not None:
        sock.bind(name if isinstance(name, bytes) else str(name))
    if listening:
        sock.listen()
    return sock
