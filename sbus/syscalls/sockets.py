"""Options of Unix-domain sockets: send buffers, descriptors, peer credentials."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import socket
import struct
import sys
import termios
from typing import Final

from sbus.protocol.keys import PeerCredentials

__all__ = [
    "DONTWAIT",
    "LARGEST_SEND_BUFFER",
    "LONGEST_PACKET",
    "MOST_PASSED",
    "OVERHEAD",
    "PEEK",
    "SEND_NOW",
    "TRUNC",
    "UNKNOWN_GROUPS",
    "brings_descriptors",
    "discard_and_close",
    "discard_input",
    "discard_plain",
    "grow_send_buffer",
    "is_unix",
    "least_charge",
    "make_send_room",
    "max_sendable",
    "overflow_ids",
    "pass_descriptors",
    "peer_credentials",
    "peer_groups",
    "send_with",
    "set_send_buffer",
    "unread_bytes",
]

# The flags are plain numbers: `&` and `|` with a member of the enum in `socket` cost 0.8 µs each.
DONTWAIT: Final = int(socket.MSG_DONTWAIT)
"""The flag of send(2) and recv(2) to return at once."""
PEEK: Final = int(socket.MSG_PEEK)
"""The flag of recv(2) to leave what it reads in place."""
TRUNC: Final = int(socket.MSG_TRUNC)
"""The flag of recv(2) to return the length of a packet, even if it did not fit."""
SEND_NOW: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
"""The flags of send(2) to return at once, and to raise no signal if the peer no longer reads."""
MOST_PASSED: Final = 253
"""Descriptors that can come with one packet (SCM_MAX_FD)."""
LARGEST_SEND_BUFFER = 1 << 20
"""Bytes in the largest send buffer to ask for; packets that the kernel holds escape flood control."""

OVERHEAD = 32
"""Bytes by which the longest packet is shorter than the send buffer (``unix_dgram_sendmsg``, Linux)."""

LONGEST_PACKET = LARGEST_SEND_BUFFER - OVERHEAD
"""Bytes in the longest packet that fits the largest send buffer."""

_SMALL_PACKET = 4096
"""Bytes that the kernel charges for a packet of some hundred bytes, at most."""

_SO_SNDBUFFORCE = 32
_SO_PEERGROUPS = 59
_MOST_BYTES = 1024
"""The largest option that `socket.socket.getsockopt` reads, in bytes."""
_MOST_GROUPS = 1_024
"""The limit of groups that are looked at: a user in a domain of Windows has no more. A process may have 65,536; a
client took 4 MB for them, and 13 ms of each connect, and everybody with subordinate GIDs can have them."""
UNKNOWN_GROUPS = frozenset({-1})
"""Stands for the groups of a process that has more, or of which the kernel does not tell them."""
_SO_PASSRIGHTS = 83
_SO_PASSPIDFD = 76
_SO_PASS_OTHER = (socket.SO_PASSCRED, socket.SO_PASSSEC, _SO_PASSPIDFD)
_UCRED = struct.Struct("iII")
_INT = struct.Struct("i")
_CREDENTIALS = socket.CMSG_SPACE(_UCRED.size)
"""Bytes of control data that have room for credentials, and then for no descriptor."""


def is_unix(sock: socket.socket, kind: socket.SocketKind = socket.SOCK_SEQPACKET) -> bool:
    """Return whether this is a Unix-domain socket of this type."""
    return sock.family == socket.AF_UNIX and sock.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == kind


def peer_credentials(sock: socket.socket) -> PeerCredentials:
    """Return the peer's credentials (``SO_PEERCRED``).

    The kernel noted them at connect(2) or listen(2).
    """
    return PeerCredentials(*_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


def peer_groups(sock: socket.socket) -> frozenset[int]:
    """Return the peer's supplementary groups (``SO_PEERGROUPS``, Linux 4.13).

    The kernel noted them at connect(2), as it did the credentials.

    :returns: `UNKNOWN_GROUPS` if there are too many, or if the kernel does not tell them, as in some sandboxes.
    """
    try:
        groups = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MOST_BYTES)
    except OSError as e:
        many = _many_peer_groups(sock) if e.errno == errno.ERANGE else None
        if many is None:
            return UNKNOWN_GROUPS
        groups = many
    return frozenset(struct.unpack(f"{len(groups) // 4}I", groups))


def _many_peer_groups(sock: socket.socket) -> bytes | None:
    """Return more groups than `socket.socket.getsockopt` has room for, or None if there are too many."""
    import ctypes  # in the process of few buses: 256 groups are many

    buffer = ctypes.create_string_buffer(4 * _MOST_GROUPS)
    size = ctypes.c_uint32(len(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.getsockopt(sock.fileno(), socket.SOL_SOCKET, _SO_PEERGROUPS, buffer, ctypes.byref(size)):
        return None
    return buffer.raw[: size.value]


def max_sendable(sock: socket.socket) -> int:
    """Return the bytes in the longest packet that this socket can send."""
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) - OVERHEAD


def grow_send_buffer(sock: socket.socket, max_packet: int) -> int:
    """Set the send buffer to hold one packet of `max_packet` bytes.

    The kernel's limit applies.

    The buffer is set to about the packet's size, which the kernel doubles (socket(7)). A larger buffer is made smaller:
    packets that the kernel holds escape flood control.

    :returns: the bytes in the longest packet that the socket can send now.
    """
    wanted = min(max_packet + OVERHEAD, LARGEST_SEND_BUFFER // 2)
    _set_send_buffer(sock, wanted, min(max_packet + OVERHEAD, LARGEST_SEND_BUFFER))
    return max_sendable(sock)


def set_send_buffer(sock: socket.socket, size: int) -> int:
    """Make the send buffer `size` bytes large, as the kernel counts them; the kernel's limits apply.

    :returns: the size in force.
    """
    _set_send_buffer(sock, (size + 1) // 2, size)
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def _set_send_buffer(sock: socket.socket, value: int, least: int) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, value)
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < least:
        with contextlib.suppress(OSError):  # needs CAP_NET_ADMIN
            sock.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, value)


def unread_bytes(sock: socket.socket) -> int:
    """Return the memory of packets that were sent and that the peer has not read (``SIOCOUTQ``, unix(7)).

    :returns: bytes, with the kernel's own for each packet; 0 if the kernel does not say.
    """
    try:
        return int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError:
        return 0


@functools.cache
def least_charge() -> int:
    """Return the least memory, in bytes, that the kernel charges for a packet that has not been read."""
    ours, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, peer:
        ours.send(b"\0", SEND_NOW)
        return unread_bytes(ours) or 1


def make_send_room(sock: socket.socket) -> bool:
    """Raise a full send buffer above its content, so that one more small packet fits.

    :returns: whether it fits now. It does not if the buffer would exceed `LARGEST_SEND_BUFFER` or the kernel's limit
        (``net.core.wmem_max``), or if the kernel does not report the content of the buffer.
    """
    held = unread_bytes(sock)
    wanted = held + _SMALL_PACKET
    if not held or wanted > LARGEST_SEND_BUFFER:
        return False
    for option in (socket.SO_SNDBUF, _SO_SNDBUFFORCE):
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) > held:
            break
        with contextlib.suppress(OSError):  # the second needs CAP_NET_ADMIN
            sock.setsockopt(socket.SOL_SOCKET, option, wanted // 2 + 1)  # the kernel doubles it (socket(7))
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) > held


def discard_input(sock: socket.socket, limit: int) -> int:
    """Read and discard the packets in a non-blocking socket that is shut down for reading.

    :param limit: packets to discard at most.
    :returns: the packets discarded; less than the limit if nothing is left.
    """
    for count in range(limit):
        try:
            if not sock.recv(1):  # the rest of a packet goes with it
                return count
        except ConnectionResetError:  # reported once, before the packets that still wait
            continue
        except OSError:
            return count
    return limit


def discard_plain(sock: socket.socket, limit: int) -> bool:
    """Discard the packets in a socket, as `discard_input` does, but no packet that came with descriptors.

    With the last packet that holds it, the kernel closes a descriptor, which can take long (`sbus.syscalls.elsewhere`).

    :returns: whether nothing is left, so that the socket can be closed at once.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, True)  # to distinguish an empty packet from the end
    while True:
        try:
            _, credentials, flags, _ = sock.recvmsg(1, _CREDENTIALS, DONTWAIT | PEEK)
        except ConnectionResetError:  # reported once, before the packets that still wait
            continue
        except OSError:
            return False
        if not credentials and not flags & socket.MSG_CTRUNC:
            return True
        if flags & socket.MSG_CTRUNC or not limit:
            return False
        sock.recv(1, DONTWAIT)
        limit -= 1


def brings_descriptors(sock: socket.socket) -> bool:
    """Return whether the next packet came with descriptors; False if there is none.

    No descriptor is opened or closed: the kernel only notes that there was no room for any (MSG_CTRUNC, recvmsg(2)).
    """
    try:
        return bool(sock.recvmsg(1, 0, DONTWAIT | PEEK)[2] & socket.MSG_CTRUNC)
    except OSError:
        return False  # a read reports the error


def discard_and_close(sock: socket.socket, limit: int) -> None:
    """Discard the packets in a socket, as `discard_input` does, and close it."""
    discard_input(sock, limit)
    sock.close()


def pass_descriptors(sock: socket.socket, wanted: bool) -> None:
    """Have the kernel pass or refuse descriptors that peers send along (SCM_RIGHTS), and pass nothing else.

    Older kernels always pass them; those that are not received are closed then. The maker of an inherited socket may
    have asked for more (systemd.socket(5), ``PassCredentials=``): that would look like descriptors, with every packet.
    """
    for option, value in ((_SO_PASSRIGHTS, wanted), *((option, False) for option in _SO_PASS_OTHER)):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, option, value)


def send_with(sock: socket.socket, packet: bytes, fd: int) -> bool:
    """Send one packet with a descriptor, without waiting.

    :returns: whether it was sent; False if the socket is full.
    :raises OSError: as sendmsg(2), but not EAGAIN; ETOOMANYREFS if the user has too many descriptors under way.
    """
    try:
        sock.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _INT.pack(fd))], SEND_NOW)
    except BlockingIOError:
        return False
    return True


def overflow_ids(directory: str = "/proc/sys/kernel") -> tuple[int, int]:
    """Return the overflow UID and GID.

    They replace IDs without a mapping in the user namespace (user_namespaces(7)).

    :param directory: where the kernel publishes them.
    """
    ids = []
    for name in ("overflowuid", "overflowgid"):
        try:
            with open(f"{directory}/{name}") as file:
                ids.append(int(file.read()))
        except (OSError, ValueError):
            ids.append(65534)
    return ids[0], ids[1]
