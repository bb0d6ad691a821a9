"""``twistd sbus-link``: the command line, and the service that it configures."""

from __future__ import annotations

import os
import signal

from twisted.application.service import IService
from twisted.python import usage

from sbus.client.connecting import check_address, find_address
from sbus.daemon.clock import use_monotonic_clock
from sbus.daemon.options import CommandLine, size
from sbus.daemon.process import Process
from sbus.daemon.service import MultiService
from sbus.daemon.signals import DeferredSignals
from sbus.daemon.supervised import SUPERVISED_FLAG, StdinWatcher
from sbus.errors import UsageError
from sbus.link.interest import Interest
from sbus.link.service import LinkService
from sbus.protocol.packets import DEFAULT_MAX_PACKET

__all__ = ["Options", "makeService"]


class Options(CommandLine):
    """The options of ``twistd sbus-link``."""

    command = "sbus-link"
    synopsis = "[options]"
    longdesc = "Link a bus to its master: carry the listed messages that the other side wants, both ways."

    optParameters = [
        [
            "socket",
            "s",
            None,
            "Address of the bus below: a path, @NAME or /dev/unix/abstract/HEX [default: $SBUS_SOCKET, else "
            "$XDG_RUNTIME_DIR/sbus.sock if it exists, else /run/sbus.sock]",
        ],
        ["upstream", None, None, "Address of the master (required)"],
        [
            "max-packet",
            None,
            DEFAULT_MAX_PACKET,
            "Longest packet of a bus that does not say its limit, in bytes",
            size("max-packet"),
        ],
    ]

    optFlags = [
        [
            "upstream-secrets",
            None,
            "Carry secret messages for clients of other buses up; the bus below needs --upstream-secrets, too",
        ],
        SUPERVISED_FLAG,
    ]

    compData = usage.Completions(
        optActions={"socket": usage.CompleteFiles(), "upstream": usage.CompleteFiles()},
        multiUse=["upstream-out", "upstream-in"],
    )

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self["upstream-out"] = []
        self["upstream-in"] = []

    def opt_upstream_out(self, pattern: str) -> None:
        """Pattern of messages that may go up; repeatable [default: none]"""
        self["upstream-out"].append(os.fsencode(pattern))

    def opt_upstream_in(self, pattern: str) -> None:
        """Pattern of messages that may come down; repeatable [default: none]"""
        self["upstream-in"].append(os.fsencode(pattern))

    def postOptions(self) -> None:
        """Check the options.

        :raises sbus.errors.UsageError: if options are missing or wrong.
        """
        if not self["upstream"]:
            raise UsageError("no master: give its address with --upstream=ADDRESS")
        self["socket"] = find_address(self["socket"])
        for option in ("socket", "upstream"):
            check_address(self[option], f"--{option}")
        for option in ("upstream-out", "upstream-in"):
            try:
                Interest(self[option])
            except UsageError as e:
                raise UsageError(f"--{option}: {e}") from None


def makeService(options: Options) -> IService:
    """Make the service that the options configure; see `twisted.application.service.IServiceMaker`."""
    from twisted.internet import reactor

    use_monotonic_clock(reactor)
    if not options["supervised"]:
        DeferredSignals().hand_over(reactor)
    services = MultiService()
    process = Process(() if options["supervised"] else (signal.SIGTERM, signal.SIGINT), options.pid_file)
    process.setServiceParent(services)
    if options["supervised"]:
        StdinWatcher(reactor, process.stop).setServiceParent(services)
    LinkService(
        reactor,
        options["socket"],
        options["upstream"],
        options["upstream-out"],
        options["upstream-in"],
        secrets=bool(options["upstream-secrets"]),
        max_packet=options["max-packet"],
    ).setServiceParent(services)
    return services
