"""``twistd sbus``: its options, and the service that they describe."""

from __future__ import annotations

import atexit
import os
import pwd

from twisted.application.service import IService
from twisted.python import usage

from sbus.daemon.options import CommandLine, amount, choice, mode
from sbus.daemon.service import MultiService
from sbus.daemon.signals import DeferredSignals
from sbus.errors import ListenError, UsageError
from sbus.protocol.keys import CURRENT, EARLY
from sbus.seqpacket.endpoints import SeqpacketServerEndpoint
from sbus.server.components import FloodControls, credentials_policies, find_policy
from sbus.server.credentials import AccessSettings
from sbus.server.limits import Limits
from sbus.server.process import BusProcess
from sbus.server.recorder_process import RecordedBus, recorder_command, require_recorder, split_options
from sbus.server.service import BusService
from sbus.syscalls.addresses import default_address
from sbus.syscalls.listening import ListeningSocket

__all__ = ["Options", "makeService"]

_DIALECTS = {d.name: d for d in (CURRENT, EARLY)}
_DEFAULTS = Limits()


def _uid(text: str) -> int:
    if text.isascii() and text.isdigit():
        if int(text) > 2**32 - 2:
            raise UsageError(f"--allow-user={text}: a UID is less than 2^32 - 1")
        return int(text)
    try:
        return pwd.getpwnam(text).pw_uid
    except KeyError:
        raise UsageError(
            f"--allow-user={text}: there is no such user: give a name that `getent passwd` knows, or a UID"
        ) from None


class Options(CommandLine):
    """The command line of ``twistd sbus``."""

    command = "sbus"
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
            "0700",
            "Permissions of the socket's path, octal; it never has more",
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
            choice("on-violation", "disconnect", "ignore"),
        ],
        ["dialect", None, "current", "Revision of the protocol: current or early", choice("dialect", *_DIALECTS)],
        [
            "block-timeout",
            None,
            _DEFAULTS.block_timeout,
            "Seconds for which a client that holds publishers back may take nothing before it is disconnected",
            amount("block-timeout", "seconds", float),
        ],
        [
            "queue-messages",
            None,
            _DEFAULTS.queue_messages,
            "Messages that may wait for one client",
            amount("queue-messages", "messages"),
        ],
        [
            "queue-bytes",
            None,
            _DEFAULTS.queue_bytes,
            "Bytes that may wait for one client",
            amount("queue-bytes", "bytes"),
        ],
        [
            "total-queue-bytes",
            None,
            _DEFAULTS.total_queue_bytes,
            "Bytes that may wait for all clients",
            amount("total-queue-bytes", "bytes"),
        ],
        [
            "record",
            None,
            None,
            "Have the bus recorded: directory of the journal that a recorder, started and watched over by the bus, "
            "writes (see twistd sbus-recorder --help)",
        ],
        [
            "record-options",
            None,
            None,
            'More options for that recorder, in one argument, as "--sync=0 --keep-days=7"',
            split_options,
        ],
        ["max-packet", None, _DEFAULTS.max_packet, "Bytes in the longest packet", amount("max-packet", "bytes")],
        [
            "max-clients",
            None,
            _DEFAULTS.max_clients,
            "Clients connected at one time",
            amount("max-clients", "clients"),
        ],
        [
            "max-patterns",
            None,
            _DEFAULTS.max_patterns,
            "Different patterns that one client may hold",
            amount("max-patterns", "patterns"),
        ],
        [
            "max-pattern-bytes",
            None,
            _DEFAULTS.max_pattern_bytes,
            "Bytes in the patterns that one client may hold (a segment past a pattern's 16th counts 256 more)",
            amount("max-pattern-bytes", "bytes"),
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
            "record": usage.CompleteDirs(),
            "allow-user": usage.CompleteUsernames(),
            "group": usage.CompleteGroups(),
        },
        multiUse=["allow-user"],
    )

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self["allow-user"] = []

    def opt_allow_user(self, user: str) -> None:
        """User (name or UID) who may connect; repeatable. The server's own user always may. [default: whoever the
        socket's mode lets in; on an abstract address root]"""
        self["allow-user"].append(_uid(user))

    opt_u = opt_allow_user

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
        """Make the components that the options describe."""
        if self["socket"] is None:
            self["socket"] = default_address()
        self["mode"] = mode(self["mode"])
        self.limits = Limits(**{name: self[name.replace("_", "-")] for name in Limits.__dataclass_fields__})
        self.policy = find_policy(self["credentials"])
        self.controls = FloodControls()
        self.endpoint = _endpoint(self)
        if self["record-options"] is not None and not self["record"]:
            raise UsageError("--record-options is for the recorder: say --record=DIRECTORY too")
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
    """The command of the recorder, which will be able to connect."""
    uid = None if options.parent is None else options.parent.get("uid")
    if bound.path is not None and uid is not None:
        # It runs as the user that the server becomes; a path with the default mode would let nobody in but root.
        os.chown(bound.path, uid, -1, follow_symlinks=False)
    return recorder_command(
        bound.address,
        options["record"],
        dialect=options["dialect"],
        max_packet=options.limits.max_packet,
        options=options["record-options"] or (),
    )


def makeService(options: Options) -> IService:
    """The service that the options describe (`twisted.application.service.IServiceMaker`).

    The socket is made already here: before the process becomes a daemon, so that whoever starts it
    sees why it cannot, and before it gives up its privileges.

    :raises SystemExit: with one line, if the address cannot be listened on.
    """
    from twisted.internet import reactor

    early = DeferredSignals()
    try:
        bound = options.endpoint.bind()
        try:
            recorder = _recorder(options, bound) if options["record"] else None
        except UsageError:
            bound.close()
            raise
    except (ListenError, UsageError) as e:
        early.restore()
        raise SystemExit(f"sbus: {e}") from None
    early.hand_over(reactor)
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
        controls=options.controls,
    )
    parent = MultiService()
    BusProcess(bus, bool(options["auto-close"])).setServiceParent(parent)
    service = bus if recorder is None else RecordedBus(bus, recorder)
    service.setServiceParent(parent)
    return parent
