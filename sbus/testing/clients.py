"""Clients that record: a test sees every message that a program has published.

There is one for each kind of program, with the same methods: `RecordingClient` blocks, `AsyncioRecordingClient` is
awaited, `TwistedRecordingClient` returns Deferreds. The server has confirmed the subscriptions before the test
continues, so every message published from then on is recorded::

    with RecordingClient(bus.address, "weather/") as recording:
        run_my_program()
        assert recording.wait_for(2) == [(b"weather/rain", b"3 mm"), (b"weather/wind", b"5 m/s")]
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

from sbus.client.core import Message
from sbus.client.dispatch import AwaitableWaiter
from sbus.errors import Closed, TimedOut

if TYPE_CHECKING:
    from twisted.internet.defer import Deferred

    from sbus.client import aio, blocking, tx
    from sbus.client.subscription import QueuedSubscription

__all__ = ["AsyncioRecordingClient", "RecordingClient", "TwistedRecordingClient"]

_TIMEOUT = 5.0
"""Default time-out in seconds of `wait_for` and `settle`."""
_CLOSED = "the recording client was closed: create another one to record more"


def _timed_out(messages: list[Message], count: int, timeout: float) -> TimedOut:
    last = f", the last {messages[-1]!r:.200}" if messages else ""
    return TimedOut(f"{len(messages)} of {count} messages came within {timeout} s{last}")


class RecordingClient:
    """Record messages, for tests that block.

    It reads its connection only in `wait_for` and `settle`; until then the messages stay in the server's queue.

    :param address: the address of the bus.
    :param patterns: the patterns to subscribe to; by default every message that is not secret is recorded.
    :param settings: as for `sbus.client.blocking.connect`.
    :ivar messages: the recorded messages, in the order in which the server sent them.
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
        """Wait until `count` messages have been recorded in all.

        :param timeout: seconds to wait.
        :returns: every recorded message; there may be more than `count`.
        :raises sbus.errors.TimedOut: if the time is up first; the text says how many messages came.
        :raises sbus.errors.Disconnected: if the connection ends first.
        :raises sbus.errors.NotAllowed: if the bus refuses a pattern.
        """
        deadline = time.monotonic() + timeout
        while len(self.messages) < count:
            try:
                self.messages += self.bus.get_many(max(0.0, deadline - time.monotonic()))
            except TimedOut:
                raise _timed_out(self.messages, count, timeout) from None
        return list(self.messages)

    def settle(self, timeout: float = _TIMEOUT) -> list[Message]:
        """Record every message that the server handled before this call.

        This shows that no more came.

        :param timeout: seconds to wait for the server.
        :returns: every recorded message.
        :raises sbus.errors.TimedOut: if the server does not answer in time.
        :raises sbus.errors.NotAllowed: if the bus refuses a pattern.
        """
        self.bus.fence(timeout)
        self.messages += self.bus.get_ready()
        return list(self.messages)

    def clear(self) -> None:
        """Forget the recorded messages; counts start at 0 again."""
        self.messages.clear()

    def close(self) -> None:
        """Disconnect."""
        self.bus.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Recording:
    """The common part of the two clients on an event loop.

    Messages arrive by themselves.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._last: Message | None = None
        self._error: Exception | None = None
        self._waiting: list[tuple[int, AwaitableWaiter]] = []
        self._subscriptions: list[QueuedSubscription] = []

    def _subscribe(self, bus: aio.Bus | tx.Bus, patterns: Iterable[bytes | str]) -> None:
        self._subscriptions = [bus.subscribe(pattern, self._record) for pattern in patterns]

    def _record(self, message: Message) -> None:
        if message is self._last:
            return  # another pattern of this client matches it too
        self._last = message
        self.messages.append(message)
        while self._waiting and len(self.messages) >= self._waiting[0][0]:
            self._waiting.pop(0)[1].set_result(b"")

    def _ended(self, error: Exception) -> None:
        self._error = error
        waiting, self._waiting = self._waiting, []
        for _, waiter in waiting:
            waiter.set_exception(error)

    def _settled(self) -> list[Message]:
        """Return the messages.

        :raises sbus.errors.NotAllowed: if the bus has refused a pattern, so that some may be missing.
        """
        for subscription in self._subscriptions:
            subscription.get_ready()  # none: they were recorded
        return list(self.messages)

    async def _wait(self, count: int, waiter: AwaitableWaiter) -> list[Message]:
        if len(self.messages) < count:
            self._settled()
            if self._error is not None:
                raise self._error
            self._waiting.append((count, waiter))
            self._waiting.sort(key=lambda waiting: waiting[0])
            await waiter
        return list(self.messages)

    def clear(self) -> None:
        """Forget the recorded messages; counts start at 0 again."""
        self.messages.clear()


class AsyncioRecordingClient(_Recording):
    """Record messages, for asyncio; use it in an ``async with`` statement.

    :param address: the address of the bus.
    :param patterns: the patterns to subscribe to; by default every message that is not secret is recorded.
    :param settings: as for `sbus.client.aio.connect`.
    :ivar messages: the messages recorded so far, in the order in which the server sent them.
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
            self._subscribe(self.bus, self._patterns)
            await self.settle()
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
            self._ended(Closed(_CLOSED))

    async def __aexit__(self, *_: object) -> None:
        await self.bus.close()
        await self._watch

    async def wait_for(self, count: int, timeout: float = _TIMEOUT) -> list[Message]:
        """Wait until `count` messages have been recorded in all.

        :param timeout: seconds to wait.
        :returns: every recorded message; there may be more than `count`.
        :raises sbus.errors.TimedOut: if the time is up first; the text says how many messages came.
        :raises sbus.errors.Disconnected: if the connection ends first.
        :raises sbus.errors.NotAllowed: if the bus refuses a pattern.
        """
        try:
            async with asyncio.timeout(timeout):
                return await self._wait(count, self.bus.waiter())
        except TimeoutError:
            raise _timed_out(self._settled(), count, timeout) from None

    async def settle(self, timeout: float = _TIMEOUT) -> list[Message]:
        """Record every message that the server handled before this call.

        This shows that no more came.

        :param timeout: seconds to wait for the server.
        :returns: every recorded message.
        :raises sbus.errors.TimedOut: if the server does not answer in time.
        :raises sbus.errors.NotAllowed: if the bus refuses a pattern.
        """
        await self.bus.fence(timeout)
        return self._settled()


class TwistedRecordingClient(_Recording):
    """Record messages, for Twisted.

    `sbus.testing.trial.InProcessBus.record` makes one; or make one from a connection.

    :param bus: a connection made by `sbus.client.tx.connect`; the caller closes it.
    :param reactor: the clock for time-outs.
    :param patterns: the patterns to subscribe to; by default every message that is not secret is recorded.
    :ivar messages: the messages recorded so far, in the order in which the server sent them.
    """

    def __init__(self, bus: tx.Bus, reactor: Any, *patterns: bytes | str) -> None:
        super().__init__()
        self.bus = bus
        self._reactor = reactor
        self._subscribe(bus, patterns or (b"",))
        bus.whenClosed().addCallbacks(
            lambda _: self._ended(Closed(_CLOSED)),
            lambda failure: self._ended(failure.value),
        )

    def wait_for(self, count: int, timeout: float = _TIMEOUT) -> Deferred[list[Message]]:
        """Wait until `count` messages have been recorded in all.

        :param timeout: seconds to wait.
        :returns: a Deferred that fires with every recorded message (there may be more than `count`). It fails with
            `sbus.errors.TimedOut` if the time is up first, with `sbus.errors.Disconnected` if the connection ends
            first, and with `sbus.errors.NotAllowed` if the bus refuses a pattern.
        """
        from twisted.internet.defer import CancelledError, Deferred
        from twisted.python.failure import Failure

        def on_timeout(value: Any, seconds: float) -> Any:
            if isinstance(value, Failure) and value.check(CancelledError):
                raise _timed_out(self._settled(), count, seconds)
            return value

        waiting = Deferred.fromCoroutine(self._wait(count, self.bus.waiter()))
        return waiting.addTimeout(timeout, self._reactor, on_timeout)

    def settle(self, timeout: float = _TIMEOUT) -> Deferred[list[Message]]:
        """Record every message that the server handled before this call.

        This shows that no more came.

        :param timeout: seconds to wait for the server.
        :returns: a Deferred that fires with every recorded message. It fails with `sbus.errors.TimedOut` if the server
            does not answer in time, and with `sbus.errors.NotAllowed` if the bus refuses a pattern.
        """
        return self.bus.fence(timeout).addCallback(lambda _: self._settled())
