#!/usr/bin/env python3
"""Measure what two buses joined over NATS carry, compared with two clients of the same library.

Each round has a fresh nats-server, and carries the same messages in two ways: from a publisher to a subscriber that use
nats-py as its documentation shows, with the same subjects, payloads and headers; and from a client of one bus to a
client of another, through two bridges (``twistd sbus-nats``). The subscriber's speed paces both publishers, so nothing
is lost. Every message has to arrive.

Then it measures the nats-server alone, with sockets that neither build nor parse anything: CPU time for a message in,
for each copy out, and memory for each connection.

    python benchmarks/nats_bridge.py [--messages 100000] [--size 100] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks.attacks.kernel import cpu, resident  # noqa: E402
from benchmarks.recording import TWISTD, running  # noqa: E402

_KEYS = [b"bench/%d" % number for number in range(10)]
_AHEAD = 20_000
"""Messages that may be on their way."""

_PUBLISHER = """\
import asyncio, sys, nats
async def main(url, count, size):
    client = await nats.connect(url)
    arrived = asyncio.Event()
    progress = [0]
    async def note(message):
        progress[0] = int(message.data)
        arrived.set()
    await client.subscribe("progress", cb=note)
    await client.flush()
    packets = [(f"sbus.bench.{n}", b"MSG bench/%d\\0" % n + b"x" * size) for n in range(10)]
    headers = {"Sbus-Origin": "0123456789abcdef0123456789abcdef host", "Sbus-Seq": ""}
    for number in range(count):
        while number - progress[0] >= AHEAD:
            arrived.clear()
            await arrived.wait()
        subject, packet = packets[number % 10]
        headers["Sbus-Seq"] = f"1234567890123456789.{number // 10 + 1}"
        await client.publish(subject, packet, headers=headers)
        if number % 128 == 127:
            await asyncio.sleep(0)
    await client.flush(60)
asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""
_SUBSCRIBER = """\
import asyncio, sys, time, nats
async def main(url, count):
    client = await nats.connect(url)
    done = asyncio.Event()
    got = 0
    async def note(message):
        nonlocal got
        got += 1
        if got % 2000 == 0:
            await client.publish("progress", b"%d" % got)
        if got == count:
            done.set()
    await client.subscribe("sbus.bench.>", cb=note, pending_msgs_limit=0, pending_bytes_limit=0)
    await client.flush()
    print("ready", flush=True)
    await done.wait()
    print(time.monotonic(), flush=True)
asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def through_clients(url: str, count: int, size: int) -> float:
    """Carry the messages between two clients of the library; return messages a second."""
    subscriber = subprocess.Popen(
        [sys.executable, "-c", _SUBSCRIBER, url, str(count)], stdout=subprocess.PIPE, text=True
    )
    assert subscriber.stdout is not None
    subscriber.stdout.readline()
    publisher = [sys.executable, "-c", _PUBLISHER.replace("AHEAD", str(_AHEAD)), url, str(count), str(size)]
    # The interpreter's start does not count: it is measured with one message.
    began = time.monotonic()
    process = subprocess.Popen(publisher)
    end = float(subscriber.stdout.readline())
    process.wait(60)
    subscriber.wait(60)
    spent = end - began
    began = time.monotonic()
    subprocess.run([*publisher[:-2], "1", str(size)], check=True)
    return count / (spent - (time.monotonic() - began))


async def _carry(source: str, target: str, count: int, size: int) -> float:
    from sbus.client.aio import connect

    messages = [(key, b"x" * size) for key in _KEYS] * 50
    async with await connect(source) as publisher, await connect(target) as subscriber:
        subscription = subscriber.subscribe(b"bench/")
        await subscriber.fence()
        while True:  # the bridges subscribe when they have learnt of it
            await publisher.publish(b"bench/0", b"first")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await subscription.get()
                    break
        await asyncio.sleep(0.5)
        subscription.get_ready()
        began = time.monotonic()
        sent = got = 0
        while got < count:
            while sent < count and sent - got < _AHEAD:
                await publisher.publish_many(messages)
                sent += len(messages)
            got += len(await subscription.get_many())
        return count / (time.monotonic() - began)


def through_bridges(url: str, count: int, size: int, folder: Path) -> tuple[float, list[float]]:
    """Carry the messages between two buses; return messages a second, and each bridge's CPU time a message, in µs."""
    with contextlib.ExitStack() as stack:
        bridges = []
        for name, direction in (("a", "--out=bench/"), ("b", "--in=bench/")):
            bus = str(folder / name)
            stack.enter_context(running([*TWISTD, "sbus", f"--socket={bus}"], folder / f"{name}.log", "listens on"))
            command = [*TWISTD, "sbus-nats", f"--socket={bus}", f"--name={name}", f"--nats={url}", direction]
            bridges.append(stack.enter_context(running(command, folder / f"{name}.nats.log", "joined NATS")))
        before = [bridge.cpu() for bridge in bridges]
        rate = asyncio.run(_carry(str(folder / "a"), str(folder / "b"), count, size))
        return rate, [(bridge.cpu() - was) / count * 1e6 for bridge, was in zip(bridges, before, strict=True)]


def _open(port: int, *lines: bytes) -> socket.socket:
    """Connect to nats-server without a library; return when it has handled the lines."""
    sock = socket.create_connection(("127.0.0.1", port))
    options = b'CONNECT {"verbose":false,"headers":true,"no_responders":false}'
    sock.sendall(b"\r\n".join([options, *lines, b"PING\r\n"]))
    received = b""
    while b"PONG\r\n" not in received:
        received += sock.recv(65536)
    return sock


def server_alone(port: int, pid: int, copies: int, count: int, size: int) -> float:
    """Return nats-server's CPU time for a message with a number of receivers, in µs."""
    receivers = [_open(port, b"SUB sbus.bench.> 1") for _ in range(copies)]
    origin, number = b"0123456789abcdef0123456789abcdef host", b"1234567890123456789.123456"
    headers = b"NATS/1.0\r\nSbus-Origin: %b\r\nSbus-Seq: %b\r\n\r\n" % (origin, number)
    packet = b"MSG bench/0\0" + b"x" * size
    message = b"HPUB sbus.bench.0 %d %d\r\n%b%b\r\n" % (len(headers), len(headers) + len(packet), headers, packet)
    publisher = _open(port)
    delivered = [0] * copies
    line = len(b"HMSG sbus.bench.0 1 %d %d\r\n" % (len(headers), len(headers) + len(packet)))
    total = count * (line + len(headers) + len(packet) + 2)

    def read(at: int) -> None:
        while delivered[at] < total:
            delivered[at] += len(receivers[at].recv(1 << 18))

    threads = [threading.Thread(target=read, args=(at,)) for at in range(copies)]
    before = cpu(pid)
    for thread in threads:
        thread.start()
    for _ in range(count // 100):
        publisher.sendall(message * 100)
    for thread in threads:
        thread.join(60)
    spent = cpu(pid) - before
    for sock in (publisher, *receivers):
        sock.close()
    return spent / count * 1e6


def memory_of_connections(port: int, pid: int, count: int, subscriptions: int) -> float:
    """Return the memory that nats-server takes for a connection with some subscriptions, in KiB."""
    before = resident(pid)
    sockets = [
        _open(port, *(b"SUB sbus.commands.%d.%d %d" % (number, each, each) for each in range(subscriptions)))
        for number in range(count)
    ]
    taken = resident(pid) - before
    for sock in sockets:
        sock.close()
    return taken / count / 1024


def main() -> None:
    """Measure, and print a line a round and the medians."""
    from tests.support.nats import free_ports, nats_server

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--size", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    ratios = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory(prefix="sbus-") as name:
            folder = Path(name)
            (port,) = free_ports(1)
            server = [nats_server(), "-a", "127.0.0.1", "-p", str(port)]
            with running(server, folder / "nats.log", "Server is ready"):
                url = f"nats://127.0.0.1:{port}"
                clients = through_clients(url, options.messages, options.size)
                bridges, spent = through_bridges(url, options.messages, options.size, folder)
        ratios.append(bridges / clients)
        print(
            f"round {number + 1}: clients {clients:,.0f}/s, bridges {bridges:,.0f}/s, ratio {ratios[-1]:.2f}, "
            f"CPU of the bridges {spent[0]:.1f} µs (out) and {spent[1]:.1f} µs (in) a message",
            flush=True,
        )
    print(f"median ratio {median(ratios):.2f}")
    with tempfile.TemporaryDirectory(prefix="sbus-") as name:
        (port,) = free_ports(1)
        server = [nats_server(), "-a", "127.0.0.1", "-p", str(port)]
        with running(server, Path(name) / "nats.log", "Server is ready") as process:
            pid = process.pid
            for copies in (1, 8):
                spent_alone = server_alone(port, pid, copies, options.messages, options.size)
                print(f"nats-server: {spent_alone:.2f} µs a message with {copies} receivers", flush=True)
            for subscriptions in (1, 20):
                taken = memory_of_connections(port, pid, 500, subscriptions)
                print(f"nats-server: {taken:.0f} KiB a connection with {subscriptions} subscriptions", flush=True)


if __name__ == "__main__":
    main()
