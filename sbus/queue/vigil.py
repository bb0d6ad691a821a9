"""The end of a worker: its process has ended (pidfd_open(2)), or nobody subscribes to its key."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sbus.client.tx import Bus
from sbus.client.watches import Watch
from sbus.errors import SbusError

__all__ = ["Vigil"]


class Vigil(Watch):
    """Notices that a worker is gone (an `IReadDescriptor`).

    :param on_end: called then.
    :param pid: the worker's process, or None.
    """

    def __init__(self, reactor: Any, bus: Bus, key: bytes, pid: int | None, on_end: Callable[[], object]) -> None:
        super().__init__(key)
        self._reactor, self._bus, self._on_end, self._fd = reactor, bus, on_end, -1
        self._is_watch = False
        if pid is not None:
            try:
                self._fd = os.pidfd_open(pid)
                reactor.addReader(self)
            except ProcessLookupError:
                reactor.callLater(0, on_end)
            except OSError:
                pass  # no descriptor is free: its connection is watched too

    def watch(self) -> None:
        """Watch the worker's key, too."""
        if not self._is_watch:
            self._is_watch = True
            self._bus.send(self._bus.core.watch(self))

    def update(self, has_subscribers: bool) -> None:
        super().update(has_subscribers)
        # After a lost connection, workers may come back later than this service: then their leases decide.
        if not has_subscribers and self._bus.state == "connected":
            self._on_end()

    def fileno(self) -> int:
        return self._fd

    def logPrefix(self) -> str:
        return "sbus.queue"

    def doRead(self) -> None:
        self._on_end()

    def connectionLost(self, reason: object = None) -> None:
        """Watch no more."""
        if self._fd >= 0:
            self._reactor.removeReader(self)
            os.close(self._fd)
            self._fd = -1
        with suppress(SbusError):
            self._bus.send(self._bus.core.extensions.unwatch(self))
