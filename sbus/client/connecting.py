"""Finding the bus, connecting to it, retrying, and explaining failures.

Theory of operation
-------------------

*Where.* `find_address` looks for files only if nobody gave an address: one that the user gave must fail loudly rather
than fall through to another bus. An error lists where the client looked.

*Connecting never blocks in the kernel.* A ``connect`` on a Unix socket waits while the server's backlog is full, for as
long as the server does not accept. `connect_once` therefore uses a non-blocking socket. EAGAIN means "the server is
there, and busy", so it is the one failure that is retried, every 10 ms until the timeout; any other failure raises at
once. For a client that reconnects, such a failure ends one attempt, and the next one follows after a pause (`Backoff`).
Its first connection is retried, too, while there is no server, until the timeout.

*Buffers.* The send buffer is raised when connecting, to one packet of the largest size, because the kernel refuses a
packet larger than the buffer (EMSGSIZE) however empty it is. The kernel may allow less; the core then lowers its own
limit (`sbus.client.core.ClientCore.connected`).

*Errors name a remedy.* Each errno that a user can meet has a sentence that says what to do. ECONNREFUSED has two
causes, a stale socket and a file that is not a socket, and the kernel does not distinguish them; a ``stat`` does.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sbus.client import lookup
from sbus.errors import AddressError, ConnectError, UsageError
from sbus.syscalls import addresses
from sbus.syscalls.sockets import grow_send_buffer

__all__ = [
    "BACKLOG_RETRY",
    "SERVER_CLOSED",
    "SOCKET_OPTION",
    "Backoff",
    "backlog_full",
    "check_address",
    "connect_blocking",
    "connect_first",
    "connect_once",
    "describe_connect_error",
    "describe_loss",
    "find_address",
    "is_absent",
]

SERVER_CLOSED = "the server closed the connection"

SOCKET_OPTION: list[object] = [
    "socket",
    "s",
    None,
    "Address of the bus: a path, @NAME or /dev/unix/abstract/HEX [default: $SBUS_SOCKET, else "
    "$XDG_RUNTIME_DIR/sbus.sock if it exists, else /run/sbus.sock]",
]
"""The option of ``twistd`` for the bus of a service (`twisted.python.usage`)."""
BACKLOG_RETRY = 0.01
"""Seconds between attempts to connect to a server whose backlog is full."""


def find_address(address: str | os.PathLike[str] | None = None, environ: Mapping[str, str] = os.environ) -> str:
    """Return the address of the bus.

    It is the given one, else ``$SBUS_SOCKET``, else the first that exists of ``$XDG_RUNTIME_DIR/sbus.sock``,
    ``/run/sbus.sock`` (where ``twistd sbus`` listens as root) and ``/run/sbus.socket`` (where ``sbusd`` listens). If
    none exists, it is ``/run/sbus.sock``.

    :raises sbus.errors.AddressError: if the given one is neither text nor a path.
    """
    if address is not None and not isinstance(address, (str, os.PathLike)):
        raise AddressError(f"an address is str or a path, not {type(address).__name__}")
    if address:
        return os.fsdecode(address)
    return lookup.find_default(environ)


def check_address(address: str, option: str = "--socket") -> str:
    """Return an address of a command line.

    :raises sbus.errors.UsageError: if a client cannot connect to it.
    """
    if not addresses.parse(address).name:
        raise UsageError(f"{option}={address:.200}: a client cannot connect to this address: give a path or @NAME")
    return address


def _others_missing(address: str) -> str:
    """Return the other default addresses, worded to follow a missing one, if `address` is a default and none exists."""
    others = lookup.default_addresses()
    if address not in others or any(map(os.path.exists, others)):
        return ""
    others.remove(address)
    return f", nor at {' or '.join(others)}"


@dataclass(frozen=True, slots=True)
class Backoff:
    """The pauses between attempts to reconnect: exponential, with random jitter.

    The first attempt is immediate, since a server that was restarted is usually back already. Each pause is shortened
    at random by up to half: otherwise thousands of clients would connect in the same instant, again and again.

    :ivar first: seconds before the second attempt; the first attempt is immediate.
    :ivar factor: ratio of each pause to the one before.
    :ivar longest: upper limit of a pause in seconds.
    :ivar spread: largest fraction by which a pause is shortened at random.
    """

    first: float = 0.05
    factor: float = 1.6
    longest: float = 15.0
    spread: float = 0.5

    def delays(self) -> Iterator[float]:
        """Iterate over the seconds to wait before each attempt, without end."""
        return _Delays(self)


class _Delays(Iterator[float]):
    """The pauses before the attempts after one loss.

    No generator: the exception of a signal handler that interrupts one ends it.
    """

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._longest: float | None = None  # of the next pause; None before the first attempt

    def __next__(self) -> float:
        backoff, longest = self._backoff, self._longest
        if longest is None:
            self._longest = min(backoff.first, backoff.longest)
            return 0.0
        import random  # here: it takes longer than what a first connection needs

        self._longest = min(longest * backoff.factor, backoff.longest)
        return longest * (1 - backoff.spread * random.random())


def connect_once(address: str, max_packet: int) -> socket.socket | None:
    """Connect without waiting.

    :param max_packet: bytes that the send buffer should hold; the kernel may permit fewer.
    :returns: a connected, non-blocking socket, or None if the server's backlog is full.
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


def connect_blocking(address: str, max_packet: int, timeout: float | None) -> socket.socket:
    """Connect as `connect_once` does, and retry while the server's backlog is full.

    :param timeout: seconds to retry for; None for no limit.
    :raises ConnectError: with the reason and the remedy.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while (sock := connect_once(address, max_packet)) is None:
        if deadline is not None and time.monotonic() >= deadline:
            raise ConnectError(backlog_full(address))
        time.sleep(BACKLOG_RETRY)
    return sock


def connect_first(address: str, max_packet: int, backoff: Backoff | None, deadline: float | None) -> socket.socket:
    """Connect for the first time; with a backoff, wait for a server that is not there yet.

    :param max_packet: as for `connect_once`.
    :param deadline: the `time.monotonic` of the end; None for no limit.
    :raises sbus.errors.ConnectError: as `connect_blocking`.
    """
    delays = (backoff or Backoff()).delays()
    next(delays)
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            return connect_blocking(address, max_packet, left)
        except ConnectError as error:
            pause = next(delays)
            if backoff is None or not is_absent(error) or (left is not None and pause > left):
                raise
        time.sleep(pause)


def is_absent(error: ConnectError) -> bool:
    """Return whether a failure to connect means that no server is there, perhaps not yet."""
    cause = error.__cause__
    number = cause.errno if isinstance(cause, OSError) else None
    number = getattr(cause, "osError", number)
    return number in (errno.ENOENT, errno.ECONNREFUSED)


def describe_loss(error: OSError) -> str:
    """Return the reason for a connection that was lost with this error."""
    return (
        SERVER_CLOSED if error.errno in (errno.EPIPE, errno.ECONNRESET) else f"the connection broke: {error.strerror}"
    )


def backlog_full(address: str) -> str:
    """Return the error text for a server whose backlog stayed full."""
    return f"the bus at {address} accepts no connections: it is overloaded or stopped; try again later"


def describe_connect_error(address: str, error: Exception) -> str:
    """Return the error text for a failed attempt to connect, with the remedy.

    :param error: an OSError, or Twisted's ``ConnectError``, whose ``osError`` is the errno.
    """
    number = error.errno if isinstance(error, OSError) else getattr(error, "osError", None)
    number = number if isinstance(number, int) else 0
    if number == errno.ECONNREFUSED and os.path.exists(address) and not stat.S_ISSOCK(os.stat(address).st_mode):
        number = errno.ENOTSOCK  # connect(2) reports ECONNREFUSED for a file of any other kind too
    where = "say where the bus is (--socket, SBUS_SOCKET)"
    permission = "you lack the permission; ask the operator of the bus for --mode, --group or --allow-user"
    why = os.strerror(number) if number else str(error) or type(error).__name__
    others = _others_missing(address) if number == errno.ENOENT else ""
    start = "sbus serve" if others else f"sbus serve --socket={address}"
    absent = f"start one ({start}), or say where it is (--socket, SBUS_SOCKET)"
    gone = (
        "the server is gone; start it again (it left its socket behind, which twistd sbus replaces, and sbusd with -r)"
    )
    remedies = {
        errno.ENOENT: absent,
        # An abstract address leaves nothing behind.
        errno.ECONNREFUSED: absent if address.startswith(("@", "/dev/unix/abstract/")) else gone,
        errno.EACCES: permission,
        errno.EPERM: permission,
        errno.EPROTOTYPE: f"that is a socket of another kind, not a bus; {where}",
        errno.ENOTSOCK: f"that is not a socket; {where}",
    }
    # Without the permission there is no telling whether a bus is there.
    what = "cannot connect to" if number in (errno.EACCES, errno.EPERM) else "no bus at"
    return f"{what} {address}{others}: {why}: {remedies.get(number, where)}"
