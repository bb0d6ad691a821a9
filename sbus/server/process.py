"""A bus that has a process to itself: the signals that stop it, and its end with the last client."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable

from twisted.application.service import Service
from twisted.internet.error import ReactorNotRunning
from twisted.internet.interfaces import IReactorFromThreads

from sbus.server.service import BusService

__all__ = ["Process"]


class Process(Service):
    """What belongs to the process rather than to the bus.

    :param auto_close: stop after the last client has left.
    :param signals: those that stop the reactor, so that the process ends with status 0.
    """

    def __init__(
        self, bus: BusService, auto_close: bool, signals: Iterable[int] = (signal.SIGTERM, signal.SIGINT)
    ) -> None:
        self._bus = bus
        self._auto_close = auto_close
        self._signals = tuple(signals)
        self._handles_signals = False

    def startService(self) -> None:
        from twisted.internet import reactor

        super().startService()  # type: ignore[no-untyped-call]
        # Handlers of our own: after Twisted's the process would end by the signal, not with status 0.
        reactor.callWhenRunning(self._handle_signals)
        if self._auto_close:
            self._bus.registry.whenEmpty().addCallback(lambda _: self._stop())

    def stopService(self) -> None:
        super().stopService()  # type: ignore[no-untyped-call]
        if self._handles_signals:
            # Another one is no reason to end in disorder; and the interpreter, when it ends, takes handlers away.
            for number in self._signals:
                signal.signal(number, signal.SIG_IGN)

    def _handle_signals(self) -> None:
        self._handles_signals = True
        for number in self._signals:
            signal.signal(number, lambda *_: self._stop())

    def _stop(self) -> None:
        from twisted.internet import reactor

        IReactorFromThreads(reactor).callFromThread(self._stop_reactor)

    def _stop_reactor(self) -> None:
        from twisted.internet import reactor

        if self.running:
            # It may be stopping already: signals come in numbers, and the last client leaves when the bus stops.
            with contextlib.suppress(ReactorNotRunning):
                reactor.stop()
