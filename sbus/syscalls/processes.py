"""The program at the other end of a connection, for the audit log.

A PID names the process that has it now. The process that connected may have ended, and another one may have its PID; an
attacker can arrange that. ``SO_PEERPIDFD`` (Linux 6.5) gives a descriptor of the process that connected. It is looked
at *after* the path was read: as long as the process has not ended, nobody else had its PID.

Nothing is read on older kernels. A path is that of the program now: the process may have called execve(2) since it
connected.
"""

from __future__ import annotations

import os
import socket

from sbus.syscalls.polling import is_readable

__all__ = ["peer_executable"]

_SO_PEERPIDFD = 77


def peer_executable(sock: socket.socket, pid: int) -> str | None:
    """Return the path of the program that the peer runs.

    :param pid: the peer's PID, as `sbus.syscalls.sockets.peer_credentials` returns it.
    :returns: None if the kernel does not say, this process may not ask, no descriptor is free, or the peer has ended.
    """
    if not pid:  # it is in another PID namespace
        return None
    try:
        process = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return None
    try:
        path = os.readlink(f"/proc/{pid}/exe")
        has_ended = is_readable(process)
        return None if has_ended else path
    except OSError:
        return None
    finally:
        os.close(process)
