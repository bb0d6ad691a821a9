"""Attacks with large payloads: wrong ones, and more descriptors than their readers take."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import socket
import struct
import time
from collections.abc import Iterator, Sequence

from benchmarks.attacks.attack import Attack
from benchmarks.attacks.attacker import Attacker, bundle, receive_now
from benchmarks.attacks.readers import EVERYTHING, PACE, silent

__all__ = ["payloads"]

_ASKING = (b"payload/on",)
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_SIZE = 65_536
"""Bytes of a payload; one that is larger takes the attacker longer to make, and the server no longer to handle."""
_MOST_DESCRIPTORS = 253
"""Descriptors that one packet can carry (SCM_MAX_FD)."""
_READERS = 200
_GRACE = 10
"""Connections that are made before one breaks the protocol: payloads come meanwhile."""
_LONGEST_LIFE = 0.05
"""Seconds until a process is killed, at most."""
_MANY_READERS = 625
"""Readers of which each has 16 descriptors unread: 10,000 in all."""


@contextlib.contextmanager
def _memory(size: int = _SIZE, seals: int = _SEALS, is_sparse: bool = False) -> Iterator[int]:
    """Make a memfd for the time of a block."""
    memory = os.memfd_create("attack", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(memory, 0, size)
        if is_sparse:
            os.ftruncate(memory, 1 << 40)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
        yield memory
    finally:
        os.close(memory)


def _send(me: Attacker, sock: socket.socket, packet: bytes, descriptors: Sequence[int]) -> None:
    """Send a packet with descriptors as soon as the server has room; as `Attacker.send_patiently`."""
    while True:
        try:
            socket.send_fds(sock, [packet], list(descriptors))
            return
        except BlockingIOError:
            if not me.running():
                raise


def _whole(size: int = _SIZE) -> bytes:
    return b"FMSG flood/payload\x000 %d" % size


def _flood(me: Attacker) -> None:
    """Publish payloads, each in a memory of its own, as fast as the server reads."""
    sock = me.connect(b"CMSG payload/on")
    me.ready()
    while me.running():
        with _memory() as memory:
            _send(me, sock, _whole(), [memory])
        me.count()


def _parts(me: Attacker) -> None:
    """Publish bundles of payloads of one byte, all in one memory."""
    sock, limit = me.connect_bundling(b"CMSG payload/on")
    number = min(limit, 60_000) // 32
    packet = bundle(b"FMSG flood/payload\0%d 1" % at for at in range(number))
    me.ready()
    while me.running():
        with _memory() as memory:
            _send(me, sock, packet, [memory])
        me.count(number)


def _wrong(me: Attacker) -> None:
    """Break each rule of payloads in turn; each one ends the connection."""
    me.ready()
    while me.running():
        with (
            _memory() as good,
            _memory(seals=0) as unsealed,
            _memory(seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW) as half_sealed,
            _memory(seals=fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE) as growing,
            _memory(is_sparse=True) as sparse,
            open(os.devnull, "rb") as device,
        ):
            for packet, descriptors in (
                (_whole(), [unsealed]),
                (_whole(), [half_sealed]),
                (_whole(), [growing]),
                (_whole(), [sparse]),
                (_whole(), [device.fileno()]),
                (_whole(), []),
                (_whole(), [good, good]),
                (_whole(_SIZE + 1), [good]),
                (b"FMSG flood/payload\0-1 1", [good]),
                (b"MSG flood/payload\0", [good]),
            ):
                with me.connect(b"CMSG payload/on") as sock:
                    _send(me, sock, packet, descriptors)
                me.count()


def _cut(me: Attacker) -> None:
    """Send as many descriptors with each packet as it can carry; each such packet ends the connection."""
    me.ready()
    with _memory() as memory:
        while me.running():
            with me.connect(b"CMSG payload/on") as sock:
                _send(me, sock, _whole(), [memory] * _MOST_DESCRIPTORS)
            me.count()


def _lingering() -> tuple[socket.socket, socket.socket]:
    """Return a TCP socket whose close takes a minute, and the other end, which does not read."""
    ours = socket.socket()
    with socket.create_server(("127.0.0.1", 0)) as port:
        ours.connect(port.getsockname())
        theirs, _ = port.accept()
    ours.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(bytes(_SIZE))
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))
    return ours, theirs


def _linger(me: Attacker) -> None:
    """Pass sockets that take a minute to close, so that the server is the last to close them."""
    me.ready()
    ends = []
    while me.running():
        ours, theirs = _lingering()
        ends.append(theirs)
        with me.connect(b"CMSG payload/on") as sock, ours:
            _send(me, sock, _whole(), [ours.fileno()])
        me.count()


def _come_and_go(me: Attacker) -> None:
    """Ask for payloads, get some, and leave without having read them."""
    me.ready()
    while me.running():
        with me.connect(b"CMSG payload/on", EVERYTHING) as sock, contextlib.suppress(BlockingIOError):
            receive_now(sock)
        me.count()


def _end_unread(me: Attacker) -> None:
    """Ask for payloads, break the protocol once some have come, read none of them, and begin again."""
    held: list[socket.socket] = []
    me.ready()
    while me.running():
        if len(held) < me.most_files - 100:
            with contextlib.suppress(OSError):
                held.append(me.connect(b"CMSG payload/on", EVERYTHING))
            for sock in held[-_GRACE : -_GRACE + 1]:
                with contextlib.suppress(OSError):
                    sock.send(b"no packet of the protocol")
                    me.count()
        time.sleep(PACE)


def _publish_and_read(me: Attacker) -> None:
    """Publish payloads and read them, without an end."""
    with me.connect(b"CMSG payload/on", EVERYTHING) as sock:
        while True:
            with _memory() as memory, contextlib.suppress(BlockingIOError):
                socket.send_fds(sock, [_whole()], [memory])
                receive_now(sock)


def _killed(me: Attacker) -> None:
    """Begin a process that publishes and reads payloads, and kill it at any moment; begin again."""
    moments = random.Random(os.getpid())
    me.ready()
    while me.running():
        process = os.fork()
        if not process:
            with contextlib.suppress(BaseException):
                _publish_and_read(me)
            os._exit(1)
        time.sleep(moments.uniform(0.0, _LONGEST_LIFE))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        me.count()


def payloads() -> Iterator[Attack]:
    """Return the attacks with large payloads."""
    yield Attack("payload-wrong", "payloads that break each rule in turn", (_wrong,))
    yield Attack("payload-cut", "253 descriptors with each packet", (_cut,))
    yield Attack("payload-linger", "sockets that take a minute to close, as payloads", (_linger,))
    yield Attack(
        "payload-silent", f"payloads to {_READERS} silent readers of them", (silent(_READERS, *_ASKING), _flood)
    )
    yield Attack(
        "payload-many",
        f"10,000 descriptors to {_MANY_READERS} silent readers of them",
        (silent(_MANY_READERS, *_ASKING), _flood),
    )
    yield Attack(
        "payload-plain", f"payloads to {_READERS} silent readers that have not asked", (silent(_READERS), _flood)
    )
    yield Attack("payload-parts", "bundles of payloads of one byte", (silent(_READERS, *_ASKING), _parts))
    yield Attack(
        "payload-ended", "readers that the server ends with payloads unread, one after another", (_end_unread, _flood)
    )
    yield Attack("payload-leavers", "readers of payloads that come and go", (_come_and_go, _flood))
    yield Attack(
        "payload-killed", "publishers and readers of payloads that are killed at any moment", (_killed, _killed)
    )
