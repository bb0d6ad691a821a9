"""The process of a bus, which can end when the last client has left."""

from __future__ import annotations

import signal
from collections.abc import Iterable

from sbus.daemon.pid_file import PidFile
from sbus.daemon.process import Process
from sbus.server.run.service import BusService

__all__ = ["BusProcess"]


class BusProcess(Process):
    """The process of a bus.

    :param bus: the bus that it runs.
    :param auto_close: whether to stop after the last client has left.
    :param signals: as for `Process`.
    :param pid_file: as for `Process`.
    """

    def __init__(
        self,
        bus: BusService,
        auto_close: bool,
        signals: Iterable[int] = (signal.SIGTERM, signal.SIGINT),
        pid_file: PidFile | None = None,
    ) -> None:
        super().__init__(signals, pid_file)
        self._bus = bus
        self._auto_close = auto_close

    def startService(self) -> None:
        super().startService()
        if self._auto_close:
            self._bus.registry.when_empty().addCallback(lambda _: self.stop())
