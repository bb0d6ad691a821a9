"""Notices to systemd from a service with ``Type=notify``: that it serves, that it stops, and that it is alive.

The protocol is a datagram to the socket that ``NOTIFY_SOCKET`` names (sd_notify(3)). With ``WatchdogSec=``, systemd
kills and restarts a process that has not said ``WATCHDOG=1`` for that time. The reactor says it, so a process whose
reactor hangs is restarted although it exists.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

from twisted.internet.interfaces import IReactorTime

from sbus.daemon.service import Service

__all__ = ["Notifier"]


class Notifier(Service):
    """Notifies systemd; does nothing in a process that systemd did not start with a socket for it.

    :param clock: for the pings: its time passes only while the reactor turns.
    :param environ: the environment of the process.
    """

    def __init__(self, clock: IReactorTime, environ: Mapping[str, str] = os.environ) -> None:
        self._clock = clock
        self._address = environ.get("NOTIFY_SOCKET", "")
        self._interval = _watchdog_interval(environ)

    def ready(self) -> None:
        """Say that the service serves, and begin to ping."""
        self._send(b"READY=1")
        if self._address and self._interval:
            self._clock.callLater(0, self._pings)

    def reloads(self, is_reloading: bool) -> None:
        """Say that a reload begins, or that it has ended."""
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send(b"RELOADING=1\nMONOTONIC_USEC=%d" % now if is_reloading else b"READY=1")

    def stopService(self) -> None:
        """Notify systemd that the service stops, and keep pinging until it has."""
        super().stopService()
        self._send(b"STOPPING=1")

    def _pings(self) -> None:
        self._send(b"WATCHDOG=1")
        self._clock.callLater(self._interval, self._pings)

    def _send(self, state: bytes) -> None:
        if self._address:
            name = "\0" + self._address[1:] if self._address.startswith("@") else self._address
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                    sock.setblocking(False)
                    sock.sendto(state, name)
            except OSError:
                pass  # sd_notify(3): a service does not fail if the notification fails


def _watchdog_interval(environ: Mapping[str, str]) -> float:
    """Return half the time of the watchdog, in seconds; 0 without one, or if it is another process's."""
    try:
        if int(environ.get("WATCHDOG_PID") or os.getpid()) != os.getpid():
            return 0.0
        return max(0, int(environ.get("WATCHDOG_USEC") or 0)) / 2_000_000
    except ValueError:
        return 0.0
