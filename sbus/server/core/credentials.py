"""The built-in credentials policies.

They use the credentials that the kernel reports (``SO_PEERCRED``, unix(7)).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from zope.interface import implementer

from sbus.errors import Violation, ViolationReason
from sbus.protocol.keys import PeerCredentials, SecretKey
from sbus.server.core.interfaces import ICredentials, ICredentialsPolicy
from sbus.syscalls.sockets import overflow_ids
from sbus.syscalls.users import is_own_user, is_owner

_overflow_ids = functools.cache(overflow_ids)

__all__ = ["AccessSettings", "KernelCredentials", "KernelPolicy", "OwnUserPolicy", "is_proven"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    """The access options of a bus.

    :ivar allowed_users: UIDs that may connect besides the server's own; None for every user that can reach the socket.
    :ivar is_abstract: whether the address is an abstract one, which has no file mode to protect it.
    :ivar block_across_users: whether a receiver may also block publishers of other users.
    """

    allowed_users: frozenset[int] | None = None
    is_abstract: bool = False
    block_across_users: bool = False


def is_proven(peer: PeerCredentials) -> bool:
    """Return whether the IDs of a peer prove who it is.

    PID 0 and the overflow IDs, as containers show them, are shared by many processes.
    """
    overflow_uid, overflow_gid = _overflow_ids()
    return peer.pid != 0 and peer.uid != overflow_uid and peer.gid != overflow_gid


@implementer(ICredentials)
class KernelCredentials:
    """Decides by the peer credentials.

    Protocol: "Secret keys", "Flood control".

    A client whose IDs prove nothing (`is_proven`) gets no secrets.

    :param allowed: UIDs that may connect besides the server's own; None for all.
    """

    restrictsPublishing = False
    verdictSeconds = 0.0

    def __init__(self, settings: AccessSettings, allowed: Iterable[int] | None) -> None:
        self._settings = settings
        self._allowed = None if allowed is None else frozenset(allowed)

    def mayConnect(self, peer: PeerCredentials) -> bool:
        return self._allowed is None or peer.uid in self._allowed or is_own_user(peer.uid)

    def checkSubscription(self, peer: PeerCredentials, pattern: bytes, secret: SecretKey | None) -> None:
        if not secret:
            return
        if not is_proven(peer):
            raise Violation(ViolationReason.UNPROVEN_IDENTITY)
        if not secret.belongs_to(peer):
            raise Violation(ViolationReason.FOREIGN_SECRET)

    def mayPublish(self, peer: PeerCredentials, key: bytes) -> bool:
        return True

    def mayBlock(self, receiver: PeerCredentials, publisher: PeerCredentials) -> bool:
        return self._settings.block_across_users or receiver.uid == publisher.uid or is_owner(receiver.uid)


@implementer(ICredentialsPolicy)
class KernelPolicy:
    """Admits every user that may write to the socket's path.

    On an abstract address it admits the server's user and root.
    """

    name = "kernel"
    description = "checks the peer credentials from the kernel, and --allow-user (the default)"

    def make(self, settings: AccessSettings) -> KernelCredentials:
        allowed = settings.allowed_users
        if allowed is None and settings.is_abstract:
            allowed = frozenset((0,))
        return KernelCredentials(settings, allowed)


@implementer(ICredentialsPolicy)
class OwnUserPolicy:
    """Admits only the server's own user, whatever the socket's mode is."""

    name = "own-user"
    description = "like kernel, but only the server's own user may connect"

    def make(self, settings: AccessSettings) -> KernelCredentials:
        return KernelCredentials(settings, frozenset())
