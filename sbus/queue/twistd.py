"""``twistd sbus-queue``: the command line, and the service that it configures."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from twisted.application.service import IService
from twisted.python import usage

from sbus.client.connecting import SOCKET_OPTION, check_address, find_address
from sbus.client.queues import HEAD_ROOM, queue_key
from sbus.daemon.clock import use_monotonic_clock
from sbus.daemon.options import CommandLine, amount, choice, duration, size
from sbus.daemon.process import Process
from sbus.daemon.service import MultiService, ProcessServices
from sbus.daemon.signals import DeferredSignals
from sbus.distribution import needs
from sbus.errors import SbusError, UsageError, Violation
from sbus.protocol.keys import CURRENT, matches_open
from sbus.protocol.packets import DEFAULT_MAX_PACKET
from sbus.queue.jobs import Settings
from sbus.queue.service import QueueService

__all__ = ["Options", "makeService", "parse_queue"]

_PARSERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "store": ("store", str),
    "lease": ("lease", duration("queue=…,lease", 0.1)),
    "deliveries": ("deliveries", amount("queue=…,deliveries", "deliveries")),
    "most": ("most", amount("queue=…,most", "jobs")),
    "bytes": ("most_bytes", size("queue=…,bytes")),
    "ordered": ("is_ordered", lambda text: bool(choice("queue=…,ordered", "key")(text))),
}
"""The options after the pattern: each name with the field of `Settings`, and its parser."""
_PACKET_SIZE = size("max-packet", HEAD_ROOM + 1)
"""A parser: no job fits a shorter packet."""
_BEFORE_OPTION = re.compile(",(?=[a-z]+=)")
"""The comma before an option, also before a misspelt one: in the pattern, that would keep messages from the queue."""


def parse_queue(text: str, directory: str | None) -> Settings:
    """Parse the value of ``--queue``; a comma in the pattern is part of it, unless a word and ``=`` follow.

    :param directory: the directory for a store that is not named.
    :raises sbus.errors.UsageError: with the remedy.
    """
    queue, *options = _BEFORE_OPTION.split(text)
    given = dict(option.split("=", 1) for option in options)
    if not given.keys() <= _PARSERS.keys() or any("," in value for value in given.values()):
        known = ", ".join(f"{option}=" for option in _PARSERS)
        raise UsageError(f"--queue={text}: an option is unknown or malformed: after the pattern, use {known}")
    name, equals, pattern_text = queue.partition("=")
    pattern = os.fsencode(pattern_text) if equals else None
    own = [queue_key(name, verb) for verb in (b"ready", b"put/key", b"worker/" + b"0" * 32)]
    if pattern is not None:
        try:
            is_open = CURRENT.check(pattern) is None
        except Violation as e:
            raise UsageError(f"--queue={text}: {e}") from None
        if not is_open or any(matches_open(pattern, key) for key in own):
            raise UsageError(f"--queue={text}: the pattern matches the queue's own keys, or secret ones: narrow it")
    store = given.get("store") or (directory and os.path.join(directory, f"{name}.sqlite"))
    is_jetstream = str(store).startswith(("nats://", "tls://"))
    if not store or ("://" in store and not is_jetstream):
        raise UsageError(f"--queue={text}: no place for its jobs: add store=FILE, or give --directory=DIRECTORY")
    chosen = {field: parse_value(given[option]) for option, (field, parse_value) in _PARSERS.items() if option in given}
    if is_jetstream and chosen.get("is_ordered"):
        raise UsageError(f"--queue={text}: JetStream gives jobs of a key to many hosts at once: leave out ordered=key")
    chosen["store"] = store if is_jetstream else os.path.abspath(store)
    return Settings(name=name, pattern=pattern, **chosen)


def _kind(settings: Settings) -> type[QueueService]:
    if "://" not in settings.store:
        return QueueService
    with needs("nats"):
        from sbus.queue.jetstream import JetQueueService
    return JetQueueService


class Options(CommandLine):
    """The options of ``twistd sbus-queue``."""

    command = "sbus-queue"
    synopsis = "[options]"
    longdesc = "Give each job to one worker, and keep it on the disk until that worker has done it."

    optParameters = [
        SOCKET_OPTION,
        ["directory", "d", None, "Directory of the stores, NAME.sqlite each [default: $STATE_DIRECTORY]"],
        ["metrics-file", None, None, "File for Prometheus's textfile collector, written every 10 s [default: none]"],
        ["max-packet", None, DEFAULT_MAX_PACKET, "Longest packet in bytes, as set on the bus", _PACKET_SIZE],
    ]

    compData = usage.Completions(multiUse=["queue"])

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self["queue"] = []

    def opt_queue(self, text: str) -> None:
        """NAME[=PATTERN][,store=…][,lease=30s][,deliveries=5][,most=1000000][,bytes=1G][,ordered=key]; repeatable"""
        self["queue"].append(text)

    def postOptions(self) -> None:
        """Check the options, and make the settings of them.

        :raises sbus.errors.UsageError: if options are missing or wrong.
        """
        self["socket"] = check_address(find_address(self["socket"]))
        directory = self["directory"] or os.environ.get("STATE_DIRECTORY", "").partition(":")[0] or None
        self.settings = [parse_queue(text, directory) for text in self["queue"]]
        if not self.settings:
            raise UsageError("no queue: give --queue=NAME=PATTERN, such as --queue=jobs=jobs/")
        names = [each.name for each in self.settings]
        if twice := {name for name in names if names.count(name) > 1}:
            raise UsageError(f"--queue={twice.pop()} is given twice: give each queue a name of its own")
        if self["metrics-file"] is not None:
            from sbus.daemon.metrics_file import MetricsFile

            self["metrics-file"] = MetricsFile(self["metrics-file"], {"bus": self["socket"]})


def makeService(options: Options) -> IService:
    """Make the service that the options configure; see `twisted.application.service.IServiceMaker`.

    The stores are opened and closed once before the process becomes a daemon, so that the operator sees any error.

    :raises SystemExit: with one line, if a store cannot be used.
    """
    from twisted.internet import reactor

    use_monotonic_clock(reactor)
    try:
        if options.parent is None or options.parent.get("uid") is None:
            for settings in options.settings:
                _kind(settings).open_store(settings).close()
    except SbusError as e:
        raise SystemExit(f"{options.command}: {e}") from None
    DeferredSignals().hand_over(reactor)
    services = ProcessServices(options.command)
    process = Process(pid_file=options.pid_file)
    process.setServiceParent(services)
    socket, longest = options["socket"], options["max-packet"]
    queues = [_kind(each)(reactor, socket, each, process.fail, longest) for each in options.settings]
    parent: MultiService = services
    if options["metrics-file"] is not None:
        from sbus.daemon.metrics import MetricsWriter
        from sbus.queue.metrics import families

        parent = MetricsWriter(reactor, options["metrics-file"], partial(families, queues))
        parent.setServiceParent(services)
    for queue in queues:
        queue.setServiceParent(parent)
    return services
