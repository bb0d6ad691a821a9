"""``twistd sbus``: its options, and the service that they describe."""

from __future__ import annotations

import pwd
import signal
import sys
from typing import Any

from twisted.application.service import IService, MultiService, Service
from twisted.python import usage

from sbus import __version__
from sbus.errors import ListenError, UsageError
from sbus.keys import CURRENT, EARLY
from sbus.seqpacket.endpoints import SeqpacketServerEndpoint
from sbus.server.components import FloodControls, credentials_policies, find_policy
from sbus.server.credentials import AccessSettings
from sbus.server.limits import Limits
from sbus.server.service import BusService
from sbus.syscalls.addresses import default_address

__all__ = ["Options", "makeService"]

_DIALECTS = {d.name: d for d in (CURRENT, EARLY)}
_DEFAULTS = Limits()


def _mode(text: str) -> int:
    mode = int(text, 8)
    if not 0 <= mode <= 0o777:
        raise ValueError("a mode has three octal digits, as 0770")
    return mode


def _choice(*words: str) -> Any:
    def coerce(text: str) -> str:
        if text not in words:
            raise ValueError(f"must be {' or '.join(words)}")
        return text

    return coerce


def _number(text: str) -> int:
    number = int(text)
    if number <= 0:
        raise ValueError("must be more than 0")
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise ValueError("must be more than 0")
    return seconds


def _uid(text: str) -> int:
    if text.isdigit():
        if int(text) > 2**32 - 2:
            raise usage.UsageError(f"--allow-user={text}: a UID is less than 2^32 - 1")
        return int(text)
    try:
        return pwd.getpwnam(text).pw_uid
    except KeyError:
        raise usage.UsageError(
            f"--allow-user={text}: there is no such user: give a name that `getent passwd` knows, or a UID"
        ) from None


class Options(usage.Options):
    """The command line of ``twistd sbus``."""

    synopsis = "[options]"
    longdesc = "A local message bus: programs of this machine publish and subscribe over one Unix SEQPACKET socket."

    optParameters = [
        [
            "socket",
            "s",
            None,
            "Where to listen: a path, @NAME or /dev/unix/abstract/HEX (abstract), /dev/unix/abstract (a random one, "
            "printed), /dev/fd/N (inherited), systemd or systemd:NAME (socket activation) "
            "[default: /run/sbus.sock for root, else $XDG_RUNTIME_DIR/sbus.sock]",
        ],
        [
            "mode",
            "m",
            0o700,
            "Permissions of the socket's path, octal; never exceeded [default: 0700]",
            _mode,
        ],
        [
            "group",
            "g",
            None,
            "Group (name or GID) that the socket's path is given to [default: the process's]",
        ],
        ["credentials", None, "kernel", "Credentials policy that says who may do what"],
        [
            "on-violation",
            None,
            "disconnect",
            "What happens to a client that breaks the protocol: disconnect, or ignore (the packet is dropped)",
            _choice("disconnect", "ignore"),
        ],
        ["dialect", None, "current", "Revision of the protocol: current or early", _choice(*_DIALECTS)],
        [
            "block-timeout",
            None,
            _DEFAULTS.block_timeout,
            "Seconds for which a client that holds publishers back may take nothing before it is disconnected",
            _seconds,
        ],
        ["queue-messages", None, _DEFAULTS.queue_messages, "Messages that may wait for one client", _number],
        ["queue-bytes", None, _DEFAULTS.queue_bytes, "Bytes that may wait for one client", _number],
        [
            "total-queue-bytes",
            None,
            _DEFAULTS.total_queue_bytes,
            "Bytes that may wait for all clients",
            _number,
        ],
        ["max-packet", None, _DEFAULTS.max_packet, "Bytes in the longest packet", _number],
        ["max-clients", None, _DEFAULTS.max_clients, "Clients connected at one time", _number],
        [
            "max-patterns",
            None,
            _DEFAULTS.max_patterns,
            "Different patterns that one client may hold",
            _number,
        ],
        [
            "max-pattern-bytes",
            None,
            _DEFAULTS.max_pattern_bytes,
            "Bytes in the patterns that one client may hold (a segment past a pattern's 16th counts 256 more)",
            _number,
        ],
    ]

    optFlags = [
        [
            "reuse",
            "r",
            "Replace a socket that nobody listens on any more (never a live one, nor another file)",
        ],
        ["auto-close", "c", "Stop after the last client has left"],
        [
            "block-across-users",
            None,
            "Let a client that chose to block hold back publishers of other users too",
        ],
    ]

    compData = usage.Completions(
        optActions={
            "on-violation": usage.CompleteList(["disconnect", "ignore"]),
            "dialect": usage.CompleteList(list(_DIALECTS)),
            "socket": usage.CompleteFiles(),
            "allow-user": usage.CompleteUsernames(),
            "group": usage.CompleteGroups(),
        },
        multiUse=["allow-user"],
    )

    def __init__(self) -> None:
        super().__init__()
        self["allow-user"] = []

    def opt_allow_user(self, user: str) -> None:
        """User (name or UID) who may connect; repeatable. The server's own user always may.
        [default: whoever the socket's mode lets in; on an abstract address only root besides]"""
        self["allow-user"].append(_uid(user))

    opt_u = opt_allow_user

    def opt_version(self) -> None:
        """Print the version of sbus and exit."""
        print(f"sbus {__version__}")
        sys.exit(0)

    def getUsage(self, width: int | None = None) -> str:
        """The help, with the components that are installed here."""
        controls = FloodControls()
        names = [
            name.decode(errors="replace") for kind in (controls.soft, controls.hard, controls.orders) for name in kind
        ]
        policies = "".join(f"\n  {p.name}: {p.description}" for p in credentials_policies().values())
        return (
            f"{super().getUsage(width)}\nCredentials policies installed:{policies}\n"
            f"Flood control that clients can choose:\n  {' '.join(names)}\n"
        )

    def postOptions(self) -> None:
        try:
            self["socket"] = self["socket"] or default_address()
            self.limits = Limits(**{name: self[name.replace("_", "-")] for name in Limits.__dataclass_fields__})
            self.policy = find_policy(self["credentials"])
            self.endpoint = _endpoint(self)
        except UsageError as e:
            raise usage.UsageError(str(e)) from None


def _endpoint(options: Options) -> SeqpacketServerEndpoint:
    from twisted.internet import reactor

    group: str | None = options["group"]
    return SeqpacketServerEndpoint(
        reactor,
        options["socket"],
        mode=options["mode"],
        group=int(group) if group is not None and group.isdigit() else group,
        reuse=bool(options["reuse"]),
        max_packet=options.limits.max_packet,
    )


class StartError(Exception, SystemExit):
    """The bus cannot be started.

    As an Exception it makes twistd remove its pid file and report to whoever waits for the daemon;
    as a SystemExit it ends the process with status 1 and this one line, without a traceback.
    """

    def __init__(self, message: str) -> None:
        SystemExit.__init__(self, f"sbus: {message}")


class _Bus(BusService):
    """A `BusService` whose failure to start is the end of the process."""

    def _listen(self) -> None:
        try:
            super()._listen()
        except (ListenError, OSError) as e:
            raise StartError(str(e)) from None


class _Process(Service):
    """What belongs to the process rather than to the bus: its signals, and its end with the last client."""

    def __init__(self, bus: BusService, auto_close: bool) -> None:
        self._bus = bus
        self._auto_close = auto_close

    def startService(self) -> None:
        from twisted.internet import reactor

        super().startService()
        # Handlers of our own: after Twisted's the process would end by the signal, not with status 0.
        reactor.callWhenRunning(self._handle_signals)
        if self._auto_close:
            self._bus.registry.whenEmpty().addCallback(lambda _: self._stop())

    def _handle_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop())

    def _stop(self) -> None:
        from twisted.internet import reactor

        if self.running:
            reactor.callFromThread(_stop_reactor)


def _stop_reactor() -> None:
    from twisted.internet import reactor

    if reactor.running:
        reactor.stop()


def makeService(options: Options) -> IService:
    """The service that the options describe (`twisted.application.service.IServiceMaker`)."""
    try:
        address = options.endpoint.resolve()
    except ListenError as e:
        raise StartError(str(e)) from None
    if options["socket"] == "/dev/unix/abstract":
        print(address.text, flush=True)
    access = AccessSettings(
        allowed_users=frozenset(options["allow-user"]) if options["allow-user"] else None,
        is_abstract=address.is_abstract,
        block_across_users=bool(options["block-across-users"]),
    )
    bus = _Bus(
        options.endpoint,
        options.policy.make(access),
        options.limits,
        dialect=_DIALECTS[options["dialect"]],
        ignore_violations=options["on-violation"] == "ignore",
    )
    parent = MultiService()
    _Process(bus, bool(options["auto-close"])).setServiceParent(parent)
    bus.setServiceParent(parent)
    return parent
