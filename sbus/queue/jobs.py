"""The jobs of one queue: which worker gets which job, and when.

Pure decisions: the caller passes the time, writes `JobQueue.take_changes` to the disk, and hands out what
`JobQueue.advance` returns.

*States.* A job *waits* behind an earlier one of its key (``ordered=key`` alone), is *ready*, *delayed* (by its sender,
or after it has failed), *out* at a worker, or *dead*. A job that is done is gone.

*Heaps* are cleaned late: an entry counts only if its job still is what it was when it was pushed.

*Fairness.* Users take turns, each with the oldest job. A job goes to the worker that has the fewest.

*Alone.* A job that was out twice may have killed its workers. The third time it goes to a worker that has no other, so
that no other job is counted for the same death. If no worker is idle, one gets nothing more until it is.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from operator import attrgetter
from typing import NamedTuple, TypeAlias

__all__ = ["PENDING", "ROW", "Changes", "Delivery", "Job", "JobQueue", "Row", "Rules", "State", "Worker", "to_row"]

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 300.0
"""Seconds after a first failure, which double with each further one, and their limit."""
_ALONE_FROM = 3
"""The delivery from which on a job goes alone."""
_KEPT_BYTES = 64 << 20
"""Bytes of payloads that stay in memory until their jobs first go out; those beyond are read from the store."""
_MOST_DELIVERIES = 512
"""Deliveries of one turn: a worker with much credit would have the service read gigabytes of payloads at once."""


class State(enum.Enum):
    """Where a job is; the value is the word for people."""

    WAITING = "waiting"
    READY = "ready"
    DELAYED = "delayed"
    OUT = "out"
    DEAD = "dead"
    GONE = "gone"

    __hash__ = object.__hash__  # `enum.Enum` hashes the name, with a call in Python


PENDING = (State.WAITING, State.READY, State.DELAYED)
"""Jobs that are neither at a worker nor dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the operator has chosen for a queue.

    :ivar lease: seconds that a worker has for a job, and again from each renewal.
    :ivar deliveries: deliveries without an ack after which a job is dead.
    :ivar is_ordered: whether jobs of one key go out one by one.
    :ivar most: jobs of one user, dead ones included. A million take 500 MB of memory, and 20 s at the start.
    """

    lease: float = 30.0
    deliveries: int = 5
    is_ordered: bool = False
    most: int = 1_000_000


@dataclass(slots=True, eq=False)
class Job:
    """A job.

    :ivar sender: the publisher, as in a notice of the bus (`sbus.protocol.notices`).
    :ivar uid: the publisher's user; -1 without one.
    :ivar due: when it may go out first, or again.
    :ivar tries: the deliveries that count.
    :ivar holder: the worker that has it, or nothing.
    :ivar until: the end of its lease.
    :ivar reason: why it is dead, or nothing.
    :ivar payload: its payload; None if it is in the store alone.
    """

    id: int
    key: bytes
    sender: bytes
    uid: int
    due: float = 0.0
    tries: int = 0
    holder: bytes = b""
    until: float = 0.0
    reason: str = ""
    payload: bytes | None = None
    is_stored: bool = True
    state: State = State.WAITING

    def __lt__(self, other: Job) -> bool:
        return self.id < other.id  # the entries of the heaps have the ID in front, which is faster


ROW = ("id", "key", "sender", "uid", "due", "tries", "holder", "until", "reason")
"""The attributes of a job that the store keeps, besides the payload."""
Row: TypeAlias = tuple[int, bytes, bytes, int, float, int, bytes, float, str]
to_row: Callable[[Job], Row] = attrgetter(*ROW)


class Worker:
    """A worker, and the jobs that it has.

    :ivar holder: what names it, at all times.
    :ivar is_silent: whether a lease ran out since it was heard: else it would get every job again, as the one with the
        fewest.
    """

    __slots__ = ("credit", "holder", "is_alone", "is_silent", "jobs", "round")

    def __init__(self, holder: bytes) -> None:
        self.holder = holder
        self.round = -1
        self.credit = 0
        self.jobs: dict[int, Job] = {}
        self.is_alone = self.is_silent = False

    def has_room(self) -> bool:
        """Return whether another job may go to it."""
        return len(self.jobs) < self.credit and not self.is_alone and not self.is_silent


class Delivery(NamedTuple):
    """A job on its way to a worker."""

    job: Job
    worker: Worker
    round: int
    tries: int

    def counts(self) -> bool:
        """Return whether the job is still the worker's: much may have happened while the disk wrote."""
        job, worker = self.job, self.worker
        return (job.holder, job.tries, worker.round) == (worker.holder, self.tries, self.round)


class Changes(NamedTuple):
    """What is to be written, in one transaction.

    :ivar new: jobs with their payloads.
    :ivar changed: jobs that the store has.
    :ivar gone: IDs of jobs to delete.
    """

    new: list[tuple[Row, bytes]]
    changed: list[Row]
    gone: list[int]


class JobQueue:
    """The jobs of one queue; see above.

    :param rules: what the operator has chosen.
    :param rows: the jobs in the store, by ID.
    :param next_id: the ID of the next new job.
    :ivar jobs: all jobs by ID.
    :ivar workers: by name, with those that held jobs before the service was started.
    :ivar counts: jobs by state.
    :ivar owned: jobs by user.
    :ivar events: what has happened since the start, by word.
    :ivar died: jobs that have died since the caller last cleared it.
    """

    def __init__(self, rules: Rules, rows: Iterable[Row] = (), next_id: int = 1) -> None:
        self.rules = rules
        self.jobs: dict[int, Job] = {}
        self.workers: dict[bytes, Worker] = {}
        self.counts: Counter[State] = Counter()
        self.owned: Counter[int] = Counter()
        self.events: Counter[str] = Counter()
        self.died: list[Job] = []
        self._next_id = next_id
        self._kept_bytes = 0
        self._dirty: dict[Job, None] = {}
        self._lines: dict[bytes, deque[Job]] = {}  # with `is_ordered`: of each key, the head is under way
        self._ready: dict[int, list[tuple[int, Job]]] = {}  # by user
        self._turns: deque[int] = deque()  # the users in `_ready`
        self._alone: list[tuple[int, Job]] = []  # ready, but for a worker without another
        self._reserved: Worker | None = None  # gets nothing more until it is idle
        self._delayed: list[tuple[float, int, Job]] = []
        self._leases: list[tuple[float, int, Job]] = []
        # The head of a line was out or has failed, so it stands in front of earlier jobs that were delayed.
        for job in sorted((Job(*row) for row in rows), key=lambda job: (not job.holder, not job.tries, job.id)):
            self._load(job)
        self._dirty.clear()

    def _load(self, job: Job) -> None:
        self._add(job)
        if job.reason:
            self._set(job, State.DEAD)
        elif job.holder:
            self._join_line(job)
            self._lend(job, self.workers.setdefault(job.holder, Worker(job.holder)))
        elif job.tries:
            if self._join_line(job):
                self._delay(job)
        else:
            self._delay(job)

    def _add(self, job: Job) -> None:
        self.jobs[job.id] = job
        self.counts[job.state] += 1
        self.owned[job.uid] += 1

    # --- publishers --------------------------------------------------------------------------

    def put(self, key: bytes, payload: bytes, sender: bytes = b"0 -", uid: int = -1, not_before: float = 0.0) -> Job:
        """Add a job."""
        job = Job(self._next_id, key, sender, uid, not_before, payload=payload, is_stored=False)
        self._next_id += 1
        self._add(job)
        self.events["put"] += 1
        self._delay(job)
        return job

    # --- workers -----------------------------------------------------------------------------

    def ready(self, holder: bytes, round: int, credit: int, held: Mapping[int, int]) -> None:
        """Take an announcement.

        :param held: for each job that the worker holds, the delivery.
        """
        worker = self.workers.setdefault(holder, Worker(holder))
        is_new_round, worker.round, worker.credit = worker.round != round, round, credit
        worker.is_silent = False
        if is_new_round:
            for job in [job for job in worker.jobs.values() if held.get(job.id) != job.tries]:
                self.events["returned"] += 1
                self._take_back(job)
                self._give_again(job)
        self._forget_idle(worker)

    def gone(self, holder: bytes) -> None:
        """Note that a worker is gone: its jobs are available again."""
        worker = self.workers.pop(holder, None)
        if worker is not None:
            worker.credit = 0
            for job in list(worker.jobs.values()):
                self._lose(job, "the worker was gone")
            self._forget_idle(worker)

    def find(self, holder: bytes, id: int, tries: int) -> Job | None:
        """Return the job that a worker holds, if it does; it has been heard in any case."""
        if holder in self.workers:
            self.workers[holder].is_silent = False
        job = self.jobs.get(id)
        if job is None or (job.holder, job.tries) != (holder, tries):
            self.events["stale"] += 1
            return None
        return job

    def ack(self, job: Job) -> None:
        """Note that a job is done."""
        self.events["acked"] += 1
        self._remove(job)

    def renew(self, job: Job, now: float) -> None:
        """Let a lease begin anew."""
        job.until = now + self.rules.lease
        heappush(self._leases, (job.until, job.id, job))
        self._dirty[job] = None

    def nack(self, job: Job, reason: str, why: str, now: float) -> None:
        """Take a job back.

        :param reason: ``released``, ``failed`` or ``poison``.
        :param why: the worker's words.
        """
        self.events[reason] += 1
        self._take_back(job)
        if reason == "released":
            self._give_again(job)
        elif reason == "poison":
            self._die(job, f"poison: {why}")
        elif not self._check_dead(job, f"failed: {why}"):
            job.due = now + min(_FIRST_PAUSE * 2.0 ** (job.tries - 1), _LONGEST_PAUSE)
            self._delay(job)

    # --- operators ---------------------------------------------------------------------------

    def find_all(self, *states: State) -> list[Job]:
        """Return the jobs in some states, the oldest first."""
        return sorted(job for job in self.jobs.values() if job.state in states)

    def retry(self, job: Job) -> None:
        """Make a dead job a new one."""
        job.tries, job.reason, job.due = 0, "", 0.0
        self._delay(job)

    def drain(self, job: Job) -> None:
        """Delete a job that is not out."""
        self._remove(job)

    # --- time --------------------------------------------------------------------------------

    def advance(self, now: float) -> list[Delivery]:
        """Do what is due, and hand out what can be handed out."""
        while self._delayed and self._delayed[0][0] <= now:
            due, _, job = heappop(self._delayed)
            if job.state is State.DELAYED and job.due == due and self._join_line(job):
                self._make_ready(job)
        while self._leases and self._leases[0][0] <= now:
            until, _, job = heappop(self._leases)
            if job.state is State.OUT and job.until == until:
                self.events["expired"] += 1
                self.workers[job.holder].is_silent = True
                self._lose(job, "the lease ran out")
        deliveries: list[Delivery] = []
        self._assign_alone(now, deliveries)
        free = [
            (len(worker.jobs), worker.holder, worker)
            for worker in self.workers.values()
            if worker.has_room() and worker is not self._reserved
        ]
        heapify(free)
        while free and len(deliveries) < _MOST_DELIVERIES and (ready := self._next_ready()) is not None:
            worker = free[0][2]
            deliveries.append(self._hand_out(ready, worker, now))
            if worker.has_room():
                heapreplace(free, (len(worker.jobs), worker.holder, worker))
            else:
                heappop(free)
        return deliveries

    def next_time(self) -> float:
        """Return when `advance` is next needed; ``inf`` for never."""
        return min(self._delayed[0][0] if self._delayed else math.inf, self._leases[0][0] if self._leases else math.inf)

    def _assign_alone(self, now: float, deliveries: list[Delivery]) -> None:
        while self._alone:
            if self._alone[0][1].state is not State.READY:
                heappop(self._alone)
                continue
            free = [worker for worker in self.workers.values() if worker.has_room()]
            if not free:
                return
            worker = min(free, key=lambda worker: len(worker.jobs))
            if worker.jobs:
                if self._reserved not in free:
                    self._reserved = worker
                return
            worker.is_alone = True
            deliveries.append(self._hand_out(heappop(self._alone)[1], worker, now))
        self._reserved = None

    def _next_ready(self) -> Job | None:
        """Remove and return the oldest job of the user whose turn it is."""
        while self._turns:
            ready = self._ready[self._turns[0]]
            while ready and ready[0][1].state is not State.READY:
                heappop(ready)
            if ready:
                self._turns.rotate(-1)
                return heappop(ready)[1]
            del self._ready[self._turns.popleft()]
        return None

    # --- changes -----------------------------------------------------------------------------

    @property
    def has_changes(self) -> bool:
        """Whether anything has changed since `take_changes`."""
        return bool(self._dirty)

    def take_changes(self) -> Changes:
        """Return what has changed since the last call."""
        changes = Changes([], [], [])
        for job in self._dirty:
            if job.state is State.GONE:
                if job.is_stored:
                    changes.gone.append(job.id)
            elif job.is_stored:
                changes.changed.append(to_row(job))
            else:
                assert job.payload is not None
                changes.new.append((to_row(job), job.payload))
                job.is_stored = True
                self._kept_bytes += len(job.payload)
                if self._kept_bytes > _KEPT_BYTES:
                    self.forget_payload(job)
        self._dirty.clear()
        return changes

    def forget_payload(self, job: Job) -> None:
        """Leave a payload to the store."""
        if job.payload is not None and job.is_stored:
            self._kept_bytes -= len(job.payload)
            job.payload = None

    # --- transitions -------------------------------------------------------------------------

    def _set(self, job: Job, state: State) -> None:
        self.counts[job.state] -= 1
        self.counts[state] += 1
        job.state = state
        self._dirty[job] = None

    def _delay(self, job: Job) -> None:
        self._set(job, State.DELAYED)
        heappush(self._delayed, (job.due, job.id, job))

    def _join_line(self, job: Job) -> bool:
        """Put a job behind those of its key; return whether it is the first one, or needs no line."""
        if not self.rules.is_ordered:
            return True
        line = self._lines.setdefault(job.key, deque())
        if not line or line[0] is not job:  # a job that failed has kept its place
            line.append(job)
        if line[0] is not job:
            self._set(job, State.WAITING)
        return line[0] is job

    def _leave_line(self, job: Job) -> None:
        line = self._lines.get(job.key)
        if line is None:
            return
        if line[0] is not job:
            if job.state is not State.DELAYED:  # else it has never joined
                line.remove(job)
            return
        line.popleft()
        if not line:
            del self._lines[job.key]
        elif line[0].state is State.WAITING:
            self._make_ready(line[0])

    def _make_ready(self, job: Job) -> None:
        self._set(job, State.READY)
        if job.tries >= _ALONE_FROM - 1:
            heappush(self._alone, (job.id, job))
            return
        ready = self._ready.get(job.uid)
        if ready is None:
            ready = self._ready[job.uid] = []
            self._turns.append(job.uid)
        heappush(ready, (job.id, job))

    def _hand_out(self, job: Job, worker: Worker, now: float) -> Delivery:
        self.events["delivered"] += 1
        job.tries += 1
        job.holder, job.until = worker.holder, now + self.rules.lease
        self._lend(job, worker)
        return Delivery(job, worker, worker.round, job.tries)

    def _lend(self, job: Job, worker: Worker) -> None:
        self._set(job, State.OUT)
        worker.jobs[job.id] = job
        heappush(self._leases, (job.until, job.id, job))

    def _take_back(self, job: Job) -> None:
        """End a lease."""
        worker = self.workers.get(job.holder)
        job.holder, job.until = b"", 0.0
        if worker is not None:
            del worker.jobs[job.id]
            if not worker.jobs:
                worker.is_alone = False
            self._forget_idle(worker)

    def _forget_idle(self, worker: Worker) -> None:
        """Forget a worker that takes no more jobs, and has none."""
        if not worker.credit and not worker.jobs:
            self.workers.pop(worker.holder, None)
        if self._reserved is worker and not worker.credit:
            self._reserved = None

    def _give_again(self, job: Job) -> None:
        """Make a job available whose last delivery does not count."""
        job.tries -= 1
        self._make_ready(job)

    def _lose(self, job: Job, reason: str) -> None:
        """Make a job available whose last delivery counts."""
        self._take_back(job)
        if not self._check_dead(job, reason):
            self._make_ready(job)

    def _check_dead(self, job: Job, reason: str) -> bool:
        if job.tries < self.rules.deliveries:
            return False
        self._die(job, reason)
        return True

    def _die(self, job: Job, reason: str) -> None:
        self.events["dead"] += 1
        job.reason = reason
        self._leave_line(job)
        self._set(job, State.DEAD)
        self.died.append(job)

    def _remove(self, job: Job) -> None:
        if job.holder:
            self._take_back(job)
        if job.state is not State.DEAD:
            self._leave_line(job)
        self.forget_payload(job)
        del self.jobs[job.id]
        self.owned[job.uid] -= 1
        self._set(job, State.GONE)
