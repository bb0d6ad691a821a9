"""Connect as other users, each time in a fork of one small process: no Python has to start."""

from __future__ import annotations

import atexit
import functools
import os
import socket
import subprocess
import sys

__all__ = ["connect_as"]

_CONNECT = """
import _socket, posix, sys
requests = _socket.socket(fileno=0)
while True:
    request, passed, _, _ = requests.recvmsg(1000, _socket.CMSG_SPACE(4))
    if not request:
        break
    answers = _socket.socket(fileno=int.from_bytes(passed[0][2], sys.byteorder))
    child = posix.fork()
    if child:
        posix.waitpid(child, 0)
        answers.close()
        continue
    uid, gid, name = request.split(b" ", 2)
    if posix.geteuid() == 0:
        posix.setgroups([])
    posix.setresgid(*[int(gid)] * 3)
    posix.setresuid(*[int(uid)] * 3)
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    error = sock.connect_ex(name)
    rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, sock.fileno().to_bytes(4, sys.byteorder))
    answers.sendmsg([b"%d %d" % (posix.getpid(), error)], [rights])
    posix._exit(0)
"""
"""A program that connects as other users, each time in a fork. It imports only C modules, so a fork costs little."""


@functools.cache
def _connector() -> socket.socket:
    """Start the process that connects as other users; it ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen([sys.executable, "-I", "-S", "-c", _CONNECT], stdin=theirs.fileno())

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def connect_as(name: bytes, user: tuple[int, int], timeout: float) -> tuple[socket.socket, int]:
    """Connect as another user, in a process of its own: connect(2) fixes the peer credentials.

    :returns: the socket, and the PID of the process.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            socket.send_fds(_connector(), [b"%d %d %b" % (*user, name)], [theirs.fileno()])
        ours.settimeout(timeout)
        answer, fds, _, _ = socket.recv_fds(ours, 100, 1)
    assert answer, f"the process of user {user} has failed: see its error above"
    pid, error = map(int, answer.split())
    sock = socket.socket(fileno=fds[0])
    if error:
        sock.close()
        raise OSError(error, os.strerror(error))
    return sock, pid
