"""The kernel's view of a server: its connections, unread bytes, memory and CPU time."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Connections", "connections", "cpu", "peak", "reset_peak", "resident"]

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST_DUMP = 0x301
_NLMSG_DONE, _NLMSG_ERROR = 3, 2
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBHIIIII")
_ESTABLISHED = 1
_SHOW_NAME, _SHOW_MEMORY = 0x01, 0x20
_NAME, _MEMORY, _SHUTDOWN = 0, 5, 6
_WRITE_ALLOC = 2
_BOTH_WAYS = 3


class Connections(NamedTuple):
    """The server's ends of its connections.

    :ivar open: ends that the server has accepted and that are not shut down both ways.
    :ivar unread: bytes of kernel memory that hold what the clients of these have not read.
    :ivar ended: other ends, whose clients have not read all.
    """

    open: int
    unread: int
    ended: int = 0


def connections(path: str) -> Connections:
    """Ask the kernel for the connections of the listening socket at `path` (sock_diag(7)).

    :raises OSError: if this kernel does not offer sock_diag for Unix sockets.
    """
    name = path.encode()
    count = unread = ended = 0
    for attributes in _sockets():
        if attributes.get(_NAME, b"").rstrip(b"\0") != name:
            continue
        (size,) = struct.unpack_from("=I", attributes[_MEMORY], 4 * _WRITE_ALLOC)
        if attributes.get(_SHUTDOWN) == bytes([_BOTH_WAYS]):
            ended += size > 0
        else:
            count += 1
            unread += size
    return Connections(count, unread, ended)


def _sockets() -> Iterator[dict[int, bytes]]:
    """The attributes of each connected Unix socket of this network namespace."""
    show = _SHOW_NAME | _SHOW_MEMORY
    body = _REQUEST.pack(socket.AF_UNIX, 0, 0, 1 << _ESTABLISHED, 0, show, 0xFFFFFFFF, 0xFFFFFFFF)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
        netlink.send(_HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, 1, 0) + body)
        while True:
            answer = netlink.recv(1 << 20)
            at = 0
            while at < len(answer):
                size, kind, *_ = _HEADER.unpack_from(answer, at)
                if kind == _NLMSG_DONE:
                    return
                if kind == _NLMSG_ERROR:
                    number = -struct.unpack_from("=i", answer, at + _HEADER.size)[0]
                    raise OSError(number, "sock_diag refused to list the Unix sockets")
                yield dict(_attributes(answer[at + _HEADER.size + 16 : at + size]))
                at += size + 3 & ~3


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        size, kind = struct.unpack_from("=HH", data, at)
        yield kind, data[at + 4 : at + size]
        at += size + 3 & ~3


# --- a process (proc(5)); each of these raises OSError when it is gone ------------------------------


def _status(pid: int, field: str) -> int:
    """Return a field of ``/proc/PID/status``, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} has no memory left")


def resident(pid: int) -> int:
    """Return the resident memory, in bytes."""
    return _status(pid, "VmRSS:")


def peak(pid: int) -> int:
    """Return the peak of the resident memory since `reset_peak`, in bytes."""
    return _status(pid, "VmHWM:")


def reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def cpu(pid: int) -> float:
    """Return the CPU time of all threads since the start, in seconds."""
    # As clock_getcpuclockid(3) makes the clock of a process: /proc has only hundredths of a second.
    seconds: float = time.clock_gettime(~pid << 3 | 2)
    return seconds
