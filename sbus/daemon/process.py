"""A service that has a process to itself: its memory, the signals that stop it."""

from __future__ import annotations

import contextlib
import ctypes
import signal
from collections.abc import Iterable

from twisted.internet.error import ReactorNotRunning
from twisted.internet.interfaces import IReactorFromThreads

from sbus.daemon.service import Service

__all__ = ["Process"]

_KEPT = 16 << 20
"""Bytes of freed memory that the process keeps for the next batch."""
_LARGEST_KEPT = 1 << 20
"""Bytes in the largest packet for which there is a place in it."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def _keep_memory() -> None:
    """Do not give memory back to the kernel between two batches.

    The C library returns what is free at the heap's end above 128 KiB, so each batch of large
    packets (or bundles) had the kernel take its pages away, and clear them again for the next:
    most of the server's time. See mallopt(3); other C libraries than glibc have none.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)


class Process(Service):
    """What belongs to the process rather than to the service that it runs.

    :param signals: those that stop the reactor, so that the process ends with status 0.
    """

    def __init__(self, signals: Iterable[int] = (signal.SIGTERM, signal.SIGINT)) -> None:
        self._signals = tuple(signals)
        self._handles_signals = False

    def startService(self) -> None:
        from twisted.internet import reactor

        super().startService()
        _keep_memory()
        # Handlers of our own: after Twisted's the process would end by the signal, not with status 0.
        reactor.callWhenRunning(self._handle_signals)

    def stopService(self) -> None:
        super().stopService()
        if self._handles_signals:
            # Another one is no reason to end in disorder; and the interpreter, when it ends, takes handlers away.
            for number in self._signals:
                signal.signal(number, signal.SIG_IGN)

    def _handle_signals(self) -> None:
        self._handles_signals = True
        for number in self._signals:
            signal.signal(number, lambda *_: self.stop())

    def stop(self) -> None:
        """Stop the reactor, in its next turn."""
        from twisted.internet import reactor

        IReactorFromThreads(reactor).callFromThread(self._stop_reactor)

    def _stop_reactor(self) -> None:
        from twisted.internet import reactor

        if self.running:
            # It may be stopping already: signals come in numbers, and the last client leaves when the bus stops.
            with contextlib.suppress(ReactorNotRunning):
                reactor.stop()
