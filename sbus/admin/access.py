"""Access to the admin socket, decided by the peer credentials from the kernel alone.

Root and the server's own user may ask everything. Members of the admin group may ask everything but what is published.
Members of the metrics group may read ``/metrics``. A group counts whether it is a process's primary or a supplementary
one (``SO_PEERGROUPS``, socket(7)).
"""

from __future__ import annotations

import grp
import socket
from dataclasses import dataclass

from sbus.errors import UsageError
from sbus.protocol.keys import PeerCredentials
from sbus.syscalls.names import is_number
from sbus.syscalls.sockets import peer_credentials, peer_groups
from sbus.syscalls.users import is_owner

__all__ = ["METRICS", "Access", "Authority", "parse_group"]

METRICS = "/metrics"
"""The path that the metrics group may read."""


def parse_group(text: str, option: str) -> int:
    """Return the GID of a group.

    :param text: a GID in decimal, or a name.
    :raises UsageError: if there is no such group.
    """
    if is_number(text) and int(text) < 2**32 - 1:
        return int(text)
    try:
        return grp.getgrnam(text).gr_gid
    except (KeyError, ValueError):
        raise UsageError(f"{option}={text}: there is no such group: name one that `getent group` lists") from None


@dataclass(frozen=True, slots=True)
class Authority:
    """The rights of a peer.

    :ivar peer: its credentials, from the kernel.
    :ivar is_owner: whether it is root or the server's own user, which may also see what is published.
    :ivar is_admin: whether it may ask everything else.
    :ivar may_read: whether it may read the metrics.
    """

    peer: PeerCredentials
    is_owner: bool
    is_admin: bool
    may_read: bool


@dataclass(frozen=True, slots=True)
class Access:
    """The groups that may ask.

    :ivar admin: the GID of the group that may ask everything; None: no group.
    :ivar metrics: the GID of the group that may read the metrics; None: no group.
    """

    admin: int | None = None
    metrics: int | None = None

    def authority(self, sock: socket.socket) -> Authority:
        """Return what the peer of a connection may ask."""
        peer = peer_credentials(sock)
        if is_owner(peer.uid):
            return Authority(peer, True, True, True)
        groups = {peer.gid, *peer_groups(sock)} if self.admin is not None or self.metrics is not None else {peer.gid}
        is_admin = self.admin is not None and self.admin in groups
        return Authority(peer, False, is_admin, is_admin or (self.metrics is not None and self.metrics in groups))

    @property
    def owner(self) -> int | None:
        """The group that the socket's path is given to; None: the process's."""
        return self.admin if self.metrics is None else None

    @property
    def mode(self) -> int:
        """The permissions of the socket's path that let these groups connect; each request is checked as well."""
        if self.metrics is not None:
            return 0o666
        return 0o600 if self.admin is None else 0o660
