"""What the admin socket says: its events, and what is kept of its answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet import defer
from twisted.internet.task import Clock

from sbus.web.admin import MOST_EVENT, AdminError, EventParser
from sbus.web.overview import CLIENTS_POLL, HISTORY, POLL, RETRY, ClientsView, Overview, View

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["status", "talk", "message"]),
        st.dictionaries(st.text(max_size=5), st.text(max_size=20) | st.integers(), max_size=3),
    ),
    max_size=6,
)


@given(EVENTS, st.lists(st.integers(0, 400), max_size=12), st.sampled_from([b"\n", b"\r\n"]))
def test_events_do_not_depend_on_the_pieces(events: list[tuple[str, Any]], cuts: list[int], end: bytes) -> None:
    """The same events come out however the stream is cut, among comments and with either end of line."""
    text = ": hello\n\n" + "".join(f"event: {name}\ndata: {json.dumps(value)}\n\n" for name, value in events)
    data = text.encode().replace(b"\n", end)
    found: list[tuple[str, Any]] = []
    parser = EventParser(lambda name, value: found.append((name, value)))
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for first, last in pairwise(places):
        parser.feed(data[first:last])
    assert found == events


def test_data_of_several_lines_is_one_event() -> None:
    """Lines of data are joined, as the standard says; without a name an event is a message."""
    found: list[Any] = []
    EventParser(lambda *event: found.append(event)).feed(b'data: {"a":\ndata: 1}\n\nevent: x\n\n')
    assert found == [("message", {"a": 1})]


def test_a_broken_stream_ends() -> None:
    """An event that is no JSON, or too long, is an error, whether its line has ended or not."""
    longest = b"data: " + b"x" * (MOST_EVENT - len(b"data: "))
    for data, error in (
        (b"data: {\n\n", "not JSON"),
        (longest + b"x", "longer than 8,388,608 bytes"),
        (longest + b"\ndata: xxxxxxx\n", "longer than 8,388,608 bytes"),
    ):
        with pytest.raises(AdminError, match=error):
            EventParser(lambda *_: None).feed(data)
    EventParser(lambda *_: None).feed(longest)


class FakeAdmin:
    """An admin socket that answers when a test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str], defer.Deferred[Any]]] = []
        self.on_event: Callable[[str, Any], object] = lambda *_: None

    def ask(self, path: str, parameters: Mapping[str, str] | None = None) -> defer.Deferred[Any]:
        answer: defer.Deferred[Any] = defer.Deferred()
        self.asked.append((path, dict(parameters or {}), answer))
        return answer

    def follow(self, path: str, parameters: Mapping[str, str], on_event: Any) -> defer.Deferred[Any]:
        self.on_event = on_event
        return self.ask(path, parameters)

    def answer(self, path: str, value: Any) -> None:
        """Answer the questions for a path, with a value or an error."""
        mine = [each for each in self.asked if each[0] == path]
        self.asked = [each for each in self.asked if each[0] != path]
        assert mine, path
        for _, _, answer in mine:
            if isinstance(value, Exception):
                answer.errback(value)
            else:
                answer.callback(value)


STATUS = {"time": 1.0, "queue_bytes": 5, "counters": {"published": 10, "routed": 20, "dropped": 1, "conflated": 0}}


class Desk:
    def __init__(self) -> None:
        self.clock, self.admin = Clock(), FakeAdmin()
        self.overview = Overview(self.clock, self.admin)  # type: ignore[arg-type]
        self.overview.start()
        self.clock.advance(0)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_the_status_is_remembered_for_five_minutes(desk: Desk) -> None:
    """A page that is opened late gets the samples of the last five minutes at once, and the newest status."""
    for second in range(HISTORY + 20):
        desk.admin.answer("/v1/status", {**STATUS, "time": float(second)})
        desk.clock.advance(POLL)
    view = View()
    desk.overview.attach(view)
    events = dict(desk.overview.changes(view))
    assert set(events) == {"history", "status", "admin"}
    assert (len(events["history"]), events["history"][-1][:3]) == (HISTORY, [HISTORY + 19.0, 10, 20])
    assert desk.overview.changes(view) == []


def test_refusals_have_the_names_of_their_users(desk: Desk) -> None:
    """What users had no permission for is shown with their names, or with the UID of a user who has none."""
    view = View()
    desk.overview.attach(view)
    rows = [{"uid": uid, "rule": "quiet", "count": 3, "at": 1.0} for uid in (0, 4_000_000)]
    desk.admin.answer("/v1/status", {**STATUS, "denied": rows})
    shown = dict(desk.overview.changes(view))["status"]["denied"]
    assert [(row["user"], row["count"]) for row in shown] == [("root", 3), ("4000000", 3)]


def test_a_refusal_is_shown_and_asked_again(desk: Desk) -> None:
    """What the admin socket refuses is said once, and is asked again later: rights can change."""
    view = View()
    desk.overview.attach(view)
    desk.admin.answer("/v1/status", AdminError(403, "your user may not ask this"))
    assert desk.overview.changes(view) == [("admin", {"status": 403, "detail": "your user may not ask this"})]
    desk.clock.advance(RETRY)
    desk.admin.answer("/v1/status", AdminError(403, "your user may not ask this"))
    assert desk.overview.changes(view) == []
    desk.clock.advance(RETRY)
    desk.admin.answer("/v1/status", STATUS)
    assert dict(desk.overview.changes(view))["admin"]["status"] == 200


def test_only_what_is_shown_is_asked_for(desk: Desk) -> None:
    """The clients are asked for while a page shows them; pages that show the same share the answer."""
    assert [path for path, _, _ in desk.admin.asked] == ["/v1/status"]
    views = [View(clients=ClientsView("lost", 50)) for _ in range(2)]
    for view in views:
        desk.overview.attach(view)
    desk.clock.advance(0)
    asked = [each for each in desk.admin.asked if each[0] == "/v1/clients"]
    assert [parameters for _, parameters, _ in asked] == [{"sort": "lost", "limit": "50"}]
    desk.admin.answer("/v1/clients", {"clients": [{"client": 1, "pid": 0, "uid": 0}], "total": 1})
    for view in views:
        rows = dict(desk.overview.changes(view))["clients"]["clients"]
        assert rows == [{"client": 1, "pid": 0, "uid": 0, "program": "", "user": "root"}]
        desk.overview.detach(view)
    desk.clock.advance(CLIENTS_POLL * 3)
    assert [path for path, _, _ in desk.admin.asked] == ["/v1/status"]


def test_the_stream_of_events_is_followed_while_it_is_shown(desk: Desk) -> None:
    """Who talks to whom comes from one stream for all pages of a depth; it ends with the last of them."""
    view = View(depth=2)
    desk.overview.attach(view)
    desk.clock.advance(0)
    [(_, parameters, answer)] = [each for each in desk.admin.asked if each[0] == "/v1/events"]
    assert parameters == {"talk": "2", "unrouted": "1"}
    desk.admin.on_event("status", STATUS)
    desk.admin.on_event("talk", {"flows": [], "clients": [{"client": 3, "pid": 0, "uid": 0}]})
    desk.admin.on_event("unrouted", {"keys": []})
    assert [name for name, _ in desk.overview.changes(view)] == ["talk", "unrouted"]
    desk.overview.detach(view)
    assert answer.called


def test_a_strange_answer_is_a_problem(desk: Desk) -> None:
    """An answer of another shape, as of another version, is said on the page and ends nothing."""
    view = View()
    desk.overview.attach(view)
    desk.admin.answer("/v1/status", {"something": "else"})
    assert dict(desk.overview.changes(view))["admin"]["status"] == 0
    desk.clock.advance(RETRY)
    assert desk.admin.asked


def test_stopping_asks_nothing_more(desk: Desk) -> None:
    """After the end no call is left, and no question."""
    desk.overview.attach(View(depth=1, clients=ClientsView()))
    desk.clock.advance(0)
    desk.overview.stop()
    assert desk.clock.getDelayedCalls() == []
    assert all(answer.called for _, _, answer in desk.admin.asked)
