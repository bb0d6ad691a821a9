"""The stream door over a real twistd: clients whose packets have their length in front, beside clients of SEQPACKET.

The client here uses nothing of this package, as one in another language would.
"""

from __future__ import annotations

import socket
import struct

import pytest

from tests.support.harness import TIMEOUT, Client


class StreamClient:
    """A raw client of a stream socket."""

    def __init__(self, address):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT)
        self.sock.connect(str(address))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sock.close()

    def send(self, *packets):
        self.sock.sendall(b"".join(struct.pack("<I", len(packet)) + packet for packet in packets))

    def _bytes(self, size):
        data = b""
        while len(data) < size:
            more = self.sock.recv(size - len(data))
            if not more:
                raise EOFError(data)
            data += more
        return data

    def recv(self):
        return self._bytes(*struct.unpack("<I", self._bytes(4)))

    def sync(self):
        """Return the packets that have come before the answer to a question."""
        self.send(b"CMSG !/cred/whoami")
        packets = []
        while not (packet := self.recv()).startswith(b"CMSG !/cred/whoami\0"):
            packets.append(packet)
        return packets

    def has_ended(self):
        """Wait for the end of the connection; return whether nothing came before it."""
        try:
            return self.sock.recv(1) == b""
        except ConnectionResetError:
            return True


@pytest.fixture
def door(directory):
    return directory / "door"


def test_both_kinds_of_clients_exchange_messages(bus, door):
    """A message goes from a stream client to a SEQPACKET client and back, and secret keys work for both."""
    started = bus(f"--stream=node={door}")
    started.wait_log(r"sbus also listens on \S+ as node")
    client = started.client(b"k")
    with StreamClient(door) as stream:
        stream.send(b"SUB k", b"MSG k\0from a stream")
        assert stream.sync() == [b"MSG k\0from a stream"]
        assert client.recv() == b"MSG k\0from a stream"
        answer = client.credentials + b"/answer"
        client.sub(answer)
        client.sync()
        stream.send(b"MSG " + answer + b"\0secret")
        assert client.recv() == b"MSG " + answer + b"\0secret"
        stream.send(b"MSG k\0" + bytes(400_000))
        assert client.recv() == stream.recv() == b"MSG k\0" + bytes(400_000)
    started.wait_log(r"client 2 connected: pid \d+ uid \d+ gid \d+ at node$")
    assert started.stop() == 0
    assert not door.exists()


def test_packets_in_pieces(bus, door):
    """A packet may arrive byte by byte, and many at once; each is handled when it is whole."""
    started = bus(f"--stream=node={door}")
    client = started.client(b"k/")
    with StreamClient(door) as stream:
        data = struct.pack("<I", 9) + b"MSG k/a\0b"
        for at in range(len(data)):
            stream.sock.sendall(data[at : at + 1])
        assert client.recv() == b"MSG k/a\0b"
        stream.sock.sendall(data * 3000 + data[:7])
        assert [client.recv() for _ in range(3000)] == [b"MSG k/a\0b"] * 3000
        stream.sock.sendall(data[7:])
        assert client.recv() == b"MSG k/a\0b"


@pytest.mark.parametrize("options", [(), ("--on-violation=ignore",)], ids=["disconnect", "ignore"])
@pytest.mark.parametrize(
    ("length", "why"), [(0, "unknown message type"), (409_601, "the packet is longer than the limit")]
)
def test_bad_lengths_always_end_the_connection(bus, door, options, length, why):
    """After a bad length there is no next frame, so the client is disconnected in any case, and the others are not."""
    started = bus(f"--stream=node={door}", *options)
    client = started.client(b"k")
    with StreamClient(door) as stream:
        stream.send(b"MSG k\0before")
        stream.sock.sendall(struct.pack("<I", length) + b"MSG k\0never")
        assert stream.has_ended()
    assert client.recv() == b"MSG k\0before"
    started.wait_log(rf"violation by client 2, .* at node: {why}")
    assert client.sync() == []


def test_an_end_inside_a_frame(bus, door):
    """A client that leaves in the middle of a packet has published what was whole, and nothing else."""
    started = bus(f"--stream=node={door}")
    client = started.client(b"k")
    with StreamClient(door) as stream:
        stream.send(b"MSG k\0whole")
        stream.sock.sendall(struct.pack("<I", 10) + b"MSG k")
    assert client.recv() == b"MSG k\0whole"
    started.wait_log("client 2 disconnected: .*the connection broke")
    assert client.sync() == []


def test_a_slow_reader(bus, door):
    """A stream client that reads late gets everything in order, frames that left in parts included."""
    started = bus(f"--stream=node={door}")
    publisher = started.client()
    packets = [b"MSG k\0%06d" % i + bytes(i * 37 % 50_000) for i in range(300)]
    with StreamClient(door) as stream:
        stream.send(b"SUB k")
        assert stream.sync() == []
        for packet in packets:
            publisher.send(packet)
        publisher.sync()
        assert [stream.recv() for _ in packets] == packets


def test_half_read_frames_are_memory_of_the_user(bus, door):
    """Clients that send halves of packets hold memory of their user, and the server sheds them at its limit."""
    started = bus(f"--stream=node={door},mode=0666", "--mode=0666", "--max-memory=20M", "--max-packet=1000000")
    with Client(started.address) as client:
        streams = [StreamClient(door) for _ in range(40)]
        for stream in streams:
            try:
                stream.sock.sendall(struct.pack("<I", 1_000_000) + bytes(900_000))
            except (BrokenPipeError, ConnectionResetError):
                break
        client.sync()
        started.wait_log("limit of memory")
        for stream in streams:
            stream.sock.close()
        assert client.sync() == []
