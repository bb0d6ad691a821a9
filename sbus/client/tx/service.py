"""A Twisted service that keeps up a connection to a bus: for applications that run as long as the machine does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet import defer
from twisted.internet.interfaces import IStreamClientEndpoint

from sbus.client.connecting import Backoff
from sbus.client.options import Settings
from sbus.client.tx import Bus
from sbus.daemon.service import Service
from sbus.errors import Closed

__all__ = ["BusClientService"]

_STOP_TIMEOUT = 10.0


class BusClientService(Service):
    """A connection to a bus that is kept up for as long as the service runs.

    It connects when it is started, again whenever the connection is lost, with growing pauses, and
    subscribes again to what was subscribed to.

    :param address: as for `connect`; ``settings`` too, but for ``reconnect``.
    :param setup: called with the `Bus` when it is connected for the first time: subscribe here. It may return a
        Deferred or be a coroutine function. If it fails, that is logged, and done again with a new connection.
    """

    def __init__(
        self,
        reactor: Any,
        address: str | IStreamClientEndpoint | None = None,
        *,
        setup: Callable[[Bus], Any] | None = None,
        backoff: Backoff | None = None,
        **settings: Any,
    ) -> None:
        self._reactor = reactor
        self._address = address
        self._setup = setup
        self._backoff = backoff or Backoff()
        self._settings = Settings(**settings, reconnect=self._backoff)
        self._newest: Bus | None = None
        self._setting_up: defer.Deferred[Any] | None = None
        self._bus: Bus | None = None  # the newest, when it is set up
        self._waiting: list[defer.Deferred[Bus]] = []

    def startService(self) -> None:
        """Begin to connect."""
        super().startService()
        connecting = defer.Deferred.fromCoroutine(self._connect())
        connecting.addErrback(lambda failure: failure.trap(defer.CancelledError))

    async def _connect(self) -> None:
        for delay in self._backoff.delays():
            bus = self._newest = Bus(self._reactor, self._address, self._settings)
            await bus._sleep(delay)
            await bus._reconnect_loop(tell=False)
            if await self._set_up(bus):
                break
            if self._newest is not bus:
                return
        self._bus = bus
        waiting, self._waiting = self._waiting, []
        for deferred in waiting:
            if not deferred.called:
                deferred.callback(bus)

    async def _set_up(self, bus: Bus) -> bool:
        """Have the application subscribe; whether the bus is ready then."""
        try:
            if self._setup is not None and self._newest is bus:
                self._setting_up = defer.maybeDeferred(self._setup, bus)
                await self._setting_up
        except Exception as e:
            if self._newest is bus:
                bus.callback_failed(e)
                await bus.close()
            return False
        finally:
            self._setting_up = None
        return self._newest is bus

    def whenConnected(self) -> defer.Deferred[Bus]:
        """Fires with the `Bus` when it has been connected for the first time (it stays the same one)."""
        if self._bus is not None:
            return defer.succeed(self._bus)
        deferred: defer.Deferred[Bus] = defer.Deferred()
        self._waiting.append(deferred)
        return deferred

    def stopService(self) -> defer.Deferred[None]:
        """Send what waits, for ten seconds at most, and disconnect."""
        super().stopService()
        return defer.Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        bus, self._newest, self._bus = self._newest, None, None
        waiting, self._waiting = self._waiting, []
        if self._setting_up is not None:
            self._setting_up.cancel()
        for deferred in waiting:
            if not deferred.called:
                deferred.errback(Closed("the service was stopped before it was connected"))
        if bus is not None:
            try:
                await bus.close().addTimeout(_STOP_TIMEOUT, self._reactor)
            except defer.TimeoutError:
                bus._close_now()  # the server stands still
