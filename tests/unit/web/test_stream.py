"""The stream of events of an open page."""

from __future__ import annotations

import json
from typing import Any

import pytest
from twisted.internet import defer
from twisted.internet.task import Clock

from sbus.client.core import Message
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


class FakeSubscription:
    """A subscription with the messages that a test puts into it, in lists that end at losses."""

    def __init__(self) -> None:
        self.lists: list[list[Message]] = []

    def get_ready(self) -> list[Message]:
        return self.lists.pop(0) if self.lists else []


class FakeTap(Tap):
    """A connection to the bus with subscriptions of a test."""

    def __init__(self) -> None:
        self.subscription = FakeSubscription()
        self.tail = Tail(self.subscription)  # type: ignore[arg-type]
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
    page.tap.subscription.lists = [[Message(b"a/b", b"1")], [Message(b"a/c", b"\xff")]]
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
    """While the browser does not read, nothing is written or kept; then the newest state is."""
    page.clock.advance(TICK)
    page.request.events()
    page.stream.pauseProducing()
    page.tap.subscription.lists = [[Message(b"a", b"1")]]
    for _ in range(400):
        page.clock.advance(TICK)
    assert page.request.written == []
    assert len(page.tap.subscription.lists) == 1
    page.stream.resumeProducing()
    page.clock.advance(TICK)
    assert [name for name, _ in page.request.events()] == ["tail"]


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


def test_a_tail_shows_the_newest() -> None:
    """Of many messages at once the newest are shown; the others are counted."""
    subscription = FakeSubscription()
    subscription.lists = [[Message(b"k", b"%d" % n) for n in range(MOST_LINES + 50)]]
    found = Tail(subscription).look()  # type: ignore[arg-type]
    assert found is not None
    assert (len(found["messages"]), found["skipped"], found["messages"][-1][3]) == (MOST_LINES, 50, "249")


def test_keys_are_bounded() -> None:
    """At most `MOST_KEYS` keys are known, the one that was quiet longest goes; large changes come in parts."""
    subscription = FakeSubscription()
    keys = Keys(subscription)  # type: ignore[arg-type]
    subscription.lists = [[Message(b"k/%d" % n, b"") for n in range(MOST_KEYS)], [Message(b"k/0", b"new")]]
    keys.take()
    subscription.lists = [[Message(b"one/more", b"x")]]
    keys.take()
    known: set[str] = set()
    removed: list[str] = []
    looks = 0
    while (found := keys.look()) is not None:
        looks += 1
        assert len(found["keys"]) <= MOST_CHANGES
        known |= {row[0] for row in found["keys"]}
        removed += [row[0] for row in found["removed"]]
    assert (len(known), removed, looks) == (MOST_KEYS, ["k/1"], MOST_KEYS // MOST_CHANGES)


def test_counts_of_keys() -> None:
    """A key has the number of its messages since the last look, and the newest payload."""
    subscription = FakeSubscription()
    keys = Keys(subscription)  # type: ignore[arg-type]
    subscription.lists = [[Message(b"a", b"1"), Message(b"b", b"2"), Message(b"a", b"3")]]
    keys.take()
    found = keys.look()
    assert found is not None
    assert found["keys"] == [["a", "text", 2, "3", "text", 1], ["b", "text", 1, "2", "text", 1]]
    assert keys.look() is None
