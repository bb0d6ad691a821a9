"""Workers: taking the jobs of a job queue, and answering them; and the calls of a connection about job queues.

Theory of operation
-------------------

:ref:`queue-wire` has the table of the messages. A `WorkCore` owns three subscriptions: its inbox, a secret key that
contains a random *token*; the key that shows the service that the worker is alive; and the key on which the service
reports that it is ready.

*Announcing.* The worker announces itself when it begins, when the service says that it is ready, and when the server
reports on the service's key, as it does after each reconnect. Each announcement begins a *round* and names the jobs
that the worker has. The service takes back jobs that the worker does not name; the worker drops deliveries of an
earlier round. Before it announces itself, it sends its latest answers again, as many as its credit: the service cannot
have lost more. So an interruption anywhere leaves each job with one worker, without timers.

*Leases.* A job's lease runs while it waits here for the application. So each `WorkCore._next`, and each `Job.renew`,
renews the jobs that wait, and releases a job whose lease has ended meanwhile: another worker may have it, and the
service gives nothing to a worker whose lease has ended until it hears from it.

*The end.* A loop that is left, a `close` and the end of the connection release all jobs that have no answer.
"""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from types import TracebackType
from typing import Any, Self

from sbus.client.arguments import check_count, check_text
from sbus.client.dispatch import Message, OwnCallback, Result
from sbus.client.identity import Sender
from sbus.client.queues import INBOX, LONGEST_WHY, MOST_CREDIT, REASONS, Reason, queue_key
from sbus.client.subscription import Readers
from sbus.client.watches import Watch
from sbus.errors import Closed, ConnectionLost, NotAllowed, RequestFailed, SbusError, UsageError

__all__ = ["Job", "QueueCalls", "Work", "WorkCore"]

_RENEWALS = 3
"""Jobs that wait here are renewed when this part of their lease is over."""


class Job:
    """A job of this worker.

    As a context manager it answers by itself: `ack` at the end of the block, `nack` if the block raises. An `Exception`
    means *failed*; any other `BaseException`, such as a cancellation, means *released*.

    The first answer counts. If it has failed, or was cancelled, any further one sends it again. The queue ignores one
    that it has had, or that comes after another worker has got the job. When the work has ended, the job is no longer
    this worker's: `ack`, `nack` and `renew` of a job without an answer raise the error that has ended the work.

    :ivar key: the key that it was published with.
    :ivar payload: its payload.
    :ivar id: its number in the queue.
    :ivar tries: the deliveries so far that count, this one included.
    :ivar lease: the seconds in which to answer or renew.
    :ivar sender: its publisher.
    """

    __slots__ = ("_answer", "_renewed", "_work", "id", "key", "lease", "payload", "sender", "tries")

    def __init__(
        self, work: WorkCore, key: bytes, payload: bytes, id: int, tries: int, lease: float, sender: Sender | None
    ) -> None:
        self._work = work
        self.key = key
        self.payload = payload
        self.id = id
        self.tries = tries
        self.lease = lease
        self.sender = sender
        self._renewed = time.monotonic()
        self._answer: tuple[bytes, bytes] | None = None

    def ack(self) -> Any:
        """Report that the job is done: the queue forgets it."""
        return self._work.publish(self, self.answer(b"ack"))

    def nack(self, reason: Reason = "failed", why: str = "") -> Any:
        """Give the job back.

        :param reason: ``released``: this worker stops, and the delivery does not count. ``failed``: the queue tries
            again after a pause of 1 s, which doubles each time up to 5 min. ``poison``: no worker can do it; it is
            dead at once.
        :param why: the cause, for people; the first 1,000 bytes are kept.
        :raises sbus.errors.UsageError: for any other reason.
        """
        return self._work.publish(self, self.nack_words(reason, why))

    def renew(self) -> Any:
        """Begin the lease of this job anew, and those of the jobs that wait after it."""
        self._renewed = time.monotonic()
        self._work.renew_waiting()
        return self._work.publish(self, (b"renew", self.word) if self.is_held else None)

    @property
    def is_held(self) -> bool:
        """Whether the job has no answer yet, and its work has not ended."""
        return not self._work.has_ended and self._work.jobs.get(self.id) is self

    @property
    def is_answered(self) -> bool:
        """Whether the application has answered the job."""
        return self._answer is not None

    @property
    def word(self) -> bytes:
        """The delivery, on the wire."""
        return b"%d %d" % (self.id, self.tries)

    @property
    def renew_at(self) -> float:
        """When to renew the job if it waits still."""
        return self._renewed + self.lease / _RENEWALS

    def is_over(self) -> bool:
        """Return whether the lease has ended."""
        return time.monotonic() - self._renewed > self.lease

    def renewed(self) -> None:
        """Note that the lease begins anew."""
        self._renewed = time.monotonic()

    def answer(self, verb: bytes, rest: bytes = b"") -> tuple[bytes, bytes] | None:
        """Return the first answer to this delivery, which may be this one; None if it must not be sent.

        The same words would answer a later delivery to this worker, if this one was released.
        """
        if self.is_held:
            self._answer = self._work.end_job(self, (verb, self.word + rest))
        elif self.id in self._work.jobs or self._work.answers.get(self.id) is not self._answer:
            return None
        return self._answer

    def nack_words(self, reason: str, why: str = "") -> tuple[bytes, bytes] | None:
        """Return what `nack` says."""
        if reason not in REASONS:
            raise UsageError(f"nack({reason!r}): use {', '.join(map(repr, REASONS))}")
        check_text(why, "the cause of a nack")
        return self.answer(b"nack", b" %b %b" % (reason.encode(), why.encode(errors="replace")[:LONGEST_WHY]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_held:
            return
        if error is None:
            self._work.say(self.answer(b"ack"))
        elif isinstance(error, Exception) and not isinstance(error, self._work.cancellations):
            self._work.say(self.nack_words("failed", f"{type(error).__name__}: {error}"))
        else:
            self._work.say(self.nack_words("released"))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"Job({self.id}, key={self.key!r}, tries={self.tries}, {len(self.payload):,} bytes)"


class _ServiceWatch(Watch):
    """Calls a function whenever the server reports a subscriber, also if that is known, and if it does not report."""

    def __init__(self, key: bytes, announce: Callable[[], object]) -> None:
        super().__init__(key)
        self._announce = announce

    def update(self, has_subscribers: bool) -> None:
        super().update(has_subscribers)
        if has_subscribers:
            self._announce()

    def end(self, error: Exception) -> None:
        super().end(error)
        if isinstance(error, UsageError):
            self._announce()


class _Refusal:
    """Calls a function if the server refuses the announcements of a worker: then no job will come."""

    def __init__(self, stop: Callable[[Exception], object]) -> None:
        self.set_exception = stop

    def set_result(self, value: bytes) -> None:
        """See `sbus.client.dispatch.Waiter`; an announcement has no reply."""


_parse_sender = lru_cache(256)(Sender.parse)
"""Parsing takes 2 µs, and few publishers put most jobs."""


class WorkCore:
    """A worker of one queue; see above.

    :param bus: the connection.
    :param queue: the queue's name.
    :param credit: the most jobs at once.
    :ivar jobs: those without an answer, by number.
    :ivar answers: the last answer to each job, as many as the credit.
    :ivar cancellations: exceptions that release a job although they are an `Exception`.
    """

    def __init__(self, bus: Any, queue: str, credit: int) -> None:
        self._prefix = queue_key(queue, b"")
        check_count(credit, "credit", f"give the number of jobs to take at once, 1 to {MOST_CREDIT}", most=MOST_CREDIT)
        self._bus = bus
        self.cancellations: tuple[type[Exception], ...] = bus._cancellations
        self._credit = credit
        self._token = os.urandom(16).hex().encode()
        self._round = 0
        self.jobs: dict[int, Job] = {}
        self._waiting: deque[Job] = deque()
        self._renew_at = math.inf  # none of them is to be renewed before
        self.answers: dict[int, tuple[bytes, bytes]] = {}
        self._readers = Readers(bus)
        self._subscriptions: list[Any] = []
        self._watch: Watch | None = None
        self._refusal = _Refusal(self._stop)
        self._error: Exception | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the worker no longer has any job."""
        return self._error is not None

    async def _start(self) -> None:
        """Subscribe, and announce this worker."""
        bus = self._bus
        me = b""
        while not me:
            try:
                me = await bus._own_name()
            except ConnectionLost:
                if bus.state == "closed":
                    raise
        if self._subscriptions or self._error is not None:
            return  # another reader of the same work was faster, or has closed it
        try:
            self._join(me)
        except BaseException:
            self._leave()
            raise

    def _join(self, me: bytes) -> None:
        """Subscribe as the client with this name; without an error, the watch then begins to announce this worker."""
        bus = self._bus
        for key, callback in (
            (me + INBOX + self._token, self._received),
            (self._prefix + b"worker/" + self._token, _ignore),
            (self._prefix + b"up", lambda _: self._announce()),
        ):
            self._subscriptions.append(bus.subscribe(key, OwnCallback(callback)))
        self._watch = _ServiceWatch(self._prefix + b"ready", self._announce)
        bus.core.extensions.denials.expect(self._watch.key, self._refusal)
        bus.send(bus.core.watch(self._watch))
        bus.works.append(self)

    def _leave(self) -> None:
        """Undo `_join`, or the part of it that was done."""
        bus = self._bus
        watch, self._watch = self._watch, None
        subscriptions, self._subscriptions = self._subscriptions, []
        if watch is not None:
            bus.core.extensions.denials.settle(self._refusal)
            with suppress(SbusError):
                bus.send(bus.core.extensions.unwatch(watch))
        for subscription in subscriptions:
            subscription.close()

    def _announce(self) -> None:
        if self._error is None:
            self._round += 1
            for id, answer in tuple(self.answers.items()):
                if id not in self.jobs:  # else it is here again
                    self.say(answer)
            words = [b"%d %d" % (self._round, self._credit)]
            words += [b"%d:%d" % (job.id, job.tries) for job in self.jobs.values()]
            self.say((b"ready", b" ".join(words)))

    def _received(self, message: Message) -> None:
        if not isinstance(message.payload, bytes):
            return  # in sealed memory, as no job is: anybody may write to an inbox
        if message.payload.startswith(b"-"):
            self._stop(RequestFailed(message.payload[1:].decode(errors="replace")))
            return
        header, nul, payload = message.payload.partition(b"\0")
        try:
            round, id, tries, lease, number, credentials, key = header.split(b" ", 6)
            sender = _parse_sender(b"%b %b" % (number, credentials))
            job = Job(self, key, payload, int(id), int(tries), float(lease), sender)
            if not nul or int(round) != self._round:
                return
        except ValueError:
            return  # no job, either
        self.jobs[job.id] = job
        self._waiting.append(job)
        self._renew_at = min(self._renew_at, job.renew_at)
        self._readers.wake()

    async def _next(self) -> Job:
        """Wait for the next job."""
        if not self._subscriptions and self._error is None:
            await self._start()
        while True:
            self.renew_waiting()
            while self._waiting:
                job = self._waiting.popleft()
                if job.is_held:
                    return job
            if self._error is not None:
                raise self._error
            await self._readers.wait()

    def renew_waiting(self) -> None:
        """Renew the jobs that wait for the application, and release those whose lease has ended."""
        now = time.monotonic()
        if now < self._renew_at:
            return
        self._renew_at = math.inf
        for job in [job for job in self._waiting if job.is_held]:
            if job.is_over():
                self.say(job.nack_words("released"))
                continue
            if now >= job.renew_at:
                job.renewed()
                self.say((b"renew", job.word))
            self._renew_at = min(self._renew_at, job.renew_at)

    def say(self, words: tuple[bytes, bytes] | None) -> None:
        """Say something to the service, without waiting for a connection: without one it sees that itself."""
        if words is not None:
            with suppress(SbusError):
                self._bus.send([self._packet(words)])

    def end_job(self, job: Job, answer: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
        """Give a job up, and keep its answer; return that."""
        del self.jobs[job.id]
        self.answers.pop(job.id, None)
        self.answers[job.id] = answer
        if len(self.answers) > self._credit:
            del self.answers[next(iter(self.answers))]
        return answer

    def publish(self, job: Job, words: tuple[bytes, bytes] | None) -> Any:
        """Say something about a job, in the library's own way; without words, only wait for earlier packets."""
        return self._bus.publish_many(self._messages(job, words))

    def _messages(self, job: Job, words: tuple[bytes, bytes] | None) -> Iterator[tuple[bytes, bytes]]:
        """Yield the messages to publish; an error is then raised as those of ``publish_many`` are."""
        if self._error is not None and not job.is_answered:
            raise self._error
        if words is not None:
            yield self._message(words)

    def _message(self, words: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
        verb, text = words
        return self._prefix + verb, b"%b %b" % (self._token, text)

    def _packet(self, words: tuple[bytes, bytes]) -> bytes:
        packet: bytes = self._bus.core.publish(*self._message(words))
        return packet

    def part(self, error: Exception) -> bytes | None:
        """End, before the connection is closed; return the packet that releases all jobs, if there may be any.

        A signal handler or another thread may call this in the midst of a call of this worker, so it changes no more.
        """
        has_joined = self._error is None and self._watch is not None
        self._error = self._error or error
        return self._packet(self._farewell()) if has_joined else None

    def _farewell(self) -> tuple[bytes, bytes]:
        """Return a new round without jobs: those on their way are released, too."""
        return b"ready", b"%d 0" % (self._round + 1)

    def close(self) -> None:
        """Release the jobs that have no answer, and take no more."""
        self._stop(
            Closed("the work was closed here: answer a job before that, else the queue gives it to another worker")
        )

    def _stop(self, error: Exception) -> None:
        if self._error is not None:
            return
        if self._watch is not None and not isinstance(error, NotAllowed):
            self.say(self._farewell())
        self.end(error)
        self._leave()

    def end_with(self, subscription: object, error: NotAllowed) -> bool:
        """End if the server has refused one of this worker's subscriptions, without which no job comes."""
        if subscription not in self._subscriptions:
            return False
        self._stop(error)
        return True

    def end(self, error: Exception) -> None:
        """Take no more jobs; waiting for one raises `error`.

        From then on no job is held (`Job.is_held`), so nothing is cleared in the midst of other calls.
        """
        if self._error is None:
            self._error = error
        if self in self._bus.works:
            self._bus.works.remove(self)
        self._readers.wake()


class Work(WorkCore):
    """The jobs of one worker: read them with ``async for``, or use it with ``async with`` around that."""

    async def __aiter__(self) -> AsyncIterator[Job]:
        """Yield jobs until the work or the bus is closed; leaving the loop closes the work."""
        try:
            while True:
                yield await self._next()
        except Closed:
            pass
        finally:
            self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


def _ignore(message: Message) -> None:
    """Do nothing: the subscription itself is the message."""


# --- the calls of a connection -------------------------------------------------------------------


class QueueCalls(ABC):
    """The calls of a connection about job queues.

    :ivar works: the workers on this connection.
    """

    works: list[WorkCore]
    _cancellations: tuple[type[Exception], ...] = ()
    """Exceptions that stand for a cancellation although they are an `Exception`."""

    @abstractmethod
    def enqueue(
        self,
        queue: str,
        key: bytes | str,
        payload: bytes = b"",
        *,
        id: bytes | str | None = None,
        delay: float = 0.0,
        timeout: float | None = 10.0,
    ) -> Result[int]:
        """Put a job into a job queue, and return its number once it is on the disk.

        :param id: any name of the job. If this user has put a job with the same ID within a day, the result is the
            number of that job, and no job is added: so you can repeat a call that failed.
        :param delay: seconds until a worker may get it.
        :raises sbus.errors.PacketTooLong: if the job does not fit a packet; it never goes into sealed memory.
        :raises sbus.errors.UsageError: if no job can have such an `id` or `delay`.
        :raises sbus.errors.NobodyListens: if no service (``twistd sbus-queue``) has this queue.
        :raises sbus.errors.TimedOut: if the service has not confirmed within `timeout` seconds. The job may be in the
            queue, or get there: repeat the call with the same `id`.
        :raises: as `sbus.client.api.ClientApi.request`.
        """

    @abstractmethod
    def work(self, queue: str, credit: int = 1) -> object:
        """Return the jobs of a job queue for this worker: loop over them.

        :param credit: the most jobs that the worker has at once.
        :raises sbus.errors.UsageError: if no queue has such a name, or without credit.
        :raises sbus.errors.InvalidKey: from the loop, if the server cannot tell this process from others.
        :raises sbus.errors.RequestFailed: from the loop, if the queue has no place for another worker.
        :raises sbus.errors.NotAllowed: from the loop, if this client may not take jobs of the queue.
        """

    def _close_works(self) -> None:
        """Release all jobs, while the connection is there."""
        for work in list(self.works):
            work.close()

    def _end_work_with(self, subscription: object, error: NotAllowed) -> bool:
        """End the worker that has a refused subscription; return whether there is one."""
        return any(work.end_with(subscription, error) for work in list(self.works))

    def _end_works(self, error: Exception) -> None:
        """Note the end of the connection."""
        for work in list(self.works):
            work.end(error)
