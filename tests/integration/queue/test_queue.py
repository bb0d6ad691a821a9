"""Queues over a real bus, with a real service: what publishers, workers and operators see."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import sbus
from sbus.client.outbox import Outbox
from sbus.client.subscription import Readers
from sbus.client.workers import WorkCore
from sbus.errors import Disconnected, NobodyListens, PacketTooLong, RequestFailed, TimedOut, UsageError
from tests.integration.clients.backends import BACKENDS, Backend, Client
from tests.integration.queue.conftest import Queued
from tests.support.disks import filled, mounted
from tests.support.harness import OTHER_USER, TIMEOUT, is_held_back, run, script
from tests.support.queues import QueueProcess, WorkerProcess, ask
from tests.support.waiting import wait_until

Start = Callable[..., Queued]
both = pytest.mark.parametrize("store", ["sqlite", "jetstream"], indirect=True)
"""What is promised with each store."""
both_and_each = pytest.mark.parametrize(
    ("backend", "store"),
    [
        # A store does not see which library asks: make test has each with one of the others.
        pytest.param(kind, store, marks=pytest.mark.slow if store == "jetstream" and kind is not BACKENDS[0] else [])
        for kind in BACKENDS
        for store in ("sqlite", "jetstream")
    ],
    indirect=True,
    ids=lambda value: getattr(value, "name", value),
)
"""What is promised with each store and each library."""


class Worker:
    """A worker of one of the libraries."""

    def __init__(self, client: Client, iterator: Any) -> None:
        self._client = client
        self._iterator = iterator

    async def next(self) -> Any:
        """The next job."""
        async with asyncio.timeout(TIMEOUT):
            return await self._client.do(self._client.backend.advance, self._iterator)

    async def do(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call a job's method, and wait until the bus has it."""
        await self._client.do(call, *args, **kwargs)
        await self._client.fence()


@asynccontextmanager
async def working(client: Client, credit: int = 1) -> AsyncIterator[Worker]:
    """Work on the queue ``jobs`` for the block."""
    work = await client.do(client.raw.work, "jobs", credit=credit)
    iterator = await client.do(client.backend.iterate, work)
    yield Worker(client, iterator)
    await client.do(work.close)


def counts(queued: Queued) -> dict[str, int]:
    """The jobs that are in the queue, by state."""
    found: dict[str, int] = ask(queued.address, "ls")["jobs"]
    return {state: count for state, count in found.items() if count}


async def until_counts(queued: Queued, wanted: dict[str, int]) -> None:
    """Wait until the queue has these jobs."""
    await asyncio.to_thread(wait_until, lambda: counts(queued), lambda found: found == wanted)


@both_and_each
async def test_life_of_a_job(backend: Backend, queued: Start) -> None:
    """A job that was put is given to a worker, with its sender, and is gone when that has acknowledged it."""
    server = queued()
    publisher, client = await backend.connect(server.address), await backend.connect(server.address)
    assert await publisher.do(publisher.raw.enqueue, "jobs", "thumbs/1", b"a picture\0") == 1
    await publisher.publish("jobs/plain", b"a message")
    await publisher.fence()
    async with working(client, 2) as worker:
        job, plain = await worker.next(), await worker.next()
        assert (job.key, job.payload, job.id, job.tries, job.lease) == (b"thumbs/1", b"a picture\0", 1, 1, 30.0)
        assert job.sender.pid == os.getpid()
        assert (plain.key, plain.payload) == (b"jobs/plain", b"a message")
        assert counts(server) == {"out": 2}
        await worker.do(job.ack)
        await worker.do(job.nack, "failed")  # a second answer is ignored
        assert counts(server) == {"out": 1}
    await until_counts(server, {"ready": 1})


@pytest.mark.parametrize("end", ["work", "bus", "server"])
async def test_answers_after_the_end(backend: Backend, queued: Start, end: str) -> None:
    """A worker whose work or connection has ended learns that the queue keeps the job."""
    server = queued()
    client = await backend.connect(server.address)
    await client.do(client.raw.enqueue, "jobs", "k")
    async with working(client) as worker:
        job = await worker.next()
        if end == "work":
            await client.do(job._work.close)
        elif end == "bus":
            await client.close()
        else:
            server.bus.stop()
            with pytest.raises(Disconnected):
                await client.fence()
        for call in (job.ack, job.nack, job.renew):
            with pytest.raises(Disconnected):
                await client.do(call)
        if end == "server":
            return
    await until_counts(server, {"ready": 1})


async def test_nobody_has_the_queue(backend: Backend, shared: Any) -> None:
    """Without a service a job is refused at once; names and options that cannot be are refused here."""
    client = await backend.connect(shared.address)
    with pytest.raises(NobodyListens, match="no service on this bus has the queue jobs: start one"):
        await client.do(client.raw.enqueue, "jobs", "k")
    for call in (
        lambda: client.do(client.raw.enqueue, "a/b", "k"),
        lambda: client.do(client.raw.enqueue, "jobs", "k", id="a b"),
        lambda: client.do(client.raw.enqueue, "jobs", "k", delay=-1),
        lambda: client.do(client.raw.enqueue, "jobs", "k", "text"),
        lambda: client.do(client.raw.request, "k", "text"),
        lambda: client.do(client.raw.work, "jobs", credit=0),
    ):
        with pytest.raises(UsageError):
            await call()


async def test_long_jobs(backend: Backend, queued: Start) -> None:
    """A job that fits a packet arrives, also with payloads=True; a longer one is refused at once, with the remedy."""
    server = queued()
    client = await backend.connect(server.address, payloads=True)
    with pytest.raises(PacketTooLong, match="put it into a file, and the file's path into the job"):
        await client.do(client.raw.enqueue, "jobs", "k", bytes(2 << 20))
    longest = client.raw.core.max_packet - 512 - len("queue/jobs/put/k\0")
    await client.do(client.raw.enqueue, "jobs", "k", bytes(longest))
    async with working(client) as worker:
        assert len((await worker.next()).payload) == longest


def test_a_worker_that_does_not_read_loses_nothing(queued: Start) -> None:
    """The service sends a worker no more than its queue on the bus holds, so a large credit costs no lease."""
    server = queued("=jobs/,lease=100s")
    reader = server.bus.client()
    inbox = reader.credentials + b"/sbus/work/ab"
    for pattern in (inbox, b"queue/jobs/worker/ab"):
        reader.sub(pattern)
    reader.msg(b"queue/jobs/ready", b"ab 1 4096")
    reader.sync()
    publisher = server.bus.client()
    for number in range(300):
        publisher.msg(b"jobs/k", b"%d" % number + bytes(10_000))
    wait_until(lambda: counts(server), lambda found: found == {"out": 105, "ready": 195})
    for _ in range(300):
        _, _, text = reader.recv().partition(b"\0")
        reader.msg(b"queue/jobs/ack", b"ab " + b" ".join(text.split(b" ", 3)[1:3]))
    wait_until(lambda: counts(server), lambda found: not found)


@both_and_each
async def test_doubles_and_delays(backend: Backend, queued: Start) -> None:
    """A second job with an ID is not put; a delayed one waits for its time."""
    server = queued()
    client = await backend.connect(server.address)
    enqueue = client.raw.enqueue
    assert [await client.do(enqueue, "jobs", "k", id="x"), await client.do(enqueue, "jobs", "k", id="x")] == [1, 1]
    start = time.time()
    await client.do(enqueue, "jobs", "late", delay=0.3)
    async with working(client) as worker:
        await worker.do((await worker.next()).ack)
        assert (await worker.next()).key == b"late"
        assert time.time() - start >= 0.3
    server.service.kill(signal.SIGKILL)
    server.service.wait()


@both_and_each
async def test_block_answers(backend: Backend, queued: Start, store: str) -> None:
    """A job as a context manager is acknowledged at the end, and has failed if the block raises."""
    server = queued("=jobs/,deliveries=1")
    client = await backend.connect(server.address)
    dead = await client.subscribe("queue/jobs/dead/")
    for _ in range(2):
        await client.do(client.raw.enqueue, "jobs", "k", b"\0x")

    def fail(job: Any) -> None:
        with job:
            raise ValueError("no such picture")

    def succeed(job: Any) -> None:
        with job:
            pass

    async with working(client) as worker:
        await worker.do(succeed, await worker.next())
        job = await worker.next()
        with pytest.raises(ValueError, match="no such picture"):
            await worker.do(fail, job)
        letter = await dead.get()
    assert letter == (b"queue/jobs/dead/k", b"2 1 failed: ValueError: no such picture\0\0x")
    assert counts(server) == {"dead": 1}
    [shown] = ask(server.address, "peek", dead=True)
    assert (shown["id"], shown["reason"]) == (2, "failed: ValueError: no such picture")
    assert ask(server.address, "retry", ids=[2]) == 1
    await until_counts(server, {"ready": 1})
    assert ask(server.address, "drain") == (0 if store else 1)  # JetStream has it, and no service


@both
async def test_cancelled_worker_releases(looping: Backend, queued: Start, store: str) -> None:
    """A worker that is cancelled gives back the job in hand and those that wait behind it, uncounted."""
    server = queued()
    client, other = await looping.connect(server.address), await looping.connect(server.address)
    for _ in range(3):
        await client.do(client.raw.enqueue, "jobs", "k")
    begun = asyncio.Event()

    async def run() -> None:
        async for job in client.raw.work("jobs", credit=3):
            async with job:
                begun.set()
                await client.raw.waiter()

    task = asyncio.create_task(client.do(run))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    async with working(other, 3) as worker:
        jobs = [await worker.next() for _ in range(3)]
    if store:  # they went back to JetStream, and behind one another
        jobs.sort(key=lambda job: job.id)
    assert [(job.id, job.tries) for job in jobs] == [(1, 1), (2, 1), (3, 1)]


@pytest.mark.parametrize(
    ("place", "name"), [(Outbox, "take"), (Outbox, "ack"), (WorkCore, "end_job"), (Readers, "wake")]
)
def test_worker_that_a_signal_handler_closes(
    queued: Start, monkeypatch: pytest.MonkeyPatch, place: type, name: str
) -> None:
    """The loop ends and the jobs are released, uncounted, whatever the handler has interrupted."""
    server = queued()
    with sbus.connect(str(server.address)) as client, sbus.connect(str(server.address)) as other:
        for _ in range(5):
            client.enqueue("jobs", "k")
        interrupted = getattr(place, name)

        def interrupt(*args: Any) -> Any:
            monkeypatch.setattr(place, name, interrupted)
            client.close()
            return interrupted(*args)

        for job in client.work("jobs", credit=2):
            with job:
                monkeypatch.setattr(place, name, interrupt)
        assert client.state == "closed"
        for job in islice(other.work("jobs"), 3):
            assert job.tries == 1
            job.ack()


@both
async def test_killed_worker(native: Backend, queued: Start) -> None:
    """If a worker is killed, another one gets its job within 50 ms, unless a process is preempted."""
    server = queued("=jobs/,deliveries=9")
    client = await native.connect(server.address)
    times = []
    async with working(client) as worker:
        for _ in range(5):
            await client.do(client.raw.enqueue, "jobs", "k")
            mine = await worker.next()
            with WorkerProcess(server.address, "jobs") as killed:
                await client.do(client.raw.enqueue, "jobs", "k")
                number = await asyncio.to_thread(killed.next_job)
                assert number != mine.id
                await worker.do(mine.ack)
                start = time.perf_counter()
            job = await worker.next()
            times.append(time.perf_counter() - start)
            assert (job.id, job.tries) == (number, 2)
            await worker.do(job.ack)
    print("a killed worker's job was with another one after", [f"{1000 * each:.1f} ms" for each in times])
    assert min(times) < 0.05


async def test_worker_that_is_killed_while_there_is_no_service(native: Backend, queued: Start, spawn: Any) -> None:
    """The next service finds that the process is gone, and does not wait for the lease."""
    server = queued()
    client = await native.connect(server.address)
    with WorkerProcess(server.address, "jobs") as killed:
        await client.do(client.raw.enqueue, "jobs", "k")
        await asyncio.to_thread(killed.next_job)
        server.service.kill(signal.SIGKILL)
        server.service.wait()
    spawn(server.service.again).wait_started()
    async with working(client) as worker:
        assert (await worker.next()).tries == 2


@both
async def test_closed_connection_of_a_live_process(native: Backend, queued: Start) -> None:
    """The bus tells the service that a worker's connection has ended, though its process lives."""
    server = queued()
    client, other = await native.connect(server.address), await native.connect(server.address)
    await client.do(client.raw.enqueue, "jobs", "k")
    async with working(client) as worker:
        await worker.next()
        client.raw.works.clear()  # it says nothing
        await client.close()
    async with working(other) as worker:
        assert (await worker.next()).tries == 2


@pytest.mark.parametrize("answer", ["before", "after"])
async def test_killed_service(native: Backend, queued: Start, spawn: Any, answer: str) -> None:
    """A job outlives the service, with the worker that holds it, and an answer meanwhile is not lost."""
    server = queued()
    client, other = await native.connect(server.address), await native.connect(server.address)
    await client.do(client.raw.enqueue, "jobs", "k")
    async with working(client) as mine, working(other):
        job = await mine.next()
        server.service.kill(signal.SIGKILL)
        server.service.wait()
        if answer == "before":
            await mine.do(job.ack)
        again = spawn(server.service.again).wait_started()
        if answer == "after":
            assert counts(server) == {"out": 1}
            await mine.do(job.ack)
        await until_counts(server, {})
        assert ask(server.address, "ls")["events"].keys() <= {"acked", "stale"}
        again.stop()


@both
async def test_killed_bus(native: Backend, queued: Start, spawn: Any, bus: Any, directory: Path) -> None:
    """Workers and the service find each other again; a worker keeps the job that it holds."""
    server = queued()
    client = await native.connect(server.address, reconnect=True)
    for _ in range(2):
        await client.do(client.raw.enqueue, "jobs", "k")
    async with working(client, 2) as worker:
        first, second = await worker.next(), await worker.next()
        server.bus.kill(signal.SIGKILL)
        server.bus.wait()
        bus()
        await client.settle()
        await asyncio.to_thread(wait_until, lambda: _has_service(server.address))
        server.service.wait_log("queue jobs: connected again; the server closed the connection")
        await worker.do(first.ack)
        await until_counts(server, {"out": 1})
        assert second.is_held
        await client.do(client.raw.enqueue, "jobs", "new")
        assert (await worker.next()).key == b"new"


def _has_service(address: Any) -> bool:
    """Return whether both connections of the service are there."""
    with sbus.connect(str(address)) as client:
        return all(client.has_subscribers(f"queue/jobs/{verb}") for verb in ("put/k", "ready"))


def test_full_disk_holds_publishers_back(bus: Any, spawn: Any, directory: Path) -> None:
    """While the disk is full, publishers wait."""
    with mounted(directory / "disk", "8m") as disk:
        server = bus()
        service = spawn(QueueProcess, disk, server.address, "--queue=jobs=jobs/").wait_started()
        publisher, bystander = server.client(), server.client()
        with filled(disk):
            assert is_held_back(publisher, bystander, b"MSG jobs/k\0" + bytes(100_000))
            service.wait_log("cannot write: database or disk is full: publishers wait")
        service.wait_log("the disk takes jobs again")
        service.kill(signal.SIGKILL)
        service.wait()


@pytest.mark.parametrize("key", ["put/k", "ready", "ack", "admin/ls"])
def test_a_busy_service_holds_back_whoever_floods_it(queued: Start, key: str) -> None:
    """While the service is busy, a flood waits in its publisher's socket; another one's message soon has its turn."""
    server = queued()
    publisher, bystander = server.bus.client(), server.bus.client()
    server.service.kill(signal.SIGSTOP)
    try:
        assert is_held_back(publisher, bystander, b"MSG queue/jobs/%b\0" % key.encode() + bytes(1000))
    finally:
        server.service.kill(signal.SIGCONT)


def test_a_disk_that_is_full_of_jobs(bus: Any, spawn: Any, directory: Path) -> None:
    """Publishers wait, and workers continue, which makes room."""
    with mounted(directory / "disk", "16m") as disk:
        server = bus()
        service = spawn(QueueProcess, disk, server.address, "--queue=jobs").wait_started()
        with sbus.connect(str(server.address)) as client, sbus.connect(str(server.address)) as worker:
            with suppress(TimedOut):
                while client.enqueue("jobs", "k", bytes(50_000), timeout=1):
                    pass
            for job in islice(worker.work("jobs"), ask(server.address, "ls")["jobs"]["ready"]):
                job.ack()
            client.enqueue("jobs", "k", bytes(50_000))
        assert service.stop() == 0


def test_full_disk_loses_nothing(bus: Any, spawn: Any, directory: Path) -> None:
    """Jobs that were published while the disk was full are all there when it has room, in order."""
    with mounted(directory / "disk", "64m") as disk:
        server = bus()
        service = spawn(QueueProcess, disk, server.address, "--queue=jobs=jobs/").wait_started()
        publisher = server.client()
        with filled(disk):
            for number in range(
                200
            ):  # as many as fit the publisher's socket, for the service may read none of them now
                publisher.msg(b"jobs/k", b"%d" % number + bytes(100))
            service.wait_log("cannot write: database or disk is full: publishers wait")
        wait_until(lambda: ask(server.address, "ls")["jobs"]["ready"], lambda count: count == 200)
        assert service.stop() == 0
        service = spawn(service.again).wait_started()
        payloads = []
        with sbus.connect(str(server.address)) as worker:
            for job in islice(worker.work("jobs", 50), 200):
                payloads.append(int(job.payload.rstrip(b"\0")))
                job.ack()
        assert payloads == list(range(200))
        service.stop()


def test_a_user_has_a_bounded_number_of_jobs(queued: Start, as_root: None) -> None:
    """A user who has too many jobs is refused, with the remedy, and others are not."""
    server = queued("=jobs/,most=2")
    os.chmod(server.address, 0o777)
    stranger = server.bus.client(user=OTHER_USER)
    for number in range(3):
        stranger.msg(b"jobs/%d" % number)
    server.service.wait_log(r"no room for another job of this user \(most=2, bytes=1073741824\): start workers")
    with sbus.connect(str(server.address)) as client:
        assert [client.enqueue("jobs", "k", id=id) for id in ("x", "y", "x")] == [3, 4, 3]
        with pytest.raises(RequestFailed, match=r"no room for another job of this user \(most=2, .*\): start workers"):
            client.enqueue("jobs", "k", id="z")
    assert ask(server.address, "drain", ids=[3]) == 1
    with sbus.connect(str(server.address)) as client:
        assert client.enqueue("jobs", "k", id="z") == 5


@both
def test_stop_takes_what_is_queued(queued: Start, spawn: Any, directory: Path) -> None:
    """A service that stops has on its disk what the bus had for it, and ends with status 0."""
    server = queued("=jobs/", "--metrics-file=metrics")
    publisher = server.bus.client()
    for number in range(3000):
        publisher.msg(b"jobs/k", b"%d" % number)
    publisher.sync()
    assert server.service.stop() == 0
    assert f'sbus_queue_put_total{{bus="{server.address}",queue="jobs"}} 3000.0' in (directory / "metrics").read_text()
    spawn(server.service.again).wait_started()
    assert counts(server) == {"ready": 3000}


def test_metrics(queued: Start, directory: Path) -> None:
    """The file has the jobs by state and what has happened, for each queue."""
    server = queued("=jobs/", "--metrics-file=metrics")
    with sbus.connect(str(server.address)) as client:
        client.enqueue("jobs", "k")
    server.service.stop()
    lines = (directory / "metrics").read_text().splitlines()
    labels = f'{{bus="{server.address}",queue="jobs"}}'
    assert f"sbus_queue_jobs_ready{labels} 1.0" in lines
    assert f"sbus_queue_put_total{labels} 1.0" in lines
    assert f'sbus_queue_up{{bus="{server.address}"}} 0.0' in lines


def queue(server: Queued, *words: str) -> tuple[int, str]:
    """Run ``sbus queue``; return the exit status and all output."""
    result = run([*script("sbus"), "queue", *words, f"--socket={server.address}"])
    return result.returncode, result.stdout + result.stderr


def test_command(queued: Start, directory: Path) -> None:
    """The command puts jobs, shows them, retries dead ones and deletes them; its exit statuses are those of sbus."""
    server = queued()
    (directory / "file").write_bytes(b"from a file")
    assert queue(server, "put", "jobs", "k", "text", "--id=x") == (0, "1\n")
    assert queue(server, "put", "jobs", "k", "text", "--id=x") == (0, "1\n")
    assert queue(server, "put", "jobs", "late", f"--file={directory}/file", "--delay=1000") == (0, "2\n")
    assert queue(server, "ls", "jobs") == (0, "0 waiting, 1 ready, 1 delayed, 0 out, 0 dead\n")
    assert queue(server, "ls") == (0, "jobs: 0 waiting, 1 ready, 1 delayed, 0 out, 0 dead\n")
    status, output = queue(server, "peek", "jobs", "--json")
    assert status == 0
    first, second = (json.loads(line) for line in output.splitlines())
    assert (first["payload"], second["state"], second["payload"]) == ("text", "delayed", "from a file")
    assert queue(server, "dead", "jobs") == (3, "sbus: queue jobs has no dead job\n")
    with sbus.connect(str(server.address)) as client:
        for job in client.work("jobs"):
            job.nack("poison", "no picture\x1b[2J")
            break
    assert queue(server, "dead", "jobs") == (
        0,
        "1 k (4 B, dead, tries: 1): text\n  poison: no picture\\x1b[2J\n",
    )
    assert queue(server, "retry", "jobs", "--id=2") == (3, "sbus: queue jobs has no dead job 2\n")
    assert queue(server, "drain", "jobs", "--id=7", "--yes") == (
        3,
        "sbus: queue jobs has no waiting, ready or delayed job 7\n",
    )
    assert queue(server, "retry", "jobs", "--id=1") == (0, "1 job\n")
    assert queue(server, "drain", "jobs", "--yes") == (0, "2 jobs\n")
    assert json.loads(queue(server, "ls", "jobs", "--json")[1])["jobs"]["ready"] == 0
    status, output = queue(server, "ls", "none")
    assert (status, "no service on this bus has the queue none" in output) == (3, True)
    assert queue(server, "ls", "a/b")[0] == 2


def test_only_the_operator_looks(queued: Start, as_root: None) -> None:
    """Other users see how many jobs there are, and nothing of them."""
    server = queued("=jobs/")
    os.chmod(server.address, 0o777)
    stranger = server.bus.client(user=OTHER_USER)
    inbox = stranger.credentials + b"/sbus/reply/1"
    stranger.sub(inbox)
    for verb, answer in ((b"ls", b'+{"queue": "jobs"'), (b"peek", b"-only root, and the user of the service")):
        stranger.msg(b"queue/jobs/admin/" + verb, inbox + b"\0")
        assert stranger.recv().startswith(b"MSG " + inbox + b"\0" + answer)


def test_refusals(bus: Any, spawn: Any, directory: Path) -> None:
    """A second service of a queue or on a store, and a store that is none, end the start with one line."""
    server = bus()
    spawn(QueueProcess, directory, server.address, "--queue=jobs").wait_started()
    (directory / "text").write_text("no database" * 1000)
    for option, text in (
        ("--queue=jobs", "jobs.sqlite: another service has this store open: stop it"),
        (f"--queue=jobs,store={directory}/text", "not a store of a queue: name another file"),
        ("--queue=a=b,lease=x", "give a time"),
        ("--queue=a=", "the pattern matches the queue's own keys"),
        ("--queue=a/b", "a queue's name is"),
    ):
        refused = spawn(QueueProcess, directory, server.address, option)
        assert refused.wait() == 1
        assert text in refused.log
        assert refused.log.count("\n") == 1
    second = spawn(QueueProcess, directory, server.address, f"--queue=jobs,store={directory}/second")
    assert second.wait() == 1
    assert second.log.count("queue jobs: another service on this bus has this queue: stop it") == 1
    assert "ready" not in second.log


def test_two_services_that_start_at_once(shared: Any, spawn: Any, directory: Path) -> None:
    """Of two services of a queue, each with its own store, never both are ready, whichever asks first."""
    options = [f"--queue=twins,store={directory}/{name}" for name in ("one", "two")]
    twins = [spawn(QueueProcess, directory, shared.address, option) for option in options]
    wait_until(lambda: [bool(re.search("queue twins: (ready|another service)", twin.log)) for twin in twins], all)
    assert sum("queue twins: ready" in twin.log for twin in twins) <= 1


def test_no_queue(shared: Any) -> None:
    """On a bus without queues, ls says how to start one."""
    found = run([*script("sbus"), "queue", "ls", f"--socket={shared.address}"])
    assert (found.returncode, "no service on this bus has a queue: start one" in found.stderr) == (3, True)
