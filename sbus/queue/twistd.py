"""``twistd sbus-queue``: the command line, and the service that it configures."""

from __future__ import annotations

import os

from twisted.application.service import IService
from twisted.logger import Logger
from twisted.python import usage

from sbus.client.connecting import find_address
from sbus.client.queues import check_queue, queue_key
from sbus.daemon.clock import use_monotonic_clock
from sbus.daemon.options import CommandLine, amount, duration, size
from sbus.daemon.process import Process
from sbus.daemon.service import MultiService
from sbus.daemon.signals import DeferredSignals
from sbus.errors import SbusError, UsageError, Violation
from sbus.protocol.keys import CURRENT, matches_open
from sbus.protocol.packets import DEFAULT_MAX_PACKET
from sbus.queue.jobs import Rules
from sbus.queue.service import QueueService, Settings
from sbus.queue.store import Store
from sbus.syscalls.addresses import parse

__all__ = ["Options", "makeService", "parse_queue"]

_FORM = "NAME[=PATTERN][,store=FILE][,lease=30s][,deliveries=5][,ordered=key]"


def parse_queue(text: str, directory: str | None) -> Settings:
    """Parse the value of ``--queue``.

    :param directory: where the stores are that are not named.
    :raises sbus.errors.UsageError: with the remedy.
    """
    given: dict[str, str] = {}
    rest = text
    while (split := rest.rpartition(","))[1] and (word := split[2].partition("="))[0] in (
        "store",
        "lease",
        "deliveries",
        "ordered",
    ):
        given[word[0]], rest = word[2], split[0]
    name, has_pattern, pattern_text = rest.partition("=")
    pattern = os.fsencode(pattern_text) if has_pattern else None
    check_queue(name)
    if pattern is not None:
        try:
            is_secret = CURRENT.check(pattern) is not None
        except Violation as e:
            raise UsageError(f"--queue={text}: {e}") from None
        own = [queue_key(name, verb) for verb in (b"ready", b"put/key", b"worker/" + b"0" * 32)]
        if is_secret or any(matches_open(pattern, key) for key in own):
            raise UsageError(f"--queue={text}: the pattern matches the queue's own keys, or secret ones: narrow it")
    if given.get("ordered", "key") != "key":
        raise UsageError(f"--queue={text}: use ordered=key, or leave it out")
    store = given.get("store") or (directory and os.path.join(directory, f"{name}.sqlite"))
    if not store:
        raise UsageError(f"--queue={text}: no place for its jobs: add store=FILE, or give --directory=DIRECTORY")
    if "://" in store:
        raise UsageError(f"--queue={text}: store=FILE is a path; this version has no other stores")
    defaults = Rules()
    rules = Rules(
        lease=duration("queue …,lease", 0.1)(given["lease"]) if "lease" in given else defaults.lease,
        deliveries=(
            amount("queue …,deliveries", "deliveries")(given["deliveries"])
            if "deliveries" in given
            else defaults.deliveries
        ),
        is_ordered="ordered" in given,
    )
    return Settings(name, pattern, os.path.abspath(store), rules)


class Options(CommandLine):
    """The options of ``twistd sbus-queue``."""

    command = "sbus-queue"
    synopsis = "[options]"
    longdesc = "Give each job to one worker, and keep it on the disk until that worker has done it."

    optParameters = [
        [
            "socket",
            "s",
            None,
            "Address of the bus: a path, @NAME or /dev/unix/abstract/HEX [default: $SBUS_SOCKET, else "
            "$XDG_RUNTIME_DIR/sbus.sock if it exists, else /run/sbus.sock]",
        ],
        ["directory", "d", None, "Directory of the stores, NAME.sqlite each [default: $STATE_DIRECTORY]"],
        ["metrics-file", None, None, "File for Prometheus's textfile collector, written every 10 s [default: none]"],
        ["max-packet", None, DEFAULT_MAX_PACKET, "Longest packet in bytes, as set on the bus", size("max-packet")],
    ]

    compData = usage.Completions(
        optActions={"socket": usage.CompleteFiles(), "directory": usage.CompleteDirs()}, multiUse=["queue"]
    )

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self["queue"] = []

    def opt_queue(self, text: str) -> None:
        """Queue: NAME[=PATTERN][,store=FILE][,lease=30s][,deliveries=5][,ordered=key]; repeatable"""
        self["queue"].append(text)

    def postOptions(self) -> None:
        """Check the options, and make the settings of them.

        :raises sbus.errors.UsageError: if options are missing or wrong.
        """
        self["socket"] = find_address(self["socket"])
        if not parse(self["socket"]).name:
            raise UsageError(
                f"--socket={self['socket']}: a client cannot connect to this address: give a path or @NAME"
            )
        directory = self["directory"] or os.environ.get("STATE_DIRECTORY", "").partition(":")[0] or None
        self.settings = [parse_queue(text, directory) for text in self["queue"]]
        if not self.settings:
            raise UsageError(f"no queue: give --queue={_FORM}")
        for what, values in (
            ("name", [settings.name for settings in self.settings]),
            ("store", [os.path.realpath(settings.store) for settings in self.settings]),
        ):
            if len(set(values)) < len(values):
                raise UsageError(f"--queue: two queues have the same {what}: give each its own")
        if self["metrics-file"] is not None:
            from sbus.metrics_file import MetricsFile

            self["metrics-file"] = MetricsFile(self["metrics-file"], {"bus": self["socket"]})


def makeService(options: Options) -> IService:
    """Make the service that the options configure; see `twisted.application.service.IServiceMaker`.

    The stores are opened and closed once before the process becomes a daemon, so that the operator sees what is wrong.

    :raises SystemExit: with one line, if a store cannot be used.
    """
    from twisted.internet import reactor

    use_monotonic_clock(reactor)
    early = DeferredSignals()
    try:
        if options.parent is None or options.parent.get("uid") is None:
            for settings in options.settings:
                Store(settings.store).close()
    except SbusError as e:
        early.restore()
        raise SystemExit(f"{options.command}: {e}") from None
    early.hand_over(reactor)
    process = Process(pid_file=options.pid_file)
    queues = [
        QueueService(reactor, options["socket"], settings, process.fail, options["max-packet"])
        for settings in options.settings
    ]
    services = _Services()
    process.setServiceParent(services)
    for queue in queues:
        queue.setServiceParent(services)
    process.log_counters = lambda: [queue.log_counters() for queue in queues]
    if options["metrics-file"] is not None:
        from sbus.daemon.metrics import MetricsWriter
        from sbus.queue.metrics import families

        MetricsWriter(reactor, options["metrics-file"], lambda is_up: families(queues, is_up)).setServiceParent(
            services
        )
    return services


class _Services(MultiService):
    """All services of the process."""

    _log = Logger(namespace="sbus.queue")

    def startService(self) -> None:
        try:
            super().startService()
        except SbusError as error:
            self._log.critical("{error}", error=error)  # a daemon's standard error goes nowhere
            raise SystemExit(f"{Options.command}: {error}") from None
