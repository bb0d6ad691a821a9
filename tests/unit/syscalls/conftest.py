"""Both helpers, and a pair of connected sockets."""

from __future__ import annotations

import socket

import pytest

from tests.unit.syscalls.pairs import load, socketpair


@pytest.fixture(params=["_pure", "_batch"])
def helper(request):
    """Each implementation in turn; the compiled one is skipped where it was not built."""
    return load(request.param)


@pytest.fixture
def pair():
    """Two connected sockets, with buffers that hold a batch of small packets."""
    ours, theirs = socketpair()
    with ours, theirs:
        for sock in (ours, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
        yield ours, theirs
