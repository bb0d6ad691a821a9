"""Clients that record: what a test uses to see which messages a program has published, without missing any.

One for each kind of program, with one vocabulary: `RecordingClient` waits, `AsyncioRecordingClient`
is awaited, `TwistedRecordingClient` returns Deferreds. Each is subscribed, and the server has
confirmed it, before the test goes on; so what is published from then on is recorded::

    with RecordingClient(bus.address, "weather/") as recording:
        run_my_program()
        assert recording.wait_for(2) == [(b"weather/rain", b"3 mm"), (b"weather/wind", b"5 m/s")]
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Self

from sbus.client.api import AwaitableWaiter
from sbus.client.core import Message
from sbus.errors import Closed, TimedOut

if TYPE_CHECKING:
    from twisted.internet.defer import Deferred

    from sbus.client import aio, blocking, tx

__all__ = ["AsyncioRecordingClient", "RecordingClient", "TwistedRecordingClient"]

_TIMEOUT = 5.0
"""Seconds to wait for messages if the test does not say."""


def _too_late(messages: list[Message], count: int, timeout: float) -> TimedOut:
    last = f", the last {messages[-1]!r:.200}" if messages else ""
    return TimedOut(f"{len(messages)} of {count} messages have come within {timeout} seconds{last}")


class RecordingClient:
    """Records messages, for tests that wait.

    It reads its connection in `wait_for` and `settle` only; until then the server keeps the messages.

    :param address: where the bus is.
    :param patterns: what to subscribe to; by default everything that is not secret.
    :param settings: as for `sbus.client.blocking.connect`.
    :ivar messages: what was recorded, in the order in which the server sent it.
    :ivar bus: the connection.
    """

    def __init__(self, address: str, *patterns: bytes | str, **settings: Any) -> None:
        from sbus.client import blocking

        self.messages: list[Message] = []
        self.bus: blocking.Bus = blocking.connect(address, **settings)
        try:
            for pattern in patterns or (b"",):
                self.bus.subscribe(pattern)
            self.bus.fence(_TIMEOUT)
        except BaseException:
            self.bus.close()
            raise

    def wait_for(self, count: int, timeout: float = _TIMEOUT) -> list[Message]:
        """Wait until so many messages were recorded in all.

        :returns: all that were recorded, which may be more.
        :raises sbus.errors.TimedOut: if they have not come in so many seconds; the text says how many have.
        :raises sbus.errors.Disconnected: if no more will come.
        """
        deadline = time.monotonic() + timeout
        while len(self.messages) < count:
            try:
                self.messages += self.bus.get_many(max(0.0, deadline - time.monotonic()))
            except TimedOut:
                raise _too_late(self.messages, count, timeout) from None
        return list(self.messages)

    def settle(self, timeout: float = _TIMEOUT) -> list[Message]:
        """Record everything that the server had dealt with before this call: to show that no more has come.

        :returns: all that was recorded.
        """
        self.bus.fence(timeout)
        self.messages += self.bus.get_ready()
        return list(self.messages)

    def clear(self) -> None:
        """Forget what was recorded; counts begin anew."""
        self.messages.clear()

    def close(self) -> None:
        """Disconnect."""
        self.bus.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Recording:
    """What the two that live on an event loop share: messages come by themselves."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._last: Message | None = None
        self._error: Exception | None = None
        self._waiting: list[tuple[int, AwaitableWaiter]] = []

    def _record(self, message: Message) -> None:
        if message is self._last:
            return  # another pattern of ours matches it too
        self._last = message
        self.messages.append(message)
        while self._waiting and len(self.messages) >= self._waiting[0][0]:
            self._waiting.pop(0)[1].set_result(b"")

    def _ended(self, error: Exception) -> None:
        self._error = error
        waiting, self._waiting = self._waiting, []
        for _, waiter in waiting:
            waiter.set_exception(error)

    async def _wait(self, count: int, waiter: AwaitableWaiter) -> list[Message]:
        if len(self.messages) < count:
            if self._error is not None:
                raise self._error
            self._waiting.append((count, waiter))
            self._waiting.sort(key=lambda waiting: waiting[0])
            await waiter
        return list(self.messages)

    def clear(self) -> None:
        """Forget what was recorded; counts begin anew."""
        self.messages.clear()


class AsyncioRecordingClient(_Recording):
    """Records messages, for asyncio: ``async with AsyncioRecordingClient(address) as recording:``.

    :param address: where the bus is.
    :param patterns: what to subscribe to; by default everything that is not secret.
    :param settings: as for `sbus.client.aio.connect`.
    :ivar messages: what was recorded so far, in the order in which the server sent it.
    :ivar bus: the connection, within the block.
    """

    bus: aio.Bus

    def __init__(self, address: str, *patterns: bytes | str, **settings: Any) -> None:
        super().__init__()
        self._address = address
        self._patterns = patterns or (b"",)
        self._settings = settings

    async def __aenter__(self) -> Self:
        from sbus.client import aio

        self.bus = await aio.connect(self._address, **self._settings)
        try:
            for pattern in self._patterns:
                self.bus.subscribe(pattern, self._record)
            await self.bus.fence(_TIMEOUT)
        except BaseException:
            await self.bus.close()
            raise
        self._watch = asyncio.create_task(self._watch_end())
        return self

    async def _watch_end(self) -> None:
        try:
            await self.bus.wait_closed()
        except Exception as error:
            self._ended(error)
        else:
            self._ended(Closed("the recording client was closed"))

    async def __aexit__(self, *_: object) -> None:
        await self.bus.close()
        await self._watch

    async def wait_for(self, count: int, timeout: float = _TIMEOUT) -> list[Message]:
        """Wait until so many messages were recorded in all.

        :returns: all that were recorded, which may be more.
        :raises sbus.errors.TimedOut: if they have not come in so many seconds; the text says how many have.
        :raises sbus.errors.Disconnected: if no more will come.
        """
        try:
            async with asyncio.timeout(timeout):
                return await self._wait(count, self.bus.waiter())
        except TimeoutError:
            raise _too_late(self.messages, count, timeout) from None

    async def settle(self, timeout: float = _TIMEOUT) -> list[Message]:
        """Record everything that the server had dealt with before this call: to show that no more has come.

        :returns: all that was recorded.
        """
        await self.bus.fence(timeout)
        return list(self.messages)


class TwistedRecordingClient(_Recording):
    """Records messages, for Twisted; made by `sbus.testing.trial.InProcessBus.record` or from a connection.

    :param bus: a connection, of `sbus.client.tx.connect`; who made it closes it.
    :param reactor: for time-outs.
    :param patterns: what to subscribe to; by default everything that is not secret.
    :ivar messages: what was recorded so far, in the order in which the server sent it.
    """

    def __init__(self, bus: tx.Bus, reactor: Any, *patterns: bytes | str) -> None:
        super().__init__()
        self.bus = bus
        self._reactor = reactor
        for pattern in patterns or (b"",):
            bus.subscribe(pattern, self._record)
        bus.whenClosed().addCallbacks(
            lambda _: self._ended(Closed("the recording client was closed")),
            lambda failure: self._ended(failure.value),
        )

    def wait_for(self, count: int, timeout: float = _TIMEOUT) -> Deferred[list[Message]]:
        """Fires when so many messages were recorded in all, with all that were recorded (which may be more).

        Fails with `sbus.errors.TimedOut` if they have not come in so many seconds, and with
        `sbus.errors.Disconnected` if no more will come.
        """
        from twisted.internet.defer import CancelledError, Deferred
        from twisted.python.failure import Failure

        def too_late(value: Any, seconds: float) -> Any:
            if isinstance(value, Failure) and value.check(CancelledError):
                raise _too_late(self.messages, count, seconds)
            return value

        waiting = Deferred.fromCoroutine(self._wait(count, self.bus.waiter()))
        return waiting.addTimeout(timeout, self._reactor, too_late)

    def settle(self, timeout: float = _TIMEOUT) -> Deferred[list[Message]]:
        """Fires with all that was recorded, when everything has come that the server had dealt with before
        this call: to show that no more has come."""
        return self.bus.fence(timeout).addCallback(lambda _: list(self.messages))
