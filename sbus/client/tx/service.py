"""A Twisted service that keeps a connection to a bus for as long as it runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Unpack

from twisted.internet import defer
from twisted.internet.interfaces import IReactorTime, IStreamClientEndpoint

from sbus.client.connecting import Backoff
from sbus.client.options import ConnectOptions, ServiceKeywords
from sbus.client.tx.bus import Bus
from sbus.daemon.service import Service
from sbus.errors import Closed

__all__ = ["BusClientService"]

_STOP_TIMEOUT = 10.0
"""Seconds to wait for the outbox to drain when the service stops."""


class BusClientService(Service):
    """A connection to a bus that the service makes again whenever it is lost.

    Each new connection restores settings and subscriptions.

    :param address: as for `connect`.
    :param setup: called with the `Bus` once it is connected for the first time: subscribe here. It may return a
        Deferred or be a coroutine function. If it fails, the service logs the error and starts over with a new
        connection.
    :param backoff: the pauses between attempts to connect.
    :param options: the fields of `sbus.client.options.ConnectOptions` except ``reconnect``.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        address: str | os.PathLike[str] | IStreamClientEndpoint | None = None,
        *,
        setup: Callable[[Bus], object] | None = None,
        backoff: Backoff | None = None,
        **options: Unpack[ServiceKeywords],
    ) -> None:
        self._reactor = reactor
        self._address = address
        self._setup = setup
        self._backoff = backoff or Backoff()
        self._options = ConnectOptions(**options, reconnect=self._backoff)
        self._newest: Bus | None = None
        self._setting_up: defer.Deferred[Any] | None = None
        self._bus: Bus | None = None  # the newest one, once it is set up
        self._waiters: list[defer.Deferred[Bus]] = []

    def startService(self) -> None:
        """Start connecting."""
        super().startService()
        connecting = defer.Deferred.fromCoroutine(self._connect())
        connecting.addErrback(lambda failure: failure.trap(defer.CancelledError))

    async def _connect(self) -> None:
        for delay in self._backoff.delays():
            bus = self._newest = Bus(self._reactor, self._address, self._options)
            await bus._connect_later(delay)
            if bus.state != "closed" and await self._set_up(bus):  # else it has ended: it names no senders
                break
            if self._newest is not bus:
                return
        self._bus = bus
        waiters, self._waiters = self._waiters, []
        for deferred in waiters:
            if not deferred.called:
                deferred.callback(bus)

    async def _set_up(self, bus: Bus) -> bool:
        """Call the application's `setup`; return whether the bus is ready then."""
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
        """Fire with the `Bus` once it is connected and set up."""
        if self._bus is not None:
            return defer.succeed(self._bus)
        deferred: defer.Deferred[Bus] = defer.Deferred()
        self._waiters.append(deferred)
        return deferred

    def stopService(self) -> defer.Deferred[None]:
        """Send the packets that are waiting, for ten seconds at most, and disconnect."""
        super().stopService()
        return defer.Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        bus, self._newest, self._bus = self._newest, None, None
        waiters, self._waiters = self._waiters, []
        if self._setting_up is not None:
            self._setting_up.cancel()
        for deferred in waiters:
            if not deferred.called:
                deferred.errback(Closed("the service was stopped before it was connected: start it and wait again"))
        if bus is not None:
            try:
                await bus.close().addTimeout(_STOP_TIMEOUT, self._reactor)
            except defer.TimeoutError:
                bus.close_now()  # the server reads nothing
