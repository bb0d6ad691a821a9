"""The jobs of one queue in a JetStream work queue, which services on many hosts share.

A service pulls as many jobs as its workers have room for, and decides about them as about its own (`sbus.queue.jobs`).
It says three times in a lease that it still has them; when it ends, the stream gives them to another one.

A job for which no worker here has room, and a dead one, *moves*: the service publishes it anew, with its number and its
tries, and then ends the old message. If that is interrupted, the job is there twice. Dead jobs are messages of the
stream that no consumer takes.

nats-server drops a message whose ID it knows, so the IDs that users choose must never be those of moves: a put has
``UID.HEX``, a move ``move.SEQ.KIND``.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from copy import copy
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qs, urlsplit

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeout
from nats.js.api import ConsumerConfig, DiscardPolicy, RetentionPolicy, StreamConfig
from nats.js.errors import APIError, NotFoundError
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread

from sbus.client.dispatch import Message
from sbus.client.queues import HEAD_ROOM, LONGEST_WHY
from sbus.errors import QueueError
from sbus.queue.jobs import Changes, Job, JobQueue, Settings
from sbus.queue.service import QueueService
from sbus.queue.store import KNOWN_SECONDS, Store

__all__ = ["JetQueueService", "JetStore"]

T = TypeVar("T")

_TIMEOUT = 5.0
_PULL_TIME = 30
"""Seconds for which nats-server remembers that jobs are wanted."""
_MOST_BYTES = 64 << 20
_AT_ONCE = 64
"""Jobs that are read from the stream or moved at the same time; the limit bounds the memory that long ones take."""
_CONSUMER = "services"


class _Held(NamedTuple):
    """A message of the stream.

    :ivar reply: where its acknowledgement goes; nothing for a dead job.
    """

    seq: int
    reply: str


def _build(job: Job, payload: bytes) -> bytes:
    return b"%d\0%b\0%b" % (job.id, job.head(), payload)


def _parse(seq: int, data: bytes) -> tuple[Job, bytes]:
    """Return the job in a message; the number of a new one is the message's.

    :raises ValueError: if it is malformed.
    """
    id, *head, payload = data.split(b"\0", 5)
    return Job.parse(int(id) or seq, b"\0".join(head), len(payload)), payload


def _is_full(error: BaseException) -> bool:
    """Return whether a stream has refused a message because of its limits."""
    return isinstance(error, APIError) and "exceed" in (error.description or "")


async def _finish_all(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Await calls, each to its end: one that is still under way could not be repeated.

    :raises BaseException: what the first one has raised.
    """
    for problem in await asyncio.gather(*calls, return_exceptions=True):
        if problem is not None:
            raise problem


class JetStore(Store):
    """An open stream: the calls of `Store`, each of which waits for nats-server.

    :param settings: the store is ``nats://…`` or ``tls://…``, with ``?creds=FILE`` for a login that is not in the URL.
    :param timeout: seconds in which nats-server answers, or the service asks again.
    :ivar most_bytes: bytes of jobs that one request brings at most, and that may wait in the service for workers when
        it makes another one.
    :ivar on_arrival: called, in a thread, when there is something to `take`, or more to `want`.
    :ivar max_payload: bytes of the longest message.
    :raises QueueError: if nats-server does not answer, or the stream is another program's.
    """

    def __init__(self, settings: Settings, *, timeout: float = _TIMEOUT, most_bytes: int = _MOST_BYTES) -> None:
        url = settings.store
        self.most_bytes = most_bytes
        self._timeout = timeout
        self.path = urlsplit(url)._replace(netloc=urlsplit(url).netloc.rpartition("@")[2]).geturl()
        self._stream = "sbus-queue-" + settings.name.replace(".", "=2E")
        self._settings = settings
        self.on_arrival: Callable[[], object] = lambda: None
        self._held: dict[int, _Held] = {}
        self._arrived: list[Job] = []
        self._late: list[Job] = []  # that the stream had no room for
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._pulled = 0  # jobs that nats-server was asked for and that have not come
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sbus.queue.nats", daemon=True)
        self._thread.start()
        self._nats = Client()
        self._keeper = asyncio.run_coroutine_threadsafe(self._keep(), self._loop)
        try:
            self._do(self._connect(url))
        except BaseException:
            self.close()
            raise

    def _do(self, call: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run_coroutine_threadsafe(call, self._loop).result()
        except (NatsError, OSError, TimeoutError) as e:
            raise QueueError(f"{self.path}: {str(e) or type(e).__name__}: is nats-server up, with JetStream?") from e

    async def _connect(self, url: str) -> None:
        async def ignore(error: Exception) -> None:
            """Each call raises its own errors."""

        async def reconnected() -> None:
            self._pulled = 0
            self.on_arrival()

        creds = parse_qs(urlsplit(url).query).get("creds", [None])[0]
        async with asyncio.timeout(self._timeout):
            await self._nats.connect(
                [urlsplit(url)._replace(query="").geturl()],
                name=self._stream,
                error_cb=ignore,
                reconnected_cb=reconnected,
                max_reconnect_attempts=-1,
                reconnect_time_wait=1,
                pending_size=0,  # what is not sent at once is an error, and never sent later
                user_credentials=creds,
            )
        self.max_payload = self._nats.max_payload
        self._js = self._nats.jetstream(timeout=self._timeout)
        await self._find_stream()
        self._inbox = self._nats.new_inbox()
        await self._nats.subscribe(self._inbox, cb=self._come)

    async def _find_stream(self) -> None:
        """Find the stream of the queue, or make it, and its consumer.

        :raises QueueError: if the stream is another program's.
        """
        try:
            config = (await self._js.stream_info(self._stream)).config
        except NotFoundError:
            subjects = [f"{self._stream}.job", f"{self._stream}.dead"]
            new = StreamConfig(
                name=self._stream,
                subjects=subjects,
                retention=RetentionPolicy.WORK_QUEUE,
                max_bytes=self._settings.most_bytes,
                discard=DiscardPolicy.NEW,  # else the oldest jobs would be lost
                duplicate_window=KNOWN_SECONDS,
            )
            config = (await self._js.add_stream(new)).config
        if config.retention != RetentionPolicy.WORK_QUEUE:
            raise QueueError(f"{self.path}: the stream {self._stream} is no work queue: rename or delete it")
        if (longest := config.max_msg_size or 0) > 0:
            self.max_payload = min(self.max_payload, longest)
        consumer = ConsumerConfig(
            durable_name=_CONSUMER,
            filter_subject=f"{self._stream}.job",
            ack_wait=self._settings.lease,
            max_ack_pending=-1,
        )
        await self._js.add_consumer(self._stream, consumer)

    def close(self) -> None:
        """Disconnect."""
        self._keeper.cancel()
        with suppress(QueueError):
            self._do(self._nats.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # --- jobs that come ----------------------------------------------------------------------

    def want(self, count: int) -> None:
        """Ask for jobs, in addition to those that have come."""
        asyncio.run_coroutine_threadsafe(self._pull(count), self._loop)

    async def _pull(self, count: int) -> None:
        batch = count - self._pulled
        if batch > 0 and self._nats.is_connected:
            self._pulled += batch
            limits = {"batch": batch, "max_bytes": self.most_bytes, "expires": _PULL_TIME * 10**9}
            subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{_CONSUMER}"
            await self._nats.publish(subject, json.dumps(limits).encode(), reply=self._inbox)

    async def _come(self, message: Msg) -> None:
        if message.reply:
            self._pulled -= 1
            await self._receive(message)
        else:  # the end of a request, with the number of jobs that it has not brought
            self._pulled = max(0, self._pulled - int((message.headers or {}).get("Nats-Pending-Messages", 0)))
        self.on_arrival()

    async def _receive(self, message: Msg) -> None:
        seq, delivered = message.metadata.sequence.stream, message.metadata.num_delivered
        try:
            job, payload = _parse(seq, message.data)
        except ValueError:
            await message.term()
            return
        held = self._held.get(job.id)
        if held is not None and not held.reply and held.seq > seq:
            await message.ack()  # the service that moved it to the dead ones was interrupted
            return
        self._held[job.id] = _Held(seq, message.reply)
        if held is None or not held.reply:
            job.tries += delivered - 1
            if job.due <= time.time():  # the payload of a delayed job would stay in memory for long
                job.payload = payload
            self._arrived.append(job)

    def take(self) -> list[Job]:
        """Return the jobs that have come since the last call."""
        arrived, self._arrived = self._arrived, []
        return arrived

    async def _keep(self) -> None:
        """Say that this service still has its jobs."""
        while True:
            await asyncio.sleep(self._settings.lease / 3)
            for held in tuple(self._held.values()):
                if held.reply and self._nats.is_connected:
                    await self._nats.publish(held.reply, b"+WPI")

    # --- jobs that go ------------------------------------------------------------------------

    def put(self, jobs: list[Job], numbers: dict[int, tuple[int, bool]]) -> None:
        """Publish new jobs.

        :param numbers: gets the number of each job, 0 if the stream is full, and whether it was known; those that have
            one are not sent again.
        """

        async def put(index: int, job: Job) -> None:
            id = f"{job.uid}.{job.ident.hex()}" if job.ident else ""
            try:
                numbers[index] = await self._publish("job", id, _build(job, job.payload or b""))
            except APIError as e:
                if not _is_full(e):
                    raise
                numbers[index] = 0, False  # waiting would keep workers from making room

        self._do(_finish_all([put(index, job) for index, job in enumerate(jobs) if index not in numbers]))

    async def _publish(self, kind: str, id: str, text: bytes) -> tuple[int, bool]:
        answer = await self._js.publish(f"{self._stream}.{kind}", text, headers={"Nats-Msg-Id": id} if id else None)
        return answer.seq, bool(answer.duplicate)

    async def _move(self, job: Job, kind: str, held: _Held) -> int:
        """Publish a job anew, unless that was done and only its end is missing; return the new message's number.

        :raises QueueError: if nats-server drops it for a message that is not this job.
        """
        id = f"move.{held.seq}.{kind}"
        payload = await self._payload(held) if job.payload is None else job.payload
        seq, is_known = await self._publish(kind, id, _build(job, payload))
        if is_known:
            with suppress(NotFoundError):  # it has moved, and another service was faster
                known = await self._js.get_msg(self._stream, seq)
                if known.subject != f"{self._stream}.{kind}" or not (known.data or b"").startswith(b"%d\0" % job.id):
                    text = f"message {seq} of {self._stream} has the ID {id} and is not job {job.id}"
                    raise QueueError(f"{text}: end the program that wrote it")
        return seq

    def write(self, changes: Changes, now: float) -> None:
        """Move the jobs that leave this service, and the dead ones; end those that are done."""
        if any(changes):
            self._do(self._write(changes))

    async def _write(self, changes: Changes) -> None:
        async def move(job: Job) -> None:
            """Move a job; one for which the stream has no room goes with the next changes, which may make some."""
            kind = "dead" if job.reason else "job"
            held = self._held.get(job.id)
            if held is None or (kind == "dead" and not held.reply):
                return  # it has moved
            del self._held[job.id]  # it may come back at once
            try:
                async with self._gate:
                    seq = await self._move(job, kind, held)
                    await self._end(held)
            except NotFoundError:
                return  # another service has moved it already
            except BaseException as e:
                self._held.setdefault(job.id, held)
                if not _is_full(e):
                    raise
                late.append(job)
                return
            if kind == "dead":
                self._held[job.id] = _Held(seq, "")

        async def end(id: int) -> None:
            if (held := self._held.get(id)) is not None:
                await self._end(held)
                self._held.pop(id, None)

        late: list[Job] = []
        await _finish_all(map(end, changes.gone))
        moving = {job.id: job for job in (*self._late, *changes.changed)}  # the latest word counts
        await _finish_all(map(move, moving.values()))
        self._late = late

    async def _end(self, held: _Held) -> None:
        if held.reply:
            with suppress(NatsTimeout):  # after a crash, nats-server does not know each delivery
                await self._nats.request(held.reply, b"+ACK", timeout=self._timeout)
                return
        try:
            await self._js.delete_msg(self._stream, held.seq)
        except APIError:
            with suppress(NotFoundError):  # another service was faster
                await self._js.get_msg(self._stream, held.seq)
                raise

    # --- what is there -----------------------------------------------------------------------

    def jobs(self) -> list[Job]:
        """Return the dead jobs of all services."""
        return self._do(self._jobs())

    async def _jobs(self) -> list[Job]:
        known = {id: held for id, held in self._held.items() if not held.reply}
        jobs: list[Job] = []
        seq = 1
        while True:
            try:
                message = await self._js.get_msg(self._stream, seq, f"{self._stream}.dead", next=True)
            except NotFoundError:
                break
            seq = (message.seq or 0) + 1
            with suppress(ValueError):  # another program's
                job, _ = _parse(seq - 1, message.data or b"")
                jobs.append(job)
                self._held[job.id] = _Held(seq - 1, "")
        for id, held in known.items():
            if self._held.get(id) is held:  # else it was found again
                self._held.pop(id, None)
        return jobs

    def counts(self) -> tuple[int, int]:
        """Return how many jobs no service has, and how many are dead."""

        async def ask() -> tuple[int, int]:
            consumer = await self._js.consumer_info(self._stream, _CONSUMER)
            dead = f"{self._stream}.dead"
            stream = await self._js.stream_info(self._stream, subjects_filter=dead)
            return consumer.num_pending or 0, (stream.state.subjects or {}).get(dead, 0)

        return self._do(ask())

    def payloads(self, ids: Iterable[int]) -> dict[int, bytes]:
        """Return the payloads of those jobs that this service has and that are still in the stream.

        It forgets jobs that another service has done.
        """

        async def read(id: int) -> None:
            if (held := self._held.get(id)) is not None:
                async with self._gate:
                    try:
                        found[id] = await self._payload(held)
                    except NotFoundError:  # another service was faster
                        if self._held.get(id) is held:
                            del self._held[id]

        found: dict[int, bytes] = {}
        self._do(_finish_all(map(read, ids)))
        return found

    async def _payload(self, held: _Held) -> bytes:
        """Return the payload of a message.

        :raises NotFoundError: if the stream no longer has it.
        """
        message = await self._js.get_msg(self._stream, held.seq)
        return _parse(held.seq, message.data or b"")[1]


class _Jobs(JobQueue):
    """The jobs that a service has."""

    def leave(self, jobs: list[Job]) -> None:
        """Let any service have jobs."""
        self._changed |= {job.id: job for job in jobs}
        self.forget(jobs)

    def retry(self, jobs: list[Job]) -> None:
        """Make dead jobs new ones, for any service."""
        super().retry(jobs)
        self.leave(jobs)

    def renewed(self, job: Job) -> None:
        """Take a job of the stream; anything known of it before is out of date."""
        if (known := self.jobs.get(job.id)) is not None:
            self.forget([known])
        self.add(job)

    def take_changes(self) -> Changes:
        """Return the changes for the stream: jobs that leave, dead ones, and those that are done."""
        changes = super().take_changes()
        moved = [copy(job) for job in changes.changed if job.reason or job.id not in self.jobs]
        return Changes(changed=moved, gone=changes.gone)


class JetQueueService(QueueService):
    """A queue whose jobs are in JetStream, while the service runs."""

    _store: JetStore
    jobs: _Jobs
    _elsewhere = (0, 0)

    @staticmethod
    def open_store(settings: Settings) -> JetStore:
        """Open the stream of a queue, as `QueueService.open_store` does."""
        return JetStore(settings)

    def _load(self) -> None:
        self._puts: list[tuple[Message | None, Job]] = []
        self._counting: Deferred[None] | None = None
        self._store = self.open_store(self.settings)
        self._store.on_arrival = lambda: self._reactor.callFromThread(self._turns.begin)
        self.jobs = _Jobs(self.settings, self._store.jobs())

    async def _call(self, do: Callable[[], T]) -> T:
        return await deferToThread(do)

    def _longest(self) -> int:
        return min(super()._longest(), self._store.max_payload - HEAD_ROOM - LONGEST_WHY)

    def _admit(self, request: Message | None, job: Job) -> None:
        self._puts.append((request, job))

    async def _turn(self) -> None:
        await self._publish()
        self._share()
        await super()._turn()

    async def _publish(self) -> None:
        """Put the jobs that have come into the stream."""
        puts, self._puts = self._puts, []
        if not puts:
            return
        numbers: dict[int, tuple[int, bool]] = {}
        await self._on_disk(lambda: self._store.put([job for _, job in puts], numbers))
        for index, (request, job) in enumerate(puts):
            number, is_double = numbers[index]
            if not number:
                self._refuse(request, job, self._full)
                continue
            self.jobs.events["doubles" if is_double else "put"] += 1
            if request is not None:
                self._answers.append((request, b"+%d" % number))

    def _share(self) -> None:
        """Take the jobs that have come from the stream, ask for more, or leave them to other services."""
        jobs, store = self.jobs, self._store
        for job in store.take():
            jobs.renewed(job)
        working = [each for each in jobs.workers.values() if each.credit and not each.is_silent and self.running]
        room = sum(worker.credit - len(worker.jobs) for worker in working if worker.has_room())
        pending = jobs.find_all("ready", "delayed")
        idle = [job for job in pending if not working or job.due <= self._now()]
        if idle and not room:
            jobs.leave(idle)
        store.want(max(0, room - len(idle)) if sum(job.size for job in idle) < store.most_bytes else 0)

    async def _count_elsewhere(self) -> None:
        try:
            self._elsewhere = await deferToThread(self._store.counts)
        except QueueError:
            pass  # what was known stands
        finally:
            self._counting = None

    async def _find_dead(self) -> None:
        dead = {job.id: job for job in await self._look(self._store.jobs)}
        self.jobs.forget([job for job in self.jobs.find_all("dead") if job.id not in dead])
        for id, job in dead.items():
            if id not in self.jobs.jobs:
                self.jobs.renewed(job)

    async def _summary(self) -> dict[str, Any]:
        if self._counting is None:
            self._counting = Deferred.fromCoroutine(self._count_elsewhere())
        await self._counting  # one for all that ask meanwhile
        summary = await super()._summary()
        waiting, summary["jobs"]["dead"] = self._elsewhere
        summary["jobs"]["ready"] += waiting
        return summary
