"""What tests of the Twisted client share: waiting for a Deferred, and a producer."""

from __future__ import annotations

import asyncio
from typing import Any

from twisted.internet import defer

from sbus.client.connecting import Backoff
from sbus.errors import Disconnected
from tests.integration.clients.backends import Client
from tests.support.harness import TIMEOUT

QUICK = Backoff(first=0.01, factor=1.2, longest=0.05)


async def done(deferred: defer.Deferred[Any]) -> Any:
    return await asyncio.wait_for(deferred.asFuture(asyncio.get_running_loop()), TIMEOUT)


class Push:
    """A push producer that publishes in each turn of the loop, and records the calls that it gets."""

    def __init__(self, client: Client) -> None:
        self.bus = client.raw
        self.reported: list[str] = []
        self.stopped = False
        self.published = 0
        self._call: Any = None
        self._going = False

    def begin(self) -> None:
        self._going = True
        self._produce()

    def _produce(self) -> None:
        self._call = None
        while self._going and self.published % 50 < 49:
            self._publish()
        if self._going:
            self._publish()
            self._call = asyncio.get_running_loop().call_later(0, self._produce)

    def _publish(self) -> None:
        number, self.published = self.published, self.published + 1
        self.bus.publish("k", b"%d " % number + bytes(2000)).addErrback(lambda failure: failure.trap(Disconnected))

    def pauseProducing(self) -> None:
        self.reported.append("pause")
        self.stop()

    def resumeProducing(self) -> None:
        self.reported.append("resume")
        self.begin()

    def stopProducing(self) -> None:
        self.reported.append("stop")
        self.stopped = True
        self.stop()

    def stop(self) -> None:
        self._going = False
        if self._call is not None:
            self._call.cancel()
            self._call = None
