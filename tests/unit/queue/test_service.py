"""The turns of a queue's service, on a bus that only records what is sent, and a clock that is turned by hand."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.logger import capturedLogs, formatEvent

from sbus.client.core import ClientCore
from sbus.client.dispatch import Message
from sbus.client.queues import INBOX, LONGEST_WHY, MOST_CREDIT
from sbus.client.senders import kind_of
from sbus.errors import RequestFailed
from sbus.protocol.packets import build
from sbus.queue.jobs import MOST_DELIVERIES, Changes, Settings
from sbus.queue.service import QueueService

NAME = b"!/cred/1/2/3"
PUT = b"queue/jobs/put/"
Sent = kind_of(b"7 " + NAME)


class RecordingBus:
    """The part of a connection that a service uses.

    :ivar sent: the packets.
    :ivar is_read: whether the socket is read.
    """

    state = "connected"

    def __init__(self) -> None:
        self.core = ClientCore()
        self.sent: list[bytes] = []
        self.is_read = True

    def send(self, packets: list[bytes]) -> None:
        self.sent += packets

    def _reply(self, replies: list[tuple[Message, bytes]]) -> None:
        self.sent += [answer for _, answer in replies]

    def fail(self, request: Message, error: str) -> None:
        self._reply([(request, b"-" + error.encode())])

    def pause_for(self, subscription: object) -> None:
        self.is_read = False

    def resume_for(self, subscription: object) -> None:
        self.is_read = True


class Served:
    """A service of the queue ``jobs``.

    :ivar ahead: seconds by which the wall clock is ahead of the reactor's.
    :ivar writes: for each transaction, the number of jobs that it kept, and of those that it deleted.
    """

    ahead = 10_000.0

    def __init__(self, path: Path, **chosen: Any) -> None:
        self.clock = Clock()
        settings = Settings(name="jobs", store=str(path), **chosen)
        self.service = QueueService(self.clock, "bus", settings, self.fail, 100_000, self.wall_clock)
        self.service._load()
        self.bus: Any = RecordingBus()
        service: Any = self.service
        service._intake = service._floor = self.bus
        service._jobs_in = [self.bus]
        service._vigils.connected(self.bus, False)
        self.writes: list[tuple[int, int]] = []
        self._write = self.service._store.write
        self.seconds = 0.0
        self.has_failed = False
        self.replace(self.count)

    def wall_clock(self) -> float:
        return float(self.clock.seconds()) + self.ahead

    def close(self) -> None:
        self.service._store.close()
        assert not self.has_failed

    def fail(self) -> None:
        self.has_failed = True

    def replace(self, write: Callable[..., None]) -> None:
        """Have the store write in another way."""
        self.service._store.write = write  # type: ignore[method-assign]

    def count(self, changes: Changes, *args: Any) -> None:
        self.clock.rightNow += self.seconds
        self.writes.append((len(changes.new) + len(changes.changed), len(changes.gone)))
        self._write(changes, *args)

    def put(self, count: int, words: bytes = b"") -> None:
        self.service._put(PUT, [Sent(PUT + b"k", NAME + b"/sbus/reply/x\0%b\0a job" % words)] * count)

    def say(self, verb: bytes, words: bytes) -> None:
        self.service._worker_said(verb, [Sent(b"queue/jobs/" + verb, b"ab " + words)])

    def take(self) -> list[bytes]:
        sent, self.bus.sent = self.bus.sent, []
        return [packet for packet in sent if not packet.startswith(b"CMSG ")]


def refuse(*args: object) -> None:
    """Write as a full disk does."""
    raise sqlite3.OperationalError("full")


def asked(served: Served, verb: bytes, payload: bytes = b"") -> Deferred[bytes]:
    """Ask as an operator does."""
    request: Any = SimpleNamespace(
        key=b"queue/jobs/admin/" + verb, payload=payload, sender=SimpleNamespace(uid=os.geteuid())
    )
    return Deferred.fromCoroutine(served.service._asked(request))


def test_a_pattern_that_is_most_likely_a_mistake(tmp_path: Path) -> None:
    """The log has a hint for a pattern with another program's wildcards."""
    settings = Settings(name="jobs", pattern=b"jobs/#", store=str(tmp_path / "store"))
    service = QueueService(Clock(), "bus", settings, lambda: None, 100_000)
    with capturedLogs() as events:
        service.startService()
    service.stopService()
    assert "'#' is an ordinary byte" in "".join(formatEvent(event) for event in events)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with closing(Served(tmp_path / "store")) as served:
        yield served


def job(id: int) -> bytes:
    return build(b"MSG", NAME + b"/sbus/work/ab", b"1 %d 1 30 7 %b k\0a job" % (id, NAME))


def test_what_comes_together_shares_a_transaction(served: Served) -> None:
    """Puts are confirmed and handed out in one turn; one message acknowledges many jobs."""
    served.say(b"ready", b"1 2")
    served.put(2)
    assert served.take() == []
    served.clock.advance(0)
    assert served.take() == [b"+1", b"+2", job(1), job(2)]
    served.say(b"ack", b"1 1 2 1")
    served.clock.advance(1)
    assert served.writes == [(2, 0), (0, 2)]
    assert served.service.jobs.counts()["out"] == 0


def test_a_job_that_is_named_twice(served: Served) -> None:
    """A message that acknowledges a job twice ends it once, and what follows in the message counts."""
    served.say(b"ready", b"1 2")
    served.put(2)
    served.clock.advance(0)
    served.say(b"ack", b"1 1 1 1 2 1")
    served.clock.advance(1)
    assert served.service.jobs.counts()["out"] == 0
    assert served.service.jobs.events["acked"] == 2


def test_words_that_no_worker_says(served: Served) -> None:
    """A stranger's acks are counted unread, and begin no turn; a worker's ack that names too many jobs is malformed."""
    served.say(b"ack", b"no numbers")
    assert (served.service.jobs.events["stale"], served.clock.getDelayedCalls()) == (1, [])
    served.say(b"ready", b"1 1")
    served.say(b"ack", b"1 1 " * MOST_CREDIT + b"1 1")
    assert served.service.jobs.events["stale"] == 1 + MOST_CREDIT + 1
    served.say(b"ack", b"1 1 " * 2 * MOST_CREDIT + b"1 1")
    assert (served.service.jobs.events["stale"], served.service.jobs.events["malformed"]) == (MOST_CREDIT + 2, 1)


def test_a_turn_waits_for_as_much_as_the_last_one_has_sent(served: Served) -> None:
    """A turn that has sent answers and jobs expects puts and acks, for half of the time that its write took."""
    served.seconds = 0.01
    served.say(b"ready", b"1 2")
    served.put(2)
    served.clock.advance(0)
    served.say(b"ack", b"1 1 2 1")
    served.put(1)
    served.clock.advance(0)
    assert len(served.writes) == 1
    served.put(1)
    served.clock.advance(0)
    assert served.writes[1:] == [(2, 2)]
    served.put(1)
    served.clock.advance(0.004)
    assert len(served.writes) == 2
    served.clock.advance(0.002)
    assert len(served.writes) == 3


def test_publishers_wait_while_the_disk_refuses(served: Served) -> None:
    """A put that the disk has refused is confirmed when it takes it.

    Meanwhile publishers are read now and then, for two and a half minutes.
    """
    served.replace(refuse)
    served.put(1)
    served.clock.advance(0)
    served.put(1)
    assert (served.bus.is_read, served.service.problem, served.take()) == (False, "full", [])
    served.clock.pump([1.0] * 4)
    assert served.bus.is_read
    served.clock.pump([1.0] * 160)
    served.put(1)
    served.clock.pump([1.0] * 10)
    assert not served.bus.is_read
    served.replace(served.count)
    served.clock.pump([1.0, 0.1])
    assert (served.take(), served.service.problem) == ([b"+1", b"+2", b"+3"], "")


def test_publishers_wait_although_an_operator_looks(served: Served) -> None:
    """To show jobs while the disk refuses new ones lets no publisher go on."""
    served.put(1)
    served.clock.advance(0)
    served.replace(refuse)
    served.put(1)
    served.clock.advance(1)
    served.put(1)
    shown: Any = Deferred.fromCoroutine(served.service._shown(served.service.jobs.find_all("ready"))).result
    assert [each["id"] for each in shown] == [1, 2, 3]
    assert (served.bus.is_read, served.service.problem) == (False, "full")


def test_a_job_that_came_back_meanwhile_is_not_sent(served: Served) -> None:
    """A worker that is gone before the disk has taken its job does not get it; another one does."""
    served.say(b"ready", b"1 1")
    served.replace(refuse)
    served.put(1)
    served.clock.advance(0)
    served.say(b"ready", b"2 0")
    served.replace(served.count)
    served.clock.pump([1.0, 0.1])
    assert served.take() == [b"+1"]
    assert served.service.jobs.counts()["ready"] == 1


def test_an_id_adds_one_job(served: Served) -> None:
    """Puts with the same ID get the same number, in one turn and in a later one; then the store alone knows the ID."""
    served.put(2, b"id=a")
    served.clock.advance(0)
    served.put(1, b"id=a")
    served.clock.advance(1)
    assert served.take() == [b"+1"] * 3
    assert served.service.jobs.events["doubles"] == 2
    assert not served.service._fresh


@pytest.mark.parametrize(("jobs", "size", "kept"), [(2, 100, True), (2, 2000, False), (2000, 100, False)])
def test_payloads_are_in_memory_if_the_queue_is_short(served: Served, jobs: int, size: int, kept: bool) -> None:
    """What waits, or is out, takes the memory of its head once the disk has it, unless few and small jobs wait."""
    payload = b"j" * size
    served.service._put(b"", [Sent(b"k", payload)] * jobs)
    served.clock.advance(0)
    served.say(b"ready", b"1 1")
    served.clock.advance(1)
    out, *ready = served.service.jobs.jobs.values()
    assert (out.state, out.payload) == ("out", None)
    assert {(each.state, each.payload) for each in ready} == {("ready", payload if kept else None)}


def test_a_kept_payload_is_not_read(served: Served) -> None:
    """A job of a short queue goes out without a look into the store."""
    served.service._store.payloads = refuse  # type: ignore[assignment]
    served.put(1)
    served.clock.advance(0)
    served.say(b"ready", b"1 1")
    served.clock.advance(1)
    assert served.take()[-1].endswith(b"a job")


def test_more_than_a_turn_hands_out_is_handed_out_in_the_next_one(served: Served) -> None:
    """If there are more jobs than a turn hands out, the next one begins at once, and not with the next message."""
    count = MOST_DELIVERIES + 10
    for token in (b"a", b"b"):
        served.service._worker_said(b"ready", [Sent(b"queue/jobs/ready", b"%b 1 %d" % (token, MOST_CREDIT))])
    served.put(count)
    served.clock.pump([0.0] * 3)
    assert sum(packet.startswith(b"MSG ") for packet in served.take()) == count


def test_the_end_of_a_worker_begins_a_turn(served: Served) -> None:
    """The jobs of a worker that is gone go to another one at once."""
    served.say(b"ready", b"1 1")
    served.put(1)
    served.clock.advance(0)
    served.service._worker_said(b"ready", [Sent(b"queue/jobs/ready", b"cd 1 1")])
    served.clock.advance(1)
    served.take()
    served.service._worker_gone(b"ab " + NAME)
    served.clock.advance(0)
    [packet] = served.take()
    assert packet.startswith(b"MSG " + NAME + b"/sbus/work/cd\0001 1 2 ")


def test_workers_are_watched_until_they_end(served: Served) -> None:
    """A worker that announces credit is watched; one that takes no more jobs is not."""
    served.say(b"ready", b"1 1")
    served.say(b"ready", b"2 0")
    watched = [packet for packet in served.bus.sent if b"interest" in packet]
    assert watched == [b"CMSG interest/%b\0queue/jobs/worker/ab" % state for state in (b"on", b"off")]


def test_an_operator_is_answered_once_the_disk_has_it(served: Served) -> None:
    """``drain`` is answered after the transaction that deletes the jobs."""
    served.put(1)
    served.clock.advance(0)
    served.replace(refuse)
    answer = asked(served, b"drain")
    assert not answer.called
    served.replace(served.count)
    served.clock.pump([1.0, 0.1])
    assert (answer.result, served.writes[-1]) == (b"1", (0, 1))


def test_keys_count_as_much_as_payloads(tmp_path: Path) -> None:
    """Long keys fill a user's bytes, and those of a worker, as payloads do; operators see the payload's length."""
    with closing(Served(tmp_path / "store", most_bytes=1005)) as served:
        served.service._put(b"", [Sent(b"k" * 1000, b"a job"), Sent(b"k", b"")])
        served.clock.advance(0)
        jobs = served.service.jobs.find_all("ready")
        shown: Any = Deferred.fromCoroutine(served.service._shown(jobs)).result
        assert [(each["bytes"], len(each["key"])) for each in shown] == [(5, 200)]


@pytest.mark.parametrize("why", [b"x" * 50_000, "\N{SNOWMAN}".encode() * 5_000, b"\xff" * 5_000])
def test_a_reason_has_a_bounded_length(served: Served, why: bytes) -> None:
    """The service cuts the words of a worker that nacks, which are kept in memory, by their bytes."""
    served.say(b"ready", b"1 1")
    served.put(1)
    served.clock.advance(0)
    served.say(b"nack", b"1 1 poison " + why)
    [job] = served.service.jobs.find_all("dead")
    assert len(job.reason.encode()) <= len("poison: ") + LONGEST_WHY


@pytest.mark.parametrize("number", [b"9" * 4300, b"-1", b"1_0", b"x"])
def test_the_number_of_a_round_is_short(served: Served, number: bytes) -> None:
    """An announcement whose number would not fit beside a job is malformed."""
    served.say(b"ready", number + b" 1")
    assert served.service.jobs.events["malformed"] == 1
    served.say(b"ready", b"9" * 19 + b" 1")
    assert [worker.round for worker in served.service.jobs.workers.values()] == [10**19 - 1]


def test_a_job_that_no_packet_holds(served: Served) -> None:
    """After a bus with a lower limit has started, a long job dies with the remedy, and the others go on."""
    served.say(b"ready", b"1 2")
    served.put(2)
    served.bus.core.max_packet = 100
    [job, other] = served.service.jobs.find_all("ready")
    job.key = b"k" * 100
    served.clock.advance(0)
    served.clock.advance(0)
    assert (job.state, other.state) == ("dead", "out")
    assert job.reason == "poison: no packet of this bus holds it: raise --max-packet above 100 bytes, then retry it"
    [packet] = [packet for packet in served.take() if INBOX in packet]
    assert packet.partition(b"\0")[2].startswith(b"1 2 1 ")


def test_a_job_that_lives_again_has_no_dead_letter(served: Served) -> None:
    """A job that an operator retries before the disk has its death is not reported as dead, without a reason."""
    served.say(b"ready", b"1 1")
    served.put(1)
    served.clock.advance(0)
    served.say(b"nack", b"1 1 poison bad")
    asked(served, b"retry")
    served.clock.advance(1)
    assert not [packet for packet in served.take() if b"queue/jobs/dead/" in packet]
    assert served.service.jobs.counts()["out"] == 1


def test_an_answer_fits_a_packet(served: Served) -> None:
    """Operators see as many jobs as fit, however many bytes JSON takes for them."""
    served.service._put(b"", [Sent(b"\x01" * 200, b"\x01" * 200)] * 100)
    served.clock.advance(0)
    served.bus.core.max_packet = 100_000
    shown: Any = asked(served, b"peek").result
    assert len(shown) <= 100_000
    assert [each["id"] for each in json.loads(shown)] == list(range(1, 26))
    served.bus.core.max_packet = 64
    assert asked(served, b"peek").result == b"[]"


def test_a_question_that_is_nested_too_deeply(served: Served) -> None:
    """It is refused, as any other that is no such object."""
    answer: Any = asked(served, b"peek", b"[" * 100_000)
    assert answer.result.check(RequestFailed)
    answer.addErrback(lambda _: None)


def test_a_lease_begins_when_the_disk_has_the_job(tmp_path: Path) -> None:
    """While the disk refuses, a job is at no worker, and no lease runs out."""
    with closing(Served(tmp_path / "store", lease=3.0, deliveries=1)) as served:
        served.replace(refuse)
        for token in (b"ab", b"cd"):
            served.service._worker_said(b"ready", [Sent(b"queue/jobs/ready", token + b" 1 1")])
        served.put(1)
        served.clock.pump([0.0, *[1.0] * 10])
        served.replace(served.count)
        served.clock.pump([1.0, 1.0, 1.0])
        assert [INBOX in packet for packet in served.take()].count(True) == 1
        assert [job.tries for job in served.service.jobs.find_all("out")] == [1]


def test_dropped_messages_are_logged_also_after_a_refused_request(tmp_path: Path) -> None:
    """The first message that is dropped is logged, whatever was refused before; later ones are only counted."""
    with closing(Served(tmp_path / "store", most=1)) as served, capturedLogs() as logs:
        served.put(2)
        served.clock.advance(0)
        for _ in range(2):
            served.service._put(b"", [Sent(b"k", b"a job")])
            served.clock.advance(1)
        assert served.service.jobs.events["full"] == 3
        [why] = [log["why"] for log in logs if "why" in log]
        assert why.startswith("messages of 7 !/cred/1/2/3 are dropped")


def test_a_worker_that_is_refused_gets_the_reason(served: Served) -> None:
    """The service answers a worker for which it has no place, and counts it."""
    for number in range(513):
        served.service._worker_said(b"ready", [Sent(b"queue/jobs/ready", b"%x 1 1" % number)])
    [answer] = served.take()
    assert answer.startswith(
        b"MSG " + NAME + b"/sbus/work/200\0-the queue has no place for another worker of this user"
    )
    assert served.service.jobs.events["refused"] == 1


def test_a_stop_does_not_wait_for_the_disk(served: Served) -> None:
    """A service that stops while the disk refuses gives up after five seconds, and reports no bug."""
    served.replace(refuse)
    served.put(1)
    served.service._jobs_in = []
    for service in served.service._services:
        service.startService = lambda: None  # type: ignore[method-assign]
    stopped = served.service.stopService()
    served.clock.pump([1.0] * 6)
    assert stopped.called
    assert stopped.result is None


def test_a_payload_that_cannot_be_read_is_read_again(served: Served) -> None:
    """A turn in which the disk refuses to read a payload is had again, and what it writes is written once."""
    read = served.service._store.payloads
    answers: list[Any] = [sqlite3.OperationalError("full")]

    def payloads(ids: Any) -> dict[int, bytes]:
        for error in answers:
            answers.clear()
            raise error
        return read(ids)

    served.service._store.payloads = payloads  # type: ignore[method-assign]
    served.service._put(b"", [Sent(b"k", b"j" * 2000)])
    served.clock.advance(0)
    served.service._put(b"", [Sent(b"k", b"second")])
    served.say(b"ready", b"1 1")
    served.clock.pump([0.0, 1.0, 0.1])
    [packet] = served.take()
    assert packet.endswith(b" 1 1 30 7 " + NAME + b" k\0" + b"j" * 2000)
    assert served.service.jobs.counts()["ready"] == 1


def test_many_bytes_wait_for_the_turn(served: Served) -> None:
    """After a mebibyte, publishers wait for the turn, even if none of it is a job: the reserve has room for that."""
    for size, count, is_read in ((90_000, 10, True), (90_000, 15, False), (100_000, 15, False), (0, 1, True)):
        served.service._put(b"", [Sent(b"k", bytes(size))] * count)
        assert served.bus.is_read == is_read
        served.clock.advance(1)
        assert served.bus.is_read


def test_a_disk_without_room(served: Served) -> None:
    """Publishers wait, and workers get jobs, whose acks make room."""
    full = True

    def check_room() -> None:
        if full:
            raise sqlite3.OperationalError("the disk has room only for acks")

    served.service._store.check_room = check_room  # type: ignore[method-assign]
    served.put(1)
    served.clock.advance(0)
    assert (served.bus.is_read, served.service.problem) == (False, "the disk has room only for acks")
    served.say(b"ready", b"1 1")
    served.clock.advance(0)
    served.say(b"ack", b"1 1")
    with capturedLogs() as events:
        served.clock.advance(0.5)
    assert (served.writes, served.bus.is_read) == ([(1, 0), (0, 0), (0, 1)], False)
    assert (events, served.service.problem) == ([], "the disk has room only for acks")  # it is not over
    full = False
    with capturedLogs() as events:
        served.clock.advance(1)
    assert (served.bus.is_read, served.service.problem) == (True, "")
    assert [formatEvent(event).partition(": ")[2] for event in events] == ["the disk takes jobs again"]


@pytest.mark.parametrize("seconds", [-7200.0, 7200.0])
def test_the_clock_is_set(tmp_path: Path, seconds: float) -> None:
    """If the clock is set, or the machine has slept, leases and pauses keep their length; delays use the new time."""
    with closing(Served(tmp_path / "q", lease=30)) as served:
        jobs = served.service.jobs
        served.say(b"ready", b"1 2")
        served.put(2)
        served.clock.advance(0.1)
        served.say(b"nack", b"1 1 failed x")
        served.clock.advance(0.1)
        served.ahead += seconds
        served.put(1, b"not-before=%.3f" % (served.wall_clock() + 50))
        seen = []
        for later in (0.8, 0.2, 28.6, 0.4, 19.8, 0.4):
            served.clock.advance(later)
            seen.append((jobs.counts()["delayed"], jobs.events["expired"]))
        assert seen == [(2, 0), (1, 0), (1, 0), (1, 1), (1, 2), (0, 2)]


def test_the_clock_is_set_back_at_the_end_of_a_turn(tmp_path: Path) -> None:
    """The turn that notices it schedules the next one by the new clock: a lease of 30 seconds ends after as many."""
    with closing(Served(tmp_path / "q", lease=30)) as served:
        jobs: Any = served.service.jobs
        served.say(b"ready", b"1 1")
        served.put(1)
        sent = jobs.sent

        def set_back(*args: Any) -> None:
            sent(*args)
            served.ahead -= 7200.0

        jobs.sent = set_back
        served.clock.advance(0)
        served.clock.advance(29.9)
        assert jobs.events["expired"] == 0
        served.clock.advance(0.2)
        assert jobs.events["expired"] == 1


def test_the_clock_is_read_in_one_thread(served: Served) -> None:
    """A clock that was set changes jobs: a service whose store has a thread does not read it there."""
    readers: set[int] = set()

    def wall_clock() -> float:
        readers.add(threading.get_ident())
        return served.wall_clock()

    async def call(do: Callable[[], object]) -> object:
        with ThreadPoolExecutor() as threads:
            return threads.submit(do).result()

    service: Any = served.service
    service._wall_clock, service._call = wall_clock, call
    served.replace(lambda *args: None)
    served.put(1)
    served.clock.advance(0)
    assert readers == {threading.get_ident()}
