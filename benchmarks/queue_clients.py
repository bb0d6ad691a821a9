"""Publishers and workers of queues, for ``queues.py``: plain sockets, one thread each.

A library would cost more CPU time for a job than the servers do. A publisher puts a batch and waits until all of it is
confirmed; a worker acknowledges what it has received at once, in one message where the protocol permits (`Sbus`,
`Redis`). `Redis` and `JetStream` confirm each ack, and the client waits for that; a queue of sbus does not, so
`Sbus.settle` waits at the end until all acks are on the disk.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from sbus.protocol.bundles import MAX_BUNDLE, pack, unbundle
from sbus.protocol.packets import CMSG, MSG, SUB, build

__all__ = ["CLIENTS", "JOB", "Client", "JetStream", "Redis", "Sbus"]

JOB = b"j" * 100
"""The payload of a job."""
_PATIENCE = 60.0
_NAME = b"jobs"


class Client(ABC):
    """A connection of a publisher, a worker or an operator.

    :param address: of the server.
    """

    numbers = itertools.count(1)

    def __init__(self, address: str) -> None:
        self.number = next(self.numbers)
        self.sock = self.connect(address)
        self.sock.settimeout(_PATIENCE)

    @abstractmethod
    def connect(self, address: str) -> socket.socket:
        """Return a new connection."""

    def prepare(self) -> None:  # noqa: B027
        """Create what publishers and workers need."""

    @abstractmethod
    def put(self, count: int) -> None:
        """Put jobs, and wait until they are confirmed."""

    @abstractmethod
    def work(self, credit: int) -> Iterator[int]:
        """Take jobs, `credit` at once, and acknowledge them; yield how many are done."""

    def settle(self) -> None:  # noqa: B027
        """Wait until all acks are on the disk."""

    def close(self) -> None:
        """End the connection; a call that waits in another thread fails."""
        self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def _connect_unix(address: str, kind: int) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, kind)
    sock.connect(address)
    return sock


class Sbus(Client):
    """A client of a bus with ``twistd sbus-queue``."""

    def connect(self, address: str) -> socket.socket:
        sock = _connect_unix(address, socket.SOCK_SEQPACKET)
        self._me = b"!/cred/%d/%d/%d" % (os.getegid(), os.geteuid(), os.getpid())
        self._inbox = b"%b/sbus/reply/%d" % (self._me, self.number)
        sock.send(build(CMSG, b"bundle/on"))
        sock.send(build(SUB, self._inbox))
        return sock

    def _receive(self) -> list[bytes]:
        packet = self.sock.recv(1 << 18)
        if not packet:
            raise OSError("the bus has closed the connection")
        return [each for each in unbundle([packet]) if each.startswith(MSG + b" ")]

    def _send(self, packets: list[bytes]) -> None:
        for packet in pack(packets, MAX_BUNDLE, len(packets))[0]:
            self.sock.send(packet)

    def put(self, count: int) -> None:
        self._send([build(MSG, b"queue/%b/put/k" % _NAME, b"%b\0\0%b" % (self._inbox, JOB))] * count)
        while count > 0:
            count -= len(self._receive())

    def work(self, credit: int) -> Iterator[int]:
        token = os.urandom(16).hex().encode()
        for key in (b"%b/sbus/work/%b" % (self._me, token), b"queue/%b/worker/%b" % (_NAME, token)):
            self.sock.send(build(SUB, key))
        self.sock.send(build(MSG, b"queue/%b/ready" % _NAME, b"%b 1 %d" % (token, credit)))
        while True:
            jobs = self._receive()
            words = (job.partition(b"\0")[2].split(b" ", 3) for job in jobs)
            acks = b" ".join([token, *(b"%b %b" % (id, tries) for _, id, tries, _ in words)])
            self.sock.send(build(MSG, b"queue/%b/ack" % _NAME, acks))
            yield len(jobs)

    def settle(self) -> None:
        self.sock.send(build(MSG, b"queue/%b/admin/drain" % _NAME, self._inbox + b'\0{"ids": []}'))
        self._receive()


class Redis(Client):
    """A client of Redis: a stream with a consumer group."""

    def connect(self, address: str) -> socket.socket:
        sock = _connect_unix(address, socket.SOCK_STREAM)
        self._file = sock.makefile("rb", 1 << 18)
        return sock

    def _read(self) -> Any:
        line = self._file.readline()
        kind, rest = line[:1], line[1:-2]
        if kind == b"$":
            return self._file.read(int(rest) + 2)[:-2]
        if kind == b"*":
            return [self._read() for _ in range(int(rest))]
        if kind in (b"-", b""):
            raise OSError(rest.decode() or "Redis has closed the connection")
        return rest

    @staticmethod
    def _build(*words: bytes) -> bytes:
        return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)

    def prepare(self) -> None:
        self.sock.sendall(self._build(b"XGROUP", b"CREATE", _NAME, b"g", b"$", b"MKSTREAM"))
        self._read()

    def put(self, count: int) -> None:
        self.sock.sendall(self._build(b"XADD", _NAME, b"*", b"j", JOB) * count)
        for _ in range(count):
            self._read()

    def work(self, credit: int) -> Iterator[int]:
        me = b"w%d" % self.number
        take = (b"XREADGROUP", b"GROUP", b"g", me, b"COUNT", b"%d" % credit, b"BLOCK", b"0", b"STREAMS", _NAME, b">")
        while True:
            self.sock.sendall(self._build(*take))
            [[_, entries]] = self._read()
            self.sock.sendall(self._build(b"XACK", _NAME, b"g", *(entry[0] for entry in entries)))
            self._read()
            yield len(entries)


class JetStream(Client):
    """A client of a nats-server: a work-queue stream with a pull consumer."""

    _MESSAGE = re.compile(rb"MSG (\S+) \S+ (?:(\S+) )?(\d+)\r\n")

    def connect(self, address: str) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", int(address)), _PATIENCE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""
        self._inbox = b"in.%d" % self.number
        sock.sendall(b'CONNECT {"verbose":false}\r\nSUB %b.* 1\r\n' % self._inbox)
        return sock

    def _read(self) -> list[tuple[bytes, bytes, bytes]]:
        """Return the next messages: subject, reply subject, and payload."""
        messages: list[tuple[bytes, bytes, bytes]] = []
        while not messages:
            received = self.sock.recv(1 << 18)
            if not received or b"-ERR" in received:
                raise OSError(f"nats-server has closed the connection {received!r}")
            buffer, at = self._received + received, 0
            if buffer.startswith((b"INFO", b"PING")):
                at = buffer.find(b"\r\n") + 2
                self.sock.sendall(b"PONG\r\n" if buffer.startswith(b"PING") else b"")
            while (found := self._MESSAGE.match(buffer, at)) and len(buffer) >= found.end() + int(found[3]) + 2:
                at = found.end() + int(found[3])
                messages.append((found[1], found[2], buffer[found.end() : at]))
                at += 2
            self._received = buffer[at:]
        return messages

    def _pub(self, subject: bytes, reply: bytes, payload: bytes) -> bytes:
        return b"PUB %b %b.%b %d\r\n%b\r\n" % (subject, self._inbox, reply, len(payload), payload)

    def _ask(self, verb: bytes, **what: Any) -> None:
        self.sock.sendall(self._pub(b"$JS.API." + verb, b"made", json.dumps(what).encode()))
        [(_, _, answer)] = self._read()
        if b'"error"' in answer:
            raise OSError(answer.decode())

    def prepare(self) -> None:
        self._ask(b"STREAM.CREATE.J", name="J", subjects=["jobs.>"], storage="file", retention="workqueue")
        config = {"durable_name": "w", "ack_policy": "explicit", "max_ack_pending": 10_000}
        self._ask(b"CONSUMER.DURABLE.CREATE.J.w", stream_name="J", config=config)

    def put(self, count: int) -> None:
        self.sock.sendall(self._pub(b"jobs.k", b"put", JOB) * count)
        while count > 0:
            count -= len(self._read())

    def work(self, credit: int) -> Iterator[int]:
        acks = b""
        asked = credit
        while True:
            pull = self._pub(b"$JS.API.CONSUMER.MSG.NEXT.J.w", b"job", b'{"batch":%d,"expires":60000000000}' % asked)
            self.sock.sendall(acks + (pull if asked else b""))
            messages = self._read()
            done = sum(subject.endswith(b".ack") for subject, _, _ in messages)
            acks = b"".join(self._pub(reply, b"ack", b"+ACK") for _, reply, _ in messages if reply)
            asked = done
            yield done


CLIENTS: dict[str, type[Client]] = {"sbus": Sbus, "redis": Redis, "jetstream": JetStream}
