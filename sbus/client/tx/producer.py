"""How the Twisted client holds a producer back, which itself knows nothing of sockets and Deferreds."""

from __future__ import annotations

import itertools
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from twisted.internet import defer
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from sbus.errors import Disconnected
from sbus.syscalls.batch import BATCH

if TYPE_CHECKING:
    from sbus.client.tx import Bus

__all__ = ["ProducerAdapter"]


class ProducerAdapter:
    """Keeps a producer at the pace of the socket.

    What is published is sent at once or when the turn is over, so there is only to wait for what the socket
    does not take: a push producer is paused meanwhile, a pull producer is asked for more when nothing waits.
    """

    def __init__(self, bus: Bus, producer: Any, streaming: bool) -> None:
        self.producer = producer
        self._bus = bus
        self._streaming = streaming
        self._busy = False
        self._stopped = False
        self._turn: defer.Deferred[None] | None = None

    def start(self) -> None:
        """Let it produce."""
        if self._streaming:
            self.flushed()
        else:
            self._run(self._pull())

    def flushed(self) -> None:
        """The socket has taken what it takes just now."""
        if self._streaming and not self._busy and len(self._bus.outbox):
            self._run(self._hold())

    def stop(self) -> None:
        """Ask nothing of it any more."""
        self._stopped = True
        if self._turn is not None:
            self._turn.cancel()

    def _run(self, call: Coroutine[Any, Any, None]) -> None:
        def failed(failure: Failure) -> None:
            if not failure.check(defer.CancelledError, Disconnected):
                self._bus.callback_failed(failure)

        self._busy = True
        defer.Deferred.fromCoroutine(call).addErrback(failed)

    async def _hold(self) -> None:
        self.producer.pauseProducing()
        while len(self._bus.outbox):
            waiter = self._bus.waiter()
            self._bus.outbox.wait(waiter)
            await waiter
        self._busy = False
        if not self._stopped:
            self.producer.resumeProducing()

    async def _pull(self) -> None:
        for turn in itertools.count(1):
            self.producer.resumeProducing()
            if not self._stopped:
                await self._bus._drained()
            if not self._stopped and not turn % BATCH:  # others must have their turn too, though it published nothing
                self._turn = deferLater(self._bus._reactor, 0)
                await self._turn
            if self._stopped:
                return
