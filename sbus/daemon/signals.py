"""Signals that come early: whoever stops a bus while it starts must not leave its socket and pid file behind."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable
from typing import Any

from twisted.internet.error import ReactorNotRunning

__all__ = ["DeferredSignals"]


class DeferredSignals:
    """Remembers a signal that comes before the reactor runs, and stops the reactor as soon as it does.

    A second signal acts as it did before: for whoever is out of patience.

    :param numbers: the signals that are to stop the process in good order.
    """

    def __init__(self, numbers: Iterable[int] = (signal.SIGTERM, signal.SIGINT)) -> None:
        self._came = False
        self._before = {number: signal.signal(number, self._remember) for number in numbers}

    def _remember(self, *_: Any) -> None:
        self._came = True
        self.restore()

    def restore(self) -> None:
        """Handle signals as before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def hand_over(self, reactor: Any) -> None:
        """From its start on signals are the reactor's business."""
        reactor.callWhenRunning(reactor.callLater, 0, self._catch_up, reactor)

    def _catch_up(self, reactor: Any) -> None:
        # A signal in the moment before anybody could replace the reactor's own handlers: it stops
        # in good order, but then twistd would end by the signal.
        reactor._exitSignal = None
        if self._came:
            with contextlib.suppress(ReactorNotRunning):
                reactor.stop()
