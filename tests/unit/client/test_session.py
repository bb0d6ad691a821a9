"""Connecting, losing and back-pressure of a session, on a backend without sockets or time."""

from __future__ import annotations

from collections import deque

import pytest

from sbus.client.core import Message
from sbus.client.responding import MOST_HANDLERS, Request
from sbus.client.subscription import HIGH_WATER
from sbus.client.workers import Work, WorkCore
from sbus.errors import Closed, Disconnected, NotAllowed
from sbus.syscalls.batch import BATCH
from tests.unit.client.sessions import NAME, Exact, FakeSession, Running, Waiter, lose

# --- subscriptions --------------------------------------------------------------------------------


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


# --- the end --------------------------------------------------------------------------------------


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
