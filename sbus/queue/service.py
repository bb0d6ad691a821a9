"""One queue on the bus: its two connections, its turns, and its workers' ends.

Two connections, so that acks never wait behind new jobs: publishers are read on the first one only as fast as the disk
takes their jobs, workers and operators on the second one always. The bus holds publishers back as soon as the socket is
full (soft ``block``): with its queue, a flood of one user would be up to 65,536 jobs ahead of another's.

While the disk refuses, the first connection is read a little now and then. A bus disconnects a client that blocks and
reads nothing (``--block-timeout``), and what is published after that is lost.
"""

from __future__ import annotations

import json
import math
import os
import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from twisted.internet import defer
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.logger import Logger

from sbus.client.api import Request
from sbus.client.dispatch import Message
from sbus.client.queues import ALL_QUEUES, INBOX, MOST_CREDIT, REASONS, build_job, parse_put, queue_key
from sbus.client.tx import Bus, BusClientService
from sbus.client.tx.bus import Subscription
from sbus.client.watches import Watch
from sbus.daemon.service import Service
from sbus.errors import PacketTooLong, QueueError, RequestFailed, SbusError, UsageError
from sbus.protocol.packets import UNSUB, build
from sbus.queue.jobs import PENDING, Changes, Delivery, Job, JobQueue, Rules, State
from sbus.queue.store import Store

__all__ = ["Put", "QueueService", "Settings"]

T = TypeVar("T")

_MOST_BYTES = 8 << 20
"""Bytes of new jobs in memory, not yet on the disk, at which publishers are no longer read."""
_PUT_BYTES = 4096
"""Each new job counts as this many bytes besides, so that a turn of tiny ones does not take seconds."""
_MOST_SIPS = 32
"""How often they are read nevertheless while the disk refuses; then the bus decides."""
_SIP_INTERVAL = 5.0
"""Seconds between two of these reads: well below the 30 s of ``--block-timeout``."""
_RETRY = 1.0
"""Seconds between two attempts to write."""
_REPORT_INTERVAL = 60.0
"""Seconds between two log lines while the disk refuses."""
_STOP_TIMEOUT = 5.0
"""Seconds in which a service that stops takes what the bus has queued for it."""
_MOST_WORKERS = 1024
"""Workers of one queue: as many keys as a client may watch."""
_TOKEN = re.compile(rb"[0-9a-f]{1,64}")
_MOST_SHOWN, _SHOWN_BYTES = 100, 200
"""Jobs in an answer to an operator, and bytes of each payload in it, so that it fits a packet."""


class Settings(NamedTuple):
    """What the operator has chosen for a queue.

    :ivar pattern: of ordinary messages that are jobs; None for none.
    :ivar store: the path of the store.
    """

    name: str
    pattern: bytes | None
    store: str
    rules: Rules


class Put(NamedTuple):
    """A new job that is not yet on the disk.

    :ivar request: the message to answer, or None.
    """

    request: Message | None
    id: bytes
    not_before: float
    message: Message
    key: bytes
    payload: bytes


class _Presence(Watch):
    """Calls a function when nobody subscribes to a key."""

    def __init__(self, key: bytes, on_absence: Callable[[], object]) -> None:
        super().__init__(key)
        self._on_absence = on_absence

    def update(self, has_subscribers: bool) -> None:
        super().update(has_subscribers)
        if not has_subscribers:
            self._on_absence()


class _ProcessWatch:
    """Calls a function when a process has ended (pidfd_open(2)); an `IReadDescriptor`."""

    def __init__(self, reactor: Any, pid: int, on_end: Callable[[], object]) -> None:
        self._reactor = reactor
        self._fd = os.pidfd_open(pid)
        self._on_end = on_end
        reactor.addReader(self)

    def fileno(self) -> int:
        return self._fd

    def logPrefix(self) -> str:
        return "sbus.queue"

    def doRead(self) -> None:
        self._on_end()

    def connectionLost(self, reason: object = None) -> None:
        """Stop watching."""
        if self._fd >= 0:
            self._reactor.removeReader(self)
            os.close(self._fd)
            self._fd = -1


class QueueService(Service):
    """A queue, while the service runs.

    :param address: the address of the bus.
    :param fail: called when the service cannot go on; the log has the reason.
    :ivar jobs: the jobs.
    :ivar problem: why the disk refuses, or nothing.
    """

    _log = Logger(namespace="sbus.queue")

    def __init__(
        self, reactor: Any, address: str, settings: Settings, fail: Callable[[], object], max_packet: int
    ) -> None:
        self._reactor = reactor
        self.settings = settings
        self._fail = fail
        self._epoch = time.time() - reactor.seconds()
        self._store: Store | None = None
        self.jobs = JobQueue(settings.rules)
        self._puts: list[Put] = []
        self._put_bytes = 0
        self._intake: Bus | None = None
        self._floor: Bus | None = None
        self._jobs_in: list[Subscription] = []
        self._presences: dict[bytes, _Presence] = {}
        self._processes: dict[bytes, _ProcessWatch] = {}
        self._trusts_pids = False
        self._turn_waiters: list[defer.Deferred[None]] = []
        self._is_turning = self._is_poked = False
        self._timer: IDelayedCall | None = None
        self.problem = ""
        self._sips = 0
        self._services = [
            BusClientService(reactor, address, setup=setup, sender=True, max_packet=max_packet, on_gap=on_gap)
            for setup, on_gap in ((self._set_up_floor, lambda _: self._say_up()), (self._set_up_intake, lambda _: None))
        ]

    @staticmethod
    def _connected(bus: Bus | None) -> Bus:
        assert bus is not None, "nothing comes before the first connection"
        return bus

    def _opened(self) -> Store:
        assert self._store is not None
        return self._store

    def _key(self, verb: bytes) -> bytes:
        return queue_key(self.settings.name, verb)

    def _now(self) -> float:
        """Return the time since 1970; while the service runs, nobody sets it."""
        seconds: float = self._epoch + self._reactor.seconds()
        return seconds

    # --- the service -------------------------------------------------------------------------

    def startService(self) -> None:
        """Open the store, and connect to the bus.

        :raises sbus.errors.QueueError: if the store cannot be used.
        """
        self._open_store()
        super().startService()
        for service in self._services:
            service.startService()
        self.poke()

    def _open_store(self) -> None:
        store = self._store = Store(self.settings.store)
        self.jobs = JobQueue(self.settings.rules, store.rows(), store.next_id())

    def stopService(self) -> defer.Deferred[None]:
        """Take what the bus has queued, and disconnect."""
        super().stopService()
        return defer.Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        with suppress(SbusError):
            if self._intake is not None:
                self._intake.send([build(UNSUB, subscription.pattern) for subscription in self._jobs_in])
                await self._intake.fence(_STOP_TIMEOUT)  # what was queued for the service comes first
        await self._settled()
        if self._puts:
            self._log.error(
                "{name}: the disk refused {n} new jobs until the end", name=self.settings.name, n=len(self._puts)
            )
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        for holder in {*self._presences, *self._processes}:
            self._unwatch(holder)
        for service in reversed(self._services):
            await service.stopService()
        if self._store is not None and not self._is_turning:  # else the disk does not answer, and the thread has it
            self._store.close()

    async def _set_up_intake(self, bus: Bus) -> None:
        self._intake = bus
        bus.flood_control(soft="block", hard="block")
        self._jobs_in = [bus.subscribe(self._key(b"put/"), self._request_received)]
        if self.settings.pattern is not None:
            self._jobs_in.append(bus.subscribe(self.settings.pattern, self._message_received))
        await bus.fence()

    async def _set_up_floor(self, bus: Bus) -> None:
        self._floor = bus
        self._trusts_pids = (await bus.whoami()).endswith(b"/%d" % os.getpid())
        for holder in list(self.jobs.workers):  # they had jobs before the service was started
            self._watch_process(holder)
        bus.echo(False)
        bus.flood_control(hard="block")
        for verb in (b"ready", b"ack", b"renew", b"nack"):
            bus.subscribe(self._key(verb), self._worker_said)
        for key in (self._key(b"admin/*"), ALL_QUEUES):
            bus.respond(key, self._asked)
        await bus.fence()
        self._log.info("queue {name}: ready, jobs: {n}", name=self.settings.name, n=len(self.jobs.jobs))
        self._say_up()

    def _say_up(self) -> None:
        bus = self._connected(self._floor)
        bus.send([bus.core.publish(self._key(b"up"), b"")])

    def log_counters(self) -> None:
        """Log what has happened since the start."""
        events = ", ".join(f"{count} {event}" for event, count in sorted(self.jobs.events.items()))
        self._log.info("queue {name}: {events}", name=self.settings.name, events=events or "nothing yet")

    # --- publishers --------------------------------------------------------------------------

    def _message_received(self, message: Message) -> None:
        self._add(Put(None, b"", 0.0, message, message.key, message.payload))

    def _request_received(self, message: Message) -> None:
        try:
            id, not_before, payload = parse_put(Request.received(self._connected(self._intake), message).payload)
        except UsageError as e:
            self._connected(self._intake).fail(message, str(e))
            return
        self._add(Put(message, id, not_before, message, message.key[len(self._key(b"put/")) :], payload))

    def _add(self, put: Put) -> None:
        self._puts.append(put)
        self._put_bytes += _PUT_BYTES + len(put.key) + len(put.payload)
        if self._put_bytes > _MOST_BYTES:
            self._connected(self._intake).pause_for(self._jobs_in[0])
        self.poke()

    # --- workers -----------------------------------------------------------------------------

    def _worker_said(self, message: Message) -> None:
        """Take what a worker says; what is malformed is counted."""
        token, *words = message.payload.split(b" ")
        try:
            if not _TOKEN.fullmatch(token):
                raise ValueError("no token")
            holder = b"%b %b" % (token, str(message.sender).encode())
            if message.key.endswith(b"/ready"):
                self._worker_ready(holder, words)
            else:
                self._worker_answered(holder, message.key.rpartition(b"/")[2], words)
        except (ValueError, IndexError):
            self.jobs.events["malformed"] += 1
        self.poke()

    def _worker_ready(self, holder: bytes, words: list[bytes]) -> None:
        round, credit = int(words[0]), min(max(0, int(words[1])), MOST_CREDIT)
        held = {int(id): int(tries) for id, tries in (word.split(b":") for word in words[2:])}
        if holder not in self.jobs.workers and len(self.jobs.workers) >= _MOST_WORKERS:
            self.jobs.events["refused"] += 1
            return
        self.jobs.ready(holder, round, credit, held)
        if not credit:
            self._unwatch(holder)
        elif holder not in self._presences:
            self._watch_process(holder)
            self._watch_presence(holder)

    def _worker_answered(self, holder: bytes, verb: bytes, words: list[bytes]) -> None:
        job = self.jobs.find(holder, int(words[0]), int(words[1]))
        if job is None:
            return
        if verb == b"ack":
            self.jobs.ack(job)
        elif verb == b"renew":
            self.jobs.renew(job, self._now())
        else:
            reason = words[2].decode()
            if reason not in REASONS:
                raise ValueError(reason)
            self.jobs.nack(job, reason, b" ".join(words[3:]).decode(errors="replace").replace("\0", ""), self._now())

    def _watch_process(self, holder: bytes) -> None:
        """Notice the end of a worker's process, if PIDs mean the same to the bus and to this process."""
        if self._trusts_pids and holder.count(b"!/cred/") == 1 and holder not in self._processes:
            try:
                self._processes[holder] = _ProcessWatch(
                    self._reactor, int(holder.rpartition(b"/")[2]), lambda: self._worker_gone(holder)
                )
            except ProcessLookupError:
                self._worker_gone(holder)
            except OSError:
                pass  # no descriptor is free: its connection is watched too

    def _watch_presence(self, holder: bytes) -> None:
        """Notice the end of a worker's connection."""
        bus = self._connected(self._floor)

        def absent() -> None:
            # After a lost connection, workers may come back later than this service: then their leases decide.
            if bus.state == "connected":
                self._worker_gone(holder)

        presence = self._presences[holder] = _Presence(self._key(b"worker/") + holder.partition(b" ")[0], absent)
        bus.send(bus.core.watch(presence))

    def _unwatch(self, holder: bytes) -> None:
        process, presence = self._processes.pop(holder, None), self._presences.pop(holder, None)
        if process is not None:
            process.connectionLost()
        if presence is not None:
            bus = self._connected(self._floor)
            with suppress(SbusError):
                bus.send(bus.core.extensions.unwatch(presence))

    def _worker_gone(self, holder: bytes) -> None:
        self.jobs.events["gone"] += 1
        self._unwatch(holder)
        self.jobs.gone(holder)
        self.poke()

    # --- turns -------------------------------------------------------------------------------

    def poke(self) -> None:
        """Have a turn soon."""
        self._is_poked = True
        if not self._is_turning:
            self._is_turning = True
            self._reactor.callLater(0, self._turn)

    def _turn(self) -> None:
        defer.Deferred.fromCoroutine(self._run_turn()).addErrback(self._broken)

    def _broken(self, failure: Any) -> None:
        self._log.failure("a bug ended the queue {name}", failure=failure, name=self.settings.name)
        self._fail()

    async def _run_turn(self) -> None:
        self._is_poked = False
        waiters, self._turn_waiters = self._turn_waiters, []
        puts, self._puts, self._put_bytes = self._puts, [], 0
        if self._jobs_in and puts:
            self._connected(self._intake).resume_for(self._jobs_in[0])
        jobs, store = self.jobs, self._opened()
        answers, new_ids = await self._admit(puts)
        deliveries = jobs.advance(self._now())
        died, jobs.died = jobs.died, []
        missing = [job.id for job in (*(d.job for d in deliveries), *died) if job.payload is None]
        changes = jobs.take_changes()
        payloads: dict[int, bytes] = {}
        if any(changes) or missing:
            payloads = await self._on_disk(lambda: self._write(store, changes, new_ids, missing))
        for request, number in answers:
            with suppress(SbusError):
                self._connected(self._intake).answer(request, b"%d" % number)
        self._send(deliveries, died, payloads)
        for waiter in waiters:
            waiter.callback(None)
        self._is_turning = False
        if self._is_poked or jobs.has_changes or deliveries:  # there may be more than a turn hands out
            self.poke()
        else:
            self._set_timer()

    async def _admit(self, puts: list[Put]) -> tuple[list[tuple[Message, int]], dict[bytes, int]]:
        """Take new jobs; return who gets which number when they are on the disk, and the IDs to remember."""
        jobs, store = self.jobs, self._opened()
        known: dict[bytes, int] = {}
        if ids := [put.id for put in puts if put.id]:
            known = await self._on_disk(lambda: store.find_known(ids, self._now()))
        new_ids: dict[bytes, int] = {}
        answers: list[tuple[Message, int]] = []
        for put in puts:
            number = known.get(put.id) if put.id else None
            if number is None:
                name, uid = self._author(put)
                if jobs.owned[uid] >= jobs.rules.most:
                    self._refuse(put)
                    continue
                number = jobs.put(put.key, put.payload, name, uid, put.not_before).id
                if put.id:
                    known[put.id] = new_ids[put.id] = number
            else:
                jobs.events["doubles"] += 1
            if put.request is not None:
                answers.append((put.request, number))
        return answers, new_ids

    @staticmethod
    def _author(put: Put) -> tuple[bytes, int]:
        """Return the publisher, as in a notice of the bus, and the UID; -1 without one."""
        sender = put.message.sender
        assert sender is not None, "the service asks for senders"
        return b"%d %b" % (sender.number, str(sender).encode()), -1 if sender.uid is None else sender.uid

    def _refuse(self, put: Put) -> None:
        """Refuse a job of a user who has too many."""
        self.jobs.events["full"] += 1
        sender, most = put.message.sender, self.jobs.rules.most
        if put.request is not None:
            with suppress(SbusError):
                why = f"the queue has {most} jobs of this user: start workers, drain it, or raise most="
                self._connected(self._intake).fail(put.request, why)
        elif self.jobs.events["full"] == 1:
            self._log.warn(
                "queue {name}: {sender} has {most} jobs: its messages are dropped: start workers, or raise most=",
                name=self.settings.name,
                sender=str(sender),
                most=most,
            )

    def _write(self, store: Store, changes: Changes, ids: dict[bytes, int], missing: list[int]) -> dict[int, bytes]:
        """Write a turn, in a thread."""
        store.write(changes, ids.items(), self._now())
        return store.payloads(missing)

    async def _on_disk(self, do: Callable[[], T]) -> T:
        """Do something in a thread, again and again while the disk refuses."""
        self._sips, reported, sipped = 0, -math.inf, self._reactor.seconds()
        while True:
            try:
                result = await deferToThread(do)
                break
            except (sqlite3.OperationalError, QueueError) as e:
                now, self.problem = self._reactor.seconds(), str(e)
            if now - reported >= _REPORT_INTERVAL:
                reported = now
                self._log.error(
                    "{path}: cannot write: {problem}: publishers wait; make room, or start it again",
                    path=self.settings.store,
                    problem=self.problem,
                )
            if now - sipped >= _SIP_INTERVAL and self._sips < _MOST_SIPS and self._jobs_in:
                self._sips, sipped = self._sips + 1, now
                self._connected(self._intake).resume_for(self._jobs_in[0])
            await deferLater(self._reactor, _RETRY)
        if self.problem:
            self._log.info("{path}: the disk takes jobs again", path=self.settings.store)
            self.problem = ""
        return result

    def _send(self, deliveries: list[Delivery], died: list[Job], payloads: dict[int, bytes]) -> None:
        bus = self._floor
        packets: list[bytes] = []
        for delivery in deliveries:
            job = delivery.job
            payload = payloads.get(job.id) if job.payload is None else job.payload
            if bus is None or payload is None or not delivery.counts():
                continue
            token, _, name = delivery.worker.holder.partition(b" ")
            lease = self.settings.rules.lease
            text = build_job(delivery.round, job.id, job.tries, lease, job.sender, job.key, payload)
            try:
                packets.append(bus.core.publish(b"%b%b%b" % (name, INBOX, token), text))
            except PacketTooLong as e:
                self.jobs.nack(job, "poison", f"it cannot be sent to a worker: {e}", self._now())
            self.jobs.forget_payload(job)
        for job in died:
            payload = payloads.get(job.id) if job.payload is None else job.payload
            self._log.warn("queue {name}: job {id} is dead: {why}", name=self.settings.name, id=job.id, why=job.reason)
            text = b"%d %d %b\0%b" % (job.id, job.tries, job.reason.encode(), payload or b"")
            with suppress(SbusError):  # too long with the reason: it is in the store
                packets += [] if bus is None else [bus.core.publish(self._key(b"dead/") + job.key, text)]
        if packets and bus is not None:
            with suppress(SbusError):  # not connected for long: workers announce themselves anew
                bus.send(packets)

    def _set_timer(self) -> None:
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        at = self.jobs.next_time()
        if at < math.inf and self.running:
            self._timer = self._reactor.callLater(max(0.001, min(at - self._now(), 3600.0)), self.poke)

    async def _settled(self) -> None:
        """Wait until all changes so far are on the disk; at the stop, as long as it takes no retry."""
        done: defer.Deferred[None] = defer.Deferred()
        self._turn_waiters.append(done)
        self.poke()
        with suppress(defer.TimeoutError):
            await done.addTimeout(_STOP_TIMEOUT, self._reactor)

    # --- operators ---------------------------------------------------------------------------

    async def _asked(self, request: Request) -> bytes:
        verb = request.key.rpartition(b"/")[2]
        if verb == b"ls":
            return json.dumps(self._summary()).encode()
        uid = None if request.sender is None else request.sender.uid
        if uid not in (0, os.geteuid()):
            raise RequestFailed("only root, and the user of the service, may look at jobs and change them")
        try:
            asked: dict[str, Any] = json.loads(request.payload or b"{}")
            ids, limit = asked.get("ids"), min(int(asked.get("limit", _MOST_SHOWN)), _MOST_SHOWN)
            states = (State.DEAD,) if asked.get("dead") or verb == b"retry" else PENDING
            chosen = [job for job in self.jobs.find_all(*states) if ids is None or job.id in ids]
        except (ValueError, TypeError, AttributeError):
            raise RequestFailed("give a JSON object with ids, dead and limit") from None
        answer: object = len(chosen)
        if verb == b"peek":
            answer = await self._shown(chosen[:limit])
        elif verb in (b"retry", b"drain"):
            for job in chosen:
                (self.jobs.retry if verb == b"retry" else self.jobs.drain)(job)
            await self._settled()
        else:
            raise RequestFailed("ask for ls, peek, retry or drain")
        return json.dumps(answer).encode()

    def _summary(self) -> dict[str, Any]:
        jobs, pattern = self.jobs, self.settings.pattern
        return {
            "queue": self.settings.name,
            "pattern": None if pattern is None else pattern.decode(errors="backslashreplace"),
            "jobs": {state.value: jobs.counts[state] for state in State if state is not State.GONE},
            "workers": [
                {"name": each.holder.partition(b" ")[2].decode(), "credit": each.credit, "jobs": len(each.jobs)}
                for each in islice(jobs.workers.values(), _MOST_SHOWN)
            ],
            "events": dict(jobs.events),
            "problem": self.problem or None,
        }

    async def _shown(self, jobs: list[Job]) -> list[dict[str, object]]:
        await self._settled()
        store = self._opened()
        payloads = await self._on_disk(lambda: store.payloads([job.id for job in jobs]))
        return [
            {
                "id": job.id,
                "key": job.key.decode(errors="backslashreplace"),
                "state": job.state.value,
                "tries": job.tries,
                "sender": job.sender.decode(),
                "reason": job.reason or None,
                "bytes": len(payload),
                "payload": payload[:_SHOWN_BYTES].decode(errors="backslashreplace"),
            }
            for job in jobs
            if (payload := payloads.get(job.id)) is not None
        ]
