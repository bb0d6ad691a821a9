"""Record in JetStream's file store, for ``recorder.py --jetstream``.

A publisher without a library writes pre-built ``PUB`` lines to a socket of a real nats-server, each with a reply
subject, so JetStream acknowledges each message when it has stored it. At most `WINDOW` messages are without an
acknowledgement. Plain means a message in each write. JetStream has no bundles; the nearest to them are many messages in
one write, and that is what is measured beside bundles. Of the acknowledgements only the last sequence number is read,
so the client costs next to nothing.
"""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks import raw

__all__ = ["SYNC_INTERVAL", "WINDOW", "configure", "publish", "state"]

WINDOW = 4096
"""Messages without an acknowledgement."""
SYNC_INTERVAL = "2m"
"""How often nats-server syncs its files by default; the recorder does it every second."""
_PIPELINED = 512
"""Messages of one write, if they are pipelined."""
_PATIENCE = 60.0
_STREAM = "BENCH"


def configure(folder: Path, port: int, monitor: int, sync_interval: str) -> Path:
    """Write a configuration for nats-server; return its path."""
    path = folder / "nats.conf"
    path.write_text(
        f'listen: "127.0.0.1:{port}"\nhttp: "127.0.0.1:{monitor}"\n'
        f'jetstream {{ store_dir: "{folder / "store"}", sync_interval: "{sync_interval}" }}\n'
    )
    return path


class _Stream:
    """A connection without a library to a nats-server, and a stream that stores ``plant.>`` in files."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), _PATIENCE)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""
        self.stored = 0
        """The number of the last message that is acknowledged."""
        body = json.dumps({"name": _STREAM, "subjects": ["plant.>"], "storage": "file", "num_replicas": 1}).encode()
        create = b"PUB $JS.API.STREAM.CREATE.%b made %d\r\n%b\r\n" % (_STREAM.encode(), len(body), body)
        self._socket.sendall(b'CONNECT {"verbose":false}\r\nSUB made 1\r\nSUB ack 2\r\n' + create)
        received = b""
        while b"created" not in received:
            received += self._receive()
            if b'"error"' in received:
                raise SystemExit(received.decode())

    def _receive(self) -> bytes:
        received = self._socket.recv(1 << 18)
        if not received:
            raise SystemExit("nats-server has closed the connection")
        if received.startswith(b"PING"):
            self._socket.sendall(b"PONG\r\n")
        return received

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def wait_stored(self, number: int) -> None:
        """Wait until a message is acknowledged, and with it all before it."""
        while self.stored < number:
            received = self._received + self._receive()
            if b'"error"' in received or b"-ERR" in received:
                raise SystemExit(received[-500:].decode(errors="replace"))
            end = received.rfind(b"}")
            at = received.rfind(b'"seq":', 0, end)
            if at >= 0:
                self.stored = int(received[at + 6 : received.index(b"}", at)].partition(b",")[0])
            self._received = received[end + 1 :] if end >= 0 else received

    def close(self) -> None:
        self._socket.close()


def _frame(key: bytes, rest: bytes) -> raw.Frame:
    return b"PUB %b ack %d\r\n" % (key.replace(b"/", b"."), 8 + len(rest)), rest + b"\r\n"


def _templates(pipelined: bool) -> list[raw.Template]:
    """Return the samples as writes of one message, or of many."""
    frames = (_frame(*sample) for sample in raw.samples())
    count = _PIPELINED if pipelined else 1
    return [raw.Template(part) for part in iter(lambda: list(islice(frames, count)), [])]


def publish(port: int, total: int, *, pipelined: bool) -> tuple[float, float]:
    """Publish numbered messages as fast as JetStream stores them.

    :returns: when the first was sent, and when the last was acknowledged, on the monotonic clock.
    """
    made = _templates(pipelined)
    stream = _Stream(port)
    start = time.monotonic()
    raw.pour(stream.send, made, total, lambda number: stream.wait_stored(number - WINDOW))
    stream.wait_stored(total)
    end = time.monotonic()
    stream.close()
    return start, end


def state(monitor: int) -> dict[str, Any]:
    """Return what nats-server says of the stream."""
    with urllib.request.urlopen(f"http://127.0.0.1:{monitor}/jsz?streams=1", timeout=_PATIENCE) as answer:
        found = json.load(answer)
    state: dict[str, Any] = found["account_details"][0]["stream_detail"][0]["state"]
    return state
