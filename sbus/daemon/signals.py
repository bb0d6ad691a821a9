"""Signals that come before the reactor runs.

A bus that is stopped during its start must still remove its socket and its pid file.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable
from typing import Any

from twisted.internet.error import ReactorNotRunning

__all__ = ["DeferredSignals"]


class DeferredSignals:
    """Remember a signal that comes before the reactor runs, and stop the reactor then.

    A second signal has its usual effect, for an operator who does not want to wait. SIGHUP is ignored until
    `sbus.daemon.process.Process` handles it.

    :param numbers: the signals that stop the process in good order.
    """

    def __init__(self, numbers: Iterable[int] = (signal.SIGTERM, signal.SIGINT)) -> None:
        self._received = False
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            signal.signal(signal.SIGHUP, lambda *_: None)
        self._before = {number: signal.signal(number, self._remember) for number in numbers}

    def _remember(self, *_: object) -> None:
        self._received = True
        self.restore()

    def restore(self) -> None:
        """Restore the handlers that were in place before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def hand_over(self, reactor: Any) -> None:
        """Leave signals to the reactor from its start on.

        :param reactor: Twisted's reactor; any of them (there is no one interface for all that is used here).
        """
        reactor.callWhenRunning(reactor.callLater, 0, self._catch_up, reactor)

    def _catch_up(self, reactor: Any) -> None:
        # A signal may hit the reactor's own handlers before `Process` replaces them. The reactor then stops in good
        # order, but twistd would end the process by that signal.
        reactor._exitSignal = None
        if self._received:
            with contextlib.suppress(ReactorNotRunning):
                reactor.stop()
