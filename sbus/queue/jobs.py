"""The jobs of one job queue: which worker gets which job, and when.

Pure decisions: the caller passes the time, makes `JobQueue.take_changes` durable, and then sends what
`JobQueue.advance` has handed out (`JobQueue.sent`). Each job that is not done has a state:

===========  ============================================================================================
*waiting*    behind an earlier job of its key, which is under way (``ordered=key`` alone)
*ready*      in a heap of its user; users take turns. A job goes to the worker that has the fewest
*delayed*    by its publisher, or after it has failed
*out*        at a worker. Leases end in the order in which they began: all are equally long
*dead*       kept for an operator
===========  ============================================================================================

The number of a job that an operator has deleted stays in its heap, and costs its user no turn.

The jobs that a worker gets in one turn are a *batch*. The store notes their worker in one row, instead of once for each
job.

*Bytes.* A worker has jobs up to its credit, and up to its part of `_MOST_BYTES_OUT`, or one job. So the jobs of a
worker that does not read fit its queue on the bus, which would drop the rest.

*Alone.* A job that was out twice may have killed its workers. From then on it goes to a worker without other jobs, so
that the same death counts against no other job. If no worker is idle, the least busy one gets no more until it is.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from operator import attrgetter
from typing import NamedTuple, Self

from sbus.client.queues import REASONS

__all__ = ["MOST_DELIVERIES", "STATES", "Batch", "Changes", "Job", "JobQueue", "Settings"]

_FIRST_PAUSE, _LONGEST_PAUSE = 1, 300
"""Seconds after a first failure, which double with each further one, and their limit; no floats, which end at 2¹⁰²³."""
_ALONE_FROM = 3
"""The delivery from which on a job goes alone."""
_MOST_BYTES_OUT, _MOST_BYTES_EACH = 64 << 20, 1 << 20
"""Bytes of jobs at all workers of a queue, and at one of them: `--queue-bytes` and `--total-queue-bytes` of a bus
have room for both by default."""
MOST_DELIVERIES = 4096
"""Deliveries of one turn, so that workers with much credit do not make it take seconds."""
_MOST_WORKERS = 1024
"""Workers of one queue: as many keys as a client may watch."""
STATES = ("waiting", "ready", "delayed", "out", "dead")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The operator's choices for a queue.

    :ivar pattern: the pattern of messages that are jobs, or None.
    :ivar store: the path of the store, or its URL.
    :ivar lease: seconds in which a worker answers or renews a job.
    :ivar deliveries: counted deliveries after which a job is dead.
    :ivar is_ordered: whether jobs of one key go out one by one.
    :ivar most: jobs of one user, dead ones included. A million take 400 MB of memory, and 5 s at the start.
    :ivar most_bytes: bytes of their keys and payloads.
    """

    name: str = ""
    pattern: bytes | None = None
    store: str = ""
    lease: float = 30.0
    deliveries: int = 5
    is_ordered: bool = False
    most: int = 1_000_000
    most_bytes: int = 1 << 30


@dataclass(slots=True, eq=False)
class Job:
    """A job.

    :ivar sender: the publisher, as in a notice of the bus (`sbus.protocol.notices`).
    :ivar uid: the publisher's user; -1 without one.
    :ivar size: bytes of its key and its payload: both are kept, and sent.
    :ivar payload: its payload; None while it is in the store alone.
    :ivar due: when it may go out first, or again, while that is to come.
    :ivar ident: the ID that its publisher has given a new job, against doubles.
    :ivar tries: the deliveries that count.
    :ivar reason: why it is dead, or nothing.
    :ivar batch: the one that it is out with; else None.
    :ivar until: the end of its lease, once it was sent.
    :ivar state: one of `STATES`.
    """

    id: int
    key: bytes
    sender: bytes
    uid: int
    size: int
    payload: bytes | None = None
    due: float = 0.0
    ident: bytes = b""
    tries: int = 0
    reason: str = ""
    batch: Batch | None = None
    until: float = 0.0
    state: str = "ready"

    @property
    def holder(self) -> bytes:
        """The worker that has it, or nothing."""
        return b"" if self.batch is None else self.batch.holder

    def head(self) -> bytes:
        """Return all that a store keeps of it beside its number, its payload and its batch."""
        form = b"%d %r %d\0%b\0%b\0%b"
        return form % (self.tries, self.due, self.uid, self.sender, self.key, self.reason.encode())

    @classmethod
    def parse(cls, id: int, head: bytes, payload_bytes: int) -> Self:
        """Return the job in a store.

        :raises ValueError: if the head is malformed.
        """
        words, sender, key, reason = head.split(b"\0")
        tries, due, uid = words.split(b" ")
        size = len(key) + payload_bytes
        return cls(id, key, sender, int(uid), size, None, float(due), b"", int(tries), reason.decode())


@dataclass(slots=True, eq=False)
class Batch:
    """The jobs that a worker got in one turn.

    :ivar holder: the worker.
    :ivar jobs: those that it still has, by number.
    """

    id: int
    holder: bytes
    jobs: dict[int, Job] = field(default_factory=dict)

    def add(self, job: Job) -> None:
        """Add a job."""
        self.jobs[job.id] = job
        job.batch = self

    def build(self) -> bytes:
        """Return all that a store keeps of it beside its number and its worker: each job's number and tries."""
        return b" ".join([b"%d:%d" % (job.id, job.tries) for job in self.jobs.values()])

    def add_stored(self, text: bytes, jobs: Mapping[int, Job]) -> None:
        """Add the jobs in a store, without those that are done.

        :raises ValueError: if the text is malformed.
        """
        for id, number in (map(int, word.split(b":")) for word in text.split()):
            if (job := jobs.get(id)) is not None:
                job.tries = number
                self.add(job)


@dataclass(slots=True, eq=False)
class Worker:
    """A worker, and the jobs that it has.

    :ivar holder: its token and its name on the bus.
    :ivar uid: its user; -1 if unknown.
    :ivar round: the number of its last announcement; -1 before the first one.
    :ivar credit: the most jobs that it has at once.
    :ivar size: bytes of its jobs.
    :ivar jobs: by number.
    :ivar is_alone: whether its job goes alone.
    :ivar is_silent: whether a lease has run out since it last said something. With the fewest jobs, it would get each
        next one.
    """

    holder: bytes
    uid: int = -1
    round: int = -1
    credit: int = 0
    size: int = 0
    jobs: dict[int, Job] = field(default_factory=dict)
    is_alone: bool = False
    is_silent: bool = False

    def has_room(self, most_bytes: float = math.inf) -> bool:
        """Return whether another job may go to it."""
        return len(self.jobs) < self.credit and self.size < most_bytes and not self.is_alone and not self.is_silent

    def take(self, job: Job) -> None:
        """Take a job; its lease begins when it is sent."""
        job.state = "out"
        self.jobs[job.id] = job
        self.size += job.size
        if job.tries >= _ALONE_FROM:
            self.is_alone = True


@dataclass(slots=True, eq=False)
class User:
    """A publishers' user.

    :ivar jobs: the number of its jobs.
    :ivar size: the bytes of their keys, payloads and reasons.
    :ivar ready: the heap of its jobs that are ready.
    :ivar alone: the heap of those of them that go alone.
    """

    jobs: int = 0
    size: int = 0
    ready: list[int] = field(default_factory=list)
    alone: list[int] = field(default_factory=list)


class Changes(NamedTuple):
    """The changes for one transaction.

    :ivar new: jobs to add.
    :ivar changed: jobs whose heads have changed.
    :ivar gone: IDs of jobs to delete.
    :ivar batches: batches to write: new ones, and those that a job has come back from.
    :ivar over: IDs of batches to delete, whose jobs have all left them.
    """

    new: Sequence[Job] = ()
    changed: Sequence[Job] = ()
    gone: Sequence[int] = ()
    batches: Sequence[Batch] = ()
    over: Sequence[int] = ()


class JobQueue:
    """The jobs of one queue; see above.

    :param jobs: the jobs in the store. The leases of those in a batch begin anew.
    :param next_id: the ID of the next new job.
    :ivar jobs: all jobs by ID.
    :ivar workers: by holder, with those that had jobs before the service was started.
    :ivar events: the number of events since the start, by name.
    :ivar died: jobs that have died since the caller last cleared it.
    """

    def __init__(self, settings: Settings, jobs: Iterable[Job] = (), next_id: int = 1, now: float = 0.0) -> None:
        self.settings = settings
        self.jobs: dict[int, Job] = {}
        self.workers: dict[bytes, Worker] = {}
        self.events: Counter[str] = Counter()
        self.died: list[Job] = []
        self._next_id = next_id
        self._new: list[Job] = []
        self._changed: dict[int, Job] = {}
        self._gone: list[int] = []
        self._batches: dict[int, Batch] = {}
        self._over: list[int] = []
        self._next_batch = 1
        self._users: defaultdict[int, User] = defaultdict(User)
        self._turns: deque[User] = deque()  # those that have jobs in their heaps
        self._first: dict[bytes, Job] = {}  # of each key, the job that is under way
        self._behind: dict[bytes, deque[Job]] = {}  # those behind it; most keys have none
        self._delayed: list[tuple[float, int]] = []
        self._aside: Counter[str] = Counter()  # jobs that are neither ready nor out, by state
        self._leases: OrderedDict[int, Job] = OrderedDict()  # jobs that were sent, in the order in which leases end
        # What was out or has failed is under way, before earlier jobs that were delayed.
        for job in sorted(jobs, key=lambda job: (not job.batch, not job.tries, job.id)):
            if job.due <= now:
                job.due = 0.0  # its delay was over before: it comes before later jobs of its key
            elif job.tries:
                job.due = min(job.due, now + _LONGEST_PAUSE)  # the clock may have been set back
            self.add(job, now)

    def add(self, job: Job, now: float = 0.0) -> None:
        """Add a job of the store."""
        self.jobs[job.id] = job
        user = self._users[job.uid]
        user.jobs += 1
        user.size += job.size + len(job.reason.encode())
        if job.batch is not None:
            if self.settings.is_ordered:
                self._join_line(job)
            self._next_batch = max(self._next_batch, job.batch.id + 1)
            self.workers.setdefault(job.holder, Worker(job.holder)).take(job)
            self._begin_leases([job], now)
        else:
            self._place(job)

    # --- publishers --------------------------------------------------------------------------

    def put(self, job: Job) -> bool:
        """Number a new job, and add it; return whether there is room for it."""
        user = self._users[job.uid]
        if user.jobs >= self.settings.most or user.size + job.size > self.settings.most_bytes:
            return False
        job.id = self._next_id
        self._next_id += 1
        self._new.append(job)
        self.add(job)
        return True

    # --- workers -----------------------------------------------------------------------------

    def ready(self, holder: bytes, uid: int, round: int, credit: int, held: Mapping[int, int]) -> bool:
        """Take an announcement; return whether there is a place for the worker.

        :param held: the jobs that the worker has, each with its tries.
        """
        worker = self.workers.get(holder)
        if worker is None:
            free = _MOST_WORKERS - len(self.workers)
            if sum(each.uid == uid for each in self.workers.values()) >= free:  # else one user could take all places
                self.events["refused"] += 1
                return False
            worker = self.workers[holder] = Worker(holder)
        worker.uid, worker.credit, worker.is_silent = uid, credit, False
        if worker.round != round:
            worker.round = round
            for job in [job for job in worker.jobs.values() if held.get(job.id) != job.tries]:
                self.events["returned"] += 1
                self._release(job)
        self._forget_idle(worker)
        return True

    def gone(self, holder: bytes) -> None:
        """Note that a worker is gone: its jobs are available again."""
        if (worker := self.workers.get(holder)) is not None:
            worker.credit = 0
            for job in list(worker.jobs.values()):
                self._lose(job, "the worker was gone")
            self._forget_idle(worker)

    def held(self, holder: bytes, deliveries: Iterable[tuple[int, int]]) -> list[Job]:
        """Return the jobs, ID and tries each, that a worker still has, once each. It is no longer silent."""
        jobs: dict[int, Job] = {}
        if (worker := self.workers.get(holder)) is not None:
            jobs, worker.is_silent = worker.jobs, False
        found: dict[int, Job] = {}
        for id, tries in deliveries:
            job = jobs.get(id)
            if job is not None and job.tries == tries:
                found[id] = job
            else:
                self.events["stale"] += 1
        return list(found.values())

    def ack(self, jobs: list[Job]) -> None:
        """Note that jobs are done."""
        self.events["acked"] += len(jobs)
        self.drain(jobs)

    def renew(self, job: Job, now: float) -> None:
        """Begin a lease anew, if the job was sent."""
        if self._leases.pop(job.id, None) is not None:
            self._begin_leases([job], now)

    def nack(self, job: Job, reason: str, why: str, now: float) -> None:
        """Take a job back.

        :param reason: one of `REASONS`.
        :param why: the worker's words.
        :raises ValueError: for another reason.
        """
        if reason not in REASONS:
            raise ValueError(reason)
        self.events[reason] += 1
        if reason == "released":
            self._release(job)
        elif reason == "poison" or job.tries >= self.settings.deliveries:
            self._return(job, death=f"{reason}: {why}")
        else:
            pause = min(_FIRST_PAUSE * 2 ** (job.tries - 1), _LONGEST_PAUSE)
            self._return(job, due=now + pause)

    # --- operators ---------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Return the number of jobs in each state."""
        counts = {state: self._aside[state] for state in STATES}
        counts["out"] = sum(len(worker.jobs) for worker in self.workers.values())
        counts["ready"] = len(self.jobs) - sum(counts.values())
        return counts

    def find_all(self, *states: str) -> list[Job]:
        """Return the jobs in some states, the oldest first."""
        return sorted((job for job in self.jobs.values() if job.state in states), key=attrgetter("id"))

    def retry(self, jobs: list[Job]) -> None:
        """Make dead jobs new ones."""
        for job in jobs:
            self._users[job.uid].size -= len(job.reason.encode())
            job.tries, job.reason = 0, ""
            self._changed[job.id] = job
            self._place(job)

    def drain(self, jobs: list[Job]) -> None:
        """Delete jobs."""
        self._gone += [job.id for job in jobs]
        self.forget(jobs)

    def forget(self, jobs: list[Job]) -> None:
        """Forget all jobs; earlier changes still go to the store."""
        self._take_back(jobs)
        for job in jobs:
            del self.jobs[job.id]
            user = self._users[job.uid]
            user.jobs -= 1
            user.size -= job.size + len(job.reason.encode())
            if job.state in self._aside:
                self._aside[job.state] -= 1
            if self._first:
                self._leave_line(job)

    # --- time --------------------------------------------------------------------------------

    def advance(self, now: float) -> list[Batch]:
        """Do the work that is due, hand out jobs as far as workers have room, and return these."""
        while self._delayed and self._delayed[0][0] <= now:
            due, id = heappop(self._delayed)
            job = self.jobs.get(id)
            if job is not None and job.due == due:
                job.due = 0.0
                self._place(job)
        while self._leases and (late := next(iter(self._leases.values()))).until <= now:
            self.events["expired"] += 1
            self.workers[late.holder].is_silent = True
            self._lose(late, "the lease ran out")
        handed = self._hand_out() if self._turns else []
        self.events["delivered"] += sum(len(batch.jobs) for batch in handed)
        return handed

    def sent(self, batches: list[Batch], now: float) -> None:
        """Begin the leases of the jobs that go to their workers now: the disk may have taken long."""
        for batch in batches:
            self._begin_leases(batch.jobs.values(), now)

    def _begin_leases(self, jobs: Iterable[Job], now: float) -> None:
        until = now + self.settings.lease
        for job in jobs:
            job.until = until
            self._leases[job.id] = job

    def next_time(self) -> float:
        """Return when `advance` is next needed; ``inf`` for never."""
        lease_end = next(iter(self._leases.values())).until if self._leases else math.inf
        return min(lease_end, self._delayed[0][0]) if self._delayed else lease_end

    def clock_set(self, seconds: float) -> None:
        """Note that the clock was set: leases, and pauses after failures, keep their length."""
        for job in self._leases.values():
            job.until += seconds
        delayed = [each for id in {id for _, id in self._delayed} if (each := self.jobs.get(id)) and each.due]
        for job in delayed:
            if job.tries:
                job.due += seconds
        self._delayed = sorted((job.due, job.id) for job in delayed)

    def _hand_out(self) -> list[Batch]:
        most_bytes = min(_MOST_BYTES_EACH, _MOST_BYTES_OUT // max(1, len(self.workers)))
        free = [worker for worker in self.workers.values() if worker.has_room(most_bytes)]
        loads = [(len(worker.jobs), number, worker) for number, worker in enumerate(free)]
        heapify(loads)
        turns = self._turns
        batches: dict[bytes, Batch] = {}
        passed: list[User] = []
        left = MOST_DELIVERIES
        is_kept = False
        while loads and turns and left:
            load, number, worker = loads[0]
            user = turns.popleft()
            if user.alone and load and not is_kept:
                heappop(loads)  # it is kept free until it is idle
                is_kept = True
                turns.appendleft(user)
                continue
            heap = user.ready if load or not user.alone else user.alone
            if not heap:
                passed.append(user)  # its jobs wait for an idle worker
                continue
            job = self.jobs.get(heappop(heap))
            if job is None or job.state != "ready":  # deleted meanwhile: that costs no turn
                if user.ready or user.alone:
                    turns.appendleft(user)
                continue
            if user.ready or user.alone:
                turns.append(user)
            job.tries += 1
            worker.take(job)
            batch = batches.get(worker.holder)
            if batch is None:
                batch = batches[worker.holder] = Batch(self._next_batch, worker.holder)
                self._batches[batch.id] = batch
                self._next_batch += 1
            batch.add(job)
            left -= 1
            if worker.has_room(most_bytes):
                heapreplace(loads, (load + 1, number, worker))
            else:
                heappop(loads)
        turns.extendleft(reversed(passed))
        return list(batches.values())

    # --- changes -----------------------------------------------------------------------------

    def take_changes(self) -> Changes:
        """Return the changes since the last call."""
        batches, over = list(self._batches.values()), []
        if batches:  # else one page more would be synced; a batch whose jobs are all gone does no harm
            over, self._over = self._over, []
        self.events["put"] += len(self._new)
        changes = Changes(self._new, list(self._changed.values()), self._gone, batches, over)
        self._new, self._changed, self._gone, self._batches = [], {}, [], {}
        return changes

    # --- transitions -------------------------------------------------------------------------

    def _place(self, job: Job) -> None:
        """Find the place of a job that no worker has."""
        if job.state in self._aside:
            self._aside[job.state] -= 1
        if job.reason:
            job.state = "dead"
        elif self.settings.is_ordered and (job.tries or not job.due) and not self._join_line(job):
            job.state = "waiting"
        elif job.due:
            job.state = "delayed"
            heappush(self._delayed, (job.due, job.id))
        else:
            job.state = "ready"
            user = self._users[job.uid]
            if not user.ready and not user.alone:
                self._turns.append(user)
            heappush(user.alone if job.tries >= _ALONE_FROM - 1 else user.ready, job.id)
            return
        self._aside[job.state] += 1

    def _join_line(self, job: Job) -> bool:
        """Return whether a job is the first one of its key; put it after the others if it is not."""
        first = self._first.setdefault(job.key, job)
        if first is not job:
            self._behind.setdefault(job.key, deque()).append(job)
        return first is job

    def _leave_line(self, job: Job) -> None:
        """Let the next job of the key be the first one, if this one was."""
        if self._first.get(job.key) is job:
            del self._first[job.key]
            line = self._behind.pop(job.key, None)
            while line and job.key not in self._first:
                following = line.popleft()
                if following.batch is not None:  # two were out at a start
                    self._first[job.key] = following
                elif following.id in self.jobs and not following.reason:
                    self._place(following)
            if line:
                self._behind[job.key] = line

    def _take_back(self, jobs: Iterable[Job]) -> None:
        """Take jobs from their workers, if they are out."""
        for job in jobs:
            if (batch := job.batch) is None:
                continue
            worker = self.workers[batch.holder]
            del worker.jobs[job.id], batch.jobs[job.id]
            self._leases.pop(job.id, None)
            worker.size -= job.size
            job.batch = None
            if not batch.jobs:
                self._over.append(batch.id)
            if not worker.jobs:
                worker.is_alone = False
                self._forget_idle(worker)

    def _forget_idle(self, worker: Worker) -> None:
        """Forget a worker that takes no more jobs, and has none."""
        if not worker.credit and not worker.jobs:
            self.workers.pop(worker.holder, None)

    def _release(self, job: Job) -> None:
        """Take back a job whose last delivery does not count."""
        job.tries -= 1
        self._return(job)

    def _lose(self, job: Job, why: str) -> None:
        """Take back a job whose worker has not answered; one that was never sent is not charged with it."""
        if job.id not in self._leases:
            self._release(job)
        else:
            self._return(job, death=why if job.tries >= self.settings.deliveries else "")

    def _return(self, job: Job, *, death: str = "", due: float = 0.0) -> None:
        """Take a job back; `death` is the reason why it is dead."""
        if job.batch is not None:
            self._batches[job.batch.id] = job.batch
        self._take_back([job])
        self._changed[job.id] = job
        job.due, job.reason = due, death
        self._users[job.uid].size += len(death.encode())
        self._place(job)
        if death:
            self.events["dead"] += 1
            self.died.append(job)
            self._leave_line(job)
