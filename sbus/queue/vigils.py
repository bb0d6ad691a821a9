"""The ends of workers: a process has ended (pidfd_open(2)), or nobody subscribes to a worker's key."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sbus.client.tx import Bus
from sbus.client.watches import Watch
from sbus.errors import SbusError
from sbus.syscalls.descriptors import descriptor_limit

__all__ = ["Vigils"]

_SPARE = 64
"""Descriptors that are left for stores, connections and metrics: anybody may have a thousand workers."""


class Vigils:
    """Watches over workers.

    :param prefix: of their keys.
    :param on_end: called with a worker that is gone.
    """

    _bus: Bus

    def __init__(self, reactor: Any, prefix: bytes, on_end: Callable[[bytes], object]) -> None:
        self._reactor, self._prefix, self._on_end = reactor, prefix, on_end
        self._trusts_pids = False
        self._vigils: dict[bytes, _Vigil] = {}

    def connected(self, bus: Bus, trusts_pids: bool) -> None:
        """Take over the connection that the keys are watched with.

        :param trusts_pids: whether PIDs mean the same to the bus and to this process.
        """
        self._bus, self._trusts_pids = bus, trusts_pids

    def expect(self, holder: bytes) -> _Vigil:
        """Watch over the process of a worker that had jobs before the service was started: it may come back later."""
        vigil = self._vigils.get(holder)
        if vigil is None:
            key = self._prefix + holder.partition(b" ")[0]
            vigil = self._vigils[holder] = _Vigil(self._reactor, self._bus, key, lambda: self._end(holder))
            if self._trusts_pids and holder.count(b"!/cred/") == 1:  # it is no client of another bus
                vigil.watch_process(int(holder.rpartition(b"/")[2]))
        return vigil

    def begin(self, holder: bytes) -> None:
        """Watch over a worker that has subscribed to its key."""
        vigil = self.expect(holder)
        if not vigil.is_watch:
            vigil.is_watch = True
            self._bus.send(self._bus.core.watch(vigil))

    def _end(self, holder: bytes) -> None:
        self.end(holder)
        self._on_end(holder)

    def end(self, holder: bytes) -> None:
        """Stop watching over a worker."""
        if vigil := self._vigils.pop(holder, None):
            vigil.connectionLost()
            with suppress(SbusError):
                self._bus.send(self._bus.core.extensions.unwatch(vigil))


class _Vigil(Watch):
    """Notices that a worker is gone (an `IReadDescriptor`).

    :ivar is_watch: whether the bus reports on the key.
    """

    def __init__(self, reactor: Any, bus: Bus, key: bytes, on_end: Callable[[], object]) -> None:
        super().__init__(key)
        self._reactor, self._bus, self._on_end, self._fd = reactor, bus, on_end, -1
        self.is_watch = False

    def watch_process(self, pid: int) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._reactor.callLater(0, self._on_end)
            return
        except OSError:
            return  # no descriptor is free: its connection is watched too
        if descriptor >= descriptor_limit() - _SPARE:
            os.close(descriptor)
            return
        self._fd = descriptor
        self._reactor.addReader(self)

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
        """Stop watching the process."""
        if self._fd >= 0:
            self._reactor.removeReader(self)
            os.close(self._fd)
            self._fd = -1
