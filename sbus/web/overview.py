"""The answers of the admin socket, kept for all open pages together.

Theory of operation
-------------------

The status is asked for once a second for as long as ``sbus web`` runs, so that a page that is opened shows the last
five minutes at once. Everything else is asked for only while a page shows it. Pages that show the same share the
answers.

A page gets the changes since it last looked: every answer has a number, and a `View` remembers the numbers that it has
seen. A page that looks seldom therefore skips answers, and none of them waits for it.

A refusal (403), a bus without an admin socket and one that has stopped are states, not ends: they are asked again after
`RETRY` seconds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from twisted.internet import defer
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from sbus.errors import SbusError
from sbus.web.admin import Admin, AdminError
from sbus.web.names import Programs, user_name

__all__ = ["HISTORY", "POLL", "RETRY", "ClientsView", "Overview", "View"]

POLL = 1.0
"""Seconds between two looks at the status."""
CLIENTS_POLL = 2.0
"""Seconds between two looks at the clients."""
QUEUES_POLL = 2.0
"""Seconds between two looks at the queues."""
RETRY = 5.0
"""Seconds to wait after a failure."""
HISTORY = 301
"""Samples kept: five minutes."""

Event = tuple[str, Any]


class ClientsView(NamedTuple):
    """The table of clients that a page shows.

    :ivar sort: a column that the admin socket sorts by.
    :ivar limit: rows at most.
    """

    sort: str = "queue"
    limit: int = 100


class _Events(NamedTuple):
    """The stream of flows by prefixes of `depth` segments, and of keys without subscribers."""

    depth: int


@dataclass(eq=False, slots=True)
class View:
    """The view of one page, and the answers that it has seen.

    :ivar clients: the table of clients, if it is shown.
    :ivar depth: segments of a key that make a prefix, if the page shows who talks to whom.
    """

    clients: ClientsView | None = None
    depth: int | None = None
    seen: dict[object, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Latest:
    """The newest answer to one question."""

    number: int = 0
    value: Any = None


class Overview:
    """Asks the admin socket, and knows the changes since a page last looked."""

    _log = Logger(namespace="sbus.web")

    def __init__(
        self, reactor: IReactorTime, admin: Admin, ask_queues: Callable[[], Awaitable[list[Any]]] | None = None
    ) -> None:
        self._reactor = reactor
        self._admin = admin
        self._ask_queues = ask_queues
        self._views: set[View] = set()
        self._latest: dict[object, _Latest] = {}
        self._number = 0
        self._history: deque[list[float]] = deque(maxlen=HISTORY)
        self._programs = Programs()
        self._talkers = Programs()
        self._running: dict[object, defer.Deferred[None]] = {}
        self._calls: dict[object, IDelayedCall] = {}
        self._is_running = False

    # --- the pages ---------------------------------------------------------------------------

    def start(self) -> None:
        """Ask for the status from now on."""
        self._is_running = True
        self._soon("status")

    def stop(self) -> None:
        """Ask nothing more."""
        self._is_running = False
        self._views.clear()
        for call in self._calls.values():
            call.cancel()
        self._calls.clear()
        for running in tuple(self._running.values()):
            running.cancel()

    def attach(self, view: View) -> None:
        """Ask for what a page shows."""
        self._views.add(view)
        for question in self._wanted():
            if question not in self._running and question not in self._calls:
                self._soon(question)

    def detach(self, view: View) -> None:
        """Stop asking for what no other page shows."""
        self._views.discard(view)
        wanted = self._wanted()
        for question in [q for q in (*self._calls, *self._running) if q not in wanted]:
            if (call := self._calls.pop(question, None)) is not None:
                call.cancel()
            if (running := self._running.get(question)) is not None:
                running.cancel()
            self._latest.pop(question, None)
            if isinstance(question, _Events):
                self._latest.pop(("talk", question.depth), None)
                self._latest.pop(("unrouted", question.depth), None)

    def changes(self, view: View) -> list[Event]:
        """Return the events that a page has not seen."""
        events: list[Event] = []
        if "history" not in view.seen and self._history:
            view.seen["history"] = 1
            events.append(("history", list(self._history)))
        for name, question in (
            ("admin", "admin"),
            ("status", "status"),
            ("clients", view.clients),
            ("talk", None if view.depth is None else ("talk", view.depth)),
            ("unrouted", None if view.depth is None else ("unrouted", view.depth)),
            ("queues", None if view.depth is None else "queues"),
        ):
            latest = self._latest.get(question)
            if question is not None and latest is not None and view.seen.get(question) != latest.number:
                view.seen[question] = latest.number
                events.append((name, latest.value))
        return events

    # --- asking ------------------------------------------------------------------------------

    def _wanted(self) -> set[object]:
        wanted: set[object] = {"status"} if self._is_running else set()
        for view in self._views:
            if view.clients is not None:
                wanted.add(view.clients)
            if view.depth is not None:
                wanted.add(_Events(view.depth))
                if self._ask_queues is not None:
                    wanted.add("queues")
        return wanted

    def _soon(self, question: object, delay: float = 0) -> None:
        self._calls[question] = self._reactor.callLater(delay, self._ask, question)

    def _ask(self, question: object) -> None:
        del self._calls[question]
        asking = self._running[question] = defer.Deferred.fromCoroutine(self._answered(question))
        asking.addErrback(lambda failure: failure.trap(defer.CancelledError))
        if asking.called:
            self._running.pop(question, None)

    async def _answered(self, question: object) -> None:
        """Ask one question, and plan when to ask it again."""
        delay = RETRY
        try:
            if question == "status":
                self._sample(await self._admin.ask("/v1/status"))
                delay = POLL
                self._problem(200, "")
            elif question == "queues":
                assert self._ask_queues is not None
                self._note(question, await self._ask_queues())
                delay = QUEUES_POLL
            elif isinstance(question, ClientsView):
                answer = await self._admin.ask("/v1/clients", {"sort": question.sort, "limit": str(question.limit)})
                self._programs.add_to(answer["clients"])
                self._note(question, answer)
                delay = CLIENTS_POLL
            else:
                assert isinstance(question, _Events)
                depth = question.depth
                await self._admin.follow(
                    "/v1/events",
                    {"talk": str(depth), "unrouted": "1"},
                    lambda name, value: self._event(depth, name, value),
                )
        except AdminError as problem:
            if question == "status" or problem.status not in (0, 403):
                self._problem(problem.status, problem.detail)
        except SbusError:
            self._latest.pop(question, None)  # the bus is away, or does not answer this
        except defer.CancelledError:
            raise
        except Exception:
            self._log.failure("An answer of the admin socket is not what it should be")
            self._problem(0, "the admin socket's answer is not what it should be: it may be of another version")
        finally:
            self._running.pop(question, None)
        if question in self._wanted():
            self._soon(question, delay)

    def _note(self, question: object, value: Any) -> None:
        self._number += 1
        self._latest[question] = _Latest(self._number, value)

    def _problem(self, status: int, detail: str) -> None:
        value = {"status": status, "detail": detail}
        latest = self._latest.get("admin")
        if latest is None or latest.value != value:
            self._note("admin", value)

    def _sample(self, status: dict[str, Any]) -> None:
        now = status.get("time", time.time())
        counters = status["counters"]
        self._history.append(
            [
                round(now, 3),
                *(counters.get(name, 0) for name in ("published", "routed", "dropped", "conflated", "unrouted")),
                status["queue_bytes"],
            ]
        )
        denied = [{**row, "user": user_name(row["uid"])} for row in status.get("denied", ())]
        self._note("status", {**status, "time": round(now, 3), "denied": denied})

    def _event(self, depth: int, name: str, value: Any) -> None:
        if name == "talk":
            self._talkers.add_to(value["clients"])
        if name in ("talk", "unrouted"):
            self._note((name, depth), value)
