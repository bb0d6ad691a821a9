"""A client with nothing but the standard library: a clock, and a program that asks it for the time.

python3 clock.py serve /run/sbus.sock
python3 clock.py ask /run/sbus.sock
"""

import socket
import sys
import time

LONGEST = 409_600  # bytes in the longest packet of a bus with default limits


def connect(address: str) -> socket.socket:
    bus = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # By default, the kernel refuses to send packets longer than about half the limit.
    bus.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST + 32)
    bus.connect("\0" + address[1:] if address.startswith("@") else address)
    return bus


def receive(bus: socket.socket) -> tuple[bytes, bytes, bytes]:
    """Return the next packet: its verb, its key and its payload."""
    packet = bus.recv(LONGEST)
    if not packet:
        raise SystemExit("the bus has closed the connection")
    verb, _, rest = packet.partition(b" ")
    key, _, payload = rest.partition(b"\0")
    return verb, key, payload


def who_am_i(bus: socket.socket) -> bytes:
    """Ask the bus for our credentials. The reply also shows that everything sent before is in force."""
    bus.send(b"CMSG !/cred/whoami")
    while True:
        verb, key, payload = receive(bus)
        if (verb, key) == (b"CMSG", b"!/cred/whoami"):
            return payload


def serve(bus: socket.socket) -> None:
    bus.send(b"SUB clock/ask")
    who_am_i(bus)
    print("the clock runs", flush=True)
    while True:
        _, _, reply_key = receive(bus)
        bus.send(b"MSG %b\0%b" % (reply_key, time.ctime().encode()))


def ask(bus: socket.socket) -> None:
    inbox = who_am_i(bus) + b"/clock"  # a secret key: only this process can subscribe to it
    bus.send(b"SUB " + inbox)
    bus.send(b"MSG clock/ask\0" + inbox)
    _, _, answer = receive(bus)
    print(answer.decode())


if __name__ == "__main__":
    {"serve": serve, "ask": ask}[sys.argv[1]](connect(sys.argv[2]))
