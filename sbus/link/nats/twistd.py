"""``twistd sbus-nats``: the command line, and the service that it configures."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from twisted.application.service import IService
from twisted.internet import defer
from twisted.logger import Logger
from twisted.python import usage

from sbus.client.connecting import SOCKET_OPTION, check_address, find_address
from sbus.daemon.metrics import MetricsWriter
from sbus.daemon.metrics_file import MetricsFile
from sbus.daemon.options import CommandLine, duration, size
from sbus.daemon.process import Process
from sbus.daemon.service import MultiService, Service
from sbus.daemon.signals import DeferredSignals
from sbus.distribution import needs
from sbus.errors import SbusError, UsageError
from sbus.link.nats.settings import Login, Settings
from sbus.link.nats.state import State, state_path
from sbus.protocol.packets import DEFAULT_MAX_PACKET
from sbus.syscalls.addresses import absolute, parse

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from sbus.link.nats.bridge import Bridge

__all__ = ["Options", "makeService"]

_FILES = ("password-file", "token-file", "nkey-file", "creds", "tls-ca", "tls-cert", "tls-key")


class Options(CommandLine):
    """The options of ``twistd sbus-nats``."""

    command = "sbus-nats"
    synopsis = "[options]"
    longdesc = "Join the bus of this host to those of other hosts, over NATS."

    optParameters = [
        SOCKET_OPTION,
        ["name", None, None, "Name of this bus among the joined ones [default: the name of the host]"],
        ["realm", None, "sbus", "First part of all subjects: only bridges of one realm hear each other"],
        ["prefix", None, None, "Key to put in front of the keys of messages that leave, such as hosts/NAME"],
        [
            "queue",
            None,
            8 << 20,
            "Bytes of messages that may wait for NATS, and of those that may wait for the bus",
            size("queue"),
        ],
        [
            "confirm-time",
            None,
            None,
            "Time that nats-server may take to confirm messages before the bridge connects again [default: 5s]",
            duration("confirm-time", 0.1),
        ],
        [
            "max-packet",
            None,
            DEFAULT_MAX_PACKET,
            "Longest packet in bytes, as set on the bus",
            size("max-packet"),
        ],
        ["state", None, None, "File of the bridge's lock and counts [default: the bus's socket with .nats behind it]"],
        ["metrics-file", None, None, "File for Prometheus, written every 10 seconds"],
        ["user", None, None, "User's name for NATS, with --password-file"],
        ["password-file", None, None, "File with the user's password for NATS"],
        ["token-file", None, None, "File with a token for NATS"],
        ["nkey-file", None, None, "File with the seed of an nkey for NATS"],
        ["creds", None, None, "File with a JWT and a seed for NATS, as nsc writes it"],
        ["tls-ca", None, None, "File with the certificates to trust, for TLS [default: those of the system]"],
        ["tls-cert", None, None, "File with the bridge's own certificate, for TLS"],
        ["tls-key", None, None, "File with the key of that certificate"],
    ]

    optFlags = [
        ["all-in", None, "Subscribe to all patterns of --in, not only to those that clients of the bus want"],
    ]

    compData = usage.Completions(
        optActions={name: usage.CompleteFiles() for name in ("socket", "state", "metrics-file", *_FILES)},
        multiUse=["nats", "in", "out"],
    )

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self["nats"], self["in"], self["out"] = [], [], []

    def opt_nats(self, url: str) -> None:
        """URL of a nats-server, such as nats://localhost:4222 or tls://host:4222; repeatable. [required]"""
        self["nats"].append(url)

    def opt_in(self, pattern: str) -> None:
        """Pattern of messages that come to this bus, if its clients want them; repeatable. [default: none]"""
        self["in"].append(os.fsencode(pattern))

    def opt_out(self, pattern: str) -> None:
        """Pattern of messages that leave this bus; repeatable. [default: none]"""
        self["out"].append(os.fsencode(pattern))

    def postOptions(self) -> None:
        """Check the options, and make the settings of them.

        :raises sbus.errors.UsageError: if options are missing or contradict each other.
        """
        self["socket"] = check_address(find_address(self["socket"]))
        login = {name.replace("-", "_"): self[name] and os.path.abspath(self[name]) for name in _FILES}
        given = {"confirm_time": self["confirm-time"]}
        self.settings = Settings(
            nats=tuple(dict.fromkeys(self["nats"])),
            name=self["name"] or os.uname().nodename,
            realm=self["realm"],
            listed_out=tuple(dict.fromkeys(self["out"])),
            listed_in=tuple(dict.fromkeys(self["in"])),
            all_in=bool(self["all-in"]),
            prefix=os.fsencode(self["prefix"] or ""),
            queue_bytes=self["queue"],
            max_packet=self["max-packet"],
            login=Login(user=self["user"], **login),
            **{name: value for name, value in given.items() if value is not None},
        )
        self["state"] = os.path.abspath(self["state"] or state_path(self["socket"]))
        labels = {"bus": absolute(parse(self["socket"])).text}
        self.metrics_file = MetricsFile(self["metrics-file"], labels) if self["metrics-file"] else None


def makeService(options: Options) -> IService:
    """Make the service that the options configure.

    See `twisted.application.service.IServiceMaker`.

    :raises SystemExit: with one line, if another bridge runs, or the login cannot be used.
    """
    try:
        reactor, loop = _asyncio_reactor()
        early = DeferredSignals()
        with needs("nats"):
            from sbus.link.nats.client import connect_options
        if options.parent is None or options.parent.get("uid") is None:
            # What is wrong shows on standard error, before the process becomes a daemon.
            connect_options(options.settings.nats, options.settings.login)
            State(options["state"]).close()
    except SbusError as e:
        raise SystemExit(f"{options.command}: {e}") from None
    early.hand_over(reactor)
    process = Process(pid_file=options.pid_file)
    bridge = BridgeService(loop, options["socket"], options.settings, options["state"], process.fail)
    process.log_counters = bridge.log_counters
    services = MultiService()
    process.setServiceParent(services)
    if options.metrics_file is None:
        bridge.setServiceParent(services)
    else:
        metrics = MetricsWriter(reactor, options.metrics_file, bridge.metrics)
        bridge.setServiceParent(metrics)
        metrics.setServiceParent(services)
    return services


def _asyncio_reactor() -> tuple[Any, asyncio.AbstractEventLoop]:
    """Install Twisted's asyncio reactor, which nats-py needs.

    :returns: the reactor, and its event loop.
    :raises UsageError: if another reactor is installed.
    """
    from twisted.internet import asyncioreactor

    if "twisted.internet.reactor" not in sys.modules:
        asyncioreactor.install(asyncio.SelectorEventLoop())
    from twisted.internet import reactor

    if not isinstance(reactor, asyncioreactor.AsyncioSelectorReactor):
        raise UsageError("this service needs Twisted's asyncio reactor: leave out --reactor, or say --reactor=asyncio")
    return reactor, reactor._asyncioEventloop


class BridgeService(Service):
    """The bridge, while the service runs.

    :param fail: called when the bridge ends by itself; the log has the reason.
    """

    _log = Logger(namespace="sbus.nats")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        address: str,
        settings: Settings,
        state: str,
        fail: Callable[[], object],
    ) -> None:
        self._loop = loop
        self._address = address
        self._settings = settings
        self._state_path = state
        self._fail = fail
        self._state: State | None = None
        self._bridge: Bridge | None = None
        self._running: asyncio.Task[None] | None = None

    def startService(self) -> None:
        """Lock the state, and start the bridge.

        :raises SystemExit: if another bridge runs.
        """
        from sbus.link.nats.bridge import Bridge

        super().startService()
        try:
            self._state = State(self._state_path)
            self._bridge = Bridge(self._address, self._settings, self._state)
        except SbusError as error:
            self._log.critical("{error}", error=error)  # a daemon's standard error goes nowhere
            raise SystemExit(f"{Options.command}: {error}") from None
        self._running = self._loop.create_task(self._run(self._bridge))

    async def _run(self, bridge: Bridge) -> None:
        try:
            await bridge.run()
        except asyncio.CancelledError:
            raise
        except SbusError as error:
            self._log.critical("{error}", error=error)
            self._fail()
        except Exception:
            self._log.failure("a bug ended the bridge")
            self._fail()

    def stopService(self) -> defer.Deferred[None]:
        """Send the waiting messages, and end the bridge."""
        super().stopService()
        return defer.Deferred.fromFuture(self._loop.create_task(self._stop()))

    async def _stop(self) -> None:
        if self._bridge is not None and self._running is not None:
            if not self._running.done():
                await self._bridge.stop()
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        if self._state is not None:
            self._state.close()
            self._state = None

    def log_counters(self) -> None:
        """Log the messages carried and lost."""
        if self._bridge is not None:
            self._bridge.log_counters()

    def metrics(self, is_up: bool) -> Iterable[Metric]:
        """Return the metrics; none before the first start.

        :param is_up: whether the service runs.
        """
        return () if self._bridge is None else self._bridge.metrics(is_up)
