"""How a client finds its bus, connects to it, says what went wrong, and tries again."""

from __future__ import annotations

import errno
import os
import random
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sbus.errors import ConnectError
from sbus.syscalls import addresses
from sbus.syscalls.sockets import grow_send_buffer

__all__ = [
    "CLOSED",
    "Backoff",
    "backlog_full",
    "connect_once",
    "describe_connect_error",
    "describe_loss",
    "dial",
    "find_address",
]

CLOSED = "the server closed the connection"

_RETRY = 0.01
"""Seconds between two attempts to connect to a server whose backlog is full."""


def find_address(address: str | None = None, environ: Mapping[str, str] = os.environ) -> str:
    """The address of the bus: as given, else ``$SBUS_SOCKET``, else ``$XDG_RUNTIME_DIR/sbus.sock`` if it
    exists, else ``/run/sbus.sock``."""
    if address:
        return address
    if environ.get("SBUS_SOCKET"):
        return environ["SBUS_SOCKET"]
    if directory := environ.get("XDG_RUNTIME_DIR"):
        path = os.path.join(directory, "sbus.sock")
        if os.path.exists(path):
            return path
    return "/run/sbus.sock"


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait between attempts to reconnect: longer each time, and never quite alike.

    :ivar first: seconds before the second attempt; the first is made at once.
    :ivar factor: by how much each wait is longer than the one before.
    :ivar longest: seconds that no wait exceeds.
    :ivar spread: each wait is shortened by up to this part of it, by chance, so that the clients of
        a server that comes back do not all knock at the same moment.
    """

    first: float = 0.05
    factor: float = 1.6
    longest: float = 15.0
    spread: float = 0.5

    def delays(self) -> Iterator[float]:
        """Seconds to wait before each attempt, without end."""
        yield 0.0
        delay = min(self.first, self.longest)
        while True:
            yield delay * (1 - self.spread * random.random())
            delay = min(delay * self.factor, self.longest)


def connect_once(address: str, max_packet: int) -> socket.socket | None:
    """Connect without waiting.

    :returns: a connected, non-blocking socket with a send buffer for packets of `max_packet` bytes
        (as far as the kernel permits); None if the server is there but its backlog is full.
    :raises ConnectError: with the reason and the remedy.
    """
    try:
        sock = addresses.connect(addresses.parse(address))
    except BlockingIOError:
        return None
    except OSError as e:
        raise ConnectError(describe_connect_error(address, e)) from e
    grow_send_buffer(sock, max_packet)
    return sock


def dial(address: str, max_packet: int, timeout: float | None) -> socket.socket:
    """Connect, waiting as long as the server's backlog is full, at most `timeout` seconds.

    :raises ConnectError: with the reason and the remedy.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while (sock := connect_once(address, max_packet)) is None:
        if deadline is not None and time.monotonic() >= deadline:
            raise ConnectError(backlog_full(address))
        time.sleep(_RETRY)
    return sock


def describe_loss(error: OSError) -> str:
    """What to say of a connection that was lost with this error."""
    return CLOSED if error.errno in (errno.EPIPE, errno.ECONNRESET) else f"the connection broke: {error.strerror}"


def backlog_full(address: str) -> str:
    """What to tell somebody whose attempts to connect all found the server's backlog full."""
    return f"the bus at {address} accepts nobody: it is overloaded or stopped; try again later"


def describe_connect_error(address: str, error: Any) -> str:
    """What to tell somebody whose attempt to connect failed with this OSError (or Twisted's ConnectError)."""
    number = int((error.errno if isinstance(error, OSError) else getattr(error, "osError", None)) or 0)
    if number == errno.ECONNREFUSED and os.path.exists(address) and not stat.S_ISSOCK(os.stat(address).st_mode):
        number = errno.ENOTSOCK  # the kernel makes no difference
    remedies = {
        errno.ENOENT: f"start one (twistd sbus --socket={address}), or say where it is (--socket, SBUS_SOCKET)",
        errno.ECONNREFUSED: "the server is gone; start it again (with --reuse, as its socket is left over)",
        errno.EACCES: "you lack the permission; ask whoever runs it for --mode, --group or --allow-user",
        errno.EPERM: "you lack the permission; ask whoever runs it for --mode, --group or --allow-user",
        errno.EPROTOTYPE: "that is a socket of another kind, no bus; say where the bus is (--socket, SBUS_SOCKET)",
        errno.ENOTSOCK: "that is no socket; say where the bus is (--socket, SBUS_SOCKET)",
    }
    why = os.strerror(number) if number else str(error) or type(error).__name__
    return f"no bus at {address}: {why}: {remedies.get(number, 'say where the bus is (--socket, SBUS_SOCKET)')}"
