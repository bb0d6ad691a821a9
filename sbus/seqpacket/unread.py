"""Keeping the socket of a connection that has ended while its peer has descriptors to read.

The kernel counts them for the server's user until they are read, whether the connection is open or not (unix(7)). A
peer that is closed, and that neither reads nor hangs up, would have them for nothing, and could come again for more.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from twisted.python.failure import Failure

from sbus.seqpacket.multiplexer import Multiplexer
from sbus.syscalls.sockets import least_charge, unread_bytes

__all__ = ["end_when_read"]


class _Kept:
    """A socket that is shut down, and watched until its peer has read everything or has hung up.

    :param end: called then, or when the reactor stops.
    :raises OSError: as `Multiplexer.watch_reads`.
    """

    __slots__ = ("_end", "_multiplexer", "_sock")

    def __init__(self, sock: socket.socket, multiplexer: Multiplexer, end: Callable[[], None]) -> None:
        self._sock = sock
        self._multiplexer = multiplexer
        self._end = end
        fd = sock.fileno()
        least_charge()  # which may need descriptors the first time
        multiplexer.add(fd, self, 0)
        try:
            multiplexer.suspend(fd)
            multiplexer.watch_reads(fd)  # it reports the socket once in any case
        except OSError:
            multiplexer.remove(fd)
            raise

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
        self._multiplexer.remove(self._sock.fileno())
        self._end()


def end_when_read(sock: socket.socket, multiplexer: Multiplexer, end: Callable[[], None]) -> None:
    """Call `end`, which closes a socket that is shut down, once its peer has read everything or has hung up."""
    try:
        _Kept(sock, multiplexer, end)
    except OSError:  # no descriptor, or no memory
        end()
