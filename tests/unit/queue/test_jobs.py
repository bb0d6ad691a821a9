"""Which worker gets which job, and when."""

from __future__ import annotations

import math

from sbus.queue.jobs import MOST_DELIVERIES, Batch, Job, JobQueue, Settings
from tests.unit.queue.handing import advance, put, queue_with


def ids(handed: list[Job]) -> list[int]:
    return [job.id for job in handed]


def test_credit_bounds_what_a_worker_has() -> None:
    """A worker gets as many jobs as it has credit, and the next one when it has answered one."""
    queue = queue_with(2)
    for _ in range(3):
        put(queue, b"k", b"")
    first = advance(queue, 0.0)
    assert ids(first) == [1, 2]
    queue.ack([first[1]])
    assert ids(advance(queue, 0.0)) == [3]


def test_the_least_busy_worker_gets_the_next_job() -> None:
    """A job goes to the worker with the fewest, not to each in turn."""
    queue = JobQueue(Settings())
    queue.ready(b"a", 0, 1, 10, {})
    queue.ready(b"b", 0, 1, 10, {})
    for _ in range(4):
        put(queue, b"k", b"")
    for job in advance(queue, 0.0):
        if job.holder == b"b":
            queue.ack([job])
    for _ in range(2):
        put(queue, b"k", b"")
    assert [job.holder for job in advance(queue, 0.0)] == [b"b", b"b"]


def test_users_take_turns() -> None:
    """A user with many jobs does not make another one wait."""
    queue = queue_with(4)
    for uid in (1, 1, 1, 1, 2, 3):
        put(queue, b"k", b"", uid=uid)
    assert [job.uid for job in advance(queue, 0.0)] == [1, 2, 3, 1]


def test_deleted_jobs_take_no_turns() -> None:
    """A user takes turns with the jobs that are left: if an operator deletes some, the user loses no turn."""
    queue = queue_with(2)
    deleted = [put(queue, b"k", b"", uid=1) for _ in range(2)]
    for uid in (1, 2, 2):
        put(queue, b"k", b"", uid=uid)
    queue.drain(deleted)
    assert sorted(job.uid for job in advance(queue, 0.0)) == [1, 2]


def test_a_user_whose_jobs_kill_workers_takes_turns_too() -> None:
    """Jobs that go alone take the turns of their user: those of another one go between them."""
    queue = queue_with(1, deliveries=9)
    bad = [put(queue, b"bad", b"", uid=1) for _ in range(3)]
    for now in (0.0, 100.0):
        for _ in bad:
            [job] = advance(queue, now)
            queue.nack(job, "failed", "", now)
    for _ in range(2):
        put(queue, b"good", b"", uid=2)
    served = []
    for _ in range(4):
        [job] = advance(queue, 200.0)
        served.append(job.uid)
        queue.ack([job])
    assert served in ([1, 2, 1, 2], [2, 1, 2, 1])


def test_failures_pause_longer_each_time() -> None:
    """The pauses after failures are 1 s, 2 s, 4 s and so on, up to 5 minutes."""
    queue, now, pauses = queue_with(deliveries=20), 0.0, []
    job = put(queue, b"k", b"")
    for _ in range(11):
        assert ids(advance(queue, now)) == [1]
        queue.nack(job, "failed", "", now)
        pauses.append(job.due - now)
        assert advance(queue, now + pauses[-1] - 0.5) == []
        now += pauses[-1]
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]


def test_a_job_may_fail_for_days() -> None:
    """With many deliveries, a job that has failed a thousand times still comes back."""
    queue = queue_with(1, deliveries=5000)
    put(queue, b"k", b"")
    now = 0.0
    for _ in range(1100):
        [job] = advance(queue, now)
        queue.nack(job, "failed", "", now)
        now += 300.0
    assert job.state == "delayed"


def test_a_job_dies_after_its_deliveries() -> None:
    """A job that fails as often as it may be delivered is dead, with the last reason; a retry makes it new."""
    queue = queue_with(deliveries=2)
    job = put(queue, b"k", b"")
    for now in (0.0, 1.0):
        assert ids(advance(queue, now)) == [1]
        queue.nack(job, "failed", f"at {now}", now)
    assert (job.state, job.reason, queue.died) == ("dead", "failed: at 1.0", [job])
    queue.retry([job])
    assert (ids(advance(queue, 2.0)), job.tries) == ([1], 1)


def test_released_jobs_do_not_count_and_poison_is_final() -> None:
    """A released job is as new, at once; a poisonous one is dead at once."""
    queue = queue_with(deliveries=1)
    job = put(queue, b"k", b"")
    for _ in range(3):
        assert ids(advance(queue, 0.0)) == [1]
        queue.nack(job, "released", "", 0.0)
    assert ids(advance(queue, 0.0)) == [1]
    queue.nack(job, "poison", "no image", 0.0)
    assert (job.state, job.reason) == ("dead", "poison: no image")


def test_a_lease_ends_unless_it_is_renewed() -> None:
    """A job whose lease has run out goes out again, and the answer to the former delivery is stale."""
    queue = queue_with(lease=30.0)
    job = put(queue, b"k", b"")
    advance(queue, 0.0)
    queue.renew(job, 20.0)
    assert advance(queue, 49.0) == []
    assert advance(queue, 50.0) == []
    assert not queue.held(b"w", [(1, 1)])
    assert ids(advance(queue, 50.0)) == [1]
    assert queue.held(b"w", [(1, 2)]) == [job]
    assert not queue.held(b"another", [(1, 2)])


def test_each_lease_ends_in_its_time() -> None:
    """The leases of jobs that came later, and of one that was renewed, do not keep that of another one from ending."""
    queue = queue_with(lease=30.0)
    jobs = [put(queue, b"k", b"") for _ in range(2)]
    assert advance(queue, 0.0) == jobs
    put(queue, b"k", b"")
    advance(queue, 10.0)
    queue.renew(jobs[0], 20.0)
    assert queue.next_time() == 30.0
    advance(queue, 30.0)
    assert [queue.events["expired"], *(job.holder for job in jobs)] == [1, b"w", b""]


def test_what_a_deleted_job_has_left_is_passed_over() -> None:
    """A job that is taken back from a queue and put into it anew is handed out once, when it is due."""
    queue = queue_with()
    ready, delayed = put(queue, b"k", b""), put(queue, b"k", b"", due=1.0)
    queue.drain([ready, delayed])
    ready.due, delayed.due = 1.0, 2.0
    for job in (ready, delayed):
        queue.add(job)
    assert [ids(advance(queue, now)) for now in (0.5, 1.0, 1.5, 2.0)] == [[], [ready.id], [], [delayed.id]]


def test_a_worker_that_says_nothing_gets_nothing_more() -> None:
    """A worker whose lease ran out has no room until it is heard, though it has the fewest jobs then."""
    queue = queue_with(lease=30.0)
    put(queue, b"k", b"")
    advance(queue, 0.0)
    assert advance(queue, 30.0) == []
    queue.ready(b"other", 0, 1, 1, {})
    assert [(d.holder, d.tries) for d in advance(queue, 31.0)] == [(b"other", 2)]
    put(queue, b"k", b"")
    assert advance(queue, 32.0) == []
    assert not queue.held(b"w", [(1, 1)])
    assert [d.holder for d in advance(queue, 33.0)] == [b"w"]
    assert advance(queue, 63.0) == []
    queue.ready(b"w", 0, 2, 10, {})
    assert [d.holder for d in advance(queue, 64.0)] == [b"w"]


def test_the_third_delivery_goes_alone() -> None:
    """A job that was out twice waits for a worker without jobs, which gets nothing else beside it."""
    queue = queue_with(5)
    for _ in range(2):
        put(queue, b"bad", b"")
        advance(queue, 0.0)
        queue.gone(b"w")
        queue.ready(b"w", 0, 1, 5, {})
    for _ in range(3):
        put(queue, b"good", b"")
    # 1 was out twice, 2 once.
    first = advance(queue, 0.0)
    assert ids(first) == [1]
    assert advance(queue, 0.0) == []
    queue.ack([first[0]])
    assert ids(advance(queue, 0.0)) == [2, 3, 4, 5]


def put_and_fail_twice(queue: JobQueue) -> Job:
    """Put a job that goes alone from the time 2 on."""
    bad = put(queue, b"bad", b"")
    for now in (0.0, 1.0):
        assert ids(advance(queue, now)) == [bad.id]
        queue.nack(bad, "failed", "", now)
    return bad


def test_a_busy_worker_is_kept_free_for_a_job_that_goes_alone() -> None:
    """If no worker is idle, one gets nothing more until it is, so that the job's turn comes."""
    queue = queue_with(2)
    bad = put_and_fail_twice(queue)
    for _ in range(3):
        put(queue, b"good", b"")
    first, second = advance(queue, 2.0)
    queue.ack([first])
    assert advance(queue, 3.0) == []
    queue.ack([second])
    assert ids(advance(queue, 3.0)) == [bad.id]
    queue.ack([bad])
    assert ids(advance(queue, 3.0)) == [4]


def test_one_busy_worker_is_kept_free_and_others_go_on() -> None:
    """Of two busy workers, one is kept free for a job that goes alone; the other one gets jobs, but not that one."""
    queue = queue_with(3)
    put_and_fail_twice(queue)
    queue.ready(b"v", 0, 1, 3, {})
    for _ in range(2):
        put(queue, b"good", b"")
    assert {job.holder for job in advance(queue, 2.0)} == {b"v", b"w"}
    for _ in range(3):
        put(queue, b"good", b"")
    handed = advance(queue, 3.0)
    assert [job.key for job in handed] == [b"good", b"good"]
    assert len({job.holder for job in handed}) == 1


def test_a_new_round_takes_back_what_the_worker_lacks() -> None:
    """After an interruption a worker keeps the jobs that it holds; the others go out again, uncounted."""
    queue = queue_with(2)
    for _ in range(2):
        put(queue, b"k", b"")
    advance(queue, 0.0)
    queue.ready(b"w", 0, 2, 2, {1: 1})
    assert [(d.id, d.tries) for d in advance(queue, 0.0)] == [(2, 1)]


def test_the_same_round_takes_nothing_back() -> None:
    """A worker that announces itself in the same round keeps the jobs that are on their way to it."""
    queue = queue_with(2)
    put(queue, b"k", b"")
    advance(queue, 0.0)
    queue.ready(b"w", 0, 1, 1, {})
    assert advance(queue, 0.0) == []
    assert queue.counts()["out"] == 1


def test_workers_without_credit_and_jobs_are_forgotten() -> None:
    """A worker that ends, or is gone, leaves its place once it has no jobs."""
    queue = queue_with(2)
    queue.ready(b"w", 0, 2, 0, {})
    assert queue.workers == {}
    for _ in range(2):
        queue.ready(b"w", 0, 3, 1, {})
        queue.gone(b"w")
        assert queue.workers == {}
    put(queue, b"k", b"")
    queue.ready(b"w", 0, 4, 1, {})
    handed = advance(queue, 0.0)
    queue.ready(b"w", 0, 4, 0, {})
    queue.ack(handed)
    assert queue.workers == {}


def test_much_credit_takes_several_turns() -> None:
    """A turn hands out a bounded number of jobs, whatever workers ask for."""
    queue = queue_with(MOST_DELIVERIES)
    queue.ready(b"v", 0, 1, MOST_DELIVERIES, {})
    for _ in range(MOST_DELIVERIES + 10):
        put(queue, b"k", b"")
    assert [len(advance(queue, 0.0)) for _ in range(3)] == [MOST_DELIVERIES, 10, 0]


def test_a_worker_has_a_bounded_number_of_bytes() -> None:
    """A worker with much credit gets no more bytes than its queue on the bus holds, and at least one job."""
    queue = queue_with(1000)
    for _ in range(2):
        put(queue, b"k", bytes(2 << 20))
    for _ in range(300):
        put(queue, b"k", bytes(10_000))
    first = advance(queue, 0.0)
    assert ids(first) == [1]
    queue.ack([first[0]])
    [second] = advance(queue, 0.0)
    queue.ack([second])
    assert len(advance(queue, 0.0)) == math.ceil((1 << 20) / 10_000)
    assert advance(queue, 0.0) == []


def test_many_workers_share_the_bytes() -> None:
    """The bytes at all workers together are bounded, too."""
    queue = JobQueue(Settings())
    for number in range(500):
        queue.ready(b"%d" % number, number, 1, 100, {})
        for _ in range(5):
            put(queue, b"k", bytes(100_000))
    assert sum(job.size for job in advance(queue, 0.0)) <= (64 << 20) + 500 * 100_000


def test_delayed_and_deleted_jobs_hold_up_no_others_of_their_key() -> None:
    """With ordered=key, a job that is delayed by its publisher has no place yet, and one that is deleted has none."""
    queue = queue_with(is_ordered=True)
    put(queue, b"k", b"", due=9.0)
    jobs = [put(queue, b"k", b"") for _ in range(3)]
    first = advance(queue, 0.0)
    assert first == jobs[:1]
    queue.drain([jobs[1]])
    queue.ack(first)
    assert advance(queue, 0.0) == jobs[2:]


def test_what_was_under_way_is_first_after_a_start() -> None:
    """With ordered=key, a job that was out, or has failed, comes before earlier jobs that were delayed."""
    for holder in (b"", b"w"):
        jobs = [Job(1, b"k", b"0 -", 1, 1), Job(2, b"k", b"0 -", 1, 1, tries=1)]
        if holder:
            Batch(1, holder).add(jobs[1])
        JobQueue(Settings(is_ordered=True), jobs, 3)
        assert [job.state for job in jobs] == ["waiting", "out" if holder else "ready"]


def test_a_lease_begins_when_the_job_is_sent() -> None:
    """A disk that refuses for longer than a lease costs the worker nothing of it, nor a job its tries."""
    queue = queue_with(2, lease=30.0, deliveries=1)
    first, second = put(queue, b"k", b""), put(queue, b"k", b"")
    batches = queue.advance(0.0)
    assert not queue.advance(100.0)
    queue.renew(first, 100.0)
    queue.sent(batches, 200.0)
    assert [job.until for job in (first, second)] == [230.0, 230.0]
    assert queue.next_time() == 230.0
    advance(queue, 231.0)
    assert [job.reason for job in (first, second)] == ["the lease ran out"] * 2


def test_a_worker_that_ends_before_its_job_is_sent() -> None:
    """A delivery that never left the service does not count."""
    queue = queue_with(1, deliveries=1)
    job = put(queue, b"k", b"")
    queue.advance(0.0)
    queue.gone(b"w")
    assert (job.state, job.tries, job.reason) == ("ready", 0, "")


def test_a_delay_that_is_over_is_over_after_a_start() -> None:
    """With ordered=key, a job whose delay was over comes before the later ones of its key, as it did before."""
    jobs = [Job(1, b"k", b"0 -", 1, 1, due=5.0), Job(2, b"k", b"0 -", 1, 1)]
    JobQueue(Settings(is_ordered=True), jobs, 3, now=6.0)
    assert [job.state for job in jobs] == ["ready", "waiting"]


def test_a_pause_is_no_longer_after_a_start() -> None:
    """If the clock was set back while no service ran, a failed job waits for the longest pause at most."""
    jobs = [Job(1, b"k", b"0 -", 1, 1, due=9000.0, tries=1), Job(2, b"k", b"0 -", 1, 1, due=9000.0)]
    JobQueue(Settings(), jobs, 3, now=6.0)
    assert [job.due for job in jobs] == [306.0, 9000.0]


def test_a_dead_job_holds_up_no_others_of_its_key() -> None:
    """Jobs of a key that were out without ordered=key may end in any order after a start with it."""
    jobs = [Job(id, b"k", b"0 -", 1, 1, tries=id < 3) for id in (1, 2, 3)]
    for job in jobs[:2]:
        Batch(job.id, b"%d" % job.id).add(job)
    queue = JobQueue(Settings(is_ordered=True), jobs, 4)
    queue.nack(jobs[1], "poison", "", 0.0)
    queue.ack(jobs[:1])
    assert [job.state for job in jobs[1:]] == ["dead", "ready"]


def test_a_job_that_is_out_is_not_given_to_a_second_worker() -> None:
    """Nor when a job of its key that was out with it, before a start with ordered=key, is done."""
    jobs = [Job(id, b"k", b"0 -", 1, 1, tries=id < 3) for id in (1, 2, 3)]
    for job in jobs[:2]:
        Batch(job.id, b"%d" % job.id).add(job)
    queue = JobQueue(Settings(is_ordered=True), jobs, 4)
    queue.ready(b"w", 0, 1, 10, {})
    queue.ack(jobs[:1])
    assert (advance(queue, 0.0), jobs[1].holder) == ([], b"2")
    queue.ack(jobs[1:2])
    assert advance(queue, 0.0) == jobs[2:]
