"""The program of a peer: read where the kernel vouches for the process, and nowhere else."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from sbus.syscalls.processes import peer_executable
from tests.support.waiting import wait_until

PROGRAM = "import socket, sys; s = socket.socket(socket.AF_UNIX, 5); s.connect('\\0' + sys.argv[1]); sys.stdin.read()"


@pytest.fixture
def peer() -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
    """A connection of another process."""
    name = f"sbus-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        process = subprocess.Popen([sys.executable, "-I", "-S", "-c", PROGRAM, name], stdin=subprocess.PIPE)
        sock, _ = listener.accept()
    yield sock, process
    sock.close()
    process.kill()
    process.communicate()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def path(peer) -> str:
    """The path of the peer's program; on a kernel that does not vouch for it there is nothing to test."""
    sock, process = peer
    found = peer_executable(sock, process.pid)
    if found is None:
        pytest.skip("the kernel has no SO_PEERPIDFD (Linux 6.5)")
    return found


def test_the_program_is_named(peer, path):
    """The path is that of the process which connected; no descriptor stays open."""
    sock, process = peer
    before = descriptors()
    assert path == os.path.realpath(sys.executable)
    for _ in range(10):
        assert peer_executable(sock, process.pid) == path
    assert descriptors() == before


def test_a_pid_that_another_process_has_now(peer, path):
    """When the peer has ended, its PID proves nothing: not even a process that has it now is named."""
    sock, process = peer
    process.kill()
    process.wait()
    assert peer_executable(sock, process.pid) is None
    assert peer_executable(sock, os.getpid()) is None


def test_a_peer_that_ends(peer, path):
    """A process that has ended and was not waited for is not named either."""
    sock, process = peer
    process.kill()
    wait_until(lambda: os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None)
    assert peer_executable(sock, process.pid) is None


def test_no_pid(peer):
    """A peer in another PID namespace has the PID 0, and is not named."""
    assert peer_executable(peer[0], 0) is None


def test_no_descriptor_is_free(peer, path):
    """Without a free descriptor the program is not named, and nothing is raised."""
    sock, process = peer
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)  # the lowest free number
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        found = peer_executable(sock, process.pid)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found is None


def test_a_socket_that_is_closed(peer):
    """A connection that is lost names nobody."""
    sock, process = peer
    sock.close()
    assert peer_executable(sock, process.pid) is None
