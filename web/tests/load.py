"""Programs that use a bus, as a plant and a house have them: what the tests in a browser look at.

Usage: python load.py ADDRESS SECONDS

Each program is a process with a name of its own and one raw socket. They end by themselves.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

ROOMS = ("attic", "cellar", "hall", "kitchen", "office")
Message = tuple[str, bytes]


def temperatures() -> Iterator[Message]:
    for number in iter(int, 1):
        del number
        for at, (room, sensor) in enumerate((room, sensor) for room in ROOMS for sensor in range(8)):
            value = round(20 + 4 * math.sin(time.time() / 20 + at), 2)
            text = json.dumps({"value": value, "unit": "°C", "room": room}, ensure_ascii=False)
            yield f"sensors/{room}/temperature/{sensor}", text.encode()


def humidity() -> Iterator[Message]:
    while True:
        for at, room in enumerate(ROOMS):
            yield f"sensors/{room}/humidity", b"%.1f" % (45 + 9 * math.sin(time.time() / 30 + at))


def speeds() -> Iterator[Message]:
    count = 0
    while True:
        for line in (1, 2, 3):
            for machine in ("belt", "press", "robot"):
                count += 1
                yield f"plant/line{line}/{machine}/speed", b"%d" % (count % 900)


def orders() -> Iterator[Message]:
    count = 0
    while True:
        for state in ("new", "paid", "shipped"):
            count += 1
            yield f"orders/{state}", json.dumps({"id": count, "total": round(7 + count % 90 * 1.17, 2)}).encode()


def frames() -> Iterator[Message]:
    while True:
        for camera in ("front", "yard"):
            yield f"camera/{camera}/frame", b"\xff\xd8" + os.urandom(6000)


def forgotten() -> Iterator[Message]:
    while True:
        yield "status/fan/rpm", b"1180"
        yield "status/ups/battery", b"97"


PUBLISHERS: dict[str, tuple[Callable[[], Iterator[Message]], float]] = {
    "thermod": (temperatures, 160),
    "hygrod": (humidity, 60),
    "plc": (speeds, 130),
    "shop": (orders, 45),
    "camera": (frames, 20),
    "legacy": (forgotten, 14),
}
"""What each publishes, and its messages a second."""

RECEIVERS: dict[str, tuple[tuple[str, ...], tuple[str, ...], float]] = {
    "dashboard": (("sensors/", "plant/", "orders/"), (), 0),
    "alarms": (("sensors/*/temperature/", "plant/line1/"), (), 0),
    "viewer": (("camera/",), (), 0),
    "billing": (("orders/paid",), (), 0),
    "archive": (("sensors/",), (), 0.05),
    "slowview": (("camera/",), ("blocking/soft/discard",), 0.15),
}
"""The patterns of each, its choices, and how long it takes over a message, in seconds."""


def connect(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(address)
    return sock


def publish(address: str, messages: Iterator[Message], rate: float, until: float) -> None:
    sock, began = connect(address), time.monotonic()
    for count, (key, payload) in enumerate(messages):
        sock.send(b"MSG " + key.encode() + b"\0" + payload)
        pause = began + count / rate - time.monotonic()
        if pause > 0:
            time.sleep(pause)
        if time.monotonic() > until:
            return


def receive(address: str, patterns: tuple[str, ...], choices: tuple[str, ...], pause: float, until: float) -> None:
    sock = connect(address)
    sock.settimeout(1)
    for choice in choices:
        sock.send(b"CMSG " + choice.encode())
    for pattern in patterns:
        sock.send(b"SUB " + pattern.encode())
    while time.monotonic() < until:
        try:
            if not sock.recv(409_600):
                return
        except TimeoutError:
            continue
        time.sleep(pause)


def main() -> None:
    address, until = sys.argv[1], time.monotonic() + float(sys.argv[2])
    programs: list[tuple[str, Callable[[], None]]] = []
    for name, (make, rate) in PUBLISHERS.items():
        programs.append((name, partial(publish, address, make(), rate, until)))
    for name, (patterns, choices, pause) in RECEIVERS.items():
        programs.append((name, partial(receive, address, patterns, choices, pause, until)))
    for name, run in programs:
        if os.fork() == 0:
            with open("/proc/self/comm", "w") as file:
                file.write(name)
            try:
                run()
            except OSError:
                pass  # the bus has stopped
            finally:
                os._exit(0)


if __name__ == "__main__":
    main()
