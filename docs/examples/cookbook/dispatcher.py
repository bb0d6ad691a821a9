"""Several workers for one key: each job goes to one idle worker, and to another one if that worker dies.

python3 dispatcher.py dispatch ADDRESS
python3 dispatcher.py work ADDRESS NAME         as often as you like
python3 dispatcher.py ask ADDRESS FILE          prints the worker's name and the file's SHA-256
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from sbus import Message, NobodyListens, RequestFailed, SbusError, UsageError
from sbus.client.aio import Bus, connect

JOBS = "jobs/digest"
JOIN = "jobs/join"
OPEN = "jobs/open"
"""What a dispatcher publishes when it starts: workers that were there first join then."""
WORKER = b"jobs/worker/"
"""What the key of each worker begins with."""
MOST_JOBS = 10_000
"""Jobs that wait in the dispatcher's memory."""


class Dispatcher:
    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.jobs: asyncio.Queue[Message] = asyncio.Queue()
        self.workers: dict[bytes, asyncio.Task[None]] = {}

    async def run(self) -> None:
        joining = self.bus.subscribe(JOIN)
        self.bus.subscribe(JOBS, self.take)
        await self.bus.publish(OPEN)
        await self.bus.fence()
        print("dispatching", flush=True)
        async for message in joining:
            worker = message.payload
            if worker.startswith(WORKER) and worker not in self.workers:
                self.workers[worker] = asyncio.create_task(self.employ(worker))

    def take(self, job: Message) -> None:
        if self.jobs.qsize() < MOST_JOBS:
            self.jobs.put_nowait(job)
        else:
            self.bus.fail(job, "too many jobs are waiting")

    async def employ(self, worker: bytes) -> None:
        """Give jobs to a worker, the key that it subscribes to, until nobody subscribes to the key."""
        hand_out = asyncio.create_task(self.hand_out(worker))
        try:
            with self.bus.watch_subscribers(worker) as watch:
                async for is_there in watch:
                    if not is_there:
                        break
        except SbusError as error:
            print("a worker was given up:", error, file=sys.stderr, flush=True)
        finally:
            hand_out.cancel()
            await asyncio.gather(hand_out, return_exceptions=True)
            del self.workers[worker]

    async def hand_out(self, worker: bytes) -> None:
        while True:
            job = await self.jobs.get()
            content = job.payload.partition(b"\0")[2]  # behind the key for the reply
            try:
                self.bus.answer(job, await self.bus.request(worker, content, timeout=None))
            except (RequestFailed, UsageError) as error:
                self.bus.fail(job, str(error))
            except (NobodyListens, asyncio.CancelledError):
                self.jobs.put_nowait(job)  # the worker is gone: another one gets the job
                raise


def digest(path: bytes) -> bytes:
    try:
        return hashlib.sha256(Path(path.decode()).read_bytes()).hexdigest().encode()
    except (OSError, ValueError) as error:
        raise RequestFailed(str(error)) from None


async def dispatch(address: str) -> None:
    async with await connect(address) as bus:
        await Dispatcher(bus).run()


async def work(address: str, name: str) -> None:
    async with await connect(address) as bus:
        key = WORKER + secrets.token_hex(16).encode()

        async def do(job: Message) -> bytes:
            return name.encode() + b" " + await asyncio.to_thread(digest, job.payload)

        bus.respond(key, do)
        opened = bus.subscribe(OPEN)
        await bus.publish(JOIN, key)
        await bus.fence()
        print("ready", flush=True)
        async for _ in opened:  # a dispatcher has started; a watch would miss one that restarts within 100 ms
            await bus.publish(JOIN, key)
            print("joined", flush=True)


async def ask(address: str, path: str) -> None:
    async with await connect(address) as bus:
        print((await bus.request(JOBS, str(Path(path).absolute()).encode(), timeout=60)).decode())


if __name__ == "__main__":
    commands: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {"dispatch": dispatch, "work": work, "ask": ask}
    try:
        asyncio.run(commands[sys.argv[1]](*sys.argv[2:]))
    except SbusError as error:
        sys.exit(str(error))
