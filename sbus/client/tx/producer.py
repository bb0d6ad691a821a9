"""The pace of a producer, which is paused while the socket is full."""

from __future__ import annotations

import itertools
from collections.abc import Coroutine
from typing import Any, Protocol, TypeAlias, cast

from twisted.internet import defer
from twisted.internet.interfaces import IPullProducer, IPushProducer, IReactorTime
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from sbus.client.outbox import Outbox
from sbus.errors import Disconnected
from sbus.syscalls.batch import BATCH

__all__ = ["Producer", "ProducerAdapter"]


Producer: TypeAlias = IPushProducer | IPullProducer


class Session(Protocol):
    """The methods of `sbus.client.tx.Bus` that a producer's adapter uses.

    :ivar outbox: the packets to send.
    """

    outbox: Outbox

    def wait_drained(self) -> defer.Deferred[None]:
        """Fire when the outbox has been handed to the kernel; fail when it never will be."""

    def callback_failed(self, error: BaseException | Failure) -> None:
        """Log an error of the application's."""


class ProducerAdapter:
    """Drives one producer.

    Published packets are sent at once or at the end of the turn, so the socket is full exactly while packets are left
    in the outbox after a flush. A push producer is paused until the outbox is empty; a pull producer is resumed each
    time it is.

    :ivar producer: the producer.
    """

    def __init__(self, session: Session, reactor: IReactorTime, producer: Producer, streaming: bool) -> None:
        self.producer = producer
        self._session = session
        self._reactor = reactor
        self._streaming = streaming
        self._paused = False
        self._stopped = False
        self._next_turn: defer.Deferred[None] | None = None

    def start(self) -> None:
        """Start producing."""
        if self._streaming:
            self.flushed()
        else:
            self._run(self._pull())

    def flushed(self) -> None:
        """Pause a push producer if the socket did not take the whole outbox."""
        if self._streaming and not self._paused and len(self._session.outbox):
            self._paused = True
            self._run(self._pause())

    def stop(self) -> None:
        """Leave the producer alone from now on."""
        self._stopped = True
        if self._next_turn is not None:
            self._next_turn.cancel()

    def _run(self, call: Coroutine[Any, Any, None]) -> None:
        def failed(failure: Failure) -> None:
            if not failure.check(defer.CancelledError, Disconnected):
                self._session.callback_failed(failure)

        defer.Deferred.fromCoroutine(call).addErrback(failed)

    async def _pause(self) -> None:
        cast(IPushProducer, self.producer).pauseProducing()
        while len(self._session.outbox):
            await self._session.wait_drained()
        self._paused = False
        if not self._stopped:
            self.producer.resumeProducing()

    async def _pull(self) -> None:
        for turn in itertools.count(1):
            self.producer.resumeProducing()
            if not self._stopped:
                await self._session.wait_drained()
            if not self._stopped and not turn % BATCH:  # let the reactor do other work, even if nothing was published
                self._next_turn = deferLater(self._reactor, 0)
                await self._next_turn
            if self._stopped:
                return
