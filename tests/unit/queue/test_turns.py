"""When the turns of a queue's service begin."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock

from sbus.queue.turns import Turns


class Slow:
    """Turns that end when the test says so.

    :ivar begun: what each turn waits for.
    """

    def __init__(self) -> None:
        self.clock = Clock()
        self.begun: list[Deferred[None]] = []
        self.turns = Turns(self.clock, self.turn)

    async def turn(self) -> Any:
        self.begun.append(Deferred())
        await self.begun[-1]


def test_what_comes_during_a_turn_shares_the_next_one() -> None:
    """However often a turn is due while one is under way, one more follows."""
    slow = Slow()
    for _ in range(4):
        slow.turns.begin()
        slow.clock.advance(0)
    for count in (1, 2):
        assert (len(slow.begun), slow.turns.is_under_way) == (count, True)
        slow.begun[-1].callback(None)
    assert (len(slow.begun), slow.turns.is_under_way) == (2, False)


def test_a_slow_disk_makes_no_turn_wait_long() -> None:
    """A turn waits for more messages for 20 ms at most, however long the last write took."""
    slow = Slow()
    slow.turns.wrote(60.0)
    slow.turns.expected = 9
    slow.turns.came(1)
    slow.clock.advance(0.019)
    assert slow.begun == []
    slow.clock.advance(0.002)
    assert len(slow.begun) == 1


def test_no_turn_follows_the_last_one() -> None:
    """A turn that was due meanwhile, or that somebody waits for, finds the store closed, and does nothing."""
    slow = Slow()
    closed: list[int] = []
    slow.turns.run()
    ended = slow.turns.end(lambda: closed.append(len(slow.begun)))
    waiting = slow.turns.run()
    slow.turns.begin()
    slow.clock.advance(0)
    slow.begun[-1].callback(None)
    assert not closed
    slow.begun[-1].callback(None)
    assert closed == [2]
    slow.turns.begin()
    slow.clock.advance(1)
    assert ended.called
    assert waiting.result is False  # a caller must not take its changes for stored
    assert len(slow.begun) == 2
