"""Queues in JetStream: services on two hosts, here two buses, that share a stream, and what happens when one ends."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nats.errors import TimeoutError as NatsTimeout
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock

import sbus
from sbus.errors import QueueError, RequestFailed
from sbus.queue.jetstream import JetQueueService, JetStore, _Jobs
from sbus.queue.jobs import Changes, Job, Settings
from tests.integration.clients.backends import Backend
from tests.integration.queue.conftest import Queued
from tests.integration.queue.test_queue import until_counts, working
from tests.support.harness import Bus
from tests.support.nats import NatsServer
from tests.support.queues import QueueProcess, WorkerProcess, ask
from tests.support.waiting import wait_until

Start = Callable[[str], Queued]


@pytest.fixture
def host(spawn: Callable[..., Any], directory: Path, nats: NatsServer) -> Start:
    """Start a host: ``host('a')``."""

    def start(name: str) -> Queued:
        place = directory / name
        place.mkdir()
        server = spawn(Bus, place).wait_started()
        option = f"--queue=jobs=jobs/,lease=1s,deliveries=3,store={nats.url}"
        return Queued(server, spawn(QueueProcess, place, server.address, option).wait_started())

    return start


def ready(server: Queued) -> int:
    """The jobs that a worker could get."""
    count: int = ask(server.address, "ls")["jobs"]["ready"]
    return count


async def test_hosts_share_a_queue(native: Backend, host: Start) -> None:
    """A job of one host goes to a worker on another one, with its author; an ID is known on both."""
    a, b = host("a"), host("b")
    publisher, client = await native.connect(a.address), await native.connect(b.address)
    other = await native.connect(b.address)
    assert await publisher.do(publisher.raw.enqueue, "jobs", "k y", b"\0x", id="x") == 1
    assert await other.do(other.raw.enqueue, "jobs", "k y", b"\0x", id="x") == 1
    async with working(client) as worker:
        job = await worker.next()
        assert (job.id, job.key, job.payload, job.tries) == (1, b"k y", b"\0x", 1)
        assert job.sender.pid == os.getpid()
        await worker.do(job.ack)
    assert (ready(a), ready(b)) == (0, 0)


async def test_a_host_that_ends(native: Backend, host: Start) -> None:
    """When its service is killed, its jobs are with another host after the lease, and the delivery counts."""
    a, b = host("a"), host("b")
    client = await native.connect(a.address)
    with WorkerProcess(b.address, "jobs") as idle:
        await client.do(client.raw.enqueue, "jobs", "k", b"x")
        assert await asyncio.to_thread(idle.next_job) == 1
        b.service.kill(signal.SIGKILL)
        b.service.wait()
        async with working(client) as worker:
            job = await worker.next()
            assert (job.id, job.payload, job.tries) == (1, b"x", 2)
            await worker.do(job.ack)


async def test_a_service_keeps_its_jobs(native: Backend, host: Start) -> None:
    """A job that is renewed stays with its worker when nats-server's own time has ended, and so does a delayed one."""
    a, b = host("a"), host("b")
    mine, other = await native.connect(a.address), await native.connect(b.address)
    await mine.do(mine.raw.enqueue, "jobs", "long")
    async with working(mine) as worker, working(other) as idle:
        job = await worker.next()
        await mine.do(mine.raw.enqueue, "jobs", "late", delay=3)
        waiting = asyncio.ensure_future(idle.next())
        while not waiting.done():
            await worker.do(job.renew)
            await asyncio.wait((waiting,), timeout=0.3)
        assert (await waiting).key == b"late"
        assert (await waiting).tries == 1
        await worker.do(job.ack)
        await idle.do((await waiting).ack)
    assert ask(a.address, "ls")["events"].get("stale", 0) == 0


async def test_a_delayed_job_that_another_host_has_done(native: Backend, host: Start, nats: NatsServer) -> None:
    """Its first host was cut off meanwhile: it forgets the job when that is due, and its worker gets the next one."""
    a = host("a")
    client = await native.connect(a.address)
    async with working(client) as worker:
        waiting = asyncio.ensure_future(worker.next())
        id = await client.do(client.raw.enqueue, "jobs", "late", delay=2)
        await until_counts(a, {"delayed": 1})
        other = JetStore(Settings(name="jobs", store=nats.url, lease=1))
        other._do(other._js.delete_msg(other._stream, id))
        other.close()
        await until_counts(a, {})
        await client.do(client.raw.enqueue, "jobs", "next")
        job = await waiting
        assert (job.key, job.tries) == (b"next", 1)
        await worker.do(job.ack)


async def test_dead_letters_are_everywhere(native: Backend, host: Start) -> None:
    """Each host shows the dead jobs of all; one that is retried goes to any host, and is dead no more."""
    a, b = host("a"), host("b")
    client, other = await native.connect(a.address), await native.connect(b.address)
    dead = await client.subscribe("queue/jobs/dead/")
    for _ in range(2):
        await client.do(client.raw.enqueue, "jobs", "k", b"x")
    async with working(client, 2) as worker:
        for _ in range(2):
            await worker.do((await worker.next()).nack, "poison", "no\npicture")
        letters = [await dead.get() for _ in range(2)]
    assert letters[0] == (b"queue/jobs/dead/k", b"1 1 poison: no\npicture\0x")
    shown = ask(b.address, "peek", dead=True)
    assert [(each["id"], each["reason"], each["payload"]) for each in shown] == [
        (1, "poison: no\npicture", "x"),
        (2, "poison: no\npicture", "x"),
    ]
    assert ask(b.address, "retry", ids=[1]) == 1
    assert [each["id"] for each in ask(a.address, "peek", dead=True)] == [2]
    async with working(other) as worker:
        job = await worker.next()
        assert (job.id, job.tries) == (1, 1)
        await worker.do(job.ack)
    assert ask(a.address, "drain", dead=True) == 1
    assert ask(b.address, "peek", dead=True) == []


def test_a_server_that_is_away_holds_publishers_back(host: Start, nats: NatsServer, spawn: Any) -> None:
    """Jobs that were published meanwhile are all there when nats-server is back; none is there twice."""
    a = host("a")
    publisher = a.bus.client()
    publisher.msg(b"jobs/k", b"0")
    publisher.sync()
    wait_until(lambda: ready(a), lambda count: count == 1)
    nats.kill_now()
    for number in range(1, 200):  # the sockets have room for these, also if the service notices at once
        publisher.msg(b"jobs/k", b"%d" % number)
    publisher.sync()
    a.service.wait_log("cannot write: .*: publishers wait")
    spawn(nats.again).wait_started()
    a.service.wait_log("the disk takes jobs again")
    payloads: list[int] = []
    with sbus.connect(str(a.address)) as client:
        for job in client.work("jobs", 100):
            payloads.append(int(job.payload))
            job.ack()
            if len(payloads) == 200:
                break
    assert sorted(payloads) == list(range(200))  # a pull that failed leaves its jobs for the next one
    assert a.service.stop() == 0


@pytest.mark.parametrize("store", ["jetstream"], indirect=True)
def test_a_full_stream(queued: Callable[..., Queued]) -> None:
    """A stream that the service makes has the bytes of the queue: jobs beyond are refused until workers make room."""
    server = queued("=jobs/,bytes=64K")
    with sbus.connect(str(server.address)) as client:
        for _ in range(6):
            client.enqueue("jobs", "k", bytes(10_000))
        with pytest.raises(RequestFailed, match=r"no room for another job .*bytes=65536\): start workers"):
            client.enqueue("jobs", "k", bytes(10_000))
        for job in client.work("jobs"):
            job.ack()
            break
        wait_until(lambda: ready(server), lambda count: count == 5)
        client.enqueue("jobs", "k", bytes(10_000))


@pytest.mark.parametrize("store", ["jetstream"], indirect=True)
def test_a_full_stream_and_a_dead_job(queued: Callable[..., Queued]) -> None:
    """A job dies although the stream has no room for it: acks are taken meanwhile, and make some."""
    server = queued("=jobs/,bytes=64K")
    with sbus.connect(str(server.address)) as client:
        for _ in range(6):
            client.enqueue("jobs", "k", bytes(10_000))
        with pytest.raises(RequestFailed, match="no room"):
            client.enqueue("jobs", "k", bytes(10_000))
        for job in client.work("jobs"):
            if job.id == 1:
                job.nack("poison", "w" * 3_000)
            else:
                job.ack()
            if job.id == 6:
                break
        wait_until(lambda: ask(server.address, "ls")["jobs"], lambda jobs: (jobs["ready"], jobs["out"]) == (0, 0))
        wait_until(lambda: len(ask(server.address, "peek", dead=True)), lambda count: count == 1)
        client.enqueue("jobs", "k", bytes(10_000))


@pytest.fixture
def stream(nats: NatsServer) -> Iterator[JetStore]:
    """The stream of a queue, without its service."""
    store = JetStore(Settings(name="jobs", store=nats.url))
    yield store
    store.close()


def put(stream: JetStore, uid: int = 0, ident: bytes = b"") -> int:
    """Put a job into the stream, and return its number."""
    numbers: dict[int, tuple[int, bool]] = {}
    stream.put([Job(0, b"k", b"1 2 3", uid, 2, b"x", ident=ident)], numbers)
    return numbers[0][0]


def take(stream: JetStore, count: int) -> dict[int, Job]:
    """Return this number of jobs, as a service gets them."""
    stream.want(count)
    taken: list[Job] = []
    wait_until(lambda: taken.extend(stream.take()), lambda _: len(taken) == count)
    for job in taken:
        job.reason = "poison: bad"
    return {job.id: job for job in taken}


def test_no_id_of_a_user_is_that_of_a_move(stream: JetStore) -> None:
    """Whatever IDs users choose, another user's job is among the dead ones when it dies."""
    chosen = [(put(stream, uid, b"\xde\xad"), put(stream, uid, b"")) for uid in range(1, 9)]
    everything = {id for pair in chosen for id in pair}
    assert everything == set(range(1, 17))
    stream.write(Changes(changed=list(take(stream, len(everything)).values())), 0.0)
    assert {job.id for job in stream.jobs()} == everything


def test_a_job_that_dies_while_an_operator_looks(stream: JetStore) -> None:
    """It is among the dead ones of the stream, though the operator's list, which was made before, does not have it."""
    id = put(stream)
    [job] = take(stream, 1).values()
    job.reason = ""
    jobs = _Jobs(Settings())
    jobs.ready(b"w", 0, 1, 1, {})
    jobs.renewed(job)
    jobs.sent(jobs.advance(0.0), 0.0)
    jobs.take_changes()
    jobs.nack(job, "poison", "bad", 0.0)
    jobs.forget([job])
    stream.write(jobs.take_changes(), 0.0)
    assert [each.id for each in stream.jobs()] == [id]


@pytest.mark.parametrize("is_there", [True, False], ids=["there", "deleted"])
def test_a_move_that_is_repeated(stream: JetStore, monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    """A move whose second half failed is completed, also if the dead job was deleted meanwhile."""
    id = put(stream)
    dead = Changes(changed=[take(stream, 1)[id]])

    async def fail(held: Any) -> None:
        raise NatsTimeout

    with monkeypatch.context() as patch:
        patch.setattr(stream, "_end", fail)
        with pytest.raises(QueueError, match="is nats-server up"):
            stream.write(dead, 0.0)
    if not is_there:
        stream._do(stream._js.delete_msg(stream._stream, 2))
    stream.write(dead, 0.0)
    assert [job.id for job in stream.jobs()] == [id] * is_there
    assert stream._do(stream._js.stream_info(stream._stream)).state.messages == is_there


def test_a_delivery_that_nats_server_has_forgotten(stream: JetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job is done, also if a crash has cost nats-server the deliveries of the consumer: it answers no ack then."""
    id = put(stream)
    take(stream, 1)
    stream._do(stream._js.delete_consumer(stream._stream, "services"))
    stream._do(stream._find_stream())
    monkeypatch.setattr(stream, "_timeout", 0.3)  # for that ack alone
    stream.write(Changes(gone=[id]), 0.0)
    assert stream._do(stream._js.stream_info(stream._stream)).state.messages == 0


def test_moves_that_fail_one_after_the_other(stream: JetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A move that fails while a later one has failed already is repeated, too."""
    first, second = put(stream), put(stream)
    dead = Changes(changed=list(take(stream, 2).values()))
    second_failed = asyncio.Event()

    async def fail(job: Job, kind: str, held: Any) -> int:
        if job.id == first:
            await second_failed.wait()
        else:
            second_failed.set()
        raise NatsTimeout

    with monkeypatch.context() as patch:
        patch.setattr(stream, "_move", fail)
        with pytest.raises(QueueError, match="is nats-server up"):
            stream.write(dead, 0.0)
    stream.write(dead, 0.0)
    assert [job.id for job in stream.jobs()] == [first, second]


def test_a_message_in_the_place_of_a_move(stream: JetStore) -> None:
    """If another program has taken the ID of a move, the job stays, and the error names the message."""
    id = put(stream)
    jobs = take(stream, 1)
    headers = {"Nats-Msg-Id": f"move.{id}.dead"}
    stream._do(stream._js.publish(f"{stream._stream}.dead", b"other", headers=headers))
    with pytest.raises(QueueError, match=r"message 2 .* has the ID move\.1\.dead and is not job 1: end the"):
        stream.write(Changes(changed=[jobs[id]]), 0.0)
    assert stream.payloads([id]) == {id: b"x"}
    assert stream._do(stream._js.stream_info(stream._stream)).state.messages == 2


def test_a_job_that_comes_back_often_is_not_dead() -> None:
    """A job of hosts that were killed goes to a worker, however often: perhaps none has had it yet."""
    jobs = _Jobs(Settings(deliveries=2))
    jobs.renewed(Job(1, b"k", b"1 2 3", 0, 2, tries=5))
    assert jobs.counts() == {"waiting": 0, "ready": 1, "delayed": 0, "out": 0, "dead": 0}


def test_dead_jobs_that_another_host_has_deleted(stream: JetStore, nats: NatsServer) -> None:
    """Another host forgets such jobs when it looks for dead jobs again."""
    id = put(stream)
    stream.write(Changes(changed=[take(stream, 1)[id]]), 0.0)
    other = JetStore(Settings(name="jobs", store=nats.url))
    assert [job.id for job in other.jobs()] == [id]
    stream.write(Changes(gone=[id]), 0.0)
    assert (other.jobs(), other.payloads([id])) == ([], {})
    other.close()


def test_payloads_of_jobs_that_wait_long(stream: JetStore) -> None:
    """A service keeps the payloads of ready jobs in memory; it reads those of delayed and dead jobs from the stream."""
    jobs = [Job(0, b"k", b"1 2 3", 0, 2, bytes(50_000), due) for due in (0.0, time.time() + 3600)]
    stream.put(jobs, {})
    taken = take(stream, 2)
    assert [taken[id].payload for id in (1, 2)] == [bytes(50_000), None]
    taken[1].payload = None
    stream.write(Changes(changed=list(taken.values())), 0.0)
    assert [job.payload for job in stream.jobs()] == [None, None]
    assert len(repr(stream._held)) < 5_000
    assert stream.payloads([1, 2]) == {1: bytes(50_000), 2: bytes(50_000)}


def test_a_stream_with_a_limit_for_each_message(stream: JetStore, nats: NatsServer) -> None:
    """Such a limit is one for jobs; one that was set meanwhile stops no other jobs."""
    info = stream._do(stream._js.stream_info(stream._stream))
    stream._do(stream._js.update_stream(info.config, max_msg_size=5_000))
    numbers: dict[int, tuple[int, bool]] = {}
    stream.put([Job(0, b"k", b"1 2 3", 0, 2, bytes(size)) for size in (6_000, 1)], numbers)
    assert numbers == {0: (0, False), 1: (1, False)}
    other = JetStore(Settings(name="jobs", store=nats.url))
    assert other.max_payload == 5_000
    other.close()


def test_jobs_that_wait_here_have_bounded_bytes() -> None:
    """However much credit workers have, a service asks for no more jobs while long ones wait for them."""
    wanted: list[int] = []
    service = JetQueueService(Clock(), "bus", Settings(name="jobs"), lambda: None, 100_000)
    service.running = True
    service.jobs = _Jobs(Settings())
    service.jobs.ready(b"w", 0, 1, 10, {})
    for size in (1_000, 2_000):
        come = [Job(size, b"k", b"1 2 3", 0, size)]
        store: Any = SimpleNamespace(take=lambda come=come: come, want=wanted.append, most_bytes=3_000)
        service._store = store
        service._share()
    assert wanted == [9, 0]


def test_a_request_for_jobs_has_bounded_bytes(nats: NatsServer) -> None:
    """Of long jobs come fewer than were asked for, and the next request brings the others."""
    stream = JetStore(Settings(name="jobs", store=nats.url), most_bytes=15_000)
    stream.put([Job(0, b"k", b"1 2 3", 0, 2, bytes(10_000)) for _ in range(3)], {})
    come: list[int] = []
    stream.on_arrival = lambda: come.append(len(stream._held)) if not stream._pulled else None
    for count in (1, 2):
        stream.want(10)
        wait_until(lambda: list(come), lambda found, count=count: found[-1:] == [count])  # type: ignore[misc]
    stream.close()


def test_a_stranger_who_asks_costs_nothing() -> None:
    """Whoever may not look at jobs is refused before the service asks nats-server for the dead ones."""
    service = JetQueueService(Clock(), "bus", Settings(name="jobs"), lambda: None, 100_000)
    request: Any = SimpleNamespace(key=b"queue/jobs/admin/peek", payload=b"", sender=SimpleNamespace(uid=12_345))
    answer: Any = Deferred.fromCoroutine(service._asked(request))
    with pytest.raises(RequestFailed, match="only root"):
        answer.result.raiseException()
    answer.addErrback(lambda _: None)


@pytest.mark.slow
def test_refusals(bus: Any, spawn: Any, directory: Path) -> None:
    """Without nats-server the start ends with one line."""
    refused = spawn(QueueProcess, directory, bus().address, "--queue=jobs,store=nats://me:secret@127.0.0.1:1")
    assert refused.wait() == 1
    assert "nats://127.0.0.1:1: TimeoutError: is nats-server up, with JetStream?" in refused.log
    assert refused.log.count("\n") == 1
