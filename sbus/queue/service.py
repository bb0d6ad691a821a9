"""One job queue on the bus: its two connections, its turns, and its workers' ends.

There are two connections, so that acks never wait behind new jobs: the first one reads publishers only as fast as the
disk takes their jobs; the second one always reads workers and operators. Both choose soft ``block``: if a socket is
full, the bus blocks the publisher of a message for it. If the bus queued the messages instead, up to 65,536 messages of
a user who floods would be ahead of those of another user.

A turn writes to the disk without a thread. Meanwhile the next messages gather, and share the next sync.

While the disk refuses, the service reads a little of the first connection now and then. A bus disconnects a client that
blocks and reads nothing (``--block-timeout``), and jobs that are published after that are lost.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count, islice
from typing import Any, TypeVar

from twisted.internet import defer
from twisted.internet.task import deferLater
from twisted.logger import Logger

from sbus.client.api import Request
from sbus.client.dispatch import Message
from sbus.client.queues import ALL_QUEUES, HEAD_ROOM, INBOX, LONGEST_WHY, MOST_CREDIT, build_job, parse_put, queue_key
from sbus.client.tx import Bus, BusClientService
from sbus.client.tx.bus import Subscription
from sbus.daemon.service import Service
from sbus.errors import NobodyListens, NotAllowed, QueueError, RequestFailed, SbusError, TimedOut, UsageError
from sbus.protocol.explain import hints
from sbus.protocol.packets import MSG, UNSUB, build
from sbus.queue.jobs import MOST_DELIVERIES, Batch, Changes, Job, JobQueue, Settings
from sbus.queue.store import Store
from sbus.queue.turns import Turns
from sbus.queue.vigils import Vigils
from sbus.syscalls.users import is_owner

__all__ = ["QueueService"]

T = TypeVar("T")

_RETRY = 1.0
"""Seconds between two attempts to write while the disk refuses; every 60th failure is logged."""
_SIP, _MOST_ATTEMPTS = 5, 160
"""Attempts after which publishers are read a little, well within the 30 s of ``--block-timeout``, and for how long."""
_SERVED_TIMEOUT = 0.5
"""Seconds in which another service of the queue would answer; a monitor of its key makes a start wait for them."""
_STOP_TIMEOUT = 5.0
"""Seconds in which a service that stops takes what the bus has queued for it."""
_FEW_JOBS, _SMALL_JOB = 1024, 1024
"""While a queue has at most this many jobs, ready jobs of at most this many bytes keep their payloads in memory:
reading each from the store takes 7 % of the service's time."""
_MOST_TAKEN = 1 << 20
"""Bytes of new jobs after which publishers wait for the next turn; they fit the store's reserve."""
_SET = 1.0
"""Seconds by which the wall clock must differ to count as set: small adjustments do not move the ends of leases."""
_MOST_WORDS = 2 + 2 * MOST_CREDIT
"""Words after the token in the longest ack, which names all jobs that a worker may have."""
_TOKEN, _ROUND = re.compile(rb"[0-9a-f]{1,64}"), re.compile(rb"[0-9]{1,19}")
_MOST_SHOWN, _SHOWN_BYTES = 100, 200
"""Jobs in an answer to an operator, and bytes of each key and payload in it, so that it fits a packet."""


class _Inflow(Subscription):
    """The messages of one pattern, passed on as they come: in lists, each from one publisher."""

    def __init__(
        self, bus: Bus, pattern: bytes, take: Callable[[list[Message]], None], refused: Callable[[NotAllowed], object]
    ) -> None:
        super().__init__(bus, None)
        self._take, self._call, self._refused = take, bus.call_user, refused
        bus.send(bus.core.subscribe(pattern, self))

    def deliver(self, messages: list[Message]) -> None:
        self._call(self._take, messages)

    def refuse(self, error: NotAllowed) -> None:
        self._call(self._refused, error)


class QueueService(Service):
    """A queue, while the service runs.

    :param address: the address of the bus.
    :param fail: called when the service cannot continue; the log has the reason.
    :param wall_clock: returns seconds since 1970.
    :ivar jobs: the jobs.
    :ivar problem: why the disk refuses, or nothing.
    """

    _log = Logger(namespace="sbus.queue")
    _store: Store

    def __init__(
        self,
        reactor: Any,
        address: str,
        settings: Settings,
        fail: Callable[[], object],
        max_packet: int,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._reactor = reactor
        self._address = address
        self.settings = settings
        self._fail = fail
        self._has_given_up = False
        self._wall_clock = wall_clock
        self._epoch = wall_clock() - reactor.seconds()
        self.jobs = JobQueue(settings)
        self.problem = ""
        limits = f"most={settings.most}, bytes={settings.most_bytes}"
        self._full = f"no room for another job of this user ({limits}): start workers, drain the queue, or raise these"
        self._answers: list[tuple[Message, bytes]] = []  # for when all is on the disk
        self._fresh: dict[tuple[int, bytes], int] = {}  # IDs against doubles that are not on the disk
        self._jobs_in: list[Subscription] = []
        self._taken = 0  # bytes of new jobs since the last turn
        self._room: defer.Deferred[None] | None = None  # while the disk has no room for new jobs
        self._vigils = Vigils(reactor, self._key(b"worker/"), self._worker_gone)
        self._turns = Turns(reactor, self._run_turn)
        self._services = [
            BusClientService(reactor, address, setup=setup, sender=True, max_packet=max_packet, on_gap=on_gap)
            for setup, on_gap in ((self._set_up_floor, self._came_back), (self._set_up_intake, None))
        ]

    def _key(self, verb: bytes) -> bytes:
        return queue_key(self.settings.name, verb)

    def _now(self) -> float:
        """Return seconds since 1970.

        If the clock was set, or the machine has slept, leases and pauses keep their length.
        """
        seconds: float = self._epoch + self._reactor.seconds()
        set_by = self._wall_clock() - seconds
        if abs(set_by) < _SET:
            return seconds
        self._epoch += set_by
        self.jobs.clock_set(set_by)
        return seconds + set_by

    # --- the service -------------------------------------------------------------------------

    def startService(self) -> None:
        """Open the store, and connect to the bus.

        :raises sbus.errors.QueueError: if the store cannot be used.
        """
        for line in hints([] if self.settings.pattern is None else [self.settings.pattern]):
            self._log.warn("queue {name}: {line}", name=self.settings.name, line=line)
        self._load()
        super().startService()
        self._log.info("queue {name}: connecting to {bus}", name=self.settings.name, bus=self._address)
        self._services[0].startService()

    @staticmethod
    def open_store(settings: Settings) -> Store:
        """Open the store of a queue.

        :raises sbus.errors.QueueError: if it cannot be used.
        """
        return Store(settings.store)

    def _load(self) -> None:
        self._store = self.open_store(self.settings)
        self.jobs = JobQueue(self.settings, self._store.jobs(), self._store.next_id(), self._now())

    def stopService(self) -> defer.Deferred[None]:
        """Take what the bus has queued, and disconnect."""
        super().stopService()
        return defer.Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        if self._jobs_in:
            with suppress(SbusError):
                self._intake.send([build(UNSUB, each.pattern) for each in self._jobs_in])
                await self._intake.fence(_STOP_TIMEOUT)  # what was queued for the service comes first
        if self._room is not None:
            self._room.cancel()
        try:
            await self._turns.end(self._store.close).addTimeout(_STOP_TIMEOUT, self._reactor)
        except defer.TimeoutError:
            self._log.error("{name}: the disk refused jobs until the end", name=self.settings.name)
        for service in reversed(self._services):
            await service.stopService()

    async def _set_up_intake(self, bus: Bus) -> None:
        self._intake = bus
        bus.flood_control(soft="block", hard="block")
        prefix = self._key(b"put/")
        self._jobs_in = [_Inflow(bus, prefix, partial(self._put, prefix), self._give_up)]
        if self.settings.pattern is not None:
            self._jobs_in.append(_Inflow(bus, self.settings.pattern, partial(self._put, b""), self._give_up))
        await bus.fence()

    async def _set_up_floor(self, bus: Bus) -> None:
        self._floor = bus
        bus.echo(False)
        bus.flood_control(soft="block", hard="block")
        for key in (self._key(b"admin/*"), ALL_QUEUES):
            bus.respond(key, self._asked)  # already: of two services that start at once, none misses the other
        with suppress(NobodyListens, NotAllowed, TimedOut):
            await bus.request(self._key(b"admin/ls"), b"", _SERVED_TIMEOUT)
            # Workers could not tell the jobs of the two apart.
            self._give_up("another service on this bus has this queue: stop it, or give this queue another name")
            return
        intake = self._services[1]
        if not intake.running:
            intake.startService()
            await intake.whenConnected()
        self._vigils.connected(bus, (await bus.whoami()).endswith(b"/%d" % os.getpid()))
        for holder in list(self.jobs.workers):
            self._vigils.expect(holder)
        for verb in (b"ready", b"ack", b"renew", b"nack"):
            _Inflow(bus, self._key(verb), partial(self._worker_said, verb), self._give_up)
        await bus.fence()
        if self._has_given_up:
            return
        self._log.info("queue {name}: ready, jobs: {n}", name=self.settings.name, n=len(self.jobs.jobs))
        self._say_up()
        self._turns.begin()

    def _give_up(self, why: object) -> None:
        """End the process, once."""
        if not self._has_given_up:
            self._has_given_up = True
            self._log.critical("queue {name}: {why}", name=self.settings.name, why=str(why))
            self._fail()

    def _came_back(self, reason: Exception) -> None:
        self._log.warn("queue {name}: connected again; {reason}", name=self.settings.name, reason=reason)
        self._say_up()

    def _say_up(self) -> None:
        self._floor.send([self._floor.core.publish(self._key(b"up"), b"")])

    # --- publishers --------------------------------------------------------------------------

    def _put(self, prefix: bytes, messages: list[Message]) -> None:
        """Take new jobs: messages, or, with a prefix in front of their keys, requests."""
        sender, longest = messages[0].sender, self._longest()  # all have the same one
        name, uid = b"0 -", -1
        if sender is not None and sender.uid is not None:
            name, uid = b"%d %b" % (sender.number, str(sender).encode()), sender.uid
        for message in messages:
            request, ident, due, (key, payload) = None, b"", 0.0, message
            if prefix:
                request, key = message, key[len(prefix) :]
                try:
                    ident, due, payload = parse_put(payload.partition(b"\0")[2])
                except UsageError as e:
                    self._fail_put(message, str(e))
                    continue
            job = Job(0, key, name, uid, len(key) + len(payload), payload, due, ident)
            self._taken += job.size
            if job.size > longest:
                self._refuse(request, job, f"a job has at most {longest:,} bytes with its key: put it into a file")
            else:
                self._admit(request, job)
        if self._turns.is_under_way or self._room is not None or self._taken > _MOST_TAKEN:  # the disk may refuse more
            self._intake.pause_for(self._jobs_in[0])
        self._turns.came(len(messages))

    def _longest(self) -> int:
        """Return the most bytes of a job, with its key, that fit a packet to a worker."""
        return self._floor.core.max_packet - HEAD_ROOM

    def _admit(self, request: Message | None, job: Job) -> None:
        """Take a new job; a request is answered once the job is on the disk."""
        known = None
        if job.ident:
            ident = job.uid, job.ident
            try:
                known = self._fresh.get(ident) or self._store.find_known(*ident, self._now())
            except sqlite3.OperationalError as e:
                self._refuse(request, job, f"cannot read the store: {e}")
                return
        if known:
            self.jobs.events["doubles"] += 1
        elif not self.jobs.put(job):
            self._refuse(request, job, self._full)
            return
        elif job.ident:
            self._fresh[ident] = job.id
        if request is not None:
            self._answers.append((request, b"+%d" % (known or job.id)))

    def _refuse(self, request: Message | None, job: Job, why: str) -> None:
        """Refuse a job: a request is answered, and the first message is logged."""
        events = self.jobs.events
        events["full"] += 1
        if request is not None:
            self._fail_put(request, why)
            return
        events["dropped"] += 1
        if events["dropped"] == 1:
            why = f"messages of {job.sender.decode()} are dropped: {why}"
            self._log.warn("queue {name}: {why}", name=self.settings.name, why=why)

    def _fail_put(self, request: Message, why: str) -> None:
        with suppress(SbusError):  # not connected: its publisher has no answer, and the next ones are not to be lost
            self._intake.fail(request, why)

    # --- workers -----------------------------------------------------------------------------

    def _worker_said(self, verb: bytes, messages: list[Message]) -> None:
        """Take a worker's messages; malformed ones are counted."""
        sender, said = messages[0].sender, 0
        name = b" " + str(sender).encode()
        for message in messages:
            token, _, text = message.payload.partition(b" ")
            holder = token + name
            if verb != b"ready" and holder not in self.jobs.workers:
                self.jobs.events["stale"] += 1
                continue  # unread: any client can send these
            words = text.split(b" ") if text else []
            said += max(1, len(words) // 2)  # many acks may share a message
            try:
                if len(words) > _MOST_WORDS:
                    raise ValueError("more jobs than a worker has")
                if verb == b"ready":
                    uid = sender.uid if sender is not None and sender.uid is not None else -1
                    self._worker_ready(token, holder, uid, words)
                else:
                    self._worker_answered(verb, holder, words)
            except (ValueError, IndexError):
                self.jobs.events["malformed"] += 1
        if said:
            self._turns.came(said)

    def _worker_answered(self, verb: bytes, holder: bytes, words: list[bytes]) -> None:
        jobs = self.jobs
        if verb == b"ack":
            numbers = list(map(int, words))
            jobs.ack(jobs.held(holder, zip(numbers[::2], numbers[1::2], strict=True)))
            return
        for job in jobs.held(holder, [(int(words[0]), int(words[1]))]):
            if verb == b"renew":
                jobs.renew(job, self._now())
            else:
                text = b" ".join(words[3:])[:LONGEST_WHY]
                why = text.decode(errors="ignore").replace("\0", "")  # without half a character at the cut
                jobs.nack(job, words[2].decode(), why, self._now())

    def _worker_ready(self, token: bytes, holder: bytes, uid: int, words: list[bytes]) -> None:
        if not _TOKEN.fullmatch(token) or not _ROUND.fullmatch(words[0]):
            raise ValueError("no token, or no number of a round")
        round, credit = int(words[0]), min(max(0, int(words[1])), MOST_CREDIT)
        held = {int(id): int(tries) for id, tries in (word.split(b":") for word in words[2:])}
        if not self.jobs.ready(holder, uid, round, credit, held):
            why = b"-the queue has no place for another worker of this user: end some, or raise their credit"
            self._floor.send([build(MSG, _inbox(holder), why)])
        elif credit:
            self._vigils.begin(holder)
        else:
            self._vigils.end(holder)

    def _worker_gone(self, holder: bytes) -> None:
        self.jobs.events["gone"] += 1
        self.jobs.gone(holder)
        self._turns.begin()

    # --- turns -------------------------------------------------------------------------------

    async def _run_turn(self) -> None:
        try:
            await self._turn()
        except defer.CancelledError:
            raise  # this service stops
        except Exception:
            self._log.failure("a bug ended the queue {name}", name=self.settings.name)
            self._fail()

    async def _turn(self) -> None:
        jobs = self.jobs
        now = self._now()
        batches = jobs.advance(now)
        handed = [job for batch in batches for job in batch.jobs.values()]
        died, jobs.died = jobs.died, []
        answers, self._answers = self._answers, []
        missing = [job for job in (*handed, *died) if job.payload is None]
        changes = jobs.take_changes()
        if any(changes) or missing:
            await self._on_disk(lambda: self._write(changes, missing, now))
            if gone := [job for job in missing if job.payload is None and jobs.jobs.get(job.id) is job]:
                jobs.forget(gone)  # another service has them, see `sbus.queue.jetstream`
                died = [job for job in died if job not in gone]
        if answers:
            with suppress(SbusError):
                self._intake._reply(answers)
        jobs.sent(batches, self._now())
        self._send(batches, died)
        is_short = len(jobs.jobs) <= _FEW_JOBS  # then most jobs go out with one of the next turns
        for job in (*changes.new, *handed, *died):
            if job.state != "ready" or job.size > _SMALL_JOB or not is_short:
                job.payload = None  # it is in the store
        self._turns.expected = len(answers) + len(handed)
        if changes.new and self._room is None:
            self._check_room()
        self._taken = 0
        self._read_publishers()
        now = self._now()  # first: if the clock was set, this moves what `next_time` returns
        # There may be more than a turn hands out.
        self._turns.begin(0.0 if len(handed) >= MOST_DELIVERIES else jobs.next_time() - now)

    def _write(self, changes: Changes, missing: list[Job], now: float) -> None:
        if missing:
            payloads = self._store.payloads([job.id for job in missing])
            for job in missing:
                job.payload = payloads.get(job.id)
        self._store.write(changes, now)
        for job in changes.new:
            if job.ident:
                del self._fresh[job.uid, job.ident]

    async def _call(self, do: Callable[[], T]) -> T:
        """Do something with the store: here and now."""
        return do()

    async def _on_disk(self, do: Callable[[], T]) -> T:
        """Do something with the store, again and again while it refuses; publishers wait meanwhile."""
        start = self._reactor.seconds()
        for attempt in count():
            try:
                result = await self._call(do)
                break
            except (sqlite3.OperationalError, QueueError) as e:
                self.problem = str(e)
            if attempt % 60 == 0:
                why = f"{self._store.path}: cannot write: {self.problem}"
                self._log.error("{why}: publishers wait; make room, or start it again", why=why)
            if attempt % _SIP == _SIP - 1 and attempt < _MOST_ATTEMPTS and self._jobs_in:
                self._intake.resume_for(self._jobs_in[0])
            await deferLater(self._reactor, _RETRY)
        self._turns.wrote(self._reactor.seconds() - start)
        if attempt:  # else it is the problem of those who still wait
            self._log.info("{path}: the disk takes jobs again", path=self._store.path)
            self.problem = ""
        return result

    def _check_room(self) -> None:
        """Let publishers wait while the disk has room only for acks, which free some."""

        async def wait() -> None:
            await self._on_disk(self._store.check_room)
            self._room = None
            self._read_publishers()

        try:
            self._store.check_room()
        except sqlite3.OperationalError:
            self._intake.pause_for(self._jobs_in[0])
            self._room = defer.Deferred.fromCoroutine(wait())
            self._room.addErrback(lambda reason: reason.trap(defer.CancelledError))

    def _read_publishers(self) -> None:
        if self._jobs_in and self._room is None:
            self._intake.resume_for(self._jobs_in[0])

    def _send(self, batches: list[Batch], died: list[Job]) -> None:
        packets: list[bytes] = []
        lease, longest = b"%.17g" % self.settings.lease, self._floor.core.max_packet
        for batch in batches:
            if batch.jobs:  # else they were given back while the store was away
                round, place = self.jobs.workers[batch.holder].round, build(MSG, _inbox(batch.holder), b"")
                for job in list(batch.jobs.values()):
                    assert job.payload is not None
                    packet = place + build_job(round, job.id, job.tries, lease, job.sender, job.key, job.payload)
                    if len(packet) <= longest:
                        packets.append(packet)
                        continue
                    why = f"no packet of this bus holds it: raise --max-packet above {longest:,} bytes, then retry it"
                    self.jobs.nack(job, "poison", why, self._now())
                    self._turns.begin()
        for job in died:
            if not job.reason:
                continue  # an operator was faster: it lives again
            self._log.warn("queue {name}: job {id} is dead: {why}", name=self.settings.name, id=job.id, why=job.reason)
            text = b"%d %d %b\0%b" % (job.id, job.tries, job.reason.encode(), job.payload or b"")
            with suppress(SbusError):  # too long with the reason: it is in the store
                packets.append(self._floor.core.publish(self._key(b"dead/") + job.key, text))
        if packets:
            with suppress(SbusError):  # not connected for long: workers announce themselves anew
                self._floor.send(packets)

    # --- operators ---------------------------------------------------------------------------

    async def _asked(self, request: Request) -> bytes:
        verb = request.key.rpartition(b"/")[2]
        if verb == b"ls":
            return json.dumps(await self._summary()).encode()
        if request.sender is None or request.sender.uid is None or not is_owner(request.sender.uid):
            raise RequestFailed("only root, and the user of the service, may look at jobs and change them")
        await self._find_dead()
        try:
            asked: dict[str, Any] = json.loads(request.payload or b"{}")
            ids, limit = asked.get("ids"), min(int(asked.get("limit", _MOST_SHOWN)), _MOST_SHOWN)
            states = ("dead",) if asked.get("dead") or verb == b"retry" else ("waiting", "ready", "delayed")
            found = [job for job in self.jobs.find_all(*states) if ids is None or job.id in ids]
        except (ValueError, OverflowError, TypeError, AttributeError, RecursionError):
            raise RequestFailed("give a JSON object with ids, dead and limit") from None
        if verb == b"peek":
            shown = await self._shown(found[:limit])
            while len(text := json.dumps(shown, ensure_ascii=False).encode()) > self._longest() and shown:
                del shown[len(shown) // 2 :]  # the first ones that fit a packet
            return text
        if verb not in (b"retry", b"drain"):
            raise RequestFailed("ask for ls, peek, retry or drain")
        (self.jobs.retry if verb == b"retry" else self.jobs.drain)(found)
        if not await self._turns.run():
            raise RequestFailed("the service stops: see what has changed when it runs again")
        return b"%d" % len(found)

    async def _find_dead(self) -> None:
        """Find the dead jobs of other services of the queue: there are none."""

    async def _summary(self) -> dict[str, Any]:
        jobs = self.jobs
        workers = [
            {"name": each.holder.partition(b" ")[2].decode(), "credit": each.credit, "jobs": len(each.jobs)}
            for each in islice(jobs.workers.values(), _MOST_SHOWN)
        ]
        return {
            "queue": self.settings.name,
            "jobs": jobs.counts(),
            "workers": workers,
            "events": dict(+jobs.events),  # those that have happened
            "problem": self.problem or None,
        }

    async def _look(self, do: Callable[[], T]) -> T:
        """Read the store once, for an operator; while the disk refuses a turn, publishers stay blocked."""
        try:
            return await self._call(do)
        except (sqlite3.OperationalError, QueueError) as e:
            raise RequestFailed(f"{self._store.path}: cannot read: {e}") from None

    async def _shown(self, jobs: list[Job]) -> list[dict[str, object]]:
        payloads = await self._look(lambda: self._store.payloads([job.id for job in jobs]))
        payloads |= {job.id: job.payload for job in jobs if job.payload is not None}
        return [
            {
                "id": job.id,
                "key": job.key[:_SHOWN_BYTES].decode(errors="backslashreplace"),
                "state": job.state,
                "tries": job.tries,
                "sender": job.sender.decode(),
                "reason": job.reason or None,
                "bytes": len(payloads[job.id]),
                "payload": payloads[job.id][:_SHOWN_BYTES].decode(errors="backslashreplace"),
            }
            for job in jobs
            if job.id in payloads
        ]


def _inbox(holder: bytes) -> bytes:
    """Return the key of a worker's inbox."""
    token, _, name = holder.partition(b" ")
    return name + INBOX + token
