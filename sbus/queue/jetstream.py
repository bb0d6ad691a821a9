"""The jobs of one queue in a JetStream work queue, which services on many hosts share.

A service pulls as many jobs as its workers have room for, and decides about them as about its own (`sbus.queue.jobs`).
It says three times in a lease that it still has them; when it ends, the stream gives them to another one.

A job for which no worker here has room, and a dead one, *moves*: the service publishes it anew, with its number and its
tries, and then ends the old message. If that is interrupted, the job is there twice. Dead jobs are messages of the
stream that no consumer takes.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qs, urlsplit

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.api import ConsumerConfig, DiscardPolicy, RetentionPolicy, StreamConfig
from nats.js.errors import APIError, NotFoundError
from twisted.internet.threads import deferToThread

from sbus.client.api import Request
from sbus.client.dispatch import Message
from sbus.errors import QueueError
from sbus.queue.jobs import Changes, Job, JobQueue, Row, Settings, to_row
from sbus.queue.service import Put, QueueService
from sbus.queue.store import KNOWN_SECONDS, Ident, Store

__all__ = ["JetQueueService", "JetStore"]

T = TypeVar("T")

_TIMEOUT = 5.0
"""Seconds in which nats-server answers, or the service asks again."""
_PULL_TIME = 30
"""Seconds for which nats-server remembers that jobs are wanted."""
_CONSUMER = "services"
_HEAD_ROOM = 512
"""Bytes that what is known of a job may take of a message."""


class _Held(NamedTuple):
    """A message of the stream.

    :ivar reply: where its acknowledgement goes; nothing for a dead job.
    """

    seq: int
    reply: str
    payload: bytes


def _build(row: Row, payload: bytes) -> bytes:
    id, key, sender, uid, _, due, tries, _, reason = row
    return b"%d %d %.17g %d %b %b\0%b\0%b" % (id, tries, due, uid, sender, key, reason.encode(), payload)


def _parse(seq: int, data: bytes) -> tuple[Row, bytes]:
    """Return the job in a message; the number of a new one is the message's.

    :raises ValueError: if it is malformed.
    """
    head, reason, payload = data.split(b"\0", 2)
    id, tries, due, uid, number, credentials, key = head.split(b" ", 6)
    sender = b"%b %b" % (number, credentials)
    known = int(id) or seq, key, sender, int(uid), len(key) + len(payload), float(due), int(tries), b"", reason.decode()
    return known, payload


class JetStore(Store):
    """An open stream: the calls of `Store`, each of which waits for nats-server.

    :param settings: the store is ``nats://…`` or ``tls://…``, with ``?creds=FILE`` for a login that is not in the URL.
    :ivar on_arrival: called, in a thread, when there is something to `take`.
    :ivar max_payload: bytes of the longest message.
    :raises QueueError: if nats-server does not answer, or the stream is another program's.
    """

    def __init__(self, settings: Settings) -> None:
        url = settings.store
        self.path = urlsplit(url)._replace(netloc=urlsplit(url).netloc.rpartition("@")[2]).geturl()
        self._stream = "sbus-queue-" + settings.name.replace(".", "=2E")
        self._settings = settings
        self.on_arrival: Callable[[], object] = lambda: None
        self._held: dict[int, _Held] = {}
        self._arrived: list[Row] = []
        self._pulled = self._wanted = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sbus.queue.nats", daemon=True)
        self._thread.start()
        self._nats = Client()
        self._keeper: asyncio.Future[None] | None = None
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
            await self._pull()

        creds = parse_qs(urlsplit(url).query).get("creds", [None])[0]
        async with asyncio.timeout(_TIMEOUT):
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
        self._js = self._nats.jetstream(timeout=_TIMEOUT)
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
        consumer = ConsumerConfig(
            durable_name=_CONSUMER,
            filter_subject=f"{self._stream}.job",
            ack_wait=self._settings.lease,
            max_ack_pending=-1,
        )
        await self._js.add_consumer(self._stream, consumer)
        self._inbox = self._nats.new_inbox()
        await self._nats.subscribe(self._inbox, cb=self._come)
        self._keeper = asyncio.ensure_future(self._keep())

    def close(self) -> None:
        """Disconnect."""

        async def close() -> None:
            if self._keeper is not None:
                self._keeper.cancel()
            await self._nats.close()

        with suppress(QueueError):
            self._do(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # --- jobs that come ----------------------------------------------------------------------

    def want(self, count: int) -> None:
        """Ask for jobs, in addition to those that have come."""
        asyncio.run_coroutine_threadsafe(self._pull(count), self._loop)

    async def _pull(self, count: int | None = None) -> None:
        self._wanted = self._wanted if count is None else count
        batch = self._wanted - self._pulled
        if batch > 0 and self._nats.is_connected:
            self._pulled += batch
            request = json.dumps({"batch": batch, "expires": _PULL_TIME * 10**9}).encode()
            await self._nats.publish(
                f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{_CONSUMER}", request, reply=self._inbox
            )

    async def _come(self, message: Msg) -> None:
        if not message.reply:  # the end of a request, with the number of jobs that it has not brought
            self._pulled = max(0, self._pulled - int((message.headers or {}).get("Nats-Pending-Messages", 0)))
            await self._pull()
            return
        self._pulled -= 1
        self._wanted -= 1
        seq, delivered = message.metadata.sequence.stream, message.metadata.num_delivered
        try:
            row, payload = _parse(seq, message.data)
        except ValueError:
            await message.term()
            return
        held = self._held.get(row[0])
        if held is not None and not held.reply and held.seq > seq:
            await message.ack()  # the service that moved it to the dead ones was interrupted
            return
        self._held[row[0]] = _Held(seq, message.reply, payload)
        if held is None or not held.reply:
            self._arrived.append((*row[:6], row[6] + delivered - 1, *row[7:]))
            self.on_arrival()

    def take(self) -> list[Row]:
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

    def put(self, puts: list[Put], numbers: dict[int, tuple[int, bool]]) -> None:
        """Publish new jobs.

        :param numbers: gets the number of each job, 0 if the stream is full, and whether it was known; those that have
            one are not sent again.
        """

        async def put(index: int, ident: Ident | None, job: Job) -> None:
            id = f"{ident[0]}.{ident[1].hex()}" if ident else ""
            try:
                numbers[index] = await self._publish("job", id, _build(to_row(job), job.payload or b""))
            except APIError as e:
                if "exceeded" not in (e.description or ""):
                    raise
                numbers[index] = 0, False  # waiting would keep workers from making room

        async def put_all() -> None:
            missing = [put(index, *each[1:]) for index, each in enumerate(puts) if index not in numbers]
            for problem in await asyncio.gather(*missing, return_exceptions=True):
                if problem is not None:
                    raise problem

        self._do(put_all())

    async def _publish(self, kind: str, id: str, text: bytes) -> tuple[int, bool]:
        answer = await self._js.publish(f"{self._stream}.{kind}", text, headers={"Nats-Msg-Id": id} if id else None)
        return answer.seq, bool(answer.duplicate)

    def write(self, changes: Changes, known: Mapping[Ident, int], now: float) -> None:
        """Move the jobs that leave this service, and the dead ones; end those that are done."""
        moves = {row[0]: row for row, _ in changes.kept if row[-1] or row[0] in changes.gone}
        gone = [id for id in changes.gone if id not in moves]
        if moves or gone:
            self._do(self._write(moves.values(), gone))

    async def _write(self, moves: Iterable[Row], gone: list[int]) -> None:
        async def move(row: Row) -> None:
            kind = "dead" if row[-1] else "job"
            held = self._held.get(row[0])
            if held is None or (kind == "dead" and not held.reply):
                return  # it has moved
            del self._held[row[0]]  # it may come back at once
            try:
                seq, _ = await self._publish(kind, f"{held.seq}.{kind}", _build(row, held.payload))
                await self._end(held)
            except BaseException:
                self._held.setdefault(row[0], held)
                raise
            if kind == "dead":
                self._held[row[0]] = _Held(seq, "", held.payload)

        async def end(id: int) -> None:
            if (held := self._held.get(id)) is not None:
                await self._end(held)
                del self._held[id]

        await asyncio.gather(*map(move, moves), *map(end, gone))

    async def _end(self, held: _Held) -> None:
        if held.reply:
            await self._nats.request(held.reply, b"+ACK", timeout=_TIMEOUT)
            return
        try:
            await self._js.delete_msg(self._stream, held.seq)
        except APIError:
            with suppress(NotFoundError):  # another service was faster
                await self._js.get_msg(self._stream, held.seq)
                raise

    # --- what is there -----------------------------------------------------------------------

    def rows(self) -> list[Row]:
        """Return the dead jobs of all services."""
        return self._do(self._rows())

    async def _rows(self) -> list[Row]:
        rows: list[Row] = []
        seq = 1
        while True:
            try:
                message = await self._js.get_msg(self._stream, seq, f"{self._stream}.dead", next=True)
            except NotFoundError:
                return rows
            seq = (message.seq or 0) + 1
            with suppress(ValueError):  # another program's
                row, payload = _parse(seq - 1, message.data or b"")
                rows.append(row)
                self._held[row[0]] = _Held(seq - 1, "", payload)

    def counts(self) -> tuple[int, int]:
        """Return how many jobs no service has, and how many are dead."""

        async def ask() -> tuple[int, int]:
            consumer = await self._js.consumer_info(self._stream, _CONSUMER)
            dead = f"{self._stream}.dead"
            stream = await self._js.stream_info(self._stream, subjects_filter=dead)
            return consumer.num_pending or 0, (stream.state.subjects or {}).get(dead, 0)

        return self._do(ask())

    def payloads(self, ids: Iterable[int]) -> dict[int, bytes]:
        """Return the payloads of jobs, as far as they are here."""
        return {id: held.payload for id in ids if (held := self._held.get(id)) is not None}


class _Jobs(JobQueue):
    """The jobs that a service has; those that leave it are new ones of the stream."""

    def __init__(self, settings: Settings, rows: Iterable[Row] = ()) -> None:
        super().__init__(settings, rows)
        self._left: list[tuple[Row, bytes]] = []

    def leave(self, jobs: list[Job]) -> None:
        """Let any service have jobs."""
        self._left += ((to_row(job), b"") for job in jobs)
        self.drain(jobs)

    def retry(self, jobs: Iterable[Job]) -> None:
        """Make dead jobs new ones, for any service."""
        chosen = list(jobs)
        super().retry(chosen)
        self.leave(chosen)

    def renewed(self, row: Row) -> None:
        """Take a job of the stream; what was known of it is out of date."""
        self.forget([job for job in [self.jobs.get(row[0])] if job is not None])
        self._load(Job(*row), 0.0)

    def forget(self, jobs: list[Job]) -> None:
        """Forget jobs, and leave their messages alone."""
        for job in jobs:
            if job.holder:
                self._take_back(job)
        self.drain(jobs)
        for job in jobs:
            del self._dirty[job.id]

    def take_changes(self) -> Changes:
        """Return what has changed, as `JobQueue.take_changes` does."""
        left, self._left = self._left, []
        changes = super().take_changes()
        return Changes(left + changes.kept, changes.gone)


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
        self._store = self.open_store(self.settings)
        self._store.on_arrival = lambda: self._reactor.callFromThread(self.poke)
        self.jobs = _Jobs(self.settings, self._store.rows())

    async def _call(self, do: Callable[[], T]) -> T:
        return await deferToThread(do)

    async def _admit(self, puts: list[Put]) -> tuple[list[tuple[Message, bytes]], dict[Ident, int]]:
        jobs, store = self.jobs, self._store
        answers: list[tuple[Message, bytes]] = []
        new: list[Put] = []
        for request, ident, job in puts:
            if job.size + _HEAD_ROOM <= store.max_payload:
                new.append((request, ident, job))
                continue
            jobs.events["refused"] += 1
            problem = f"longer than {store.max_payload:,} bytes, max_payload of nats-server"
            self._log.error("queue {name}: a job was refused: {problem}", name=self.settings.name, problem=problem)
            if request is not None:
                self._fail_put(request, problem)
        if new:
            numbers: dict[int, tuple[int, bool]] = {}
            await self._on_disk(lambda: store.put(new, numbers))
            for index, (request, _, job) in enumerate(new):
                number, is_double = numbers[index]
                if not number:
                    self._refuse(request, job)
                    continue
                jobs.events["doubles" if is_double else "put"] += 1
                if request is not None:
                    answers.append((request, b"+%d" % number))
        for row in store.take():
            jobs.renewed(row)
        working = [each for each in jobs.workers.values() if each.credit and not each.is_silent and self.running]
        room = sum(worker.credit - len(worker.jobs) for worker in working if worker.has_room())
        pending = jobs.find_all("waiting", "ready", "delayed")
        idle = [job for job, _ in pending if not working or job.due <= self._now()]
        if idle and not room:
            jobs.leave(idle)
        store.want(max(0, room - len(idle)))
        return answers, {}

    async def _asked(self, request: Request) -> bytes:
        if request.key.endswith(b"/ls"):
            with suppress(QueueError):  # else what was known
                self._elsewhere = await deferToThread(self._store.counts)
            return await super()._asked(request)
        rows = {row[0]: row for row in await self._look(self._store.rows)}
        self.jobs.forget([job for job, _ in self.jobs.find_all("dead") if job.id not in rows])
        for id, row in rows.items():
            if id not in self.jobs.jobs:
                self.jobs.renewed(row)
        return await super()._asked(request)

    def _summary(self) -> dict[str, Any]:
        summary = super()._summary()
        waiting, summary["jobs"]["dead"] = self._elsewhere
        summary["jobs"]["ready"] += waiting
        return summary
