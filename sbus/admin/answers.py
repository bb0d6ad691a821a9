"""Answers on their way: pieces are made in slices, one slice in a turn for all answers together.

.. rubric:: Theory of operation

The bus has one thread, so answers must not take it for long. All answers share one slice of `SLICE` in a turn of the
reactor, and rest three times as long after it as it took: however many ask, however often, three quarters of the time
are left for the bus. Answers take turns; within a slice each makes one piece after the other.

A page that has nothing to say now yields None. It is asked again after `TICK`; that is how a stream of events lives.

Memory: each answer is a push producer of its connection. When the peer does not read, the connection's buffer fills up
(64 KiB), the producer is paused, and no more pieces are made until the peer has read. So an answer holds one slice of
text beside that buffer, and its page has what it needs to continue.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from twisted.internet.interfaces import IDelayedCall, IPushProducer
from twisted.logger import Logger
from twisted.web import http
from zope.interface import implementer

from sbus.admin.pages import Pieces, Problem

__all__ = ["SLICE", "TICK", "Answers", "refuse"]

SLICE = 0.0005
"""Seconds of a turn of the reactor in which pieces are made; the last one may take it a bit further."""
TICK = 0.1
"""Seconds until a page that had nothing to say is asked again."""
_REST = 3
"""Time between two slices, as a multiple of the first one's."""
_MOST_PIECES = 64
"""Pieces that one answer makes in a row."""


@implementer(IPushProducer)
class _Answer:
    """One answer: a producer of its connection."""

    def __init__(self, answers: Answers, request: Any, begin: Callable[[], tuple[Pieces, str]]) -> None:
        self._answers = answers
        self._request = request
        self._begin = begin
        self._pieces: Pieces | None = None
        self._is_paused = False
        self._is_gone = False
        self.is_queued = False
        request.notifyFinish().addBoth(lambda _: self.end())

    def pauseProducing(self) -> None:
        self._is_paused = True

    def resumeProducing(self) -> None:
        self._is_paused = False
        self._answers.add(self)

    def stopProducing(self) -> None:
        self.end()

    def end(self) -> None:
        """Make no more pieces: all is written, the peer has gone, or the service stops."""
        self._is_gone = True
        self._answers.forget(self)
        self._close()

    def _close(self) -> None:
        pieces, self._pieces = self._pieces, None
        close = getattr(pieces, "close", None)
        if close is not None:
            close()

    def run(self, until: float) -> None:
        """Make pieces until a time; ask for another turn if there is more."""
        if self._is_paused or self._is_gone:
            return
        request = self._request
        if self._pieces is None:
            try:
                self._pieces, kind = self._begin()
                first = next(self._pieces, "")
            except Problem as problem:
                refuse(request, problem)
                return
            except Exception:
                self._answers.log.failure("An answer of the admin socket failed")
                refuse(request, Problem(500, "an error in the server: its log has the details"))
                return
            request.setHeader(b"content-type", kind.encode())
            request.setHeader(b"cache-control", b"no-store")
            request.registerProducer(self, True)
            made = [first or ""]
            is_over, is_idle = False, first is None
        else:
            made, is_over, is_idle = [], False, False
        try:
            while not is_idle and len(made) < _MOST_PIECES and (not made or time.perf_counter() < until):
                try:
                    piece = next(self._pieces)
                except StopIteration:
                    is_over = True
                    break
                if piece is None:
                    is_idle = True
                else:
                    made.append(piece)
        except Exception:
            self._answers.log.failure("An answer of the admin socket failed")
            self._close()
            request.unregisterProducer()
            request.loseConnection()
            return
        if text := "".join(made):
            request.write(text.encode("utf-8", "replace"))
        if is_over:
            self._pieces = None
            request.unregisterProducer()
            request.finish()
        elif is_idle:
            self._answers.rest(self)
        elif not self._is_paused:
            self._answers.add(self)


class Answers:
    """The answers of one service.

    :param reactor: schedules the slices.
    :param log: for errors.
    :ivar longest_slice: seconds of the longest slice so far.
    """

    def __init__(self, reactor: Any, log: Logger) -> None:
        self._reactor = reactor
        self.log = log
        self.longest_slice = 0.0
        self._ready: deque[_Answer] = deque()
        self._resting: dict[_Answer, None] = {}
        self._all: dict[_Answer, None] = {}
        self._turn: IDelayedCall | None = None
        self._tick: IDelayedCall | None = None

    def start(self, request: Any, begin: Callable[[], tuple[Pieces, str]]) -> None:
        """Answer a request.

        :param begin: returns the pieces and the content type; raises `Problem`.
        """
        answer = _Answer(self, request, begin)
        self._all[answer] = None
        self.add(answer)

    def stop(self) -> None:
        """Give up all answers."""
        for answer in tuple(self._all):
            answer.end()
        for call in (self._turn, self._tick):
            if call is not None and call.active():
                call.cancel()
        self._turn = self._tick = None

    def add(self, answer: _Answer) -> None:
        """Have an answer continue in one of the next turns."""
        if not answer.is_queued and answer not in self._resting:
            answer.is_queued = True
            self._ready.append(answer)
            if self._turn is None:
                self._turn = self._reactor.callLater(0, self._run)

    def rest(self, answer: _Answer) -> None:
        """Have an answer continue after a tick."""
        self._resting[answer] = None
        if self._tick is None:
            self._tick = self._reactor.callLater(TICK, self._wake)

    def forget(self, answer: _Answer) -> None:
        """Forget an answer that has ended."""
        self._all.pop(answer, None)
        self._resting.pop(answer, None)

    def _wake(self) -> None:
        self._tick = None
        resting, self._resting = self._resting, {}
        for answer in resting:
            self.add(answer)

    def _run(self) -> None:
        """Make pieces for one slice."""
        began = time.perf_counter()
        now = began
        while self._ready and now < began + SLICE:
            answer = self._ready.popleft()
            answer.is_queued = False
            answer.run(began + SLICE)
            now = time.perf_counter()
        self.longest_slice = max(self.longest_slice, now - began)
        self._turn = self._reactor.callLater(_REST * (now - began), self._run) if self._ready else None


def refuse(request: Any, problem: Problem) -> None:
    """Answer a request with a problem."""
    body = {
        "type": "about:blank",
        "title": http.RESPONSES.get(problem.status, b"").decode(),
        "status": problem.status,
        "detail": problem.detail,
    }
    data = json.dumps(body).encode()
    request.setResponseCode(problem.status)
    request.setHeader(b"content-type", b"application/problem+json")
    request.setHeader(b"content-length", b"%d" % len(data))
    request.write(data)
    request.finish()
