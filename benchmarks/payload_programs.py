"""Publishers and receivers of large messages in Python: sbus, zenoh and iceoryx2, as their documentation recommends.

``python payload_programs.py LIBRARY publish|receive ADDRESS …`` is one of the two ends; `benchmarks.payloads` starts
them. A receiver reads a byte of every page of each message, and acknowledges messages through a pipe, so that a
publisher is at most `WINDOW` messages ahead of each receiver, whatever the library does when it is. Each end prints one
JSON object.

A message ends with its number. Messages with the number 0 are probes: the publisher sends them until each receiver has
got one, since zenoh does not say when a publisher knows all receivers.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

__all__ = ["LIBRARIES", "WINDOW", "touch"]

_NUMBER = 8
"""Bytes of a message's number."""
_LONGEST = 30
"""Seconds without an acknowledgement after which messages count as lost."""
WINDOW = 8
"""Messages that a publisher may be ahead of a receiver: enough to overlap their work, and few enough for caches."""
WARM = 2 * WINDOW
"""Messages before the measurement."""
_KEY = "bench/payload"
_PAGE = 4096
_BATCH = 8
"""Payloads in a batch of sbus."""

Send = Callable[[Iterable[object]], None]
"""Publishes the content once for each item, at most `_BATCH`: each item changes the content."""
Publisher = Callable[[str, bytearray, int], AbstractContextManager[Send]]
"""Connects to an address, to publish the content to a number of receivers."""
Receiver = Callable[[str, int], AbstractContextManager[Iterator[Any]]]
"""Connects to an address, to receive messages of a size; yields the length of each, and a buffer with its end."""


# --- sbus -----------------------------------------------------------------------------------------


_PART = 400_000
"""Bytes of a payload that fit a packet; a longer one that is copied goes in parts."""


def _connect(address: str, **options: Any) -> Any:
    import sbus

    return sbus.connect(address, **options)


@contextmanager
def _publish_copied(address: str, content: bytearray, receivers: int) -> Iterator[Send]:
    parts = [memoryview(content)[at : at + _PART] for at in range(0, len(content), _PART)]
    with _connect(address) as bus:

        def send(items: Iterable[object]) -> None:
            for _ in items:
                for part in parts:
                    bus.publish(_KEY, part)

        yield send


@contextmanager
def _receive_copied(address: str, size: int) -> Iterator[Iterator[Any]]:
    with _connect(address) as bus:
        subscription = bus.subscribe(_KEY)
        bus.fence()

        def messages() -> Iterator[Any]:
            missing = size
            for message in subscription:
                missing -= len(message.payload)
                if missing > 0:
                    touch(message.payload)
                else:
                    yield size - missing, message.payload
                    missing = size

        yield messages()


@contextmanager
def _publish_payloads(address: str, content: bytearray, receivers: int) -> Iterator[Send]:
    with _connect(address, payloads=True) as bus:

        def send(items: Iterable[object]) -> None:
            for _ in items:
                bus.publish(_KEY, content)

        yield send


@contextmanager
def _publish_batches(address: str, content: bytearray, receivers: int) -> Iterator[Send]:
    with _connect(address, payloads=True) as bus:

        def send(items: Iterable[object]) -> None:
            with bus.payloads() as batch:
                for _ in items:
                    batch.publish(_KEY, content)

        yield send


@contextmanager
def _receive_payloads(address: str, size: int) -> Iterator[Iterator[Any]]:
    with _connect(address, payloads=True) as bus:
        subscription = bus.subscribe(_KEY)
        bus.fence()
        yield ((len(message.payload), message.payload) for message in subscription)


# --- zenoh ----------------------------------------------------------------------------------------


def _session(address: str, side: str) -> Any:
    import zenoh

    config = zenoh.Config()
    settings = {
        "mode": "peer",
        "scouting/multicast/enabled": False,
        f"{side}/endpoints": [f"unixsock-stream/{address}"],
        "transport/shared_memory/enabled": True,
    }
    for name, value in settings.items():
        config.insert_json5(name, json.dumps(value))
    return zenoh.open(config)


@contextmanager
def _publish_zenoh(address: str, content: bytearray, receivers: int) -> Iterator[Send]:
    import zenoh
    from zenoh import shm

    provider = shm.ShmProvider.default_backend(4 * WINDOW * (len(content) + _PAGE))
    policy = shm.BlockOn(shm.GarbageCollect())
    with _session(address, "listen") as session:
        publisher = session.declare_publisher(_KEY, congestion_control=zenoh.CongestionControl.BLOCK)

        def send(items: Iterable[object]) -> None:
            for _ in items:
                buffer = provider.alloc(len(content), policy=policy)
                buffer[0 : len(content)] = content
                publisher.put(buffer)

        yield send


@contextmanager
def _receive_zenoh(address: str, size: int) -> Iterator[Iterator[Any]]:
    import zenoh

    with _session(address, "connect") as session:
        subscriber = session.declare_subscriber(_KEY, zenoh.handlers.FifoChannel(2 * WINDOW))
        # Neither the payload nor its shared memory is a buffer in Python, so each receiver has to copy.
        yield ((len(sample.payload), sample.payload.to_bytes()) for sample in subscriber)


# --- iceoryx2 -------------------------------------------------------------------------------------


def _services(address: str, receivers: int) -> tuple[Any, Any]:
    import ctypes

    import iceoryx2 as iox2

    iox2.set_log_level_from_env_or(iox2.LogLevel.Error)
    node = iox2.NodeBuilder.new().create(iox2.ServiceType.Ipc)
    name = iox2.ServiceName.new(address)
    samples = (
        node.service_builder(name)
        .publish_subscribe(iox2.Slice[ctypes.c_uint8])
        .max_subscribers(receivers)
        .subscriber_max_buffer_size(2 * WINDOW)
        .enable_safe_overflow(False)
        .open_or_create()
    )
    events = node.service_builder(name).event().max_listeners(receivers).open_or_create()
    return samples, events


@contextmanager
def _publish_iceoryx2(address: str, content: bytearray, receivers: int) -> Iterator[Send]:
    import ctypes

    samples, events = _services(address, receivers)
    publisher = samples.publisher_builder().initial_max_slice_len(len(content)).create()
    notifier = events.notifier_builder().create()
    source = (ctypes.c_char * len(content)).from_buffer(content)

    def send(items: Iterable[object]) -> None:
        for _ in items:
            sample = publisher.loan_slice_uninit(len(content))
            ctypes.memmove(sample.payload_ptr, source, len(content))
            sample.assume_init().send()
            notifier.notify()

    yield send


@contextmanager
def _receive_iceoryx2(address: str, size: int) -> Iterator[Iterator[Any]]:
    samples, events = _services(address, int(os.environ["RECEIVERS"]))
    subscriber = samples.subscriber_builder().buffer_size(2 * WINDOW).create()
    listener = events.listener_builder().create()

    def messages() -> Iterator[Any]:
        while True:
            while (sample := subscriber.receive()) is not None:
                payload = sample.payload()
                yield payload.len(), payload.as_memory_view()
                del payload, sample
            listener.blocking_wait()

    yield messages()


LIBRARIES: dict[str, tuple[Publisher, Receiver]] = {
    "sbus copied": (_publish_copied, _receive_copied),
    "sbus payloads": (_publish_payloads, _receive_payloads),
    "sbus batches": (_publish_batches, _receive_payloads),
    "zenoh": (_publish_zenoh, _receive_zenoh),
    "iceoryx2": (_publish_iceoryx2, _receive_iceoryx2),
}
"""The two ends by name."""


# --- the two ends ---------------------------------------------------------------------------------


def _content(size: int) -> bytearray:
    # Not zeros: the pages of a buffer that was never written are all one page.
    return bytearray((bytes(range(251)) * (size // 251 + 1))[:size])


class _Publishing:
    """Publishes numbered messages, at most `WINDOW` ahead of each receiver.

    :param content: what `send` publishes; its end becomes the number.
    """

    def __init__(self, send: Send, content: bytearray, pipes: list[int]) -> None:
        self._send = send
        self._content = content
        self._pipes = {pipe: select.poll() for pipe in pipes}
        for pipe, poll in self._pipes.items():
            poll.register(pipe, select.POLLIN)
        self._sent, self._received = 0, dict.fromkeys(pipes, 0)

    def _number(self, number: int) -> int:
        self._content[-_NUMBER:] = number.to_bytes(_NUMBER, "big")
        return number

    def probe(self) -> None:
        """Publish probes until each receiver has got one."""
        for pipe, poll in self._pipes.items():
            while True:
                self._send(map(self._number, [0]))
                if poll.poll(10):
                    self._read(pipe)
                    break

    def wait(self, most: int) -> None:
        """Wait until each receiver has all messages but `most`."""
        for pipe, poll in self._pipes.items():
            while self._sent - self._received[pipe] > most:
                if not poll.poll(_LONGEST * 1000):
                    raise SystemExit("the last messages were lost")
                self._read(pipe)

    def _read(self, pipe: int) -> None:
        read = os.read(pipe, 4096)
        if not read:
            raise SystemExit("a receiver has ended")
        self._received[pipe] += read.count(_GOT)

    def send(self, count: int) -> None:
        while count:
            now = min(count, _BATCH)
            self.wait(max(WINDOW - now, 0))
            self._send(map(self._number, range(self._sent + 1, self._sent + 1 + now)))
            self._sent += now
            count -= now


def _publish(library: str, address: str, size: int, count: int, rate: float, pipes: list[int]) -> dict[str, Any]:
    content = _content(size)
    with LIBRARIES[library][0](address, content, len(pipes)) as send:
        sys.stdin.readline()  # when all receivers are ready
        publishing = _Publishing(send, content, pipes)
        publishing.probe()
        publishing.send(WARM)
        publishing.wait(0)
        began, cpu, late = time.monotonic(), time.process_time(), 0
        print(json.dumps({"begun": began}), flush=True)
        if not rate:
            publishing.send(count)
        for number in range(count if rate else 0):
            due = began + number / rate
            time.sleep(max(0.0, due - time.monotonic()))
            publishing.wait(WINDOW - 1)
            late += time.monotonic() - due > 1 / rate
            publishing.send(1)
        publishing.wait(0)
        took, cpu = time.monotonic() - began, time.process_time() - cpu
    return {"seconds": took, "cpu": cpu, "late": late}


_GOT, _PROBED = b".", b"?"
"""What a receiver writes for each message."""


def touch(payload: Any) -> bytes:
    """Return a byte of every page."""
    return bytes(memoryview(payload)[::_PAGE])


def _receive(library: str, address: str, size: int, count: int, pipe: int) -> dict[str, Any]:
    last = lost = wrong = 0
    cpu = 0.0
    content = _content(size)
    with LIBRARIES[library][1](address, size) as messages:
        print("ready", flush=True)
        for length, payload in messages:
            number = int.from_bytes(payload[-_NUMBER:], "big")
            gap = number - last - 1 if number else 0
            if number:
                wrong += length != size or touch(payload) != content[size - len(payload) :: _PAGE]
                lost += gap
                last = number
            del payload
            os.write(pipe, _GOT * (gap + 1) if number else _PROBED)
            if number == WARM:
                cpu = time.process_time()
            if number == WARM + count:
                break
        cpu = time.process_time() - cpu
    return {"cpu": cpu, "wrong": wrong, "lost": lost}


def main(library: str, side: str, address: str, size: int, count: int, rate: float, *pipes: int) -> None:
    if side == "publish":
        found = _publish(library, address, size, count, rate, list(pipes))
    else:
        found = _receive(library, address, size, count, pipes[0])
    print(json.dumps(found), flush=True)
    os._exit(0)  # the threads of a library may outlive its session


if __name__ == "__main__":
    _library, _side, _address, _size, _count, _rate, *_pipes = sys.argv[1:]
    main(_library, _side, _address, int(_size), int(_count), float(_rate), *map(int, _pipes))
