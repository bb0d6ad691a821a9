"""What a session sends, and what it sends again after a loss."""

from __future__ import annotations

import pytest

from sbus.client.subscription import HIGH_WATER
from sbus.errors import Closed, ConnectError, Disconnected
from sbus.syscalls.batch import BATCH
from tests.unit.client.sessions import NAME, WHOAMI, Exact, FakeSession, Running, Waiter, lose

# --- sending --------------------------------------------------------------------------------------


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


# --- coming back ----------------------------------------------------------------------------------


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
