"""Any bytes as packets and bundles: nothing crashes, the twins agree, and only the sender is affected.

Each input is a list of packets. It is taken apart and put together, received by a client, and by a server with two
other clients on it. To fuzz for as long as one likes, coverage-guided if atheris is installed, else at random::

    python -m tests.fuzz.bundles -max_total_time=300
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from sbus.client.core import ClientCore, Message
from sbus.flood import SendQueue
from sbus.protocol import bundles
from sbus.routing import runs
from sbus.server.bus.protocol import BusProtocol
from sbus.server.bus.registry import SubscriptionRegistry
from sbus.server.core.limits import Limits
from tests.support.buses import Bus, Peer

__all__ = ["inputs", "packets_of", "try_input"]

ON = b"CMSG bundle/on"
KEYS = (b"a", b"a/b", b"k", b"", b"!/cred////x", b"!/cred/1/2/3/", b"*", b"sbus/" * 30)
PIECES = (
    *(b"%b %b\0" % (verb, key) for verb in (b"MSG", b"SUB", b"UNSUB", b"CMSG") for key in KEYS),
    b"MSG k\0payload",
    b"SUB a/*",
    ON,
    ON + b"\x0065536",
    b"CMSG bundle/off",
    b"CMSG !/cred/whoami",
    b"CMSG order/random",
    b"CMSG blocking/soft/block",
    b"CMSG blocking/hard/error",
    b"CMSG echo/off",
    b"BNDL",
    b"BNDL\x05\0\0\0SUB b",
    b"NONSENSE",
    b"MSG",
    b"",
)


def packets_of(data: bytes) -> list[bytes]:
    """Return the packets that an input encodes.

    Its first byte of each part says what the part is: a known piece, raw bytes, or a bundle of the parts before.
    """
    packets: list[bytes] = []
    at = 0
    while at < len(data) and len(packets) < 64:
        kind = data[at]
        at += 1
        if kind < 160:
            packets.append(PIECES[kind % len(PIECES)])
        elif kind < 200:
            size = data[at] if at < len(data) else 0
            packets.append(data[at + 1 : at + 1 + size])
            at += 1 + size
        elif kind < 230 and packets:
            count = 1 + (kind - 200) % len(packets)
            some = packets[-count:]
            packets[-count:] = [b"BNDL" + b"".join(len(p).to_bytes(4, "little") + p for p in some)]
        elif packets and packets[-1]:
            where = (data[at] if at < len(data) else 0) % len(packets[-1])
            spoilt = bytearray(packets[-1])
            if kind % 2:
                spoilt[where] ^= 1 << kind % 8
                packets[-1] = bytes(spoilt)
            else:
                packets[-1] = bytes(spoilt[:where])
            at += 1
    return packets


def try_input(data: bytes) -> None:
    """Run all checks with one input.

    :raises AssertionError: if one fails.
    """
    packets = packets_of(data)
    _check_twins(packets)
    _check_framing(packets)
    _check_client(packets)
    _check_server(packets)


def _compiled(name: str) -> Any:
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def _check_twins(packets: list[bytes]) -> None:
    """Check that the compiled functions return what the plain ones return."""
    twin, runner = _compiled("sbus.protocol._bundles"), _compiled("sbus.routing._runs")
    routes = {b"a": ("one",), b"k": ("one", "two"), b"": ()}
    plain = bundles._unbundle(list(packets))
    if twin is not None:
        assert twin.unbundle(list(packets)) == plain
        for limit, most in ((30, 3), (100, 2), (65_536, 8)):
            assert twin.pack(packets, limit, most) == bundles._pack(packets, limit, most)
    if runner is not None:
        for start in range(0, len(plain), 3):
            found = runner.next_run(plain, start, len(plain), routes)
            assert found == runs._next_run(plain, start, len(plain), routes)
            messages = runner.next_messages(plain, start, len(plain), routes, Message)
            assert messages == runs._next_messages(plain, start, len(plain), routes, Message)


def _check_framing(packets: list[bytes]) -> None:
    """Check that good bundles are unbundled, and that others have bad framing or are behind ``bundle/off``."""
    plain = bundles.unbundle(list(packets))
    end = next((at for at, packet in enumerate(plain) if bundles._is_end(packet)), len(plain))
    assert all(bundles._split(packet) == [] for packet in plain[:end] if packet[:4] == b"BNDL")
    whole = [packet for packet in plain if packet and packet[:4] != b"BNDL" and not bundles._is_end(packet)]
    for limit in (16, 64, 65_536):
        sent, counts = bundles.pack(whole, limit, 1 << 20)
        assert bundles.unbundle(sent) == whole
        assert sum(counts) == len(whole)
        assert all(len(one) <= limit or count == 1 for one, count in zip(sent, counts, strict=True))


class _Sink:
    pattern = b""
    callback: Callable[[Message], Any] | None = None

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def begin(self) -> None:
        """Do nothing: no messages of others are kept."""

    def deliver(self, messages: list[Message]) -> None:
        self.messages += messages


def _check_client(packets: list[bytes]) -> None:
    """Check that a client survives the input and receives each message once and in order."""
    core, sink = ClientCore(bundles=True, on_control=lambda key, payload: None), _Sink()
    core.subscribe("k", sink)
    core.receive(list(packets))
    wanted = [packet[6:] for packet in bundles._unbundle(list(packets)) if packet.startswith(b"MSG k\0")]
    assert [message.payload for message in sink.messages] == wanted
    assert 0 <= core.bundle_limit <= core.max_packet


def _check_server(packets: list[bytes]) -> None:
    """Check that a server survives the input and still delivers each message to the others once."""
    bus = Bus(limits=Limits(queue_messages=50, queue_bytes=5000, total_queue_bytes=8000))
    reader, publisher, sender = (bus.connect(uid=uid) for uid in (1, 2, 3))
    reader.send(b"SUB k", b"SUB fuzz/")
    _deliver(sender, [ON, *packets])
    if sender.is_connected:
        sender.drain()
    before = [packet for packet in reader.take() if not packet.startswith(b"MSG k\0")]
    assert before == []
    publisher.send(b"MSG fuzz/end\0")
    assert reader.take()[-1:] == [b"MSG fuzz/end\0"]
    assert reader.is_connected
    assert publisher.is_connected
    assert len(bus.registry.clients) == 2 + sender.is_connected


def _deliver(sender: Peer, packets: list[bytes]) -> None:
    """Unbundle as a transport does: once both ends have agreed, before the protocol sees the packets."""
    sender.send(packets[0])
    for at in range(1, len(packets), 8):
        some = packets[at : at + 8]
        if sender.is_connected:
            sender.send(*(bundles.unbundle(some) if sender.transport.bundle_limit else some))


def inputs(seed: int) -> Iterator[bytes]:
    """Yield random inputs for ever, the same ones for the same seed."""
    chance = random.Random(seed)
    kept = [bytes(range(0, 160, 7)), bytes([0, 1, 200, 35, 36, 37, 215, 230, 5])]
    while True:
        data = bytearray(chance.choice(kept))
        for _ in range(chance.randint(1, 12)):
            where = chance.randint(0, len(data))
            action = chance.random()
            if action < 0.5:
                data[where:where] = chance.randbytes(chance.randint(1, 6))
            elif action < 0.8 and data:
                data[where % len(data)] = chance.randrange(256)
            else:
                del data[where : where + chance.randint(1, 8)]
        if len(kept) < 500 and chance.random() < 0.1:
            kept.append(bytes(data[:200]))
        yield bytes(data[:400])


def main(argv: list[str]) -> None:
    """Fuzz until a check fails or the time is over."""
    if importlib.util.find_spec("atheris"):
        atheris: Any = importlib.import_module("atheris")
        for function in (bundles._unbundle, bundles._split, bundles._pack, runs._next_run, runs._next_messages):
            atheris.instrument_func(function)
        for kind in (ClientCore, BusProtocol, SubscriptionRegistry, SendQueue):
            for function in filter(inspect.isfunction, vars(kind).values()):
                atheris.instrument_func(function)
        atheris.Setup(argv, try_input)
        atheris.Fuzz()
        return
    seconds = next((float(word.partition("=")[2]) for word in argv if word.startswith("-max_total_time=")), 60.0)
    end, seed, count = time.monotonic() + seconds, time.time_ns(), 0
    for data in inputs(seed):
        try:
            try_input(data)
        except BaseException:
            print(f"seed {seed}: {data!r}", file=sys.stderr)
            raise
        count += 1
        if time.monotonic() > end:
            break
    print(f"{count} inputs, nothing found (seed {seed})")


if __name__ == "__main__":
    main(sys.argv)
