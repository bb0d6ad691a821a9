"""Both helpers, a pair of connected sockets, and a path for a socket."""

from __future__ import annotations

import shutil
import socket
import tempfile
from pathlib import Path

import pytest

from tests.support.descriptors import descriptors
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


@pytest.fixture
def directory():
    """A directory with a short name (a socket's path has 107 bytes at most) that other users can enter."""
    path = Path(tempfile.mkdtemp(prefix="sbus-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def path(directory):
    return directory / "socket"


@pytest.fixture
def no_leaks():
    """The test leaves no descriptor open."""
    before = descriptors()
    yield
    assert not descriptors().items() - before.items()
