"""Connecting, losing and back-pressure of a session, on a backend without sockets or time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from typing import Any

import pytest

from sbus.client.connecting import Backoff
from sbus.client.core import Message
from sbus.client.options import ConnectOptions
from sbus.client.responding import MOST_HANDLERS, Request
from sbus.client.session import Session
from sbus.client.subscription import HIGH_WATER, QueuedSubscription
from sbus.client.workers import Work, WorkCore
from sbus.errors import Closed, ConnectError, Disconnected, NotAllowed
from sbus.syscalls.batch import BATCH
from tests.unit.client.fakes import WithoutCalls

WHOAMI = b"CMSG !/cred/whoami"
NAME = b"!/cred/1/2/3"
ASKED = b"CMSG bye/on", b"CMSG denied/on"


class Waiter:
    """A waiter whose coroutines resume at once when it completes, as with Twisted."""

    def __init__(self) -> None:
        self.outcome: Any = None
        self.waiting: list[Running] = []

    def set_result(self, value: bytes) -> None:
        self._end(value)

    def set_exception(self, error: Exception) -> None:
        self._end(error)

    def _end(self, outcome: Any) -> None:
        if self.outcome is None:
            self.outcome = outcome
            for running in self.waiting:
                running.resume()

    def __await__(self) -> Generator[Waiter, None, bytes]:
        if self.outcome is None:
            yield self
        if isinstance(self.outcome, Exception):
            raise self.outcome
        outcome: bytes = self.outcome
        return outcome


class Running:
    """A coroutine that runs as far as it can."""

    def __init__(self, call: Coroutine[Any, None, Any]) -> None:
        self._call = call
        self.is_done = False
        self.result: Any = None
        self.resume()

    def resume(self) -> None:
        try:
            waiter: Waiter = self._call.send(None)
        except StopIteration as end:
            self.is_done, self.result = True, end.value
        except Exception as error:
            self.is_done, self.result = True, error
        else:
            waiter.waiting.append(self)


class Sub(QueuedSubscription):
    def get(self) -> Running:
        return Running(self._get())


class FakeSession(WithoutCalls[Sub], Session[Sub]):
    """A session whose server is controlled by the test.

    :ivar sent: packets that the server has received on this connection, but for the questions that begin it.
    :ivar room: packets that the socket still takes; None for any number.
    :ivar answers: outcomes of attempts to connect: an error to raise, or a function to call once connected.
    :ivar naps: the pauses; each ends when its waiter completes.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__("/fake", ConnectOptions(**{"max_packet": 1000, "bundles": False, **settings}))
        self.soon: list[Callable[[], None]] = []
        self.connected = True
        self.reading = True
        self.sent: list[bytes] = []
        self.room: int | None = None
        self.answers: deque[Any] = deque()
        self.naps: list[tuple[float, Waiter]] = []
        self.failures: list[BaseException] = []
        self.ends: list[Exception] = []
        self.attempts: list[Running] = []
        self.core.connected(1 << 20)
        self._flush()

    # the server

    def arrive(self, *packets: bytes) -> None:
        self._receive_packets(list(packets))

    def turn(self) -> None:
        """End the turn of the loop."""
        soon, self.soon = self.soon, []
        for call in soon:
            call()

    def reply(self) -> None:
        """Answer every ``whoami`` of this connection that has no reply yet."""
        questions, self.sent = self.sent.count(WHOAMI), [p for p in self.sent if p != WHOAMI]
        self.arrive(*[WHOAMI + b"\0" + NAME] * questions)

    def wake(self) -> None:
        """End the newest pause."""
        self.naps[-1][1].set_result(b"")

    # what a backend does

    def waiter(self) -> Waiter:
        return Waiter()

    def callback_failed(self, error: BaseException) -> None:
        self.failures.append(error)

    def run_handler(self, handler: Coroutine[Any, Any, None], ended: Callable[[], None]) -> bool:
        async def run() -> None:
            await handler
            self.soon.append(ended)

        Running(run())
        return True

    def _make_subscription(self, callback: Callable[[Message], Any] | None) -> Sub:
        return Sub(self, callback)

    def _flush(self) -> None:
        while self.connected and self.room != 0 and (taken := self.outbox.take(1)):
            if taken[0] not in ASKED:
                self.sent += taken
                if self.room is not None:
                    self.room -= 1
            self.outbox.ack(taken, 1)

    def _try_send(self, packets: list[bytes]) -> int:
        count = 0 if not self.connected else len(packets) if self.room is None else min(self.room, len(packets))
        self.sent += packets[:count]
        if self.room is not None:
            self.room -= count
        return count

    def _call_soon(self, call: Callable[[], None]) -> None:
        self.soon.append(call)

    def _set_reading(self, reading: bool) -> None:
        assert reading is not self.reading
        self.reading = reading

    async def _open(self) -> None:
        answer = self.answers.popleft() if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        self.connected = True
        self.core.connected(1 << 20)
        self.sent = []
        if answer is not None:
            answer()
        self._flush()

    def is_connected(self) -> bool:
        return self.connected

    def _detach(self) -> None:
        self.connected = False

    def _sleep(self, seconds: float) -> Waiter:
        self.naps.append((seconds, Waiter()))
        return self.naps[-1][1]

    def wait_drained(self) -> Waiter:
        self._flush()
        waiter = Waiter()
        self.outbox.wait(waiter)
        return waiter

    def _start_reconnecting(self) -> None:
        self.attempts.append(Running(self._reconnect_loop()))

    def _on_end(self, error: Exception) -> None:
        self.ends.append(error)


def lose(session: FakeSession) -> None:
    session._disconnected("the server fell over")


class Exact(Backoff):
    """Pauses of 0, 1, 2, … seconds."""

    def delays(self) -> Iterator[float]:
        yield from range(1000)


# --- subscriptions ---------------------------------------------------------------------------


def test_reading_stops_at_the_high_water_mark() -> None:
    """An unread subscription stops the reading, once; reading resumes at the low-water mark."""
    session = FakeSession()
    sub, other = session.subscribe("a"), session.subscribe("b")
    for i in range(HIGH_WATER - 1):
        session.arrive(b"MSG a\0%d" % i)
    assert session.reading
    session.arrive(*[b"MSG a\0x"] * BATCH)
    assert not session.reading
    session.arrive(b"MSG b\0x")
    for _ in range(HIGH_WATER - 1 + BATCH - HIGH_WATER // 4 - 1):
        assert sub._next() is not None
    assert not session.reading
    sub._next()
    assert session.reading
    assert (len(sub.get_ready()), len(other.get_ready())) == (HIGH_WATER // 4, 1)


def test_reading_resumes_for_the_last_subscription() -> None:
    """Reading resumes when the last subscription above the mark is read, in any way, or closed."""
    session = FakeSession()
    subs = [session.subscribe("a") for _ in range(3)]
    session.arrive(*[b"MSG a\0x"] * HIGH_WATER)
    subs[0].get_ready()
    subs[1].close()
    assert not session.reading
    for _ in range(HIGH_WATER - HIGH_WATER // 4):
        subs[2]._next()
    assert session.reading
    callback = session.subscribe("b", lambda message: None)
    session.arrive(*[b"MSG b\0x"] * (2 * HIGH_WATER))
    assert session.reading
    assert callback.get_ready() == []


def test_a_full_subscription_keeps_no_answer_from_a_publisher() -> None:
    """While a call waits to learn what the server takes, the client reads on: its reader may be that call's."""
    session = FakeSession()
    sub = session.subscribe("a")
    session.arrive(*[b"MSG a\0x"] * HIGH_WATER)
    assert not session.reading
    sent = Running(session._write_in_turn(lambda: [b"MSG b\0x"]))
    assert session.reading
    session.reply()
    assert sent.is_done
    assert not session.reading
    sub.get_ready()
    assert session.reading


def test_a_full_subscription_keeps_no_word_about_payloads_from_the_outbox() -> None:
    """The outbox keeps large messages back until it is known whether the server takes them, so the client reads on."""
    session = FakeSession(payloads=True)
    session.subscribe("a")
    session.arrive(*[b"MSG a\0x"] * HIGH_WATER)
    assert session.reading
    session.reply()
    session.turn()
    assert not session.reading


def test_several_may_wait_for_one_subscription() -> None:
    """Readers get messages in the order in which they wait; the end completes the others."""
    session = FakeSession()
    sub = session.subscribe("a")
    gets = [sub.get() for _ in range(4)]
    session.arrive(b"MSG a\x001", b"MSG a\x002")
    assert [get.is_done for get in gets] == [True, True, False, False]
    assert [get.result.payload for get in gets[:2]] == [b"1", b"2"]
    sub.close()
    assert {type(get.result) for get in gets[2:]} == {Closed}
    assert sub._readers._waiters == []
    assert session.sent == [b"SUB a", b"UNSUB a"]


def test_abandoned_wait_takes_no_message() -> None:
    """An abandoned reader takes no message; the next reader gets it."""
    session = FakeSession()
    sub = session.subscribe("a")
    gets = [sub.get() for _ in range(2)]
    gets[0]._call.close()
    assert len(sub._readers._waiters) == 1
    session.arrive(b"MSG a\x001")
    assert gets[1].result.payload == b"1"


def test_closed_subscription_gets_nothing_more() -> None:
    """A subscription that another sink's callback has closed does not get the same message."""
    session = FakeSession()
    got: list[Message] = []
    session.subscribe("a", lambda message: second.close())
    second = session.subscribe("a", got.append)
    third = session.subscribe("a")
    session.arrive(b"MSG a\0")
    assert (got, len(third.get_ready())) == ([], 1)
    with session.subscribe("b"):
        pass
    assert session.sent == [b"SUB a", b"SUB b", b"UNSUB b"]


def test_exceptions_of_the_application_go_to_its_log() -> None:
    """Exceptions of callbacks and of `on_control` are logged, and other sinks get their messages."""
    session = FakeSession(on_control=lambda key, payload: 1 // 0)
    session.subscribe("a", lambda message: 1 // 0)
    sub = session.subscribe("a")
    session.arrive(b"MSG a\0", b"CMSG x\0", b"MSG a\0")
    assert [type(error) for error in session.failures] == [ZeroDivisionError] * 3
    assert len(sub.get_ready()) == 2


def test_handlers_that_wait_are_bounded() -> None:
    """Requests beyond the bound wait as unread messages, and get their handlers in order as others end."""
    session = FakeSession()
    begun: list[int] = []
    holds: deque[Waiter] = deque()

    async def handler(request: Request) -> None:
        begun.append(int(request.payload))
        holds.append(Waiter())
        await holds[-1]

    def end(count: int) -> None:
        for _ in range(count):
            holds.popleft().set_result(b"")
        while session.soon:
            session.turn()

    session.respond("a", handler)
    count = MOST_HANDLERS + HIGH_WATER - 1
    session.arrive(*[b"MSG a\0%b\0%d" % (NAME, i) for i in range(count)])
    assert (len(holds), session.reading) == (MOST_HANDLERS, True)
    session.arrive(b"MSG a\0%b\0%d" % (NAME, count))
    assert not session.reading
    end(HIGH_WATER - HIGH_WATER // 4 - 1)
    assert not session.reading
    end(1)
    assert (len(holds), session.reading) == (MOST_HANDLERS, True)
    end(MOST_HANDLERS)
    session.arrive(b"MSG a\0%b\0%d" % (NAME, count + 1))
    assert begun == list(range(count + 2))
    end(len(holds))


@pytest.mark.parametrize("end", ["subscription", "bus"])
def test_requests_that_wait_at_the_end(end: str) -> None:
    """Nobody answers them after the end of the subscription, which stops no reading either."""
    session = FakeSession()
    holds: list[Waiter] = []

    async def handler(request: Request) -> None:
        holds.append(Waiter())
        await holds[-1]

    sub = session.respond("a", handler)
    session.arrive(*[b"MSG a\0%b\0" % NAME] * (MOST_HANDLERS + HIGH_WATER))
    assert not session.reading
    if end == "bus":
        session.close_now()
    else:
        sub.close()
        assert session.reading
    for hold in holds:
        hold.set_result(b"")
    session.turn()
    assert len(holds) == MOST_HANDLERS


def test_a_loss_among_requests_that_wait() -> None:
    """It is reported between the handlers of the requests around it."""
    events: list[object] = []
    session = FakeSession(on_lost=lambda lost: events.append(lost.why))
    hold = Waiter()

    async def handler(request: Request) -> None:
        events.append(request.payload)
        await hold

    session.respond("a", handler)
    session.arrive(*[b"MSG a\0%b\0x" % NAME] * (MOST_HANDLERS + 1), b"CMSG lost\0" + b"1 2 3 discard")
    session.arrive(b"MSG a\0%b\0y" % NAME)
    assert events == [b"x"] * MOST_HANDLERS
    hold.set_result(b"")
    session.turn()
    assert events[MOST_HANDLERS:] == [b"x", "discard", b"y"]


def test_a_loss_beside_a_worker() -> None:
    """The library's own subscriptions read nothing: a loss is reported when an application's reader reaches it."""
    lost: list[object] = []
    session = FakeSession(on_lost=lost.append)
    starting = Running(Work(session, "jobs", 1)._start())
    session.reply()
    assert starting.is_done
    sub = session.subscribe("a")
    session.arrive(b"MSG a\0before", b"CMSG lost\0" + b"1 2 3 discard", b"MSG a\0after")
    assert lost == []
    assert [message.payload for message in sub.get_ready()] == [b"before"]
    assert [message.payload for message in sub.get_ready()] == [b"after"]
    assert len(lost) == 1


@pytest.mark.parametrize("pattern", [b"queue/jobs/up", b"queue/jobs/worker/"])
def test_a_worker_that_may_not_subscribe(pattern: bytes) -> None:
    """The loop raises the refusal: without the subscription no job would ever come."""
    denied: list[object] = []
    session = FakeSession(on_denied=denied.append)
    work = Work(session, "jobs", 1)
    waiting = Running(work._next())
    session.reply()
    [refused] = [sub.pattern for sub in session.core.sinks() if sub.pattern.startswith(pattern)]
    session.arrive(b"CMSG denied\0SUB " + refused + b" closed")
    assert isinstance(waiting.result, NotAllowed)
    assert (session.works, list(session.core.sinks()), denied) == ([], [], [])


# --- sending ---------------------------------------------------------------------------------


def publish(session: FakeSession, *numbers: int) -> None:
    for number in numbers:
        session.send([b"MSG k\0%d" % number])


def numbers(session: FakeSession) -> list[int]:
    """Return and forget the numbers sent so far."""
    sent, session.sent = session.sent, []
    return [int(packet.partition(b"\0")[2]) for packet in sent]


def test_lone_packets_go_at_once() -> None:
    """Lone packets go out at once, but for one in `BATCH`, which waits for the end of its turn."""
    session = FakeSession()
    for number in range(10 * BATCH):
        publish(session, number)
        if session.soon:
            assert numbers(session) == list(range(number - number % (BATCH + 1), number))
            session.turn()
            assert numbers(session) == [number]
            session.sent = []
            break
        assert len(session.sent) == number + 1
    assert number == BATCH
    publish(session, 1)
    assert (numbers(session), session.soon) == ([1], [])


def test_packets_of_a_turn_go_together() -> None:
    """The first packet of a busy turn goes out at once, and the others at its end."""
    session = FakeSession()
    publish(session, *range(BATCH + 10))
    assert numbers(session) == list(range(BATCH))
    session.turn()
    assert numbers(session) == list(range(BATCH, BATCH + 10))
    for _ in range(3):
        publish(session, 1, 2, 3)
        assert numbers(session) == [1]
        session.turn()
        assert numbers(session) == [2, 3]
    publish(session, 1)  # alone: goes at once
    assert numbers(session) == [1]
    session.turn()
    publish(session, 2)  # alone too, but later writes of the turn could follow
    assert numbers(session) == []
    session.turn()
    assert numbers(session) == [2]
    publish(session, *range(BATCH))
    assert numbers(session) == list(range(BATCH))


def test_much_is_not_put_off() -> None:
    """A full bundle is sent before the turn ends, so that a fast producer is paused."""
    session = FakeSession()
    publish(session, *range(BATCH))
    packet = b"MSG k\0" + bytes(1000)
    for _ in range(100):
        session.send([packet])
    assert len(session.outbox) < 67
    assert len(session.outbox) + len(session.sent) == BATCH + 100
    session.turn()
    assert len(session.outbox) == 0
    assert session.soon == []


def test_what_is_put_off_keeps_its_place() -> None:
    """Deferred packets keep their order, over a full socket and a lost connection."""
    session = FakeSession(reconnect=Exact())
    publish(session, *range(BATCH), 100)
    session.subscribe("a")
    publish(session, 101)
    session.room = 0
    session.turn()
    publish(session, 102)
    assert session.soon == []  # it is sent when there is room
    session.room = None
    session._flush()
    assert session.sent[BATCH:] == [b"MSG k\x00100", b"SUB a", b"MSG k\x00101", b"MSG k\x00102"]
    publish(session, 103, 104)
    lose(session)
    session.turn()
    session.wake()
    assert session.sent == [b"SUB a", WHOAMI]
    session.reply()
    session.turn()
    assert session.sent[:2] == [b"SUB a", b"MSG k\x00104"]


def test_bundles_are_asked_for_first() -> None:
    """The question for bundles is the first packet of each connection."""
    session = FakeSession(bundles=True, reconnect=Exact())
    session.subscribe("a")
    assert session.sent == [b"CMSG bundle/on", b"SUB a"]
    session.arrive(b"CMSG bundle/on\x0065536")
    assert session.core.bundle_limit > 0
    lose(session)
    assert session.core.bundle_limit == 0
    session.wake()
    assert session.sent[:2] == [b"CMSG bundle/on", b"SUB a"]


def test_readers_wake_after_the_whole_batch() -> None:
    """A reader that resumes finds everything that came with its message."""
    session = FakeSession()
    sub, other = session.subscribe("a"), session.subscribe("b")
    seen: list[int] = []

    async def read() -> None:
        await sub._get()
        seen.append(len(other.get_ready()))
        other.close()
        seen.append(len(await sub._get_many()))

    Running(read())
    session.arrive(b"MSG a\0", b"MSG b\0", b"MSG a\0", b"MSG b\0")
    assert seen == [2, 1]


# --- the end ---------------------------------------------------------------------------------


def test_lost_connection_is_the_end() -> None:
    """Every waiter fails, once; earlier messages can still be read; later calls raise."""
    session = FakeSession()
    session.room = 2
    sub, idle = session.subscribe("a"), session.subscribe("b")
    waiting = [Running(session._whoami()), Running(session._fence()), idle.get()]
    publishing = session.wait_drained()
    session.arrive(b"MSG a\x001")
    lose(session)
    lose(session)
    (end,) = session.ends
    assert str(end) == "the server fell over (/fake)"
    assert [call.result for call in waiting] == [end] * 3
    assert publishing.outcome is end
    assert sub._next() == (b"a", b"1")
    assert sub.get().result is end
    for call in (
        lambda: session.subscribe("c"),
        lambda: session.send([]),
        lambda: session.control("x"),
        lambda: session.echo(False),
    ):
        with pytest.raises(Disconnected, match="fell over"):
            call()
    sub.close()
    assert session.ends == [end]


def test_closing_sends_what_waits_first() -> None:
    """`close` sends the outbox, then fails every waiter with Closed."""
    session = FakeSession()
    session.room = 0
    sub = session.subscribe("a")
    get = sub.get()
    closing = Running(session._finish())
    assert not closing.is_done
    session.room = 5
    session._flush()
    assert closing.is_done
    assert session.sent == [b"SUB a"]
    assert type(get.result) is type(session.ends[0]) is Closed
    assert Running(session._finish()).is_done
    assert len(session.ends) == 1


class Farewell(WorkCore):
    """A work that says something when it is closed."""

    def __init__(self, session: FakeSession) -> None:
        super().__init__(session, "jobs", 1)
        session.works.append(self)

    def close(self) -> None:
        self._bus.send([b"MSG work\0"])
        super().close()


def test_closing_that_is_given_up_closes_nothing() -> None:
    """A `close` that is abandoned while it sends leaves the connection open."""
    session = FakeSession(reconnect=Exact())
    session.room = 0
    session.subscribe("a")
    work = Farewell(session)
    closing = Running(session._finish())
    closing._call.close()
    assert (session.ends, session.works) == ([], [work])
    lose(session)
    assert (session.ends, len(session.attempts)) == ([], 1)


def test_works_say_goodbye_before_the_end() -> None:
    """`close` sends the outbox, then what the works say at their end, then it ends."""
    session = FakeSession()
    Farewell(session)
    session.room = 0
    session.send([b"MSG k\0"])
    closing = Running(session._finish())
    for packets in ([b"MSG k\0"], [b"MSG k\0", b"MSG work\0"]):
        assert not closing.is_done
        session.room = 1
        session._flush()
        assert session.sent == packets
    assert closing.is_done
    assert [type(end) for end in session.ends] == [Closed]


def test_connection_lost_while_closing_is_closed() -> None:
    """A connection lost while closing is not made again for unsent packets."""
    session = FakeSession(reconnect=Exact())
    session.room = 0
    session.subscribe("a")
    closing = Running(session._finish())
    lose(session)
    assert closing.is_done
    assert [type(end) for end in session.ends] == [Closed]
    assert session.attempts == []


# --- coming back -----------------------------------------------------------------------------


def test_lost_connection_is_made_again() -> None:
    """A lost connection is made again, restores what is in force, and reports the gap after its fence."""
    gaps: list[Exception] = []
    session = FakeSession(reconnect=Exact(), on_gap=gaps.append)
    session.subscribe("a")
    session.echo(False)
    asked = Running(session._whoami())
    session.answers += [ConnectError("no"), ConnectError("no")]
    lose(session)
    assert isinstance(asked.result, Disconnected)
    for _ in range(3):
        session.wake()
    assert [seconds for seconds, _ in session.naps] == [0, 1, 2]
    assert session.sent == [b"CMSG echo/off", b"SUB a", WHOAMI]
    assert gaps == []
    session.reply()
    assert [str(gap) for gap in gaps] == ["the server fell over (/fake)"]
    lose(session)
    session.wake()
    session.reply()
    assert [seconds for seconds, _ in session.naps] == [0, 1, 2, 0]
    assert len(gaps) == 2


def test_connection_that_does_not_last_is_a_failed_attempt() -> None:
    """A connection lost before its fence counts as failed: pauses grow, and one gap is reported."""
    gaps: list[Exception] = []
    session = FakeSession(reconnect=Exact(), on_gap=gaps.append)
    session.subscribe("a")
    session._disconnected("first")
    session.wake()
    session._disconnected("second")
    session.answers += [lambda: session._disconnected("third"), ConnectError("no")]
    for _ in range(3):
        session.wake()
    session.reply()
    assert [seconds for seconds, _ in session.naps] == [0, 1, 2, 3]
    assert len(session.attempts) == 1
    assert session.attempts[0].is_done
    assert [str(gap) for gap in gaps] == ["first (/fake)"]


def test_loss_in_the_moment_of_the_fence_is_not_overlooked() -> None:
    """A connection lost in the moment of its fence's reply is made again."""
    session = FakeSession(reconnect=Exact())
    lose(session)
    session.wake()
    fence = session._restoring
    assert isinstance(fence, Waiter)
    fence.waiting.insert(0, Lose(session))  # type: ignore[arg-type]
    session.reply()
    assert len(session.naps) == 2
    session.wake()
    session.reply()
    assert session.connected
    assert session.attempts[0].is_done


class Lose:
    """A coroutine's stand-in that loses the connection when it is resumed."""

    def __init__(self, session: FakeSession) -> None:
        self._session = session

    def resume(self) -> None:
        lose(self._session)


def test_what_is_sent_meanwhile_follows_the_resync_packets_in_order() -> None:
    """Packets sent during a loss follow the resync packets in order."""
    session = FakeSession(reconnect=Exact())
    kept = session.subscribe("kept")
    session.room = 0
    session.send([session.core.publish("k", b"0")])
    session.subscribe("waiting")
    session.control("other/thing")
    old = Running(session._fence())
    sent: list[Waiter] = [session.wait_drained()]
    lose(session)
    assert isinstance(old.result, Disconnected)
    session.send([session.core.publish("k", b"1")])
    sent.append(session.wait_drained())
    session.subscribe("new")
    fence = Running(session._fence())
    kept.close()
    session.send([session.core.publish("k", b"2")])
    session.room = None
    session.wake()
    resync, later = [b"SUB kept", b"SUB waiting"], [b"SUB new", WHOAMI, b"UNSUB kept", b"MSG k\x002"]
    assert session.sent == [*resync, WHOAMI]
    session.reply()  # the server, an older one, says no limit
    session.turn()
    assert session.sent == [*resync, b"MSG k\x000", b"MSG k\x001", *later]
    assert all(waiter.outcome == b"" for waiter in sent)
    assert not fence.is_done
    session.reply()
    assert fence.is_done
    assert fence.result is None


def test_failed_caller_may_call_again_at_once() -> None:
    """A call made while an error is delivered is for the new connection."""
    session = FakeSession(reconnect=Exact())
    names: list[bytes] = []

    async def ask() -> None:
        try:
            names.append(await session._whoami())
        except Disconnected:
            names.append(await session._whoami())

    asking = Running(ask())
    lose(session)
    session.wake()
    assert session.sent == [WHOAMI, WHOAMI]
    session.reply()
    assert asking.is_done
    assert names == [NAME]
    assert session._loss_reason is None


def test_failed_caller_may_close() -> None:
    """Closing the bus while an error is delivered ends the session."""
    session = FakeSession(reconnect=Exact())

    async def give_up() -> None:
        try:
            await session._whoami()
        except Disconnected:
            await session._finish()

    asking = Running(give_up())
    lose(session)
    assert asking.is_done
    assert [type(end) for end in session.ends] == [Closed]
    session.wake()
    session.wake()
    assert all(attempt.is_done for attempt in session.attempts)
    assert not session.connected


@pytest.mark.parametrize("turns", [0, 1])
def test_closing_while_there_is_no_connection(turns: int) -> None:
    """Closing during a reconnect does not wait, and ends the attempts."""
    session = FakeSession(reconnect=Exact())
    lose(session)
    for _ in range(turns):
        session.wake()
    get = session.subscribe("a").get()
    session.room = 0
    publishing = session.wait_drained()
    closing = Running(session._finish())
    if turns:
        session.room = None
        session._flush()
    assert closing.is_done
    assert isinstance(get.result, Closed)
    assert publishing.outcome in (b"", session.ends[0])
    session.wake()
    assert session.attempts[0].is_done
    assert not session.connected


def test_on_gap_that_raises() -> None:
    """An exception of `on_gap` is logged, and the session continues."""
    session = FakeSession(reconnect=Exact(), on_gap=lambda error: 1 // 0)
    for losses in (1, 2):
        lose(session)
        session.wake()
        session.reply()
        assert len(session.failures) == losses
        assert session.connected


def test_reader_that_did_not_read_when_the_connection_was_lost() -> None:
    """A new connection stays paused until the unread subscription is read."""
    session = FakeSession(reconnect=Exact())
    sub = session.subscribe("a")
    session.arrive(*[b"MSG a\0x"] * HIGH_WATER)
    lose(session)
    session.wake()
    assert not session.reading
    sub.get_ready()
    assert session.reading
