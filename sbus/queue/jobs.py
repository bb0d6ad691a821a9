"""The jobs of one queue: which worker gets which job, and when.

Pure decisions: the caller passes the time, makes `JobQueue.take_changes` durable, and then sends what
`JobQueue.advance` has handed out. Each job that is not done is in one place, whose name is its state:

===========  ============================================================================================
*waiting*    behind an earlier job of its key, which is under way (``ordered=key`` alone)
*ready*      in a heap of its user; users take turns. A job goes to the worker that has the fewest
*delayed*    by its publisher, or after it has failed
*out*        at a worker, in the order in which leases end: all leases are equally long
*dead*       kept for an operator
===========  ============================================================================================

*Bytes.* A worker has jobs up to its credit, and up to its part of `_MOST_BYTES_OUT`, or one job. So the jobs of a
worker that does not read fit its queue on the bus, which would drop the rest.

*Alone.* A job that was out twice may have killed its workers. From then on it goes to a worker that has no other, so
that no other job is charged with the same death. If no worker is idle, the least busy one gets no more until it is.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain, islice
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from sbus.client.queues import REASONS

__all__ = ["MOST_DELIVERIES", "ROW", "STATES", "Changes", "Job", "JobQueue", "Row", "Settings", "to_row"]

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 300.0
"""Seconds after a first failure, which double with each further one, and their limit."""
_MOST_DOUBLINGS = 16
"""Enough for the limit; a float ends at 1,023."""
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
    :ivar most: jobs of one user, dead ones included. A million take 500 MB of memory, and 20 s at the start.
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
    :ivar due: when it may go out first, or again.
    :ivar tries: the deliveries that count.
    :ivar holder: the worker that has it, or nothing.
    :ivar reason: why it is dead, or nothing.
    :ivar payload: its payload; None while it is in the store alone.
    :ivar until: the end of its lease.
    """

    id: int
    key: bytes
    sender: bytes
    uid: int
    size: int
    due: float = 0.0
    tries: int = 0
    holder: bytes = b""
    reason: str = ""
    payload: bytes | None = None
    until: float = 0.0


ROW = ("id", "key", "sender", "uid", "size", "due", "tries", "holder", "reason")
"""The attributes of a job that the store keeps, besides the payload."""
Row: TypeAlias = tuple[int, bytes, bytes, int, int, float, int, bytes, str]
to_row: Callable[[Job], Row] = attrgetter(*ROW)


@dataclass(slots=True, eq=False)
class Worker:
    """A worker, and the jobs that it has.

    :ivar holder: its token and its name on the bus.
    :ivar size: bytes of its jobs.
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
        is_open = len(self.jobs) < self.credit and self.size < most_bytes
        return is_open and not self.is_alone and not self.is_silent


class Changes(NamedTuple):
    """The changes for one transaction.

    :ivar kept: rows of jobs that are new or have changed, each with the payload, or with nothing if the store has it.
    :ivar gone: IDs of jobs to delete.
    """

    kept: list[tuple[Row, bytes]]
    gone: list[int]


class JobQueue:
    """The jobs of one queue; see above.

    :param rows: the jobs in the store. The leases of those that are out begin anew.
    :param next_id: the ID of the next new job.
    :ivar jobs: all jobs by ID.
    :ivar workers: by name, with those that held jobs before the service was started.
    :ivar owned: jobs by user.
    :ivar owned_bytes: bytes of their keys and payloads by user.
    :ivar events: the number of events since the start, by name.
    :ivar died: jobs that have died since the caller last cleared it.
    """

    def __init__(self, settings: Settings, rows: Iterable[Row] = (), next_id: int = 1, now: float = 0.0) -> None:
        self.settings = settings
        self.jobs: dict[int, Job] = {}
        self.workers: dict[bytes, Worker] = {}
        self.owned: Counter[int] = Counter()
        self.owned_bytes: Counter[int] = Counter()
        self.events: Counter[str] = Counter()
        self.died: list[Job] = []
        self._next_id = next_id
        self._dirty: dict[int, Job | None] = {}  # None: it is gone
        self._lines: dict[bytes, deque[Job]] = {}  # of each key, the first one is under way
        # By user, in the order of their turns: the heap of jobs that go alone, and that of the others.
        self._ready: OrderedDict[int, tuple[list[int], list[int]]] = OrderedDict()
        self._delayed: list[tuple[float, int]] = []
        self._out: OrderedDict[int, Job] = OrderedDict()
        self._dead: dict[int, Job] = {}
        # What was out or has failed is under way, before earlier jobs that were delayed.
        for job in sorted((Job(*row) for row in rows), key=lambda job: (not job.holder, not job.tries, job.id)):
            self._load(job, now)

    def _load(self, job: Job, now: float) -> None:
        self._add(job)
        if (job.holder or job.tries) and not job.reason and self.settings.is_ordered:
            self._lines.setdefault(job.key, deque([job]))
        if job.reason:
            self._dead[job.id] = job
        elif job.holder:
            self._lend(job, self.workers.setdefault(job.holder, Worker(job.holder)), now)
        elif job.tries or job.due:
            heappush(self._delayed, (job.due, job.id))
        else:
            self._join_line(job)

    def _add(self, job: Job) -> None:
        self.jobs[job.id] = job
        self.owned[job.uid] += 1
        self.owned_bytes[job.uid] += job.size

    # --- publishers --------------------------------------------------------------------------

    def is_full(self, uid: int, size: int) -> bool:
        """Return whether a user may not have another job of this size."""
        return self.owned[uid] >= self.settings.most or self.owned_bytes[uid] + size > self.settings.most_bytes

    def put(self, job: Job) -> None:
        """Add a new job, and number it."""
        job.id = self._next_id
        self._next_id += 1
        self.events["put"] += 1
        self._dirty[job.id] = job
        self._add(job)
        if job.due:
            heappush(self._delayed, (job.due, job.id))
        else:
            self._join_line(job)

    # --- workers -----------------------------------------------------------------------------

    def ready(self, holder: bytes, uid: int, round: int, credit: int, held: Mapping[int, int]) -> bool:
        """Take an announcement; return whether there is a place for the worker.

        :param held: the jobs that the worker holds, each with its delivery.
        """
        worker = self.workers.get(holder)
        if worker is None:
            free = _MOST_WORKERS - len(self.workers)
            if sum(each.uid == uid for each in self.workers.values()) >= free:  # else one user could take all places
                self.events["refused"] += 1
                return False
            worker = self.workers[holder] = Worker(holder)
        is_new_round, worker.round = worker.round != round, round
        worker.uid, worker.credit, worker.is_silent = uid, credit, False
        if is_new_round:
            for job in [job for job in worker.jobs.values() if held.get(job.id) != job.tries]:
                self.events["returned"] += 1
                self._take_back(job)
                job.tries -= 1
                self._make_ready(job)
        self._forget_idle(worker)
        return True

    def gone(self, holder: bytes) -> None:
        """Note that a worker is gone: its jobs are available again."""
        worker = self.workers.get(holder)
        if worker is not None:
            worker.credit = 0
            for job in list(worker.jobs.values()):
                self._lose(job, "the worker was gone")
            self._forget_idle(worker)

    def find(self, holder: bytes, id: int, tries: int) -> Job | None:
        """Return the job if the worker holds it. In any case the worker is no longer silent."""
        worker = self.workers.get(holder)
        if worker is not None:
            worker.is_silent = False
            job = worker.jobs.get(id)
            if job is not None and job.tries == tries:
                return job
        self.events["stale"] += 1
        return None

    def ack(self, job: Job) -> None:
        """Note that a job is done."""
        self.events["acked"] += 1
        self._take_back(job)
        self._leave_line(job)
        self._erase(job)

    def renew(self, job: Job, now: float) -> None:
        """Begin a lease anew."""
        job.until = now + self.settings.lease
        self._out.move_to_end(job.id)

    def nack(self, job: Job, reason: str, why: str, now: float) -> None:
        """Take a job back.

        :param reason: one of `REASONS`.
        :param why: the worker's words.
        :raises ValueError: for another reason.
        """
        if reason not in REASONS:
            raise ValueError(reason)
        self.events[reason] += 1
        self._take_back(job)
        if reason == "released":
            job.tries -= 1
            self._make_ready(job)
        elif reason == "poison" or job.tries >= self.settings.deliveries:
            self._die(job, f"{reason}: {why}")
        else:
            job.due = now + min(_FIRST_PAUSE * 2.0 ** min(job.tries - 1, _MOST_DOUBLINGS), _LONGEST_PAUSE)
            heappush(self._delayed, (job.due, job.id))

    # --- operators ---------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Return the number of jobs in each state."""
        ready = sum(map(len, chain(*self._ready.values())))
        others = [ready, len(self._delayed), len(self._out), len(self._dead)]
        return dict(zip(STATES, [len(self.jobs) - sum(others), *others], strict=True))

    def find_all(self, *states: str) -> list[tuple[Job, str]]:
        """Return the jobs in some states, each with its state, the oldest first."""
        places: dict[str, Iterable[Job]] = {
            "waiting": (job for line in self._lines.values() for job in islice(line, 1, None)),
            "ready": (self.jobs[id] for id in chain(*chain(*self._ready.values()))),
            "delayed": (self.jobs[id] for _, id in self._delayed),
            "out": self._out.values(),
            "dead": self._dead.values(),
        }
        found = ((job, state) for state in states for job in places[state])
        return sorted(found, key=lambda each: each[0].id)

    def retry(self, jobs: Iterable[Job]) -> None:
        """Make dead jobs new ones."""
        for job in jobs:
            del self._dead[job.id]
            job.tries, job.reason, job.due = 0, "", 0.0
            self._dirty[job.id] = job
            self._join_line(job)

    def drain(self, jobs: Collection[Job]) -> None:
        """Delete jobs that are not out."""
        ids = {job.id for job in jobs}
        self._delayed = [entry for entry in self._delayed if entry[1] not in ids]
        heapify(self._delayed)
        for uid, heaps in list(self._ready.items()):
            for heap in heaps:
                heap[:] = [id for id in heap if id not in ids]
                heapify(heap)
            if not any(heaps):
                del self._ready[uid]
        for key, line in list(self._lines.items()):
            left = deque(job for job in line if job.id not in ids)
            if left and left[0] is not line[0]:
                self._make_ready(left[0])
            self._lines[key] = left
        self._lines = {key: line for key, line in self._lines.items() if line}
        for job in jobs:
            self._dead.pop(job.id, None)
            self._erase(job)

    # --- time --------------------------------------------------------------------------------

    def advance(self, now: float) -> list[Job]:
        """Do what is due, hand out jobs as far as workers have room, and return these."""
        while self._delayed and self._delayed[0][0] <= now:
            job = self.jobs[heappop(self._delayed)[1]]
            if job.tries:
                self._make_ready(job)  # it has kept its place in the line
            else:
                self._join_line(job)
        while self._out and (job := next(iter(self._out.values()))).until <= now:
            self.events["expired"] += 1
            self.workers[job.holder].is_silent = True
            self._lose(job, "the lease ran out")
        handed: list[Job] = []
        if self._ready:
            self._hand_out(handed, now)
            self.events["delivered"] += len(handed)
        return handed

    def next_time(self) -> float:
        """Return when `advance` is next needed; ``inf`` for never."""
        lease = next(iter(self._out.values())).until if self._out else math.inf
        return min(lease, self._delayed[0][0]) if self._delayed else lease

    def _hand_out(self, handed: list[Job], now: float) -> None:
        most_bytes = min(_MOST_BYTES_EACH, _MOST_BYTES_OUT // max(1, len(self.workers)))
        free = [worker for worker in self.workers.values() if worker.has_room(most_bytes)]
        loads = [(len(worker.jobs), number, worker) for number, worker in enumerate(free)]
        heapify(loads)
        turns, is_kept = deque(self._ready), False
        while loads and turns and len(handed) < MOST_DELIVERIES:
            alone, others = self._ready[turns[0]]
            load, number, worker = loads[0]
            if alone and load and not is_kept:
                heappop(loads)  # it is kept free until it is idle
                is_kept = True
                continue
            uid, heap = turns.popleft(), others if load or not alone else alone
            if not heap:
                continue  # this user's jobs wait for an idle worker
            handed.append(self._deliver(heappop(heap), worker, now))
            if alone or others:
                self._ready.move_to_end(uid)
                turns.append(uid)
            else:
                del self._ready[uid]
            if worker.has_room(most_bytes):
                heapreplace(loads, (len(worker.jobs), number, worker))
            else:
                heappop(loads)

    def _deliver(self, id: int, worker: Worker, now: float) -> Job:
        job = self.jobs[id]
        job.tries += 1
        job.holder = worker.holder
        self._lend(job, worker, now)
        self._dirty[job.id] = job
        return job

    # --- changes -----------------------------------------------------------------------------

    def take_changes(self) -> Changes:
        """Return the changes since the last call. Payloads of jobs that are not out are in the store alone then."""
        dirty, self._dirty = self._dirty, {}
        changes = Changes([], [])
        for id, job in dirty.items():
            if job is None:
                changes.gone.append(id)
                continue
            changes.kept.append((to_row(job), job.payload or b""))
            if not job.holder:
                job.payload = None
        return changes

    def _erase(self, job: Job) -> None:
        self._dirty[job.id] = None
        del self.jobs[job.id]
        self.owned[job.uid] -= 1
        self.owned_bytes[job.uid] -= job.size

    # --- transitions -------------------------------------------------------------------------

    def _join_line(self, job: Job) -> None:
        """Make a job ready, or put it behind those of its key."""
        if self.settings.is_ordered:
            line = self._lines.setdefault(job.key, deque())
            line.append(job)
            if line[0] is not job:
                return
        self._make_ready(job)

    def _leave_line(self, job: Job) -> None:
        line = self._lines.get(job.key)
        if line is not None and line[0] is job:
            line.popleft()
            if line:
                self._make_ready(line[0])
            else:
                del self._lines[job.key]

    def _make_ready(self, job: Job) -> None:
        heaps = self._ready.get(job.uid)
        if heaps is None:
            heaps = self._ready[job.uid] = [], []
        heappush(heaps[job.tries < _ALONE_FROM - 1], job.id)

    def _lend(self, job: Job, worker: Worker, now: float) -> None:
        job.until = now + self.settings.lease
        self._out[job.id] = worker.jobs[job.id] = job
        worker.size += job.size
        worker.is_alone = worker.is_alone or job.tries >= _ALONE_FROM

    def _take_back(self, job: Job) -> None:
        """End a lease."""
        worker = self.workers[job.holder]
        del worker.jobs[job.id], self._out[job.id]
        worker.size -= job.size
        worker.is_alone = worker.is_alone and bool(worker.jobs)
        job.holder = b""
        self._dirty[job.id] = job
        self._forget_idle(worker)

    def _forget_idle(self, worker: Worker) -> None:
        """Forget a worker that takes no more jobs, and has none."""
        if not worker.credit and not worker.jobs:
            self.workers.pop(worker.holder, None)

    def _lose(self, job: Job, reason: str) -> None:
        """Make a job available whose last delivery counts."""
        self._take_back(job)
        if job.tries < self.settings.deliveries:
            self._make_ready(job)
        else:
            self._die(job, reason)

    def _die(self, job: Job, reason: str) -> None:
        self.events["dead"] += 1
        job.reason = reason
        self._leave_line(job)
        self._dead[job.id] = job
        self.died.append(job)
        self._dirty[job.id] = job
