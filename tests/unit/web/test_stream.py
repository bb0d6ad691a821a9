"""The stream of events of an open page."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from twisted.internet import defer
from twisted.internet.task import Clock

from sbus.client.core import Message
from sbus.client.denials import Denial
from sbus.client.subscription import HIGH_WATER
from sbus.errors import NotAllowed
from sbus.web.overview import View
from sbus.web.stream import PING, TICK, PageStream
from sbus.web.taps import MOST_CHANGES, MOST_KEYS, MOST_LINES, Keys, Tail, Tap


class FakeRequest:
    """A request whose answer is kept."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.gone: defer.Deferred[None] = defer.Deferred()
        self.is_finished = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def finish(self) -> None:
        self.is_finished = True

    def notifyFinish(self) -> defer.Deferred[None]:
        return self.gone

    def registerProducer(self, producer: object, streaming: bool) -> None:
        assert streaming

    def unregisterProducer(self) -> None:
        pass

    def events(self) -> list[tuple[str, Any]]:
        """Return the events written so far, and forget them."""
        text, self.written = b"".join(self.written).decode(), []
        parts = [part.split("\ndata: ") for part in text.split("\n\n") if part.startswith("event: ")]
        return [(name.removeprefix("event: "), json.loads(data)) for name, data in parts]


class FakeOverview:
    """An overview that has what a test puts into it."""

    def __init__(self) -> None:
        self.views: list[View] = []
        self.events: list[tuple[str, Any]] = []

    def attach(self, view: View) -> None:
        self.views.append(view)

    def detach(self, view: View) -> None:
        self.views.remove(view)

    def changes(self, view: View) -> list[tuple[str, Any]]:
        events, self.events = self.events, []
        return events


class FakeBus:
    """A connection with one subscription, which gets the messages of a test."""

    def __init__(self) -> None:
        self.is_paused = False

    def subscribe(self, pattern: bytes, callback: Callable[[Message], object], *, last: bool = False) -> object:
        self.callback = callback
        return self

    def pause_for(self, subscription: object) -> None:
        assert subscription is self
        self.is_paused = True

    def resume_for(self, subscription: object) -> None:
        assert subscription is self
        self.is_paused = False

    def bring(self, *messages: Message) -> None:
        """Deliver messages, as many as the page takes."""
        for message in messages:
            if not self.is_paused:
                self.callback(message)


class FakeTap(Tap):
    """A connection to the bus with a subscription of a test."""

    def __init__(self) -> None:
        self.bus = FakeBus()
        self.tail = Tail(self.bus, b"")  # type: ignore[arg-type]
        self.keys = None
        self.problem = ""
        self.lost = 0
        self.is_closed = False

    @property
    def state(self) -> str:
        return "connected"

    async def open(self) -> None:
        pass

    def take_lost(self) -> int:
        lost, self.lost = self.lost, 0
        return lost

    def close(self) -> None:
        self.is_closed = True


class Page:
    def __init__(self) -> None:
        self.clock, self.request, self.overview, self.tap = Clock(), FakeRequest(), FakeOverview(), FakeTap()
        self.ended: list[PageStream] = []
        self.stream = PageStream(
            self.clock,
            self.request,
            self.tap,
            self.overview,  # type: ignore[arg-type]
            View(),
            self.ended.append,
        )
        self.stream.start({"version": "1"})


@pytest.fixture
def page() -> Page:
    return Page()


def test_a_stream_says_what_is_new(page: Page) -> None:
    """A stream begins with a greeting, and then has what has changed since the last look."""
    page.tap.bus.bring(Message(b"a/b", b"1"), Message(b"a/c", b"\xff"))
    page.overview.events = [("status", {"clients": 1})]
    page.tap.lost = 7
    page.clock.advance(TICK)
    events = page.request.events()
    assert [name for name, _ in events] == ["hello", "status", "bus", "tail", "missed"]
    found = dict(events)
    assert [line[1:6] for line in found["tail"]["messages"]] == [
        ["a/b", "text", "1", "text", 1],
        ["a/c", "text", "/w==", "base64", 1],
    ]
    assert found["missed"] == {"messages": 7}
    page.clock.advance(TICK)
    assert page.request.events() == []


def test_nothing_is_written_to_a_browser_that_does_not_read(page: Page) -> None:
    """While the browser does not read, nothing is written, and no more taken than between two looks."""
    page.clock.advance(TICK)
    page.request.events()
    page.stream.pauseProducing()
    for _ in range(400):
        page.tap.bus.bring(*[Message(b"a", b"1")] * 100)
        page.clock.advance(TICK)
    assert page.request.written == []
    assert page.tap.bus.is_paused
    page.stream.resumeProducing()
    page.clock.advance(TICK)
    ((name, found),) = page.request.events()
    assert (name, len(found["messages"]) + found["skipped"]) == ("tail", HIGH_WATER)
    assert not page.tap.bus.is_paused


def test_a_quiet_stream_shows_that_it_lives(page: Page) -> None:
    """A comment is written every now and then, so that either end notices when the other has gone."""
    page.clock.advance(TICK)
    page.request.events()
    page.clock.pump([TICK] * (int(PING / TICK) + 1))
    assert page.request.written == [b":\n\n"]


@pytest.mark.parametrize("how", ["gone", "stopProducing", "close"])
def test_the_end_of_a_stream(page: Page, how: str) -> None:
    """When the browser leaves, or the server stops, everything that the page used is given back, once."""
    page.clock.advance(TICK)
    if how == "gone":
        page.request.gone.callback(None)
    else:
        getattr(page.stream, how)()
    page.stream.close()
    assert page.ended == [page.stream]
    assert (page.tap.is_closed, page.overview.views) == (True, [])
    assert page.clock.getDelayedCalls() == []


@pytest.fixture
def bus() -> Any:
    return FakeBus()


def test_a_tail_shows_the_newest(bus: Any) -> None:
    """Of many messages at once the newest are shown; the others are counted."""
    tail = Tail(bus, b"")
    bus.bring(*(Message(b"k", b"%d" % n) for n in range(MOST_LINES + 50)))
    found = tail.look()
    assert found is not None
    assert (len(found["messages"]), found["skipped"], found["messages"][-1][3]) == (MOST_LINES, 50, "249")
    assert tail.look() is None


def bring(bus: Any, keys: Keys, *messages: Message) -> None:
    """Deliver all messages, however many looks that takes."""
    for start in range(0, len(messages), HIGH_WATER):
        bus.bring(*messages[start : start + HIGH_WATER])
        keys.go_on()


def test_keys_are_bounded(bus: Any) -> None:
    """At most `MOST_KEYS` keys are known, the one that was quiet longest goes; large changes come in parts."""
    keys = Keys(bus, b"")
    bring(bus, keys, *(Message(b"k/%d" % n, b"") for n in range(MOST_KEYS)), Message(b"k/0", b"new"))
    bring(bus, keys, Message(b"one/more", b"x"))
    known: set[str] = set()
    removed: list[str] = []
    looks = 0
    while (found := keys.look()) is not None:
        looks += 1
        assert len(found["keys"]) <= MOST_CHANGES
        known |= {row[0] for row in found["keys"]}
        removed += [row[0] for row in found["removed"]]
    assert (len(known), removed, looks) == (MOST_KEYS, ["k/1"], MOST_KEYS // MOST_CHANGES)


def test_counts_of_keys(bus: Any) -> None:
    """A key has the number of its messages since the last look, and the newest payload."""
    keys = Keys(bus, b"")
    bus.bring(Message(b"a", b"1"), Message(b"b", b"2"), Message(b"a", b"3"))
    found = keys.look()
    assert found is not None
    assert found["keys"] == [["a", "text", 2, "3", "text", 1], ["b", "text", 1, "2", "text", 1]]
    assert keys.look() is None


def test_long_messages_are_cut(bus: Any) -> None:
    """Of a long key and a long payload the beginnings are shown, without half a character, and the payload's length."""
    key, payload = "é".encode() * 100_000, b"x" + "é".encode() * 100_000
    tail = Tail(bus, b"")
    bus.bring(Message(key, payload))
    found = tail.look()
    assert found is not None
    assert found["messages"][0][1:] == ["é" * 128, "text", "x" + "é" * 1023, "text", 200_001, False]
    keys = Keys(bus, b"")
    bus.bring(Message(key, payload), Message(key + b"y", payload))
    assert keys.look() == {
        "keys": [["é" * 128, "text", 2, "x" + "é" * 127, "text", 200_001]],
        "removed": [],
        "limit": MOST_KEYS,
        "more": 0,
    }


def test_memory_does_not_depend_on_the_bus(bus: Any) -> None:
    """What a page keeps is bounded in bytes, however long keys and payloads are."""
    tail = Tail(bus, b"")
    take_tail = bus.callback
    keys = Keys(bus, b"")
    tracemalloc.start()
    try:
        for number in range(MOST_KEYS + 4 * HIGH_WATER):
            message = Message(b"%05d" % number + bytes(30_000), bytes(30_000))
            take_tail(message)
            bus.callback(message)
        del message
        assert tracemalloc.get_traced_memory()[0] < 16 << 20
    finally:
        tracemalloc.stop()
    assert tail.look()
    assert keys.look()


def test_a_refusal_is_shown() -> None:
    """A pattern that the bus refuses is a problem of the page, with the rule."""
    tap = FakeTap()
    denial = Denial(b"SUB", b"secret/", "closed.1")
    tap._on_denied(denial)
    assert tap.problem == str(NotAllowed(b"SUB", b"secret/", "closed.1"))
