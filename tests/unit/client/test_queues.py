"""What publishers and workers say to a queue's service, on the wire."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import CancelledError
from twisted.internet.task import Clock

from sbus.client.blocking.waiting import PolledWaiter
from sbus.client.core import ClientCore, Message
from sbus.client.denials import Denial
from sbus.client.queues import HEAD_ROOM, build_job, build_put, check_job, check_queue, parse_put
from sbus.client.workers import Job, WorkCore
from sbus.errors import Closed, ConnectionLost, NotAllowed, PacketTooLong, RequestFailed, TimedOut, UsageError


class FakeBus:
    """The part of a connection that a worker uses; nothing waits.

    :ivar said: what was sent, without the token.
    """

    state = "connected"
    _cancellations = (CancelledError,)

    def __init__(self) -> None:
        self.core = ClientCore()
        self.works: list[WorkCore] = []
        self.said: list[bytes] = []
        self.callbacks: dict[bytes, Any] = {}

    async def _own_name(self) -> bytes:
        return b"!/cred/1/2/3"

    def subscribe(self, pattern: bytes, callback: Any) -> Any:
        self.callbacks[pattern] = callback
        return type("Subscription", (), {"close": lambda _: self.callbacks.pop(pattern)})()

    def waiter(self) -> PolledWaiter:
        return PolledWaiter()

    def send(self, packets: list[bytes]) -> None:
        for packet in packets:
            if packet.startswith(b"MSG "):
                key, _, payload = packet[4:].partition(b"\0")
                self.said.append(key.rpartition(b"/")[2] + b" " + payload.partition(b" ")[2])

    def publish_many(self, messages: list[tuple[bytes, bytes]]) -> None:
        self.send([self.core.publish(*message) for message in messages])

    def take(self) -> list[bytes]:
        said, self.said = self.said, []
        return said


@pytest.fixture
def bus() -> FakeBus:
    return FakeBus()


def started(bus: FakeBus, credit: int = 2) -> WorkCore:
    """A worker that has subscribed."""
    work = WorkCore(bus, "jobs", credit)
    with pytest.raises(StopIteration):
        work._start().send(None)
    return work


def deliver(bus: FakeBus, round: int, id: int, tries: int = 1, lease: float = 30.0) -> None:
    """Have a job arrive."""
    [inbox] = [key for key in bus.callbacks if key.startswith(b"!/cred/1/2/3/sbus/work/")]
    bus.callbacks[inbox](
        Message(inbox, build_job(round, id, tries, b"%.17g" % lease, b"7 !/cred/4/5/6", b"a key", b"\0x"))
    )


def test_a_refused_worker_raises(bus: FakeBus) -> None:
    """A worker for which the queue has no place raises the service's words."""
    work = started(bus)
    [inbox] = [key for key in bus.callbacks if key.startswith(b"!/cred/1/2/3/sbus/work/")]
    bus.callbacks[inbox](Message(inbox, b"-no place"))
    with pytest.raises(RequestFailed, match="no place"):
        next_job(work)
    assert bus.works == []


def test_a_forbidden_worker_raises(bus: FakeBus) -> None:
    """A worker whose announcements the policy forbids raises the refusal, and says no more."""
    refused: list[Denial] = []
    bus.core = ClientCore(on_denied=refused.append)
    work = started(bus)
    work._announce()
    bus.take()
    assert bus.core.extensions.denials.receive(b"MSG queue/jobs/ready closed")
    with pytest.raises(NotAllowed, match="queue/jobs/ready"):
        next_job(work)
    assert (bus.works, bus.take(), refused) == ([], [], [])
    assert bus.core.extensions.denials.receive(b"MSG queue/jobs/ready closed")
    assert len(refused) == 1  # nobody waits any more


def next_job(work: WorkCore) -> Job:
    try:
        work._next().send(None)
    except StopIteration as result:
        job: Job = result.value
        return job
    raise AssertionError("there is no job")


@given(
    st.binary(),
    st.none() | st.binary(min_size=1, max_size=256).filter(lambda id: not set(b" \t\n\r\v\f\0") & set(id)),
)
def test_puts_come_back(payload: bytes, id: bytes | None) -> None:
    """What a put says is read as it was meant, whatever the payload is."""
    assert parse_put(build_put(payload, id)) == (id or b"", 0.0, payload)


@pytest.mark.parametrize(
    "text", [b"", b"id=a", b"id=\0", b"id=" + bytes([65]) * 257 + b"\0", b"not-before=nan\0", b"x\0"]
)
def test_malformed_puts(text: bytes) -> None:
    """A malformed put is refused."""
    with pytest.raises(UsageError):
        parse_put(text)


WORDS = [b"", "", b"a b", b"a\0", b"a" * 257, "a\tb", "a\n", "\ra", b"a\vb", b"a\fnot-before=9"]


@pytest.mark.parametrize("id", [*WORDS, 10**18, 0, 1.5, "\udc80", ["a"]])
def test_impossible_ids(id: Any) -> None:
    """An ID is one word of bytes or text, so that no part of it is taken for something else."""
    with pytest.raises(UsageError, match=r"^id=.*: give "):
        build_put(b"", id)


@pytest.mark.parametrize("delay", [-1.0, math.inf, math.nan])
def test_impossible_delays(delay: float) -> None:
    """A delay is a number of seconds."""
    with pytest.raises(UsageError, match="give a number of seconds"):
        build_put(b"", delay=delay)


def test_the_longest_job() -> None:
    """The error for a job that is too long names the limit that it exceeds, which is below that of a packet."""
    check_job(10_000 - HEAD_ROOM, 10_000)
    with pytest.raises(PacketTooLong, match=r"9,489 bytes, and the limit is 9,488"):
        check_job(10_001 - HEAD_ROOM, 10_000)


@pytest.mark.parametrize("name", ["", "a/b", "a" * 65, "ä", "a b", "*"])
def test_names_of_queues(name: str) -> None:
    """A queue's name is one plain segment of a key."""
    with pytest.raises(UsageError, match="a queue's name is"):
        check_queue(name)


def test_rounds(bus: FakeBus) -> None:
    """Each announcement names what the worker holds; deliveries of an earlier round are dropped."""
    work = started(bus)
    work._announce()
    deliver(bus, 1, 5)
    job = next_job(work)
    assert (job.key, job.payload, str(job.sender)) == (b"a key", b"\0x", "!/cred/4/5/6")
    bus.callbacks[b"queue/jobs/up"](Message(b"queue/jobs/up", b""))
    assert bus.take() == [b"ready 1 2", b"ready 2 2 5:1"]
    deliver(bus, 1, 6)
    assert list(work.jobs) == [5]


@pytest.mark.parametrize("payload", [b"", b"x", b"1 2 3 4 5 6 7", b"1 2 x\0", memoryview(b"- in sealed memory")])
def test_messages_to_an_inbox_that_are_no_jobs(bus: FakeBus, payload: bytes) -> None:
    """They are ignored, whoever has sent them."""
    work = started(bus)
    work._announce()
    [inbox] = [key for key in bus.callbacks if b"/sbus/work/" in key]
    bus.callbacks[inbox](Message(inbox, payload))
    assert not work.jobs
    deliver(bus, 1, 1)
    assert next_job(work).id == 1


def test_answers_are_repeated(bus: FakeBus) -> None:
    """An announcement repeats the latest answers, but not for a job that is here again."""
    work = started(bus)
    work._announce()
    for id in (1, 2):
        deliver(bus, 1, id)
        with next_job(work):
            pass
    deliver(bus, 1, 1, tries=2)
    bus.take()
    work._announce()
    assert bus.take() == [b"ack 2 1", b"ready 2 2 1:2"]


def test_an_answer_that_failed_can_be_repeated(bus: FakeBus) -> None:
    """The job is held no longer; the first answer is sent by the next call, and a block sends none."""
    work = started(bus)
    work._announce()
    deliver(bus, 1, 1)
    bus.take()
    publish, bus.publish_many = bus.publish_many, Mock(side_effect=TimedOut("not sent"))  # type: ignore[method-assign]
    with next_job(work) as job:
        with pytest.raises(TimedOut):
            job.ack()
        bus.publish_many = publish  # type: ignore[method-assign]
        assert (job.is_held, bus.take()) == (False, [])
        job.ack()
        job.nack("poison")
    assert bus.take() == [b"ack 1 1", b"ack 1 1"]


def test_an_answer_is_not_repeated_to_a_later_delivery(bus: FakeBus) -> None:
    """A released job that is here again has the same number and tries: the answer to the first one must not end it."""
    work = started(bus)
    work._announce()
    deliver(bus, 1, 1)
    first = next_job(work)
    first.nack("released")
    deliver(bus, 1, 1)
    second = next_job(work)
    bus.take()
    first.ack()
    assert bus.take() == []
    assert second.is_held
    second.ack()
    first.nack("released")
    assert bus.take() == [b"ack 1 1"]


@pytest.mark.parametrize("call", [Job.ack, Job.nack, Job.renew])
@pytest.mark.parametrize("error", [Closed("closed"), ConnectionLost("lost"), NotAllowed(b"MSG", b"k", "r")])
def test_answers_after_the_end(bus: FakeBus, call: Callable[[Job], Any], error: Exception) -> None:
    """The queue gives a job without an answer to another worker: the call raises what has ended the work."""
    work = started(bus)
    work._announce()
    for id in (1, 2):
        deliver(bus, 1, id)
    answered, job = next_job(work), next_job(work)
    answered.ack()
    work._stop(error)
    bus.take()
    with pytest.raises(type(error)):
        call(job)
    assert bus.take() == []
    call(answered)  # it had its answer in time
    with job:
        pass  # the loop raises, not the block


def test_work_that_is_closed_while_it_starts(bus: FakeBus) -> None:
    """Nothing is subscribed to any more, and the reader learns why."""
    work = WorkCore(bus, "jobs", 2)

    async def close() -> bytes:
        work.close()
        return b"!/cred/1/2/3"

    bus._own_name = close  # type: ignore[method-assign]
    with pytest.raises(Closed):
        next_job(work)
    assert (bus.callbacks, bus.works) == ({}, [])


@pytest.mark.parametrize("place", [1, 2, 3, 4])
def test_a_start_that_fails_leaves_nothing(bus: FakeBus, place: int) -> None:
    """What a start has subscribed to before an error is undone, and the next reader starts anew."""
    work = WorkCore(bus, "jobs", 2)
    calls = 0

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def do(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == place:
                raise TimedOut("not sent")
            return call(*args)

        return do

    bus.subscribe, bus.core.watch = failing(bus.subscribe), failing(bus.core.watch)  # type: ignore[method-assign]
    with pytest.raises(TimedOut):
        next_job(work)
    watches = bus.core.extensions.watches
    assert (bus.callbacks, bus.works, watches.keys()) == ({}, [], ())
    with pytest.raises(AssertionError, match="there is no job"):
        next_job(work)
    assert (len(bus.callbacks), bus.works, watches.keys()) == (3, [work], (b"queue/jobs/ready",))


def test_only_the_last_answer_of_a_job_is_repeated(bus: FakeBus) -> None:
    """A job that an operator has revived does not die again because of the first answer."""
    work = started(bus)
    work._announce()
    deliver(bus, 1, 1)
    next_job(work).nack("poison")
    deliver(bus, 1, 1)
    next_job(work).ack()
    bus.take()
    work._announce()
    assert bus.take() == [b"ack 1 1", b"ready 2 2"]


def test_what_blocks_say(bus: FakeBus) -> None:
    """An exception means failed, a cancellation released; the end of the work takes all back with a new round."""
    work = started(bus, 4)
    work._announce()
    for id in (1, 2, 3, 4):
        deliver(bus, 1, id)
    bus.take()
    for error in (ValueError("bad"), KeyboardInterrupt(), CancelledError()):
        with pytest.raises(type(error)), next_job(work):
            raise error
    with pytest.raises(UsageError, match=r"nack\('why'\): use 'released', 'failed', 'poison'"):
        next_job(work).nack("why")  # type: ignore[arg-type]
    work.close()
    released = [b"nack 2 1 released ", b"nack 3 1 released "]
    assert bus.take() == [b"nack 1 1 failed ValueError: bad", *released, b"ready 2 0"]
    assert bus.works == []


def test_leases_of_jobs_that_wait(bus: FakeBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that waits behind a slow one is renewed; one whose lease has ended is released."""
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    work = started(bus, 3)
    work._announce()
    deliver(bus, 1, 1)
    deliver(bus, 1, 2, lease=100.0)
    deliver(bus, 1, 3, lease=10.0)
    next_job(work)
    bus.take()
    now = 50.0
    assert next_job(work).id == 2
    assert bus.take() == [b"renew 2 1", b"nack 3 1 released "]
    assert list(work.jobs) == [1, 2]


def test_a_job_that_waits_long_is_renewed_again(bus: FakeBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that waits for the application is renewed each time a third of its lease is over."""
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock.seconds)
    work = started(bus)
    work._announce()
    deliver(bus, 1, 1, lease=90.0)
    bus.take()
    said = []
    for seconds in (29.0, 1.0, 29.0, 1.0, 30.0):
        clock.advance(seconds)
        work.renew_waiting()
        said.append(bus.take())
    assert said == [[], [b"renew 1 1"], [], [b"renew 1 1"], [b"renew 1 1"]]


def test_renewing_a_job_renews_those_behind_it(bus: FakeBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that renews a job which takes long keeps those that wait."""
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock.seconds)
    work = started(bus)
    work._announce()
    for id in (1, 2):
        deliver(bus, 1, id)
    job = next_job(work)
    bus.take()
    clock.advance(20.0)
    job.renew()
    assert bus.take() == [b"renew 2 1", b"renew 1 1"]


def test_when_a_worker_announces_itself(bus: FakeBus) -> None:
    """A worker announces itself also to a server that reports on no keys, and not once it is closed."""
    work = started(bus)
    assert work._watch is not None
    work._watch.end(UsageError("the server does not say"))
    assert bus.take() == [b"ready 1 2"]
    up = bus.callbacks[b"queue/jobs/up"]
    work.close()
    bus.take()
    up(Message(b"queue/jobs/up", b""))
    assert bus.take() == []


def test_strangers_in_the_inbox(bus: FakeBus) -> None:
    """What is no job is ignored: anybody may write to an inbox."""
    work = started(bus)
    [inbox] = [key for key in bus.callbacks if key.startswith(b"!/cred/1/2/3/sbus/work/")]
    for text in (b"", b"1 2 3\0", b"a b c d e f g\0"):
        bus.callbacks[inbox](Message(inbox, text))
    assert work.jobs == {}
