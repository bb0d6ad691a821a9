"""The one stream of events of an open page (Server-Sent Events), written at the pace of the browser.

Theory of operation
-------------------

A page that is open holds one request, whose answer never ends. `TICK` times a second the stream asks each of its
sources for changes, and writes them as events. There is no queue: twisted.web pauses the stream while the browser does
not read, ticks then write nothing, sources that describe a state are asked later for the newest one, and the connection
to the bus drops what nobody takes (`sbus.web.taps`). So a browser that hangs costs this process at most 64 MB of
memory, for what the connection to the bus has noted and the text of one look, and the bus nothing.

The request's parameters say what the page shows; a page that shows something else opens a new stream and ends the old
one. The server keeps no state of a page beyond that.

A comment every `PING` seconds lets both ends notice that the other has gone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

from twisted.internet import defer
from twisted.internet.interfaces import IDelayedCall, IPushProducer, IReactorTime
from twisted.logger import Logger
from zope.interface import implementer

from sbus.web.overview import Overview, View
from sbus.web.taps import Tap

__all__ = ["PING", "TICK", "PageStream"]

TICK = 0.25
"""Seconds between two looks."""
PING = 15.0
"""Seconds after which a comment is written if nothing else was."""
_KEYS_EVERY = 4
"""Ticks between two reports of the keys."""


class Answer(Protocol):
    """The methods of a request that a stream uses (`twisted.web.http.Request`)."""

    def write(self, data: bytes, /) -> object: ...
    def finish(self) -> object: ...
    def notifyFinish(self) -> defer.Deferred[None]: ...
    def registerProducer(self, producer: object, streaming: bool, /) -> object: ...
    def unregisterProducer(self) -> object: ...


@implementer(IPushProducer)
class PageStream:
    """Writes the events of one page until the browser leaves.

    :param request: the request, whose headers are set.
    :param tap: the page's connection to the bus.
    :param overview: the source of what the admin socket says.
    :param view: what the page shows of that.
    :param on_end: called once, when the stream has ended.
    """

    _log = Logger(namespace="sbus.web")

    def __init__(
        self,
        reactor: IReactorTime,
        request: Answer,
        tap: Tap,
        overview: Overview,
        view: View,
        on_end: Callable[[PageStream], object],
    ) -> None:
        self._reactor = reactor
        self._request = request
        self._tap = tap
        self._overview = overview
        self._view = view
        self._on_end = on_end
        self._is_paused = False
        self._is_over = False
        self._ticks = 0
        self._written_at = reactor.seconds()
        self._call: IDelayedCall | None = None
        self._opening: defer.Deferred[None] | None = None
        self._state: object = None

    def start(self, hello: dict[str, Any]) -> None:
        """Write the first events, and continue."""
        self._request.notifyFinish().addBoth(lambda _: self._ended())
        self._request.registerProducer(self, True)
        self._overview.attach(self._view)
        self._write([("hello", hello)])
        self._opening = defer.Deferred.fromCoroutine(self._tap.open())
        self._opening.addErrback(lambda failure: failure.trap(defer.CancelledError))
        self._call = self._reactor.callLater(0, self._tick)

    def close(self) -> None:
        """End the stream."""
        if not self._is_over:
            self._request.unregisterProducer()
            self._request.finish()
            self._ended()

    # IPushProducer
    def pauseProducing(self) -> None:
        """Write nothing: the browser does not read."""
        self._is_paused = True

    def resumeProducing(self) -> None:
        """Write again."""
        self._is_paused = False

    def stopProducing(self) -> None:
        """End: the browser has gone."""
        self._ended()

    def _ended(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._call is not None and self._call.active():
            self._call.cancel()
        if self._opening is not None:
            self._opening.cancel()
        self._tap.close()
        self._overview.detach(self._view)
        self._on_end(self)

    def _tick(self) -> None:
        self._call = self._reactor.callLater(TICK, self._tick)
        self._ticks += 1
        if self._is_paused:
            return
        events = self._overview.changes(self._view) + self._from_bus()
        if events:
            self._write(events)
        elif self._reactor.seconds() - self._written_at >= PING:
            self._written_at = self._reactor.seconds()
            self._request.write(b":\n\n")

    def _from_bus(self) -> list[tuple[str, Any]]:
        tap = self._tap
        events: list[tuple[str, Any]] = []
        if (state := (tap.state, tap.problem)) != self._state:
            self._state = state
            events.append(("bus", {"state": tap.state, "problem": tap.problem}))
        if (found := tap.look_at_tail()) is not None:
            events.append(("tail", found))
        if (found := tap.look_at_keys(report=self._ticks % _KEYS_EVERY == 0)) is not None:
            events.append(("keys", found))
        if lost := tap.take_lost():
            events.append(("missed", {"messages": lost}))
        return events

    def _write(self, events: list[tuple[str, Any]]) -> None:
        self._written_at = self._reactor.seconds()
        text = "".join(
            f"event: {name}\ndata: {json.dumps(value, separators=(',', ':'), ensure_ascii=False)}\n\n"
            for name, value in events
        )
        self._request.write(text.encode("utf-8", "replace"))
