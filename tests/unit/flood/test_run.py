"""A run of messages: what each queue asks about it is found out once."""

from __future__ import annotations

import sys

import hypothesis.strategies as st
import pytest
from hypothesis import given

from sbus.flood import Run
from tests.support.costs import calls

KEYS = (b"a", b"b", b"long/key")


@given(st.lists(st.tuples(st.sampled_from(KEYS), st.binary(max_size=9)), min_size=1, max_size=40))
def test_a_run_says_what_its_messages_say(messages):
    """Length, bytes and shortest packet are the list's; the newest of each key stand where it came first."""
    packets = [b"MSG %b\0%b" % message for message in messages]
    run = Run(packets)
    assert (run.count, run.size, run.shortest) == (len(packets), sum(map(len, packets)), min(map(len, packets)))
    newest = {packet.partition(b"\0")[0]: packet for packet in packets}
    assert run.newest.packets == [*newest.values()]
    assert run.packets == packets


def test_a_run_of_different_keys_is_its_own_newest():
    """If no key comes twice, nothing is copied."""
    run = Run([b"MSG a\0", b"MSG b\0"])
    assert run.newest is run
    assert run.newest is run
    assert sys.getrefcount(run) == 2  # it does not refer to itself, which only the collector would find


@pytest.mark.parametrize("question", ["shortest", "newest"])
def test_a_run_is_looked_at_once(question):
    """The second queue that asks gets the first one's answer, however long the run is."""
    run = Run([b"MSG a\0"] * 1_000)
    first = getattr(run, question)
    asked = calls(getattr, run, question)
    assert getattr(run, question) is first
    assert asked <= 4
