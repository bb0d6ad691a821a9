"""The limits of a bus: for one client, and for all clients together."""

from __future__ import annotations

import functools
import os
import re
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

from sbus.errors import UsageError
from sbus.flood import USER_PAYLOADS, MemoryAccount, QueueLimits
from sbus.protocol.packets import DEFAULT_MAX_PACKET
from sbus.server.core.listeners import parse_user
from sbus.syscalls.sockets import LONGEST_PACKET

__all__ = ["MAX_REPLIES", "Limits", "cgroup_limits", "default_max_memory", "parse_user_clients"]

MAX_REPLIES = 64
"""Replies in a client's queue past which the server does not read from the client."""

_LARGEST_PACKET = 1 << 30
_CACHE = 16
"""The part of the memory (one over it) that is set aside for the route cache."""
_INTERPRETER = 48 << 20
"""Bytes that the process takes without clients."""
_LEAST_DEFAULT = 16 << 20
"""The smallest default of ``--max-memory``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one bus.

    Each option of ``twistd sbus`` with the same name sets one; `max_match_steps` has no option. Those of one user are
    where `sbus.server.core.shares` begins.

    :ivar max_packet: bytes in the longest packet.
    :ivar max_payload: bytes in the longest payload in sealed memory.
    :ivar max_clients: connections at one time.
    :ivar user_clients: connections of one user at one time. Root and the server's own user have none of the limits of
        one user.
    :ivar user_clients_of: by UID, the connections of users who may have another number of them.
    :ivar user_accepts: connections of one user that are accepted in a second, and five times that at once.
    :ivar user_patterns: patterns of all clients of one user together.
    :ivar user_payloads: memfds with large messages of one publisher's user that wait in queues; root and the
        server's user have this limit too, because descriptors are few.
    :ivar max_patterns: different patterns of one client.
    :ivar max_pattern_bytes: the cost of one client's patterns together, by `sbus.protocol.patterns.pattern_cost`.
    :ivar max_match_steps: steps that the wildcards of one user can add to the look-up of a key, by
        `sbus.routing.cost.MatchCost`; root and the server's own user have no such limit.
    :ivar queue_messages: messages in one client's queue.
    :ivar queue_bytes: bytes of packets in one client's queue.
    :ivar total_queue_bytes: bytes of packets in all queues together.
    :ivar max_memory: bytes of memory that all clients may make the server hold, in its process and in the kernel; None
        for `default_max_memory`.
    :ivar user_memory: bytes of these that one user may hold; None for a quarter.
    :ivar block_timeout: seconds after which a client that blocks publishers and takes no packet is disconnected.
    """

    max_packet: int = DEFAULT_MAX_PACKET
    max_payload: int = 64 << 20
    max_clients: int = 16_384
    user_clients: int = 256
    user_clients_of: Mapping[int, int] = field(default_factory=dict, hash=False)
    user_accepts: int = 200
    user_patterns: int = 32_768
    user_payloads: int = USER_PAYLOADS
    max_patterns: int = 16_384
    max_pattern_bytes: int = 1 << 20
    max_match_steps: int = 1024
    queue_messages: int = 65_536
    queue_bytes: int = 64 << 20
    total_queue_bytes: int = 256 << 20
    max_memory: int | None = None
    user_memory: int | None = None
    block_timeout: float = 30.0

    def __post_init__(self) -> None:
        if not isinstance(self.user_clients_of, Mapping):
            raise UsageError(f"user_clients_of is {self.user_clients_of!r}: it must be a dict from UIDs to numbers")
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "user_clients_of" or (value is None and each.default is None):
                continue
            _check(each.name, value, isinstance(each.default, float))
        for uid, clients in self.user_clients_of.items():
            _check(f"user_clients_of[{uid}]", clients)
        if self.max_packet < 64:
            raise UsageError(f"max_packet is {self.max_packet}: replies of the server take up to 64 bytes")
        if self.max_packet > _LARGEST_PACKET:
            raise UsageError(
                f"max_packet is {self.max_packet}: no socket sends more than {_LARGEST_PACKET} bytes at once"
            )

    @property
    def announced(self) -> bytes:
        """The answer to ``bye/on``: the longest packet that is delivered, if a client expects another limit."""
        longest = min(self.max_packet, LONGEST_PACKET)
        return b"" if longest == DEFAULT_MAX_PACKET else b"%d" % longest

    def memory_account(self) -> tuple[MemoryAccount, int]:
        """Return a new account with the limits of memory, and the bytes set aside for the route cache."""
        limit = default_max_memory() if self.max_memory is None else self.max_memory
        of_user = max(1, limit // 4) if self.user_memory is None else self.user_memory
        cache = limit // _CACHE
        return MemoryAccount(limit - cache, of_user), cache

    @property
    def queue(self) -> QueueLimits:
        """Return the limits of one client's queue."""
        return QueueLimits(self.queue_messages, self.queue_bytes)


def _check(name: str, value: object, may_be_float: bool = False) -> None:
    """Check one limit.

    :raises UsageError: if it is no number above 0.
    """
    if not isinstance(value, (int, float) if may_be_float else int):
        raise UsageError(f"{name} is {value!r}: it must be a {'number' if may_be_float else 'whole number'}")
    if not value > 0:
        raise UsageError(f"{name} is {value}: it must be more than 0")


def parse_user_clients(text: str) -> tuple[int | None, int]:
    """Parse the value of ``--user-clients``: ``256``, or ``NAME=4096`` for one user.

    :returns: the user's UID, or None for all other users, and the number of clients.
    :raises UsageError: if that is not what the text is, with the remedy.
    """
    user, is_named, number = text.rpartition("=")
    option = f"--user-clients={text}"
    clients = int(number) if re.fullmatch("[0-9]{1,9}", number, re.ASCII) else 0
    if not clients:
        raise UsageError(f"{option}: give a number of clients above 0, or that of one user, such as 1001=4096")
    if not is_named:
        return None, clients
    uid = parse_user(user, option)
    if uid == 0:
        raise UsageError(f"{option}: root may have any number of clients: leave the option out")
    return uid, clients


# --- the default limit of memory -------------------------------------------------------------


@functools.cache
def default_max_memory() -> int:
    """Return three quarters of what the process may take beside the interpreter, or half of the machine's memory.

    The process may take what its cgroup and RLIMIT_AS allow; if neither is limited, the machine's memory counts.
    """
    left = []
    cgroup = min(cgroup_limits(_read), default=None)
    if cgroup is not None and cgroup < _machine_memory():
        left.append(cgroup - _INTERPRETER)
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        left.append(soft - _address_space())
    return max(_LEAST_DEFAULT, min(left) * 3 // 4) if left else _machine_memory() // 2


def cgroup_limits(read: Callable[[str], str | None]) -> list[int]:
    """Return the limits of memory, in bytes, of this process's cgroup and of the groups above it (cgroups(7)).

    :param read: returns the content of a file, or None.
    """
    limits = []
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, name = "/sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            root, name = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be the host's, and the group's own files are at the root.
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            text = (read("/".join([root, *parts[:depth], name])) or "").strip()
            if text.isdigit():
                limits.append(int(text))
    return limits


def _read(path: str) -> str | None:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return None


def _machine_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _address_space() -> int:
    """Return the bytes of address space that this process uses."""
    return int((_read("/proc/self/statm") or "0").split()[0]) * os.sysconf("SC_PAGE_SIZE")
