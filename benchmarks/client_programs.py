"""Publishers and receivers in Python, written as their libraries' documentation recommends.

``python client_programs.py NAME publish|receive ADDRESS SECONDS`` is one of the two ends. A publisher sends probes
until its input has a line, because only a received message proves that the subscription is in force; then it sends
``start``, messages for the given number of seconds, and ``over``. Each end prints its counts and its CPU time.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import sbus
from sbus.syscalls.polling import is_readable

__all__ = ["PROGRAMS", "SIZE", "Program"]

SIZE = 64
"""Bytes in the payload of a measured message; control words are shorter."""
BATCH = 512
"""Messages between two readings of the clock, and in a batch where a program publishes many at once."""
KEY = "bench/clients"
PAYLOAD = bytes(SIZE)
PROBE, START, OVER = b"probe", b"start", b"over"
_LONGEST = 120


@dataclass(frozen=True)
class Program:
    """One way to use a library.

    :ivar server: what it speaks to, a name in `benchmarks.servers`; ``zmq-proxy`` is started by `benchmarks.clients`.
    :ivar publishing: in the words of the table; so is `receiving`.
    :ivar needs: the module of the library.
    """

    library: str
    publishing: str
    receiving: str
    publish: Callable[[str, Publication], None]
    receive: Callable[[str, Reception], None]
    server: str = "sbus"
    needs: str = "sbus"


# --- the two ends ---------------------------------------------------------------------------------


class Publication:
    """A publisher's task, and its result."""

    def __init__(self, seconds: float) -> None:
        self.published = 0
        self.begun = self.cpu = 0.0
        self._seconds = seconds

    def probes(self) -> Iterator[bytes]:
        """Yield the payloads to send before the measurement; the last one is `START`."""
        while not is_readable(sys.stdin, 0.01):
            yield PROBE
        yield START
        self.begun, self.cpu = time.monotonic(), time.process_time()

    def rounds(self) -> Iterator[None]:
        """Yield once for each `BATCH` messages to publish; `OVER` follows the last."""
        while time.monotonic() - self.begun < self._seconds:
            yield
            self.published += BATCH

    def report(self) -> dict[str, Any]:
        return {"published": self.published, "begun": self.begun, "cpu": time.process_time() - self.cpu}


class Reception:
    """The messages that a receiver has counted."""

    def __init__(self) -> None:
        self.received = 0
        self.ended = self.cpu = 0.0
        self._is_ready = False

    def probed(self, payload: bytes) -> bool:
        """Handle a control word, and return whether messages follow."""
        if not self._is_ready:
            self._is_ready = True
            print("ready", flush=True)
        if payload == START:
            self.cpu = time.process_time()
        return payload == START

    def over(self, received: int) -> None:
        """Report that every message has arrived."""
        self.ended, self.cpu = time.monotonic(), time.process_time() - self.cpu
        self.received = received

    def report(self) -> dict[str, Any]:
        return {"received": self.received, "ended": self.ended, "cpu": self.cpu}

    def count(self, payloads: Iterator[bytes]) -> None:
        """Count messages that arrive one by one."""
        for payload in payloads:
            if self.probed(payload):
                break
        received = 0
        for payload in payloads:
            if len(payload) != SIZE:
                break
            received += 1
        self.over(received)

    def listed(self, messages: list[sbus.Message]) -> bool:
        """Count messages that arrive in a list, and return whether more will come."""
        self.received += len(messages)
        if not self.cpu:  # it has not begun yet
            for message in messages:
                if len(message.payload) != SIZE:
                    self.probed(message.payload)
                    self.received -= 1
        if messages[-1].payload != OVER:
            return True
        self.over(self.received - 1)
        return False


# --- sbus, blocking -------------------------------------------------------------------------------


def _sbus(address: str, **settings: Any) -> sbus.Bus:
    bus = sbus.connect(address, **settings)
    bus.flood_control(soft="queue", hard="block")  # a receiver that is late blocks the publisher
    return bus


def _blocking_many(address: str, job: Publication, **settings: Any) -> None:
    batch: list[tuple[bytes | str, bytes]] = [(KEY, PAYLOAD)] * BATCH
    with _sbus(address, **settings) as bus:
        for payload in job.probes():
            bus.publish(KEY, payload)
        for _ in job.rounds():
            bus.publish_many(batch)
        bus.publish(KEY, OVER)
        bus.fence()


def _blocking_each(address: str, job: Publication) -> None:
    with _sbus(address) as bus:
        for payload in job.probes():
            bus.publish(KEY, payload)
        for _ in job.rounds():
            for _ in range(BATCH):
                bus.publish(KEY, PAYLOAD)
        bus.publish(KEY, OVER)
        bus.fence()


def _blocking_lists(address: str, job: Reception, **settings: Any) -> None:
    with _sbus(address, **settings) as bus:
        bus.subscribe(KEY)
        while job.listed(bus.get_many()):
            pass


def _blocking_loop(address: str, job: Reception) -> None:
    with _sbus(address) as bus:
        bus.subscribe(KEY)
        job.count(message.payload for message in bus)


# --- sbus, with an event loop ---------------------------------------------------------------------


async def _publish_many(bus: Any, job: Publication) -> None:
    batch: list[tuple[bytes | str, bytes]] = [(KEY, PAYLOAD)] * BATCH
    for payload in job.probes():
        await bus.publish(KEY, payload)
    for _ in job.rounds():
        await bus.publish_many(batch)
    await bus.publish(KEY, OVER)
    await bus.fence()
    await bus.close()


async def _publish_each(bus: Any, job: Publication) -> None:
    for payload in job.probes():
        await bus.publish(KEY, payload)
    for _ in job.rounds():
        for _ in range(BATCH):
            await bus.publish(KEY, PAYLOAD)
    await bus.publish(KEY, OVER)
    await bus.fence()
    await bus.close()


async def _publish_turns(bus: Any, job: Publication) -> None:
    for payload in job.probes():
        await bus.publish(KEY, payload)
    for _ in job.rounds():
        for _ in range(BATCH - 1):
            bus.publish(KEY, PAYLOAD)
        await bus.publish(KEY, PAYLOAD)
    await bus.publish(KEY, OVER)
    await bus.fence()
    await bus.close()


async def _receive_loop(bus: Any, job: Reception) -> None:
    bus.flood_control(soft="queue", hard="block")
    subscription = bus.subscribe(KEY)
    received = 0
    async for message in subscription:
        if job.probed(message.payload):
            break
    async for message in subscription:
        if len(message.payload) != SIZE:
            break
        received += 1
    job.over(received)
    await bus.close()


async def _receive_lists(bus: Any, job: Reception) -> None:
    bus.flood_control(soft="queue", hard="block")
    subscription = bus.subscribe(KEY)
    while job.listed(await subscription.get_many()):
        pass
    await bus.close()


def _asyncio(use: Callable[[Any, Any], Coroutine[Any, Any, None]]) -> Callable[[str, Any], None]:
    def run(address: str, job: Any) -> None:
        from sbus.client import aio

        async def main() -> None:
            await use(await aio.connect(address), job)

        asyncio.run(main())

    return run


def _twisted(use: Callable[[Any, Any], Coroutine[Any, Any, None]]) -> Callable[[str, Any], None]:
    def run(address: str, job: Any) -> None:
        from twisted.internet import defer, reactor, task

        from sbus.client import tx

        async def main() -> None:
            await use(await tx.connect(reactor, address), job)

        task.react(lambda _: defer.Deferred.fromCoroutine(main()))

    return run


# --- redis ----------------------------------------------------------------------------------------


def _redis_many(address: str, job: Publication) -> None:
    import redis

    with redis.Redis(unix_socket_path=address) as client:
        for payload in job.probes():
            client.publish(KEY, payload)
        for _ in job.rounds():
            with client.pipeline(transaction=False) as pipe:
                for _ in range(BATCH):
                    pipe.publish(KEY, PAYLOAD)
                pipe.execute()
        client.publish(KEY, OVER)


def _redis_each(address: str, job: Publication) -> None:
    import redis

    with redis.Redis(unix_socket_path=address) as client:
        for payload in job.probes():
            client.publish(KEY, payload)
        for _ in job.rounds():
            for _ in range(BATCH):
                client.publish(KEY, PAYLOAD)
        client.publish(KEY, OVER)


def _redis_loop(address: str, job: Reception) -> None:
    import redis

    with redis.Redis(unix_socket_path=address) as client, client.pubsub(ignore_subscribe_messages=True) as pubsub:
        pubsub.subscribe(KEY)
        job.count(message["data"] for message in pubsub.listen() if message is not None)


def _redis_asyncio_many(address: str, job: Publication) -> None:
    import redis.asyncio

    async def main() -> None:
        async with redis.asyncio.Redis(unix_socket_path=address) as client:
            for payload in job.probes():
                await client.publish(KEY, payload)
            for _ in job.rounds():
                async with client.pipeline(transaction=False) as pipe:
                    for _ in range(BATCH):
                        pipe.publish(KEY, PAYLOAD)
                    await pipe.execute()
            await client.publish(KEY, OVER)

    asyncio.run(main())


def _redis_asyncio_loop(address: str, job: Reception) -> None:
    import redis.asyncio

    async def main() -> None:
        async with (
            redis.asyncio.Redis(unix_socket_path=address) as client,
            client.pubsub(ignore_subscribe_messages=True) as pubsub,
        ):
            await pubsub.subscribe(KEY)
            await _count(job, (message["data"] async for message in pubsub.listen() if message is not None))

    asyncio.run(main())


async def _count(job: Reception, payloads: AsyncIterator[bytes]) -> None:
    async for payload in payloads:
        if job.probed(payload):
            break
    received = 0
    async for payload in payloads:
        if len(payload) != SIZE:
            break
        received += 1
    job.over(received)


# --- nats -----------------------------------------------------------------------------------------

_SUBJECT = KEY.replace("/", ".")


def _nats_each(address: str, job: Publication) -> None:
    import nats

    async def main() -> None:
        client = await nats.connect(f"nats://127.0.0.1:{address}")
        for payload in job.probes():
            await client.publish(_SUBJECT, payload)
            await client.flush()
        for _ in job.rounds():
            for _ in range(BATCH):
                await client.publish(_SUBJECT, PAYLOAD)
        await client.publish(_SUBJECT, OVER)
        await client.drain()

    asyncio.run(main())


def _nats_loop(address: str, job: Reception) -> None:
    import nats

    async def main() -> None:
        client = await nats.connect(f"nats://127.0.0.1:{address}")
        # Without these limits it drops what comes faster than it is received.
        subscription = await client.subscribe(_SUBJECT, pending_msgs_limit=0, pending_bytes_limit=0)
        await _count(job, (message.data async for message in subscription.messages))
        await client.close()

    asyncio.run(main())


def _nats_callback(address: str, job: Reception) -> None:
    import nats

    async def main() -> None:
        client = await nats.connect(f"nats://127.0.0.1:{address}")
        over = asyncio.Event()
        started = False
        received = 0

        async def callback(message: Any) -> None:
            nonlocal started, received
            if not started:
                started = job.probed(message.data)
            elif len(message.data) == SIZE:
                received += 1
            else:
                job.over(received)
                over.set()

        await client.subscribe(_SUBJECT, cb=callback, pending_msgs_limit=0, pending_bytes_limit=0)
        await over.wait()
        await client.close()

    asyncio.run(main())


# --- zmq ------------------------------------------------------------------------------------------


def _zmq_socket(context: Any, kind: int, address: str) -> Any:
    import zmq

    made = context.socket(kind)
    made.setsockopt(zmq.SNDHWM, 0)  # no limit: nothing is dropped
    made.setsockopt(zmq.RCVHWM, 0)
    made.connect(f"ipc://{address}")
    if kind == zmq.SUB:
        made.setsockopt(zmq.SUBSCRIBE, KEY.encode())
    return made


def _zmq_each(address: str, job: Publication) -> None:
    import zmq

    key = KEY.encode()
    with zmq.Context() as context, _zmq_socket(context, zmq.PUB, f"{address}.in") as publisher:
        for payload in job.probes():
            publisher.send_multipart((key, payload))
        for _ in job.rounds():
            for _ in range(BATCH):
                publisher.send_multipart((key, PAYLOAD))
        publisher.send_multipart((key, OVER))


def _zmq_loop(address: str, job: Reception) -> None:
    import zmq

    with zmq.Context() as context, _zmq_socket(context, zmq.SUB, f"{address}.out") as subscriber:
        job.count(iter(lambda: subscriber.recv_multipart()[1], None))


def _zmq_asyncio_each(address: str, job: Publication) -> None:
    import zmq.asyncio

    async def main() -> None:
        key = KEY.encode()
        with zmq.asyncio.Context() as context, _zmq_socket(context, zmq.PUB, f"{address}.in") as publisher:
            for payload in job.probes():
                await publisher.send_multipart((key, payload))
            for _ in job.rounds():
                for _ in range(BATCH):
                    await publisher.send_multipart((key, PAYLOAD))
            await publisher.send_multipart((key, OVER))

    asyncio.run(main())


def _zmq_asyncio_loop(address: str, job: Reception) -> None:
    import zmq.asyncio

    async def main() -> None:
        with zmq.asyncio.Context() as context, _zmq_socket(context, zmq.SUB, f"{address}.out") as subscriber:

            async def payloads() -> AsyncIterator[bytes]:
                while True:
                    yield (await subscriber.recv_multipart())[1]

            await _count(job, payloads())

    asyncio.run(main())


# --- all of them ----------------------------------------------------------------------------------


def _plain(use: Callable[..., None]) -> Callable[[str, Any], None]:
    return lambda address, job: use(address, job, bundles=False)


PROGRAMS: dict[str, Program] = {
    "blocking-lists": Program("sbus, blocking", "``publish_many``", "``get_many``", _blocking_many, _blocking_lists),
    "blocking": Program("sbus, blocking", "``publish_many``", "``for``", _blocking_many, _blocking_loop),
    "blocking-each": Program("sbus, blocking", "``publish``", "``for``", _blocking_each, _blocking_loop),
    "blocking-plain": Program(
        "sbus, blocking, ``bundles=False``",
        "``publish_many``",
        "``get_many``",
        _plain(_blocking_many),
        _plain(_blocking_lists),
    ),
    "asyncio-lists": Program(
        "sbus, asyncio", "``publish_many``", "``get_many``", _asyncio(_publish_many), _asyncio(_receive_lists)
    ),
    "asyncio": Program(
        "sbus, asyncio", "``publish_many``", "``async for``", _asyncio(_publish_many), _asyncio(_receive_loop)
    ),
    "asyncio-each": Program(
        "sbus, asyncio", "``await publish``", "``async for``", _asyncio(_publish_each), _asyncio(_receive_loop)
    ),
    "twisted-lists": Program(
        "sbus, Twisted", "``publish_many``", "``get_many``", _twisted(_publish_many), _twisted(_receive_lists)
    ),
    "twisted": Program(
        "sbus, Twisted", "``publish_many``", "``async for``", _twisted(_publish_many), _twisted(_receive_loop)
    ),
    "twisted-turns": Program(
        "sbus, Twisted",
        "``publish``, one in 512 awaited",
        "``async for``",
        _twisted(_publish_turns),
        _twisted(_receive_loop),
    ),
    "twisted-each": Program(
        "sbus, Twisted", "``await publish``", "``async for``", _twisted(_publish_each), _twisted(_receive_loop)
    ),
    "redis": Program(
        "redis-py", "``pipeline`` of 512", "``listen()``", _redis_many, _redis_loop, server="redis", needs="redis"
    ),
    "redis-each": Program(
        "redis-py", "``publish``", "``listen()``", _redis_each, _redis_loop, server="redis", needs="redis"
    ),
    "redis-asyncio": Program(
        "redis-py, asyncio",
        "``pipeline`` of 512",
        "``async for``",
        _redis_asyncio_many,
        _redis_asyncio_loop,
        server="redis",
        needs="redis",
    ),
    "nats": Program(
        "nats-py, asyncio", "``await publish``", "``async for``", _nats_each, _nats_loop, server="nats", needs="nats"
    ),
    "nats-callback": Program(
        "nats-py, asyncio", "``await publish``", "callback", _nats_each, _nats_callback, server="nats", needs="nats"
    ),
    "zmq": Program(
        "pyzmq", "``send_multipart``", "``recv_multipart``", _zmq_each, _zmq_loop, server="zmq-proxy", needs="zmq"
    ),
    "zmq-asyncio": Program(
        "pyzmq, asyncio",
        "``await send_multipart``",
        "``await recv_multipart``",
        _zmq_asyncio_each,
        _zmq_asyncio_loop,
        server="zmq-proxy",
        needs="zmq",
    ),
}


def main(name: str, role: str, address: str, seconds: str) -> None:
    """Run as the publisher or as the receiver."""
    limit = threading.Timer(_LONGEST, os._exit, (1,))
    limit.daemon = True
    limit.start()
    program = PROGRAMS[name]
    job: Any
    if role == "publish":
        job = Publication(float(seconds))
        end: Callable[[str, Any], None] = program.publish
    else:
        job = Reception()
        end = program.receive
    try:
        end(address, job)
    except SystemExit as e:  # what `task.react` ends with
        if e.code:
            raise
    print(json.dumps(job.report()), flush=True)
    os._exit(0)  # not every library's threads end by themselves


if __name__ == "__main__":
    main(*sys.argv[1:])
