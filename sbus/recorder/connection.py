"""The recorder's connection to the bus: subscribes, reads, reconnects.

The invariant that this module is for: *between two messages in the journal, messages may be missing only where a row
says so.* Four decisions follow from it:

* Each connection is a `sbus.client.tx.Bus` of its own. The client library can reconnect by itself, but it would put the
  messages of the old and the new connection into one queue, and the recorder could not tell where the gap is.
* One subscription has all the patterns, so that a message that several patterns match arrives once, and the messages of
  all patterns arrive in the order in which the bus sent them.
* The recorder asks the bus for receipts. What the bus drops for the recorder becomes a row in its place
  (`RecordSink.add_lost`). A bus that knows no receipts drops silently.
* After subscribing, the recorder sends a *fence*, a question that the bus answers once it has handled everything before
  it. Messages that arrive earlier are kept (`sbus.recorder.unconfirmed`), because some of the patterns may not be in
  force yet; beyond ``buffer_bytes`` the oldest of them are dropped, as a part of the gap.
  When the answer comes, `RecordSink.recording_started` writes the row that begins recording or ends the gap; the kept
  messages follow it.

Back-pressure: when the sink has no capacity, the subscription is paused and the socket is not read. Messages then queue
in the kernel and in the bus, where flood control decides about them. Nothing is dropped here.

Stopping: the recorder shuts down its sending side. The bus ends the subscriptions, sends what it has queued, and closes
the connection; after that no message can follow, and everything received was recorded.

Reconnecting: the pauses grow (`sbus.client.connecting.Backoff`), and start over only after a connection that was
confirmed and lasted `_MIN_LIFETIME`. So a bus that accepts and disconnects at once is not tried in a tight loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from twisted.internet import defer
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from sbus.client.connecting import Backoff
from sbus.client.losses import Lost
from sbus.client.tx import Bus, Subscription, connect
from sbus.errors import ConnectError, Disconnected
from sbus.journal import clock
from sbus.protocol.controls import OBSERVER_ON
from sbus.recorder.settings import Settings
from sbus.recorder.unconfirmed import Unconfirmed

__all__ = ["Connection", "GapDetails", "RecordSink"]

T = TypeVar("T")

_CONFIRM_TIMEOUT = 30.0
"""Seconds that the bus may take to confirm the subscriptions."""
_MIN_LIFETIME = 0.25
"""Seconds that a connection must have lasted for the next attempt to be made without a pause."""
_REPORT_INTERVAL = 60.0
"""Seconds between two log lines with the same reason why nothing is recorded."""

GapDetails = Mapping[str, object]
"""What is known about a gap: ``since``, in µs since the epoch, and ``reason``; the JSON object of its row."""


class RecordSink(Protocol):
    """Takes the messages that a `Connection` receives."""

    def recording_started(self, gap: GapDetails | None) -> None:
        """Record that all patterns are in force: every message from now on arrives.

        :param gap: the gap that ends; None the first time.
        """

    def add(self, messages: Sequence[tuple[bytes, bytes]]) -> None:
        """Take messages that have just arrived."""

    def add_lost(self, lost: Lost) -> None:
        """Take a loss that the bus has reported; it stands behind the messages added before."""

    def wait_for_capacity(self) -> defer.Deferred[None] | None:
        """Return None if the sink has capacity, else a Deferred that fires when it has."""

    def failed(self, failure: Failure) -> None:
        """Handle a bug after which the connection cannot continue."""


class Connection:
    """Keeps the recorder connected to the bus.

    :param reactor: the reactor to connect with.
    :param address: the address of the bus, as for `sbus.client.tx.connect`.
    :param sink: takes the messages.
    :param backoff: the pauses between attempts to connect.
    :ivar gap: the details of the current gap; None while everything is recorded, and before the first connection.
    """

    _log = Logger(namespace="sbus.recorder")

    def __init__(
        self, reactor: Any, address: str | None, settings: Settings, sink: RecordSink, backoff: Backoff | None = None
    ) -> None:
        self.gap: GapDetails | None = None
        self._reactor = reactor
        self._address = address
        self._settings = settings
        self._sink = sink
        self._backoff = backoff or Backoff()
        self._bus: Bus | None = None
        self._subscription: Subscription | None = None
        self._is_recording = False
        self._has_recorded = False  # whether the newest connection was confirmed
        self._is_paused = False  # until the sink has capacity
        self._stopping = False
        self._is_draining = False  # the bus sends what it has queued for us, and closes
        self._waiting: defer.Deferred[Any] | None = None  # what `_abort` cancels
        self._finished: defer.Deferred[None] = defer.succeed(None)
        self._unconfirmed = Unconfirmed(settings.buffer_bytes)
        self._unconfirmed_losses: list[Lost] = []
        self._last_report: tuple[str, float] = ("", 0.0)  # the reason, and when it was logged

    def start(self) -> None:
        """Start connecting."""
        self._finished = defer.Deferred.fromCoroutine(self._run()).addErrback(self._sink.failed)

    def add_ready(self) -> None:
        """Add the messages that were received while the connection is paused to the sink.

        No further packets are read.
        """
        if self._is_paused and self._bus is not None and self._subscription is not None:
            self._add_all(self._subscription)
            self._bus.pause_for(self._subscription)

    def _add_all(self, subscription: Subscription) -> None:
        while messages := subscription.get_ready():  # a list ends where messages are missing
            self._sink.add(messages)

    async def stop(self, timeout: float) -> None:
        """Receive what the bus has queued for us, and disconnect.

        :param timeout: the seconds that this may take; 0: disconnect at once.
        """
        self._stopping = True
        bus = self._bus
        deadline = None
        if bus is not None and timeout and self._is_recording:
            try:
                bus.transport.loseWriteConnection()
                self._is_draining = True
            except Disconnected:
                pass
            deadline = self._reactor.callLater(timeout, self._abort)
        else:
            self._abort()
        await self._finished
        if deadline is not None and deadline.active():
            deadline.cancel()

    def _abort(self) -> None:
        self._is_draining = False
        if self._bus is not None:
            self._bus.close()
        if self._waiting is not None:
            self._waiting.cancel()

    # --- one connection after the other --------------------------------------------------------

    async def _run(self) -> None:
        delays = self._backoff.delays()
        while not self._stopping:
            try:
                await self._wait(deferLater(self._reactor, next(delays)))
                self._bus = await self._wait(self._connect())
            except ConnectError as error:
                self._report(str(error))
                continue
            except defer.CancelledError:
                return
            since, self._has_recorded = self._reactor.seconds(), False
            reason = await self._read(self._bus)
            await self._bus.close()
            self._bus = self._subscription = None
            if not self._stopping:
                self._report(reason)
            if self._has_recorded and self._reactor.seconds() - since >= _MIN_LIFETIME:
                delays = self._backoff.delays()

    def _connect(self) -> defer.Deferred[Bus]:
        settings = self._settings
        return connect(
            self._reactor,
            self._address,
            dialect=settings.dialect,
            max_packet=settings.max_packet,
            on_lost=self._lost_received,
        )

    def _lost_received(self, lost: Lost) -> None:
        if self._is_recording:
            self._sink.add_lost(lost)
        else:
            self._unconfirmed_losses.append(lost)

    async def _wait(self, deferred: defer.Deferred[T]) -> T:
        """Wait for a Deferred, so that `_abort` can cancel it."""
        self._waiting = deferred
        try:
            return await deferred
        finally:
            self._waiting = None

    def _report(self, reason: str) -> None:
        """Log why nothing is recorded: at once, when the reason changes, and at intervals."""
        now = self._reactor.seconds()
        if reason != self._last_report[0] or now - self._last_report[1] >= _REPORT_INTERVAL:
            self._last_report = reason, now
            self._log.warn("nothing is recorded: {reason}; trying again", reason=reason)

    async def _read(self, bus: Bus) -> str:
        """Record the messages of one connection; return why it ended."""
        lost_at: list[int] = []
        bus.whenClosed().addBoth(lambda _: lost_at.append(clock.now()))
        self._unconfirmed = Unconfirmed(self._settings.buffer_bytes)
        self._unconfirmed_losses = []
        try:
            subscription = self._subscription = self._subscribe(bus)
            bus.fence(_CONFIRM_TIMEOUT).addCallbacks(
                lambda _: self._confirmed(), lambda failure: self._not_confirmed(bus, failure)
            )
            while True:
                messages = await subscription.get_many()
                if not self._is_recording:
                    self._unconfirmed.add(messages)
                    continue
                self._sink.add(messages)
                capacity = self._sink.wait_for_capacity()
                if capacity is not None:
                    bus.pause_for(subscription)
                    self._is_paused = True
                    try:
                        await self._wait(capacity)
                    finally:
                        self._is_paused = False
                    bus.resume_for(subscription)
        except (Disconnected, defer.CancelledError) as error:
            reason = str(error) or "the recorder is stopping"
        if self._is_recording:
            self._is_recording = False
            self._add_all(subscription)
            if self._is_draining:
                return reason  # everything was recorded, so there is no gap
            self.gap = {"since": lost_at[0] if lost_at else clock.now(), "reason": reason}
        return reason

    def _subscribe(self, bus: Bus) -> Subscription:
        """Choose the flood control and subscribe: one subscription for all patterns."""
        settings = self._settings
        if bus.core.dialect.control:
            bus.control(OBSERVER_ON)
            bus.flood_control(soft=settings.soft, hard=settings.hard, order=settings.order)
        first, *more = settings.patterns
        subscription = bus.subscribe(first)
        for pattern in more:
            bus.send(bus.core.subscribe(pattern, subscription))
        return subscription

    def _confirmed(self) -> None:
        gap, self.gap = self.gap, None
        self._is_recording = self._has_recorded = True
        self._last_report = ("", 0.0)
        self._sink.recording_started(gap)
        if self._unconfirmed.dropped:
            self._log.warn(
                "{dropped} messages arrived before the bus had confirmed the patterns and found no memory "
                "(--buffer-bytes): they are not recorded",
                dropped=self._unconfirmed.dropped,
            )
        for lost in self._unconfirmed_losses:  # before the messages: no gap may stand in front of its row
            self._sink.add_lost(lost)
        self._sink.add(self._unconfirmed.take())

    def _not_confirmed(self, bus: Bus, failure: Failure) -> None:
        if not failure.check(Disconnected):
            self._report(f"{bus.address}: the bus does not answer: {failure.getErrorMessage()}")
            bus.close()
