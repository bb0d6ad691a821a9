"""Closing a socket at which descriptors may wait, in either direction.

The kernel counts those that the peer has not read for the server's user until they are read, whether the connection is
open or not (unix(7)). A peer whose connection is closed, and that does not read or hang up, would hold them for
nothing, and could connect again for more. So the socket is kept, and counts for the peer's user: with 64 such
connections a user gets no descriptors on new ones.

Those that the peer has sent can take long to close (`sbus.syscalls.elsewhere`). A socket without any is closed at once.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from functools import partial

from twisted.python.failure import Failure

from sbus.flood import PayloadShare
from sbus.seqpacket.multiplexer import Multiplexer
from sbus.syscalls.sockets import discard_and_close, discard_plain, least_charge, unread_bytes

__all__ = ["close", "close_when_read"]

_DISCARDED_AT_ONCE = 256
"""Packets that are discarded before any other work continues."""


class _Kept:
    """A socket that is shut down, and watched until its peer has read everything or has hung up.

    :param close: called then, or when the reactor stops.
    :raises OSError: as `Multiplexer.watch_reads`.
    """

    __slots__ = ("_close", "_multiplexer", "_share", "_sock")

    def __init__(
        self, sock: socket.socket, multiplexer: Multiplexer, share: PayloadShare, close: Callable[[], object]
    ) -> None:
        self._sock = sock
        self._multiplexer = multiplexer
        self._share = share
        self._close = close
        fd = sock.fileno()
        least_charge()  # which may need descriptors the first time
        multiplexer.add(fd, self, 0)
        try:
            multiplexer.suspend(fd)
            multiplexer.watch_reads(fd)  # it reports the socket once in any case
        except OSError:
            multiplexer.remove(fd)
            raise
        share.ended += 1
        share.connections += 1

    def ready(self, events: int, exclusive: bool) -> None:
        """See `sbus.seqpacket.multiplexer.Handler`."""
        if unread_bytes(self._sock) < least_charge():  # the last byte is released after the report
            self._stop()

    def failed(self, failure: Failure) -> None:
        """See `sbus.seqpacket.multiplexer.Handler`."""
        self._stop()

    def lost(self, reason: Failure) -> None:
        """See `sbus.seqpacket.multiplexer.Handler`."""
        self._stop()

    def _stop(self) -> None:
        self._share.ended -= 1
        self._share.connections -= 1
        self._multiplexer.remove(self._sock.fileno())
        self._close()


def close(sock: socket.socket, share: PayloadShare, limit: int) -> None:
    """Shut a socket down, discard the peer's packets, and close it.

    :param share: the descriptors that the peer's user has passed.
    :param limit: packets to discard at most.
    """
    _closer(sock, share, limit)()


def close_when_read(sock: socket.socket, share: PayloadShare, limit: int, multiplexer: Multiplexer) -> None:
    """Do as `close`, but close the socket when its peer has read everything, or has hung up."""
    closer = _closer(sock, share, limit)
    try:
        _Kept(sock, multiplexer, share, closer)
    except OSError:  # no descriptor, or no memory
        closer()


def _closer(sock: socket.socket, share: PayloadShare, limit: int) -> Callable[[], object]:
    """Shut a socket down; return a function that closes it."""
    with contextlib.suppress(OSError):  # the peer has left
        sock.shutdown(socket.SHUT_RDWR)
    if discard_plain(sock, min(limit, _DISCARDED_AT_ONCE)):
        return sock.close
    return partial(share.close, partial(discard_and_close, sock, limit))
