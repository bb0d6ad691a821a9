"""The command line of ``twistd sbus``: its options, and the combinations that are errors."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

from twisted.python import usage

import sbus.policy
from sbus.admin.access import Access, parse_group
from sbus.admin.locate import admin_path
from sbus.daemon.options import CommandLine, amount, choice, duration, mode, size
from sbus.errors import UsageError
from sbus.policy.rules import LEAST_USER_MEMORY
from sbus.protocol.keys import CURRENT, DIALECTS
from sbus.protocol.patterns import shape
from sbus.seqpacket.systemd import passed_names
from sbus.server.asks.last_values import check_rules, parse_rule
from sbus.server.bus.memory import LEAST_MAX_MEMORY
from sbus.server.core.components import FloodControls, credentials_policies, find_policy
from sbus.server.core.limits import Limits, parse_user_clients
from sbus.server.core.listeners import (
    MAIN,
    ListenOption,
    check_names,
    parse_listen,
    parse_user,
    passed_admin,
    passed_sockets,
)
from sbus.server.run.recorder import require_recorder, split_options
from sbus.syscalls.addresses import default_address, parse

if TYPE_CHECKING:
    from sbus.policy import Policy

__all__ = ["Options"]

_DEFAULTS = Limits()
_LONGEST_NAME = 200
_EXAMPLES = """\
Examples, in the foreground:
  twistd --nodaemon sbus
  twistd --nodaemon sbus --socket=/run/sbus.sock --mode=0770 --group=bus
  twistd --nodaemon sbus --record=/var/lib/sbus/journal
"""


class Options(CommandLine):
    """The command line of ``twistd sbus``.

    :ivar main_sockets: the label and the address of each socket of ``--socket``; systemd can pass several.
    :ivar labels: the labels of all sockets.
    """

    command = "sbus"
    synopsis = "[options]"
    longdesc = "A local message bus: programs on this machine publish and subscribe over one Unix SEQPACKET socket."
    gone = {
        "--upstream-inside": "--upstream=ADDRESS starts the link as a process of its own; leave --upstream-inside out"
    }
    deprecated = {
        **CommandLine.deprecated,
        "max-match-steps": f"leave it out: {_DEFAULTS.max_match_steps} steps will be the limit",
        "metrics-group": "--admin-group=GROUP,metrics replaces it",
    }
    limit_options = frozenset(name.replace("_", "-") for name in Limits.__dataclass_fields__)

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
            "policy",
            None,
            None,
            "File, or directory of *.toml, with the rights to publish and subscribe; SIGHUP reads it again "
            "[default: none]",
        ],
        [
            "on-violation",
            None,
            "disconnect",
            "Reaction to a client that breaks the protocol: disconnect it, or ignore (drop the packet)",
            choice("on-violation", "disconnect", "ignore"),
        ],
        ["dialect", None, "current", "Protocol revision: current or early", choice("dialect", *DIALECTS)],
        [
            "block-timeout",
            None,
            _DEFAULTS.block_timeout,
            "Seconds after which a client that blocks publishers and reads nothing is disconnected",
            duration("block-timeout", 0.001),
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
            size("queue-bytes"),
        ],
        [
            "total-queue-bytes",
            None,
            _DEFAULTS.total_queue_bytes,
            "All queues together, in bytes",
            size("total-queue-bytes"),
        ],
        [
            "max-memory",
            None,
            None,
            "Memory that all clients together may take, such as 64M or 2G; at it, the largest client of the user with "
            "most is disconnected [default: three quarters of what cgroup or RLIMIT_AS leave, else half of the "
            "machine's]",
            size("max-memory", LEAST_MAX_MEMORY),
        ],
        [
            "user-memory",
            None,
            None,
            "The part of it that one user may take; root and the server's user may take any "
            "[default: a quarter of --max-memory]",
            size("user-memory", LEAST_USER_MEMORY),
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
        [
            "upstream",
            None,
            None,
            "Address of a bus that becomes this one's master; the bus starts a link to it, and restarts it if it dies "
            "(see twistd sbus-link --help)",
        ],
        [
            "name",
            None,
            None,
            "Name of the bus, for people: a link reports it when it finds a loop [default: the address]",
        ],
        [
            "admin",
            None,
            None,
            "Path of the admin socket: metrics and requests of operators (HTTP); auto: the path of the bus with .admin "
            "appended; systemd:NAME [default: the one that systemd passes as admin, else none]",
        ],
        ["metrics-group", None, None, "", functools.partial(parse_group, option="--metrics-group")],
        ["max-packet", None, _DEFAULTS.max_packet, "Longest packet, in bytes", size("max-packet")],
        [
            "max-payload",
            None,
            _DEFAULTS.max_payload,
            "Longest payload in sealed memory, in bytes",
            size("max-payload"),
        ],
        [
            "max-clients",
            None,
            _DEFAULTS.max_clients,
            "Clients connected at the same time",
            amount("max-clients", "clients"),
        ],
        [
            "user-accepts",
            None,
            _DEFAULTS.user_accepts,
            "Connections of one user accepted in a second, and five times that at once",
            amount("user-accepts", "connections"),
        ],
        [
            "user-patterns",
            None,
            _DEFAULTS.user_patterns,
            "Different patterns that all clients of one user may subscribe to, together",
            amount("user-patterns", "patterns"),
        ],
        [
            "user-payloads",
            None,
            _DEFAULTS.user_payloads,
            "Memfds (memory files) with large messages of one user, root included, that may wait in queues",
            amount("user-payloads", "memfds"),
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
            size("max-pattern-bytes"),
        ],
        ["max-match-steps", None, None, "", amount("max-match-steps", "steps")],
    ]

    optFlags = [
        [
            "reuse",
            "r",
            "Changes nothing: a leftover socket that no server listens on is always replaced; live sockets and other "
            "files are never touched",
        ],
        ["auto-close", "c", "Stop when the last client has left"],
        ["check", None, "Check all options and the files and users in them, print the actions of the bus, and exit"],
        [
            "block-across-users",
            None,
            "Let a client block the publishers of other users, too",
        ],
        [
            "subuid-as-owner",
            None,
            "Count all UIDs of a range in /etc/subuid as the range's owner, for limits and turns",
        ],
        [
            "upstream-secrets",
            None,
            "Give secret messages that are not for clients of this bus to its link, to be carried up",
        ],
        [
            "no-interest",
            None,
            "Answer no questions about interest but those of root and the server's user",
        ],
        [
            "no-sender",
            None,
            "Name the publishers of messages only to root and the server's user",
        ],
    ]

    compData = usage.Completions(
        optActions={
            "on-violation": usage.CompleteList(["disconnect", "ignore"]),
            "dialect": usage.CompleteList(list(DIALECTS)),
            "socket": usage.CompleteFiles(),
            "policy": usage.CompleteFiles(),
            "record": usage.CompleteDirs(),
            "upstream": usage.CompleteFiles(),
            "allow-user": usage.CompleteUsernames(),
            "group": usage.CompleteGroups(),
        },
        multiUse=["allow-user", "last-value", "listen", "stream", "upstream-out", "upstream-in", "user-clients"],
    )

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self["admin-group"] = {}
        self["allow-user"] = []
        self["listen"] = []
        self["user-clients"] = _DEFAULTS.user_clients
        self["user-clients-of"] = {}
        self["last-value"] = []
        self["upstream-out"] = []
        self["upstream-in"] = []

    def opt_admin_group(self, group: str) -> None:
        """Group, a name or GID, whose members may ask everything there; with GROUP,metrics: may read /metrics alone"""
        name, _, what = group.partition(",")
        if what not in ("", "metrics"):
            raise UsageError(f"--admin-group={group}: give GROUP, or GROUP,metrics for a group that may read /metrics")
        self["admin-group"][what] = parse_group(name, "--admin-group")

    def opt_allow_user(self, user: str) -> None:
        """Name or UID of a user who may connect; repeatable [default: all that --mode admits; abstract: only root]"""
        self["allow-user"].append(parse_user(user, f"--allow-user={user}"))

    opt_u = opt_allow_user

    def opt_listen(self, socket: str) -> None:
        """One more socket, NAME=ADDRESS[,mode=OCTAL][,group=GROUP][,users=USER:USER][,max-clients=N]; repeatable"""
        self["listen"].append(parse_listen(socket))

    def opt_stream(self, socket: str) -> None:
        """A stream socket for clients without SEQPACKET, such as Node and Java; its value is as that of --listen"""
        self["listen"].append(parse_listen(socket, stream=True))

    def opt_user_clients(self, clients: str) -> None:
        """Clients of each user but root and the server's, or USER=CLIENTS for one user; repeatable [default: 256]"""
        uid, most = parse_user_clients(clients)
        if uid is None:
            self["user-clients"] = most
        else:
            self["user-clients-of"][uid] = most

    def opt_last_value(self, rule: str) -> None:
        """PATTERN[,keys=N][,bytes=SIZE]: keep their last values; repeatable [default: none; keys=10000,bytes=16M]"""
        self["last-value"].append(parse_rule(rule))

    def opt_upstream_out(self, pattern: str) -> None:
        """Pattern of messages that may go up to the master; repeatable [default: none]"""
        self["upstream-out"].append(os.fsencode(pattern))

    def opt_upstream_in(self, pattern: str) -> None:
        """Pattern of messages that may come down from the master; repeatable [default: none]"""
        self["upstream-in"].append(os.fsencode(pattern))

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
        limits = {name: self[name.replace("_", "-")] for name in Limits.__dataclass_fields__}
        self.limits = Limits(**{name: value for name, value in limits.items() if value is not None})
        self.credentials = find_policy(self["credentials"])
        self.controls = FloodControls()
        self.main_sockets = [(MAIN.name, self["socket"])]
        if self["socket"] == "systemd":
            self.main_sockets = passed_sockets(passed_names(), self["listen"])
        self.labels = [*(name for name, _ in self.main_sockets), *(option.name for option in self["listen"])]
        check_names(self.labels)
        self.policy = self._policy()
        if self["allow-user"]:
            _check_users(self["listen"], self["allow-user"])
        parse(self["socket"])
        check_rules(self["last-value"], DIALECTS[self["dialect"]])
        if self["record-options"] is not None and not self["record"]:
            raise UsageError("--record-options is for the recorder: give --record=DIRECTORY too")
        if self["record"]:
            require_recorder()
        self["admin"] = self._admin()
        self._check_upstream()
        groups = self["admin-group"]
        if self["metrics-group"] is not None:
            groups["metrics"] = self["metrics-group"]
        if groups and self["admin"] is None:
            raise UsageError("--admin-group is for the admin socket: give --admin=PATH too")
        self.access = Access(groups.get(""), groups.get("metrics"))

    def _policy(self) -> Policy | None:
        """Return the policy, if there is one.

        :raises PolicyError: if it is wrong.
        """
        if self["policy"] is None:
            return None
        if self["dialect"] != CURRENT.name:
            raise UsageError("--policy needs the current dialect: leave --dialect or --policy out")
        return sbus.policy.load(self["policy"], listeners=self.labels)

    def _admin(self) -> str | None:
        """Return the address of the admin socket, or None."""
        given: str | None = self["admin"]
        passed = passed_admin(passed_names(), self["listen"])
        if given is None or given == "auto":
            return passed or (admin_path(self["socket"]) if given is not None else None)
        return given or None

    def _check_upstream(self) -> None:
        """Check the options of the link.

        :raises UsageError: if they are wrong.
        """
        name = self["name"]
        if name is not None and not (name.isprintable() and 0 < len(name.encode()) <= _LONGEST_NAME):
            raise UsageError(f"--name={name}: give up to {_LONGEST_NAME} bytes of text in one line")
        if self["dialect"] != CURRENT.name and (self["upstream"] or self["upstream-secrets"]):
            raise UsageError("--upstream needs control messages, which the early dialect does not have")
        if self["upstream"] == "":
            raise UsageError("--upstream= has no address: give the master's, or leave the option out")
        for option in ("upstream-out", "upstream-in"):
            if self[option] and not self["upstream"]:
                raise UsageError(f"--{option} is for the link: give --upstream=ADDRESS too")
        for option in ("upstream-out", "upstream-in"):
            for pattern in self[option]:
                if pattern.startswith(b"!/") or shape(pattern) is None:
                    raise UsageError(f"--{option}={os.fsdecode(pattern)}: no open key matches it: see 'sbus match'")
        if self["upstream"] and not parse(self["upstream"]).name:
            raise UsageError(
                f"--upstream={self['upstream']}: a client cannot connect to this address: give a path or @NAME"
            )


def _check_users(listen: list[ListenOption], allowed: list[int]) -> None:
    """Check that the users of each socket may use the bus."""
    for option in listen:
        for uid in sorted((option.users or frozenset()) - frozenset(allowed)):
            raise UsageError(
                f"{option.text}: user {uid} may not use this bus: add --allow-user={uid}, or leave out every "
                "--allow-user"
            )
