"""The bystander's clients: round trips, throughput with a bounded window, and new connections.

The pair's round trips are open-loop, and its throughput has up to 256 messages under way. A crowd has one message of
each client under way all the time, from which both follow.

Each of the two processes obeys commands from a pipe. A command is the name of a measurement with its arguments; exactly
one stop follows it. A measurement ends at its own bound or at the stop, and then its result goes back. Throughput ends
at its own bound only.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from sbus.syscalls.polling import is_readable

__all__ = ["GRACE", "Stop", "bulk", "crowd", "newcomer", "pair", "rounds", "scraper", "summary", "trips"]

GRACE = 2.0
"""Seconds after its last scheduled message that a measurement waits for answers."""

_WHOAMI = b"CMSG !/cred/whoami"
_PING, _PONG, _BULK = b"by/ping", b"by/pong", b"by/bulk"
_WINDOW = 256
"""Messages under way, at most, while throughput is measured."""
_SILENCE = 0.5
"""Seconds without an arrival after which one message more may be under way, so that a loss becomes known."""
_CROSSING = 0.05
"""Seconds between two messages that find out whether a subscription is known on another bus."""
_NEWCOMER_EVERY = 0.1
_NEWCOMER_PATIENCE = 1.0

Result = dict[str, Any]


def summary(times: Sequence[float], unanswered: int) -> Result:
    """The quantiles of durations, in milliseconds from seconds.

    :param unanswered: how many of the durations belong to a message without an answer, and are lower bounds.
    """
    found = sorted(times) or [0.0]
    at = {name: found[min(len(found) - 1, int(len(found) * part))] for name, part in (("p50", 0.5), ("p99", 0.99))}
    return {
        **{f"{name}_ms": round(value * 1e3, 3) for name, value in {**at, "max": found[-1]}.items()},
        "count": len(times),
        "unanswered": unanswered,
    }


# --- the pair -------------------------------------------------------------------------------------


def pair(commands: Connection, address: str, far: str = "") -> None:
    """Two clients that exchange messages through the router, in one process.

    :param far: the address of the second one's bus, if that is another one.

    Commands: ``("trips", messages a second, seconds, bytes)`` and ``("bulk", seconds, messages)``.
    """
    measurements: dict[str, Callable[..., Result]] = {"trips": trips, "bulk": bulk}
    with _connect(address) as first, _connect(far or address) as second:
        first.send(b"SUB " + _PONG)
        for key in (_PING, _BULK):
            second.send(b"SUB " + key)
        for sock in (first, second):
            _fence(sock)
        for source, target, key in ((first, second, _PING), (second, first, _PONG)) if far else ():
            while not is_readable(target, _CROSSING):
                source.send(b"MSG " + key + b"\0")
        first.setblocking(False)
        second.setblocking(False)
        _obey(commands, lambda stop, name, *arguments: measurements[name](stop, first, second, *arguments))


def _obey(commands: Connection, measure: Callable[..., Result]) -> None:
    """Report that all is set up, then carry out commands until the other end of the pipe is closed."""
    commands.send({})
    while True:
        try:
            command = commands.recv()
            stop = Stop(commands)
            try:
                result = measure(stop, *command)
            except OSError as e:
                result = {"error": f"the bystander's connection has ended: {e}"}
            stop.wait()
        except EOFError:
            return
        commands.send(result)


class Stop:
    """The one stop that follows a command."""

    def __init__(self, commands: Connection) -> None:
        self._commands = commands
        self._has_come = False

    def fileno(self) -> int:
        return self._commands.fileno()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether the stop has come within `timeout` seconds (None: wait for it)."""
        if not self._has_come and self._commands.poll(timeout):
            self._commands.recv()
            self._has_come = True
        return self._has_come


def _connect(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(address)
    return sock


def _fence(sock: socket.socket) -> None:
    sock.send(_WHOAMI)
    while not sock.recv(4096).startswith(_WHOAMI):
        pass


def _payloads(sock: socket.socket, key: bytes, run: bytes) -> Iterator[bytes]:
    """The payloads that are there now, without the run's prefix; stragglers of earlier runs are left out."""
    prefix = b"MSG " + key + b"\0" + run
    while True:
        try:
            packet = sock.recv(4096)
        except BlockingIOError:
            return
        if not packet:
            raise ConnectionResetError("end-of-file")
        if packet.startswith(prefix):
            yield packet[len(prefix) :]


def trips(
    stop: Stop,
    first: socket.socket,
    second: socket.socket,
    rate: float,
    seconds: float,
    size: int = 0,
    grace: float = GRACE,
) -> Result:
    """Send a message at each scheduled time; the second client sends a short one back to the first.

    :param size: bytes in the payload of the first client's messages, at least.
    :param grace: seconds after the last message to wait for answers.

    A message has the time of this measurement and its own number, which gives its scheduled time. While the socket
    takes nothing, messages wait here.
    """
    start = time.monotonic()
    run = struct.pack("<d", start)
    end = start + seconds
    due = 0
    unsent: collections.deque[bytes] = collections.deque()
    replies: collections.deque[bytes] = collections.deque()
    waiting: set[int] = set()
    times: list[float] = []
    while True:
        now = time.monotonic()
        if now < end and stop.wait(0):
            end = now
        while (scheduled := start + due / rate) <= now and scheduled < end:
            payload = run + struct.pack("<Q", due)
            unsent.append(b"MSG " + _PING + b"\0" + payload.ljust(size, b"\0"))
            waiting.add(due)
            due += 1
        if now >= end and (not waiting or now >= end + grace):
            break
        _send_waiting(first, unsent)
        _send_waiting(second, replies)
        next_time = start + due / rate if now < end else end + grace
        poll = select.poll()
        for sock, packets in ((first, unsent), (second, replies)):
            poll.register(sock, select.POLLIN | (select.POLLOUT if packets else 0))
        if now < end:
            poll.register(stop, select.POLLIN)
        poll.poll(max(0, next_time - now) * 1000)
        replies.extend(b"MSG " + _PONG + b"\0" + run + data[:8] for data in _payloads(second, _PING, run))
        for data in _payloads(first, _PONG, run):
            number = struct.unpack("<Q", data)[0]
            if number in waiting:
                waiting.remove(number)
                times.append(time.monotonic() - start - number / rate)
    times += (now - start - number / rate for number in waiting)
    return {**summary(times, len(waiting)), "seconds": round(now - start, 3)}


def _send_waiting(sock: socket.socket, packets: collections.deque[bytes]) -> None:
    with contextlib.suppress(BlockingIOError):
        while packets:
            sock.send(packets[0])
            packets.popleft()


def bulk(stop: Stop, first: socket.socket, second: socket.socket, seconds: float, most: int) -> Result:
    """Publish with at most `_WINDOW` messages under way, for `seconds` or until `most` messages have arrived.

    Afterwards the messages under way are awaited, so that they do not disturb the next measurement.
    """
    start = heard_at = time.monotonic()
    end = start + seconds
    run = struct.pack("<d", start)
    packet = b"MSG " + _BULK + b"\0" + run
    payload = bytes(48)
    sent = following = arrived = extra = 0

    def receive(timeout: float) -> None:
        nonlocal following, arrived
        is_readable(second, max(0, timeout))
        for data in _payloads(second, _BULK, run):
            arrived += 1
            following = struct.unpack_from("<Q", data)[0] + 1

    while (now := time.monotonic()) < end and arrived < most:
        with contextlib.suppress(BlockingIOError):
            while sent - following < _WINDOW + extra:
                first.send(packet + struct.pack("<Q", sent) + payload)
                sent += 1
        before = arrived
        receive(min(_SILENCE, end - now))
        if arrived > before:
            heard_at, extra = now, 0
        elif now - heard_at > _SILENCE:
            heard_at, extra = now, extra + 1
    passed, in_time, lost = time.monotonic() - start, arrived, following - arrived
    while following < sent and (left := end + GRACE - time.monotonic()) > 0:
        receive(left)
    return {"per_second": round(in_time / passed), "lost": lost, "seconds": round(passed, 3)}


# --- the crowd ------------------------------------------------------------------------------------


def crowd(commands: Connection, socks: Sequence[socket.socket], topics: int) -> None:
    """Clients that each send a message to themselves, and the next one when it has come back, in one process.

    Commands: ``("trips", seconds)`` and ``("bulk", seconds)``, which is the same without regard to the stop.

    :param socks: their connections.
    :param topics: see `benchmarks.attacks.attack.Crowd`.
    """
    for number, sock in enumerate(socks):
        sock.send(b"SUB " + _own_key(number))
        for topic in range(number, topics, len(socks)):
            sock.send(b"SUB by/topic/%d" % topic)
        _fence(sock)
        sock.setblocking(False)
    _obey(commands, lambda stop, name, seconds: rounds(stop if name == "trips" else None, socks, seconds))


def _own_key(number: int) -> bytes:
    return b"by/%d" % number


def rounds(stop: Stop | None, socks: Sequence[socket.socket], seconds: float, grace: float = GRACE) -> Result:
    """Have each client send itself one message after the other, for `seconds` or until the stop, if one is given.

    A message without an answer for `grace` seconds counts with this time, and the next one follows. So does one under
    way at the end.
    """
    pause = grace / 4  # between two looks for such messages
    start = time.monotonic()
    end = start + seconds
    run = struct.pack("<d", start)
    numbers = {sock.fileno(): number for number, sock in enumerate(socks)}
    sent = [0] * len(socks)
    sent_at = [0.0] * len(socks)
    times: list[float] = []
    unanswered = 0

    def send(number: int) -> None:
        sent[number] += 1
        sent_at[number] = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            socks[number].send(b"MSG " + _own_key(number) + b"\0" + run + struct.pack("<Q", sent[number]))

    def receive(timeout: float) -> Iterator[int]:
        """Yield the clients that have got their message."""
        for descriptor, _ in poll.poll(timeout):
            if descriptor not in numbers:
                continue
            number = numbers[descriptor]
            expected = struct.pack("<Q", sent[number])
            if expected in list(_payloads(socks[number], _own_key(number), run)):
                times.append(time.monotonic() - sent_at[number])
                yield number

    with select.epoll() as poll:
        for descriptor in (*numbers, *((stop.fileno(),) if stop else ())):
            poll.register(descriptor, select.EPOLLIN)
        for number in range(len(socks)):
            send(number)
        looked_at = start
        while (now := time.monotonic()) < end:
            for number in receive(min(pause, end - now)):
                send(number)
            if now - looked_at > pause:
                looked_at = now
                if stop is not None and stop.wait(0):
                    break
                for number in range(len(socks)):
                    if now - sent_at[number] > grace:
                        times.append(now - sent_at[number])
                        unanswered += 1
                        send(number)
        now = time.monotonic()
        passed, answered = now - start, len(times) - unanswered
        waiting = set(range(len(socks)))
        while waiting and (left := now + grace - time.monotonic()) > 0:
            waiting.difference_update(receive(left))
    times += (time.monotonic() - sent_at[number] for number in waiting)
    unanswered += len(waiting)
    return {
        **summary(times, unanswered),
        "per_second": round(answered / passed),
        "lost": unanswered,
        "seconds": round(passed, 3),
    }


# --- new clients ----------------------------------------------------------------------------------


def newcomer(commands: Connection, address: str) -> None:
    """Connect every 0.1 s, ask whoami and leave; command: ``("connects", seconds)``."""
    _obey(commands, lambda stop, name, seconds: _connects(stop, functools.partial(_serve_me, address), seconds))


def scraper(commands: Connection, address: str) -> None:
    """Read the metrics at the admin socket every 0.1 s; command: ``("connects", seconds)``."""
    _obey(commands, lambda stop, name, seconds: _connects(stop, functools.partial(_scrape, address), seconds))


def _connects(stop: Stop, serve: Callable[[float], None], seconds: float) -> Result:
    """A connection counts from its scheduled time. It fails if it is not served a second later, or before the stop."""
    start = time.monotonic()
    most = max(1, int(seconds / _NEWCOMER_EVERY))
    times: list[float] = []
    failed = 0
    for number in range(most):
        scheduled = start + number * _NEWCOMER_EVERY
        if stop.wait(max(0, scheduled - time.monotonic())):
            break
        try:
            serve(scheduled + _NEWCOMER_PATIENCE - time.monotonic())
        except OSError:
            failed += 1
        times.append(time.monotonic() - scheduled)
    now = time.monotonic()
    due = min(most, 1 + int((now - start) / _NEWCOMER_EVERY))
    untried = [now - start - number * _NEWCOMER_EVERY for number in range(len(times), due)]
    return summary(times + untried, failed + len(untried))


def _serve_me(address: str, patience: float) -> None:
    with _patient(socket.SOCK_SEQPACKET, address, patience) as sock:
        sock.send(_WHOAMI)
        if not sock.recv(4096):
            raise ConnectionResetError


def _scrape(address: str, patience: float) -> None:
    with _patient(socket.SOCK_STREAM, f"{address}.admin", patience) as sock:
        sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: bus\r\nConnection: close\r\n\r\n")
        answer = sock.recv(4096)
        if not answer.startswith(b"HTTP/1.1 200 "):
            raise ConnectionResetError
        while sock.recv(65_536):
            pass


def _patient(kind: int, address: str, patience: float) -> socket.socket:
    """Connect with a socket whose calls each take `patience` seconds at most."""
    if patience <= 0:
        raise TimeoutError
    span = struct.pack("@ll", int(patience), int(patience % 1 * 1e6))
    sock = socket.socket(socket.AF_UNIX, kind)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, span)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, span)
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock
