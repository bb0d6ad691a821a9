"""The recorder's connection to the bus: subscribes, reads, reconnects.

The invariant that this module is for: *between two messages in the journal, messages may be missing only where a row
says so.* Five decisions keep it, and the names of publishers right:

================================================  ====================================================================
decision                                          reason
================================================  ====================================================================
Each connection is a new `RecorderBus`.           The client library can reconnect by itself, but it would not show
                                                  where the gap between the messages of the two connections is.
One connection subscribes to all patterns.        A message that several match arrives once, and all messages arrive in
                                                  the order in which the bus sent them.
It asks for receipts.                             What the bus drops for the recorder becomes a row in its place
                                                  (`RecordSink.add_lost`). A bus that knows no receipts drops silently.
It asks for senders before it subscribes.         So the bus names the publisher of the very first message, and the
                                                  sink finds the names among the packets. If the bus does not name
                                                  senders, the columns are null.
After subscribing, it sends a *fence*.            Some patterns may not be in force before the answer, so the sink
                                                  holds messages that arrive earlier, in bounded memory. Then
                                                  `RecordSink.recording_started` writes the row that begins recording
                                                  or ends the gap; the losses reported until then and the held
                                                  messages follow it.
================================================  ====================================================================

Back-pressure: when the sink has no capacity, the socket is not read until `Connection.resume`. Messages then queue in
the kernel and in the bus, where flood control decides about them (`sbus.recorder.pressure`). Nothing is dropped here.

Stopping: the recorder shuts down its sending side. The bus ends the subscriptions, sends its queue, and closes the
connection; after that no message can follow, and everything received was recorded.

Reconnecting: the pauses grow (`sbus.client.connecting.Backoff`), and start over only after a connection that was
confirmed and lasted `_MIN_LIFETIME`. So a bus that accepts and disconnects at once is not tried in a tight loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from twisted.internet import defer
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from sbus.client.connecting import Backoff
from sbus.client.losses import Lost
from sbus.client.options import ConnectOptions
from sbus.errors import ConnectError, Disconnected
from sbus.journal import clock
from sbus.protocol.controls import OBSERVER_ON
from sbus.protocol.explain import hints
from sbus.protocol.keys import find_dialect
from sbus.recorder.bus import RecorderBus
from sbus.recorder.pressure import Pressure
from sbus.recorder.settings import Settings

__all__ = ["Connection", "GapDetails", "RecordSink"]

T = TypeVar("T")

_CONFIRM_TIMEOUT = 30.0
"""Seconds that the bus may take to confirm the subscriptions."""
_MIN_LIFETIME = 0.25
"""Seconds that a connection must have lasted for the next attempt to be made without a pause."""
_REPORT_INTERVAL = 60.0
"""Seconds between two log lines with the same reason why nothing is recorded."""

GapDetails = Mapping[str, object]
"""The details of a gap: ``since``, in µs since the epoch, and ``reason``; the JSON object of its row."""


class RecordSink(Protocol):
    """Takes the messages that a `Connection` receives."""

    def connected(self) -> None:
        """Keep the messages that are added from now on, until `recording_started`."""

    def recording_started(self, gap: GapDetails | None) -> None:
        """Record that all patterns are in force: every message from now on arrives.

        :param gap: the gap that ends; None the first time.
        """

    def add(self, packets: list[bytes], handle: Callable[[bytes], None]) -> bool:
        """Take packets and bundles that have just arrived, notices of publishers included.

        :param handle: called with each other packet, in its place.
        :returns: whether there was a message.
        :raises sbus.recorder.payloads.UnusablePayload: if a payload in sealed memory cannot be recorded.
        """

    def add_lost(self, lost: Lost) -> None:
        """Take a loss that the bus has reported; it stands after the messages added before."""

    def has_capacity(self) -> bool:
        """Return whether more messages may come; else the sink calls `Connection.resume` when they may."""

    def oldest_waiting(self) -> float:
        """Return the age in seconds of the oldest message that is not in the journal; 0 without one."""

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
        self._bus: RecorderBus | None = None
        self._pressure: Pressure | None = None
        self._is_recording = False
        self._has_recorded = False  # whether the newest connection was confirmed
        self._stopping = False
        self._is_draining = False  # the bus sends what it has queued for us, and closes
        self._waiting: defer.Deferred[Any] | None = None  # what `_abort` cancels
        self._capacity: defer.Deferred[None] | None = None  # what `resume` fires
        self._finished: defer.Deferred[None] = defer.succeed(None)
        self._last_report: tuple[str, float] = ("", 0.0)  # the reason, and when it was logged

    def start(self) -> None:
        """Start connecting."""
        for line in hints(self._settings.patterns, find_dialect(self._settings.dialect)):
            self._log.warn("{line}", line=line)
        self._finished = defer.Deferred.fromCoroutine(self._run()).addErrback(self._sink.failed)

    def resume(self) -> None:
        """Read again: the sink has capacity."""
        if self._bus is not None:
            self._bus.resume()
        if self._capacity is not None:
            self._capacity.callback(None)

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
                if not self._sink.has_capacity():
                    self._capacity = defer.Deferred()
                    await self._wait(self._capacity)
                bus = self._connection()
                await self._wait(bus.open())
            except ConnectError as error:
                self._report(str(error))
                continue
            except defer.CancelledError:
                return
            finally:
                self._capacity = None
            since, self._has_recorded = self._reactor.seconds(), False
            self._bus = bus
            reason = await self._read(bus)
            await bus.close()
            self._bus = None
            if not self._stopping:
                self._report(reason)
            if self._has_recorded and self._reactor.seconds() - since >= _MIN_LIFETIME:
                delays = self._backoff.delays()

    def _connection(self) -> RecorderBus:
        settings = self._settings
        options = ConnectOptions(dialect=settings.dialect, max_packet=settings.max_packet, on_lost=self._sink.add_lost)
        return RecorderBus(self._reactor, self._address, options, self._take)

    def _take(self, packets: list[bytes], handle: Callable[[bytes], None]) -> None:
        if self._sink.add(packets, handle) and self._pressure is not None:
            self._pressure.note_traffic()
        if self._bus is not None and not self._sink.has_capacity():
            self._bus.pause()

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

    async def _read(self, bus: RecorderBus) -> str:
        """Record the messages of one connection; return why it ended."""
        lost_at: list[int] = []
        ended = bus.whenClosed().addBoth(_note_time, lost_at)
        self._sink.connected()
        try:
            self._subscribe(bus)
            bus.confirm(_CONFIRM_TIMEOUT).addCallbacks(
                lambda _: self._confirmed(), lambda failure: self._not_confirmed(bus, failure)
            )
            await self._wait(ended)
            reason = "the connection was closed here"
        except (Disconnected, defer.CancelledError) as error:
            reason = str(error) or "the recorder is stopping"
        if self._pressure is not None:
            self._pressure.stop()
            self._pressure = None
        if self._is_recording:
            self._is_recording = False
            if not self._is_draining:  # else everything was recorded, so there is no gap
                self.gap = {"since": lost_at[0] if lost_at else clock.now(), "reason": reason}
        return reason

    def _subscribe(self, bus: RecorderBus) -> None:
        """Choose the flood control and subscribe."""
        settings = self._settings
        if bus.core.dialect.control:
            bus.control(OBSERVER_ON)
            bus.ask_senders()
            bus.ask_payloads()
            hard = None if settings.hard == "adaptive" else settings.hard
            bus.flood_control(soft=settings.soft, hard=hard, order=settings.order)
            if settings.hard == "adaptive":
                self._pressure = Pressure(
                    self._reactor,
                    settings.max_lag,
                    ask=bus.fence,
                    choose=lambda hard: bus.flood_control(hard=hard),
                    waiting=self._sink.oldest_waiting,
                )
        bus.subscribe_all(settings.patterns)

    def _confirmed(self) -> None:
        gap, self.gap = self.gap, None
        self._is_recording = self._has_recorded = True
        self._last_report = ("", 0.0)
        self._sink.recording_started(gap)

    def _not_confirmed(self, bus: RecorderBus, failure: Failure) -> None:
        if not failure.check(Disconnected):
            self._report(f"{bus.address}: the bus does not answer: {failure.getErrorMessage()}")
            bus.close()


def _note_time(result: T, times: list[int]) -> T:
    times.append(clock.now())
    return result
