"""The table of states: every reachable state with every event, and no state or entry too many."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sbus.seqpacket.states import (
    LIFE,
    READ_SIDE,
    WRITE_SIDE,
    Connection,
    Event,
    Life,
    ReadSide,
    TransitionError,
    WriteSide,
)
from tests.support.examples import examples

States = tuple[Life, ReadSide, WriteSide]
CONCERNED = [{event for row in rows.values() for event in row} for rows in (LIFE, READ_SIDE, WRITE_SIDE)]
ANY_TIME = (Event.PAUSE, Event.RESUME, Event.DRAIN, Event.LOSE, Event.ABORT, Event.CLOSE)
"""Events that a protocol, or a reactor that stops, can cause at any time."""


def states(connection: Connection) -> States:
    return connection.life, connection.read_side, connection.write_side


def in_states(found: States) -> Connection:
    connection = Connection()
    connection.life, connection.read_side, connection.write_side = found
    return connection


def expected(found: States, event: Event) -> States | None:
    """The states that follow by the three tables; None if one of them has no entry."""
    life, read_side, write_side = found
    rows = (LIFE[life], READ_SIDE[read_side], WRITE_SIDE[write_side])
    if any(event in concerned and event not in row for concerned, row in zip(CONCERNED, rows, strict=True)):
        return None
    return rows[0].get(event, life), rows[1].get(event, read_side), rows[2].get(event, write_side)


def reachable_states() -> set[States]:
    found = {states(Connection())}
    new = set(found)
    while new:
        following = {expected(one, event) for one, event in itertools.product(new, Event)}
        new = {one for one in following if one is not None} - found
        found |= new
    return found


def test_every_reachable_state_and_every_event() -> None:
    """In each reachable state each event either is a transition of the table, or an error that changes nothing."""
    errors = 0
    for before, event in itertools.product(reachable_states(), Event):
        connection = in_states(before)
        after = expected(before, event)
        if after is None:
            errors += 1
            with pytest.raises(TransitionError, match=str(event)):
                connection.move(event)
            assert states(connection) == before
        else:
            connection.move(event)
            assert states(connection) == after
    assert errors


def test_every_state_can_be_reached() -> None:
    """No state of the three machines is only written down."""
    lives, read_sides, write_sides = zip(*reachable_states(), strict=True)
    assert set(lives) == set(Life) == set(LIFE)
    assert set(read_sides) == set(ReadSide) == set(READ_SIDE)
    assert set(write_sides) == set(WriteSide) == set(WRITE_SIDE)


def test_every_event_concerns_some_machine() -> None:
    """No event is without effect."""
    assert set().union(*CONCERNED) == set(Event)


def test_protocols_can_call_at_any_time() -> None:
    """What a protocol or a stopping reactor can do is possible in every state of a connection that has started."""
    for before in reachable_states():
        if before[0] is not Life.NEW:
            assert all(expected(before, event) is not None for event in ANY_TIME), before


def test_ends() -> None:
    """Nothing is delivered or written on a connection that is closed, and nothing moves it any more."""
    for before, event in itertools.product(reachable_states(), Event):
        life, read_side, write_side = before
        if life in (Life.ABORTING, Life.CLOSED):
            assert read_side is ReadSide.STOPPED
            assert write_side in (WriteSide.SHUT, WriteSide.LOST)
        if life is Life.CLOSING:
            assert read_side is ReadSide.STOPPED
            assert write_side is not WriteSide.OPEN
        if life is Life.CLOSED:
            assert expected(before, event) in (before, None)


def test_an_error_names_event_and_states() -> None:
    """The error says what happened, and where the connection was."""
    with pytest.raises(TransitionError, match=r"Event\.RESUMED is not possible in Life\.NEW, ReadSide\.OPEN, Write"):
        Connection().move(Event.RESUMED)


def test_connected_and_disconnecting() -> None:
    """A connection is connected from its start to its close, and disconnecting after loseConnection."""
    connection = Connection()
    assert not connection.connected
    connection.move(Event.START)
    assert (connection.connected, connection.disconnecting) == (True, False)
    connection.move(Event.LOSE)
    assert (connection.connected, connection.disconnecting) == (True, True)
    connection.move(Event.CLOSE)
    assert (connection.connected, connection.disconnecting) == (False, False)


class AnyOrder(RuleBasedStateMachine):
    """Events in any order: ends stay ended, and each error leaves the connection as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.connection = Connection()
        self.reported = 0

    @rule(event=st.sampled_from(list(Event)))
    def move(self, event: Event) -> None:
        before = states(self.connection)
        try:
            self.connection.move(event)
        except TransitionError:
            assert expected(before, event) is None
            assert states(self.connection) == before
        else:
            assert states(self.connection) == expected(before, event)
            self.reported += event is Event.REPORT
            if before[1] is ReadSide.STOPPED:
                assert self.connection.read_side is ReadSide.STOPPED
            if before[2] in (WriteSide.SHUT, WriteSide.LOST):
                assert self.connection.write_side is before[2]

    @invariant()
    def end_of_file_is_reported_once(self) -> None:
        assert self.reported <= 1


AnyOrder.TestCase.settings = settings(max_examples=examples(100), deadline=None)
TestAnyOrder = AnyOrder.TestCase
