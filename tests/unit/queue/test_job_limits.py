"""Bounds of a queue's jobs, bytes and workers, and a model of all of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sbus.queue.jobs import STATES, Batch, Changes, Job, JobQueue, Settings
from tests.support.examples import examples
from tests.unit.queue.handing import advance, put, queue_with


def test_reasons_count_as_bytes_of_the_user() -> None:
    """What workers say about dead jobs fills their publisher's part, until the jobs are new again, or deleted."""
    queue = queue_with(2, most_bytes=120)
    jobs = [put(queue, b"k", b"", uid=1) for _ in range(2)]
    advance(queue, 0.0)
    for job in jobs:
        queue.nack(job, "poison", "é" * 26, 0.0)
    assert not queue.put(Job(0, b"k", b"0 -", 1, 1))
    queue.retry(jobs[:1])
    queue.drain(jobs[1:])
    assert queue.put(Job(0, b"k", b"0 -", 1, 120))


def test_one_user_does_not_take_all_places_of_workers() -> None:
    """A user has at most as many workers as there are free places, so another user always finds one."""
    queue = JobQueue(Settings())
    places = {uid: sum(queue.ready(b"%d %d" % (uid, n), uid, 1, 1, {}) for n in range(1100)) for uid in range(4)}
    assert places == {0: 512, 1: 256, 2: 128, 3: 64}
    assert queue.ready(b"0 0", 0, 2, 1, {})
    assert queue.events["refused"] == 4 * 1100 - 960
    assert queue.ready(b"4 0", 4, 1, 1, {})


def test_a_user_has_bounded_jobs_and_bytes() -> None:
    """A user at a limit has no room, another one has; what is done makes room."""
    queue = queue_with(10, most=2, most_bytes=10)

    def has_room(uid: int, size: int) -> bool:
        return queue.put(Job(0, b"", b"0 -", uid, size, bytes(size)))

    assert [has_room(1, 8), has_room(1, 3), has_room(2, 3), has_room(1, 2), has_room(1, 0)] == [1, 0, 1, 1, 0]
    queue.ack(advance(queue, 0.0))
    assert has_room(1, 10)


KEYS = [b"a", b"b"]
WORKERS = [b"1", b"2", b"3"]


class Machine(RuleBasedStateMachine):
    """A queue beside a naive model of its promises.

    :ivar disk: what the store has of jobs.
    :ivar batches: what it has of batches.
    :ivar hold: for each worker that is connected, the jobs that it has, with the delivery.
    :ivar open: jobs that were put and not done.
    """

    @initialize(ordered=st.booleans(), deliveries=st.integers(1, 4))
    def begin(self, ordered: bool, deliveries: int) -> None:
        self.chosen = Settings(lease=30.0, deliveries=deliveries, is_ordered=ordered)
        self.queue = JobQueue(self.chosen)
        self.now = 1000.0
        self.disk: dict[int, bytes] = {}
        self.batches: dict[int, tuple[bytes, bytes]] = {}
        self.next_id = 1
        self.hold: dict[bytes, dict[int, int]] = {}
        self.credit: dict[bytes, int] = {}
        self.round = 0
        self.open: set[int] = set()
        self.prompt: set[int] = set()  # neither delayed nor retried
        self.begun: set[int] = set()

    # --- what the service does ---

    def save(self) -> Changes:
        changes = self.queue.take_changes()
        for job in (*changes.new, *changes.changed):
            self.disk[job.id] = job.head()
        for id in changes.gone:
            self.disk.pop(id, None)
        for batch in changes.batches:
            self.batches[batch.id] = batch.holder, batch.build()
        for id in changes.over:
            self.batches.pop(id, None)
        return changes

    @rule()
    def turn(self) -> None:
        before = {uid: self.queue_ready(uid) for uid in (1, 2)}
        silent = {job.holder for job in self.queue.jobs.values() if job.holder and job.until <= self.now}
        handed = advance(self.queue, self.now)
        self.save()
        served: list[int] = []
        held = {token: sum(self.is_held(token, job) for job in jobs.items()) for token, jobs in self.hold.items()}
        for job in handed:
            token = job.holder
            assert token not in silent
            assert self.credit[token] > held[token]
            if job.tries >= 3:
                assert not held[token]
            held[token] += 1
            assert job.due <= self.now
            if self.chosen.is_ordered and job.id in self.prompt and job.id not in self.begun:
                earlier = {id for id in self.prompt & self.open if id < job.id and self.queue.jobs[id].key == job.key}
                assert all(self.queue.jobs[id].reason for id in earlier)
            self.begun.add(job.id)
            self.hold[token][job.id] = job.tries
            served.append(job.uid)
        for uid in (1, 2):  # nobody has two while another one who had some got none
            if before[uid] and uid not in served:
                assert served.count(3 - uid) <= 1 or self.chosen.is_ordered

    def is_held(self, token: bytes, delivery: tuple[int, int]) -> bool:
        """Whether the lease of what a worker has still runs."""
        job = self.queue.jobs.get(delivery[0])
        return job is not None and (job.holder, job.tries) == (token, delivery[1])

    def queue_ready(self, uid: int) -> int:
        return sum(job.uid == uid and job.tries < 2 for job in self.queue.find_all("ready"))

    @rule(key=st.sampled_from(KEYS), uid=st.sampled_from([1, 2]), delay=st.sampled_from([0.0, 0.0, 5.0]))
    def put(self, key: bytes, uid: int, delay: float) -> None:
        job = put(self.queue, key, b"", uid=uid, due=self.now + delay if delay else 0.0)
        assert job.id == self.next_id
        self.next_id += 1
        self.open.add(job.id)
        if not delay:
            self.prompt.add(job.id)

    @rule(token=st.sampled_from(WORKERS), credit=st.integers(1, 3))
    def announce(self, token: bytes, credit: int) -> None:
        self.round += 1
        self.credit[token] = credit
        self.queue.ready(token, 0, self.round, credit, self.hold.get(token, {}))
        self.hold[token] = {id: job.tries for id, job in self.queue.workers[token].jobs.items()}

    @precondition(lambda self: self.hold)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        token = data.draw(st.sampled_from(sorted(self.hold)))
        self.queue.gone(token)
        del self.hold[token]

    @precondition(lambda self: any(self.hold.values()))
    @rule(data=st.data(), what=st.sampled_from(["ack", "released", "failed", "poison", "renew"]))
    def answer(self, data: st.DataObject, what: str) -> None:
        token = data.draw(st.sampled_from(sorted(token for token in self.hold if self.hold[token])))
        id = data.draw(st.sampled_from(sorted(self.hold[token])))
        tries = self.hold[token][id]
        held = self.queue.held(token, [(id, tries)])
        if not held:  # the lease had run out
            del self.hold[token][id]
            return
        [job] = held
        if what == "renew":
            self.queue.renew(job, self.now)
            return
        del self.hold[token][id]
        if what == "ack":
            self.queue.ack([job])
            self.open.remove(id)
            return
        self.queue.nack(job, what, "why", self.now)
        is_dead = what == "poison" or (what == "failed" and tries >= self.chosen.deliveries)
        assert bool(job.reason) == is_dead
        if what == "failed" and not is_dead:
            assert job.due == self.now + 2.0 ** (tries - 1)

    @rule(seconds=st.sampled_from([0.5, 2.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.queue.find_all("dead"))
    @rule()
    def retry(self) -> None:
        for job in self.queue.find_all("dead"):
            self.queue.retry([job])
            self.prompt.discard(job.id)

    @precondition(lambda self: self.queue.find_all("ready", "waiting", "delayed"))
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        found = self.queue.find_all("ready", "waiting", "delayed")
        chosen = data.draw(st.lists(st.sampled_from(found), min_size=1, max_size=2, unique_by=lambda job: job.id))
        self.queue.drain(chosen)
        self.open -= {job.id for job in chosen}

    @rule()
    def restart(self) -> None:
        """Start the service again: from the disk, with the same workers, some of which have died meanwhile."""
        self.save()
        stored = {id: Job.parse(id, head, 0) for id, head in self.disk.items()}
        for id, (holder, tries) in self.batches.items():
            Batch(id, holder).add_stored(tries, stored)
        self.queue = JobQueue(self.chosen, stored.values(), self.next_id, self.now)
        for token in list(self.hold):
            self.announce(token, self.credit[token])
        assert not any(self.save())

    # --- promises ---

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "queue"):
            return
        queue = self.queue
        assert set(queue.jobs) == self.open
        found = queue.find_all(*STATES)
        assert [job.id for job in found] == sorted(self.open)
        states = [job.state for job in found]
        assert queue.counts() == {state: states.count(state) for state in STATES}
        for job in found:
            self.check(job)

    def check(self, job: Job) -> None:
        queue, state = self.queue, job.state
        holders = [worker for worker in queue.workers.values() if job.id in worker.jobs]
        assert len(holders) == (state == "out")
        assert bool(job.reason) == (state == "dead")
        assert job.tries <= self.chosen.deliveries
        if state == "out":
            assert holders[0].holder == job.holder
            assert queue.next_time() <= job.until < math.inf
            if job.tries >= 3:
                assert len(holders[0].jobs) == 1
        if self.chosen.is_ordered and state == "out":
            under_way = [other for other in queue.find_all("out") if other.key == job.key]
            assert under_way == [job]
        if state == "waiting":
            assert self.chosen.is_ordered

    def teardown(self) -> None:
        """In the end, with workers that do their work, every job is done or dead."""
        if not hasattr(self, "queue"):
            return
        for token in list(self.hold):
            self.die_now(token)
        self.announce(b"9", 2)
        for _ in range(20 * len(self.open) + 20):
            out = self.queue.find_all("out")
            self.queue.ack(out)
            self.open -= {job.id for job in out}
            self.now += 31.0
            advance(self.queue, self.now)
        assert all(job.reason for job in self.queue.jobs.values())

    def die_now(self, token: bytes) -> None:
        self.queue.gone(token)
        del self.hold[token]


Machine.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
TestModel = pytest.mark.timeout(120)(Machine.TestCase)
