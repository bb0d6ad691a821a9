"""``twistd sbus``: its command line, and the service that it describes."""

from __future__ import annotations

import atexit
import pwd

from twisted.application.service import IService
from twisted.python import usage

from sbus.daemon.clock import use_monotonic_clock
from sbus.daemon.options import CommandLine, amount, choice, mode
from sbus.daemon.service import MultiService
from sbus.daemon.signals import DeferredSignals
from sbus.errors import ListenError, UsageError
from sbus.protocol.keys import CURRENT, EARLY
from sbus.seqpacket.endpoints import SeqpacketServerEndpoint
from sbus.server.components import FloodControls, credentials_policies, find_policy
from sbus.server.credentials import AccessSettings
from sbus.server.last_values import check_rules, parse_rule
from sbus.server.limits import Limits
from sbus.server.process import BusProcess
from sbus.server.recorder_process import RecordedBus, recorder_command, require_recorder, split_options
from sbus.server.service import BusService
from sbus.syscalls.addresses import default_address
from sbus.syscalls.listening import ListeningSocket

__all__ = ["Options", "makeService"]

_DIALECTS = {d.name: d for d in (CURRENT, EARLY)}
_DEFAULTS = Limits()
_EXAMPLES = """\
Examples, in the foreground:
  twistd --nodaemon --pidfile= sbus
  twistd --nodaemon --pidfile= sbus --socket=/run/sbus.sock --mode=0770 --group=bus
  twistd --nodaemon --pidfile= sbus --record=/var/lib/sbus/journal
"""


def _uid(text: str) -> int:
    if text.isascii() and text.isdigit():
        if int(text) > 2**32 - 2:
            raise UsageError(f"--allow-user={text}: a UID is less than 2^32 - 1")
        return int(text)
    try:
        return pwd.getpwnam(text).pw_uid
    except KeyError:
        raise UsageError(
            f"--allow-user={text}: there is no such user: give a UID, or a name from `getent passwd`"
        ) from None


class Options(CommandLine):
    """The command line of ``twistd sbus``."""

    command = "sbus"
    synopsis = "[options]"
    longdesc = "A local message bus: programs on this machine publish and subscribe over one Unix SEQPACKET socket."

    optParameters = [
        [
            "socket",
            "s",
            None,
            "Address to listen on: a path; @NAME or /dev/unix/abstract/HEX (abstract); /dev/unix/abstract (random, is "
            "printed); /dev/fd/N (inherited); systemd or systemd:NAME (socket activation) "
            "[default: /run/sbus.sock for root, else $XDG_RUNTIME_DIR/sbus.sock]",
        ],
        [
            "mode",
            "m",
            "0700",
            "Permissions of the socket's path, in octal",
        ],
        [
            "group",
            "g",
            None,
            "Group of the socket's path, a name or GID [default: the process's]",
        ],
        ["credentials", None, "kernel", "Policy that decides which clients may connect, subscribe and publish"],
        [
            "on-violation",
            None,
            "disconnect",
            "What to do when a client breaks the protocol: disconnect it, or ignore (drop the packet)",
            choice("on-violation", "disconnect", "ignore"),
        ],
        ["dialect", None, "current", "Protocol revision: current or early", choice("dialect", *_DIALECTS)],
        [
            "block-timeout",
            None,
            _DEFAULTS.block_timeout,
            "Seconds after which a client that blocks publishers and reads nothing is disconnected",
            amount("block-timeout", "seconds", float),
        ],
        [
            "queue-messages",
            None,
            _DEFAULTS.queue_messages,
            "Longest queue of a client, in messages",
            amount("queue-messages", "messages"),
        ],
        [
            "queue-bytes",
            None,
            _DEFAULTS.queue_bytes,
            "Longest queue of a client, in bytes",
            amount("queue-bytes", "bytes"),
        ],
        [
            "total-queue-bytes",
            None,
            _DEFAULTS.total_queue_bytes,
            "All queues together, in bytes",
            amount("total-queue-bytes", "bytes"),
        ],
        [
            "record",
            None,
            None,
            "Record the bus to the journal in this directory; the bus starts the recorder, restarts it if it dies, "
            "and stops it (see twistd sbus-recorder --help)",
        ],
        [
            "record-options",
            None,
            None,
            'Options for that recorder, in one argument, such as "--sync=0 --keep-days=7"',
            split_options,
        ],
        ["max-packet", None, _DEFAULTS.max_packet, "Longest packet, in bytes", amount("max-packet", "bytes")],
        [
            "max-clients",
            None,
            _DEFAULTS.max_clients,
            "Clients connected at the same time",
            amount("max-clients", "clients"),
        ],
        [
            "max-patterns",
            None,
            _DEFAULTS.max_patterns,
            "Different patterns that a client may subscribe to",
            amount("max-patterns", "patterns"),
        ],
        [
            "max-pattern-bytes",
            None,
            _DEFAULTS.max_pattern_bytes,
            "Bytes in all patterns of a client; each segment after a pattern's 16th counts as 256 more",
            amount("max-pattern-bytes", "bytes"),
        ],
        [
            "max-match-steps",
            None,
            _DEFAULTS.max_match_steps,
            "Steps that the wildcards of a user's patterns may add to the look-up of a key; root and the server's user "
            "may add any number",
            amount("max-match-steps", "steps"),
        ],
    ]

    optFlags = [
        [
            "reuse",
            "r",
            "Replace a leftover socket that no server listens on; live sockets and other files are never touched",
        ],
        ["auto-close", "c", "Stop when the last client has left"],
        [
            "block-across-users",
            None,
            "Let a client block the publishers of other users, too",
        ],
        [
            "no-interest",
            None,
            "Answer no questions about interest but those of root and the server's user",
        ],
    ]

    compData = usage.Completions(
        optActions={
            "on-violation": usage.CompleteList(["disconnect", "ignore"]),
            "dialect": usage.CompleteList(list(_DIALECTS)),
            "socket": usage.CompleteFiles(),
            "record": usage.CompleteDirs(),
            "allow-user": usage.CompleteUsernames(),
            "group": usage.CompleteGroups(),
        },
        multiUse=["allow-user", "last-value"],
    )

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self["allow-user"] = []
        self["last-value"] = []

    def opt_allow_user(self, user: str) -> None:
        """Name or UID of a user who may connect; repeatable [default: all that --mode admits; abstract: only root]"""
        self["allow-user"].append(_uid(user))

    opt_u = opt_allow_user

    def opt_last_value(self, rule: str) -> None:
        """PATTERN[,keys=N][,bytes=SIZE]: keep their last values; repeatable [default: none; keys=10000,bytes=16M]"""
        self["last-value"].append(parse_rule(rule))

    def getUsage(self, width: int | None = None) -> str:
        """Return the help, with the installed components."""
        controls = FloodControls()
        names = [
            name.decode(errors="replace") for kind in (controls.soft, controls.hard, controls.orders) for name in kind
        ]
        policies = "".join(f"\n  {p.name}: {p.description}" for p in credentials_policies().values())
        return (
            f"{super().getUsage(width)}\n{_EXAMPLES}\nInstalled credentials policies:{policies}\n"
            f"Installed strategies and orders, for clients to choose:\n  {' '.join(names)}\n"
        )

    def postOptions(self) -> None:
        """Check the options together, and make the components that they describe."""
        if self["socket"] is None:
            self["socket"] = default_address()
        self["mode"] = mode(self["mode"])
        self.limits = Limits(**{name: self[name.replace("_", "-")] for name in Limits.__dataclass_fields__})
        self.policy = find_policy(self["credentials"])
        self.controls = FloodControls()
        check_rules(self["last-value"], _DIALECTS[self["dialect"]])
        self.endpoint = _endpoint(self)
        if self["record-options"] is not None and not self["record"]:
            raise UsageError("--record-options is for the recorder: give --record=DIRECTORY too")
        if self["record"]:
            require_recorder()


def _endpoint(options: Options) -> SeqpacketServerEndpoint:
    from twisted.internet import reactor

    return SeqpacketServerEndpoint(
        reactor,
        options["socket"],
        mode=options["mode"],
        group=options["group"],
        reuse=bool(options["reuse"]),
        max_packet=options.limits.max_packet,
    )


def _recorder(options: Options, bound: ListeningSocket) -> list[bytes]:
    """Return the recorder's command, after making sure that it can connect."""
    uid = None if options.parent is None else options.parent.get("uid")
    if uid is not None:
        # The recorder runs as the user that the server becomes; with the default mode only root could connect.
        bound.give_to(uid)
    return recorder_command(
        bound.address,
        options["record"],
        dialect=options["dialect"],
        max_packet=options.limits.max_packet,
        options=options["record-options"] or (),
    )


def makeService(options: Options) -> IService:
    """Return the service that the options describe.

    It binds the socket here already: before the process becomes a daemon, so that the caller sees why it fails, and
    before it drops its privileges.

    :raises SystemExit: with one line, if the address cannot be listened on.
    """
    from twisted.internet import reactor

    use_monotonic_clock(reactor)
    signals = DeferredSignals()
    try:
        bound = options.endpoint.bind()
        try:
            recorder = _recorder(options, bound) if options["record"] else None
        except UsageError:
            bound.close()
            raise
    except (ListenError, UsageError) as e:
        signals.restore()
        raise SystemExit(f"sbus: {e}") from None
    signals.hand_over(reactor)
    atexit.register(bound.close)
    address = bound.address
    if options["socket"] == "/dev/unix/abstract":
        print(address.text, flush=True)
    access = AccessSettings(
        allowed_users=frozenset(options["allow-user"]) if options["allow-user"] else None,
        is_abstract=address.is_abstract,
        block_across_users=bool(options["block-across-users"]),
    )
    bus = BusService(
        options.endpoint,
        options.policy.make(access),
        options.limits,
        dialect=_DIALECTS[options["dialect"]],
        ignore_violations=options["on-violation"] == "ignore",
        public_interest=not options["no-interest"],
        last_values=tuple(options["last-value"]),
        controls=options.controls,
    )
    parent = MultiService()
    BusProcess(bus, bool(options["auto-close"])).setServiceParent(parent)
    service = bus if recorder is None else RecordedBus(bus, recorder)
    service.setServiceParent(parent)
    return parent
