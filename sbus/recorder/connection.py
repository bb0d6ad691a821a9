"""The recorder's end of the bus: connects, subscribes, reads, and when the connection is lost does so again.

Each connection has a `sbus.client.tx.Bus` of its own, without the client's own reconnecting: that would carry messages
of the old connection and of the new one in one queue, and what the recorder has to tell is where between them some
are missing.

What a new connection brings before the bus has confirmed that all patterns are in force (a fence) is kept until then.
So the row that says since when everything is recorded comes before all messages of that connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from twisted.internet import defer
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from sbus.client.connecting import Backoff
from sbus.client.core import Message
from sbus.client.tx import Bus, Subscription, connect
from sbus.errors import ConnectError, Disconnected
from sbus.recorder.buffer import microseconds
from sbus.recorder.settings import Settings

__all__ = ["Connection", "RecordSink"]

_ANSWER = 30.0
"""Seconds that a bus may take to confirm subscriptions."""
_LASTING = 0.25
"""Seconds that a connection must last before the next one is tried for at once: one that recorded something."""
_REMIND = 60.0
"""Seconds after which it is said again that there is still no bus."""


class RecordSink(Protocol):
    """Where the messages go."""

    def recording_started(self, gap: dict[str, Any] | None) -> None:
        """From here on everything is recorded.

        :param gap: since when it was not, and why; None at the first time.
        """

    def add(self, messages: Sequence[tuple[bytes, bytes]]) -> None:
        """Messages have come."""

    def wait_for_capacity(self) -> defer.Deferred[None] | None:
        """None if there is room for more messages, else fires when there is."""

    def failed(self, failure: Failure) -> None:
        """It cannot go on; no error of the bus's or the connection's."""


class Connection:
    """Keeps up the recorder's connection to the bus.

    :param address: of the bus, as for `sbus.client.tx.connect`.
    :ivar gap: since when nothing is recorded, and why, as for a row of a gap; None while everything is, and before
        the first connection.
    """

    _log = Logger(namespace="sbus.recorder")

    def __init__(
        self, reactor: Any, address: str | None, settings: Settings, intake: RecordSink, backoff: Backoff | None = None
    ) -> None:
        self.gap: dict[str, Any] | None = None
        self._reactor = reactor
        self._address = address
        self._settings = settings
        self._intake = intake
        self._backoff = backoff or Backoff()
        self._bus: Bus | None = None
        self._subscription: Subscription | None = None
        self._is_recording = False
        self._has_recorded = False  # with the newest connection
        self._waits = False  # for room
        self._stopping = False
        self._is_ending = False  # the bus sends what waits for us, and closes
        self._pause: defer.Deferred[Any] | None = None  # what may be cancelled to stop
        self._over: defer.Deferred[None] = defer.succeed(None)
        self._held: list[Message] = []  # what came before the patterns were confirmed
        self._said: tuple[str, float] = ("", 0.0)

    def start(self) -> None:
        """Begin to connect."""
        self._over = defer.Deferred.fromCoroutine(self._run()).addErrback(self._intake.failed)

    def ready(self) -> list[Message]:
        """The messages that were read already and not passed on, as there was no room; nothing more is read by this."""
        if not self._waits or self._bus is None or self._subscription is None:
            return []
        messages = self._subscription.get_ready()
        self._bus.pause_for(self._subscription)
        return messages

    async def stop(self, patience: float) -> None:
        """Take what the bus still has for us, and disconnect.

        :param patience: seconds that this may take; 0: take nothing more.
        """
        self._stopping = True
        bus = self._bus
        cut = None
        if bus is not None and patience and self._is_recording:
            try:
                # The bus ends the subscriptions, sends what waits, and closes: after that nothing can come.
                bus.transport.loseWriteConnection()
                self._is_ending = True
            except Disconnected:
                pass
            cut = self._reactor.callLater(patience, self._cut)
        else:
            self._cut()
        await self._over
        if cut is not None and cut.active():
            cut.cancel()

    def _cut(self) -> None:
        self._is_ending = False
        if self._bus is not None:
            self._bus.close()
        if self._pause is not None:
            self._pause.cancel()

    # --- one connection after the other --------------------------------------------------------

    async def _run(self) -> None:
        delays = self._backoff.delays()
        while not self._stopping:
            try:
                await self._wait(deferLater(self._reactor, next(delays)))
                self._bus = await self._wait(self._connect())
            except ConnectError as error:
                self._say(str(error))
                continue
            except defer.CancelledError:
                return
            since, self._has_recorded = self._reactor.seconds(), False
            why = await self._read(self._bus)
            await self._bus.close()
            self._bus = self._subscription = None
            if not self._stopping:
                self._say(why)
            if self._has_recorded and self._reactor.seconds() - since >= _LASTING:
                delays = self._backoff.delays()

    def _connect(self) -> defer.Deferred[Bus]:
        settings = self._settings
        return connect(self._reactor, self._address, dialect=settings.dialect, max_packet=settings.max_packet)

    async def _wait(self, pause: defer.Deferred[Any]) -> Any:
        """Wait, until it comes or `_cut` ends the waiting."""
        self._pause = pause
        try:
            return await pause
        finally:
            self._pause = None

    def _say(self, why: str) -> None:
        """Say why nothing is recorded: when it begins or changes, and now and then."""
        now = self._reactor.seconds()
        if why != self._said[0] or now - self._said[1] >= _REMIND:
            self._said = why, now
            self._log.warn("nothing is recorded: {why}; trying again", why=why)

    async def _read(self, bus: Bus) -> str:
        """Record what this connection brings; returns why it has ended."""
        lost_at: list[int] = []
        bus.whenClosed().addBoth(lambda _: lost_at.append(microseconds()))
        self._held = []
        try:
            subscription = self._subscription = self._subscribe(bus)
            bus.fence(_ANSWER).addCallbacks(lambda _: self._begin(), lambda failure: self._unconfirmed(bus, failure))
            while True:
                messages = await subscription.get_many()
                if not self._is_recording:
                    self._held += messages
                    continue
                self._intake.add(messages)
                room = self._intake.wait_for_capacity()
                if room is not None:
                    bus.pause_for(subscription)
                    self._waits = True
                    try:
                        await self._wait(room)
                    finally:
                        self._waits = False
                    bus.resume_for(subscription)
        except (Disconnected, defer.CancelledError) as error:
            why = str(error) or "the recorder is stopping"
        if self._is_recording:
            self._is_recording = False
            self._intake.add(subscription.get_ready())
            if self._is_ending:
                return why  # everything is recorded
            self.gap = {"since": lost_at[0] if lost_at else microseconds(), "reason": why}
        return why

    def _subscribe(self, bus: Bus) -> Subscription:
        """One subscription for all patterns, so that a message comes once, and all come in order."""
        settings = self._settings
        if bus.core.dialect.control:
            bus.flood_control(soft=settings.soft, hard=settings.hard, order=settings.order)
        first, *more = settings.patterns
        subscription = bus.subscribe(first)
        for pattern in more:
            bus.send(bus.core.subscribe(pattern, subscription))
        return subscription

    def _begin(self) -> None:
        """All patterns are in force."""
        gap, self.gap = self.gap, None
        self._is_recording = self._has_recorded = True
        self._said = ("", 0.0)
        self._intake.recording_started(gap)
        held, self._held = self._held, []
        self._intake.add(held)

    def _unconfirmed(self, bus: Bus, failure: Failure) -> None:
        if not failure.check(Disconnected):
            self._say(f"{bus.address}: the bus does not answer: {failure.getErrorMessage()}")
            bus.close()
