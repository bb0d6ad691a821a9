"""Type-annotated versions of Twisted's services.

`twisted.application.service` has no annotations.

At run time these names *are* Twisted's classes. Only a type checker sees the signatures below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twisted.application import service
from twisted.application.service import IServiceCollection
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from sbus.errors import SbusError

__all__ = ["MultiService", "ProcessServices", "Service"]

if TYPE_CHECKING:

    class Service(service.Service):
        """A service: see `twisted.application.service.Service`."""

        running: bool

        def privilegedStartService(self) -> None: ...
        def startService(self) -> None: ...
        def stopService(self) -> Deferred[None] | None: ...
        def setServiceParent(self, parent: IServiceCollection) -> None: ...
        def disownServiceParent(self) -> Deferred[None] | None: ...

    class MultiService(service.MultiService):
        """A group of services: see `twisted.application.service.MultiService`."""

        running: bool

        def __init__(self) -> None: ...
        def privilegedStartService(self) -> None: ...
        def startService(self) -> None: ...
        def stopService(self) -> Deferred[None]: ...
        def setServiceParent(self, parent: IServiceCollection) -> None: ...

else:
    Service = service.Service
    MultiService = service.MultiService


class ProcessServices(MultiService):
    """All services of a process; one that cannot start ends it with one line.

    :param command: the service's name on the command line of ``twistd``.
    """

    _log = Logger(namespace="sbus.daemon")

    def __init__(self, command: str) -> None:
        super().__init__()
        self._command = command

    def startService(self) -> None:
        """Start all services.

        :raises SystemExit: with the reason, if one cannot start.
        """
        try:
            super().startService()
        except SbusError as error:
            self._log.critical("{error}", error=error)  # the standard error of a daemon goes nowhere
            raise SystemExit(f"{self._command}: {error}") from None
