"""Sockets that listen at an address."""

from __future__ import annotations

import contextlib
import os
import socket
import stat

import pytest

from sbus.syscalls.addresses import connect, parse
from sbus.syscalls.listening import listen

NOBODY = 65_534


def on(path, **kwargs):
    """Listen on a path, for use with `closing`."""
    return contextlib.closing(listen(parse(str(path)), **kwargs))


def seqpacket():
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def talk(address):
    """Return whether a client can connect to the address right now."""
    try:
        connect(address).close()
    except OSError:
        return False
    return True


def stale(path):
    """A socket as a killed server leaves it."""
    with seqpacket() as sock:
        sock.bind(str(path))
        sock.listen()
    return os.lstat(path).st_ino


def mode(path):
    return stat.S_IMODE(os.lstat(path).st_mode)


@contextlib.contextmanager
def as_user(uid):
    """Act as another user for a while, without any capability; only root can."""
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")

# --- listening and connecting ---------------------------------------------------------------------


def fill_backlog(bound, stack):
    """Connect until the server's backlog is full."""
    with contextlib.suppress(BlockingIOError):
        for _ in range(100):
            stack.enter_context(connect(bound.address))
