"""Memory on a real bus: prices beside the growth of a process, and a server that outlives clients who want it all."""

from __future__ import annotations

import fcntl
import os
import re
import resource
import socket
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.harness import Client
from tests.support.weigh import KINDS

PAGE = os.sysconf("SC_PAGE_SIZE")


_WEIGHED = [kind for kind in KINDS if kind != "connections"]


@pytest.fixture(scope="module")
def weighed() -> dict[str, list[int]]:
    """What is charged for each kind of state, and what a process grows by."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.weigh", *_WEIGHED],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=200,
        cwd=ROOT,
    )
    return {kind: [int(figure) for figure in figures] for kind, *figures in map(str.split, done.stdout.splitlines())}


@pytest.mark.parametrize("kind", _WEIGHED)
@pytest.mark.slow
def test_what_is_charged_is_what_it_takes(weighed, kind):
    """What is charged for a kind of state is within a factor of two of what the process grows by."""
    charged, grown = weighed[kind]
    assert charged / 2 <= grown <= charged * 2


def status(pid: int, field: str) -> int:
    """A figure of /proc/<pid>/status, in bytes."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"^{field}:\s*([0-9]+) kB$", text, re.MULTILINE)
    assert found
    return int(found[1]) << 10


def unread(sock: socket.socket) -> int:
    """Bytes of packets that the kernel holds for a socket to read."""
    return int.from_bytes(fcntl.ioctl(sock, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_a_silent_client_keeps_little_in_the_kernel(lease):
    """The kernel holds 64 KiB for a client that has never read, and up to 0.8 MB for one that reads."""
    started = lease()
    silent, reader = started.client(b"k"), started.client(b"k")
    publisher = started.client()
    for _ in range(6):
        for _ in range(50):
            publisher.send(b"MSG k\0".ljust(100, b"x"))
        assert publisher.sync() == []
    for _ in range(6):
        assert reader.sync()
        for _ in range(200):
            publisher.send(b"MSG k\0".ljust(100, b"x"))
        assert publisher.sync() == []
    assert 80 * 100 <= unread(silent.sock) <= 90 * 100
    assert unread(reader.sock) > 180 * 100


def test_a_flood_does_not_make_a_silent_client_keep_more_in_the_kernel(lease):
    """A send buffer grows only once its client has read, also if flood control sends what was late."""
    started = lease()
    silent, publisher = started.client(), started.client()
    silent.cmsg(b"blocking/soft/discard")
    silent.sub(b"k/")
    assert silent.sync() == []
    for number in range(5_000):
        publisher.send(b"MSG k/%d\0" % number)
    assert publisher.sync() == []
    assert unread(silent.sock) < 100 * len(b"MSG k/9999\0")


def try_to_send(sock: socket.socket, packet: bytes) -> bool:
    try:
        sock.send(packet)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("user_memory", [pytest.param("10M", marks=pytest.mark.slow), "40M"])
def test_the_process_survives(bus, user_memory):
    """With 40 MB and little more address space, the server outlives all of it at once, without a MemoryError.

    That is: secret patterns without end, silent readers under each order with small and with maximal packets, replies
    that nobody reads, and publishers of maximal packets that a receiver blocks.
    """
    started = bus("--max-memory=40M", f"--user-memory={user_memory}")
    pid = started.pid
    limit = status(pid, "VmSize") + (100 << 20)
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
    left_open: list[socket.socket] = []
    for rounds in range(3):  # the third one adds two megabytes
        socks: list[socket.socket] = []

        def connect(*packets: bytes, into: list[socket.socket] = socks) -> socket.socket:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 420_000)
            sock.settimeout(2)
            into.append(sock)
            sock.connect(str(started.address))
            for packet in packets:
                try_to_send(sock, packet)
            sock.setblocking(False)
            return sock

        holder = connect()
        holder.settimeout(0.2)
        for number in range(16_384):
            if not try_to_send(holder, b"SUB !/cred////%d/%d" % (rounds, number)):
                break
        for order in (b"queue", b"stack", b"random"):
            for key in (b"small", b"large"):
                for _ in range(3):
                    connect(b"CMSG order/" + order, b"SUB " + key)
        asker = connect()
        publishers = [connect() for _ in range(10)]
        connect(b"CMSG blocking/soft/block", b"SUB blocked")
        for _ in range(100):
            try_to_send(publishers[0], b"MSG large\0" + bytes(409_000))
            for _ in range(30):
                try_to_send(publishers[1], b"MSG small\0" + bytes(50))
                try_to_send(asker, b"CMSG !/cred/whoami")
        for publisher in publishers:
            try_to_send(publisher, b"MSG blocked\0" + bytes(400_000))
            try_to_send(publisher, b"MSG other\0" + bytes(400_000))
        if rounds % 2 == 0:
            left_open += socks
        else:
            for sock in socks:
                sock.close()
    with Client(started.address) as client:
        client.sync()
    assert status(pid, "VmHWM") < status(pid, "VmSize") + (60 << 20)
    for sock in left_open:
        sock.close()
    assert started.stop() == 0
    assert "MemoryError" not in started.log
    assert "Traceback" not in started.log
