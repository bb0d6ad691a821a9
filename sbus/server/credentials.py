"""Who may do what: the credentials policy that goes by the kernel's word alone."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from zope.interface import implementer

from sbus.errors import Violation, ViolationReason
from sbus.protocol.keys import PeerCredentials, SecretKey
from sbus.server.interfaces import ICredentials, ICredentialsPolicy
from sbus.syscalls.sockets import overflow_ids

__all__ = ["AccessSettings", "KernelCredentials", "KernelPolicy", "OwnUserPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    """What a bus was told about who may use it.

    :ivar allowed_users: UIDs that may connect besides the server's own; None: whoever can reach the socket.
    :ivar is_abstract: the address has no file mode that could keep anybody out.
    :ivar block_across_users: a receiver may hold back publishers of other users too.
    """

    allowed_users: frozenset[int] | None = None
    is_abstract: bool = False
    block_across_users: bool = False


@implementer(ICredentials)
class KernelCredentials:
    """The kernel's word on the peer (``SO_PEERCRED``) decides, as the protocol's page has it.

    IDs that many share prove nothing (PID 0 and the overflow IDs, as containers show them), so who
    has one gets no secrets.
    """

    restrictsPublishing = False

    def __init__(self, settings: AccessSettings, allowed: Iterable[int] | None) -> None:
        self._settings = settings
        self._allowed = None if allowed is None else frozenset(allowed)
        self._overflow_uid, self._overflow_gid = overflow_ids()

    # The server's own user is asked for each time: it is another one after twistd --uid or --euid has given root up.

    def mayConnect(self, peer: PeerCredentials) -> bool:
        return self._allowed is None or peer.uid in self._allowed or peer.uid == os.geteuid()

    def checkSubscription(self, peer: PeerCredentials, pattern: bytes, secret: SecretKey | None) -> None:
        if not secret:
            return
        if peer.pid == 0 or peer.uid == self._overflow_uid or peer.gid == self._overflow_gid:
            raise Violation(ViolationReason.UNPROVEN_IDENTITY)
        if not secret.belongs_to(peer):
            raise Violation(ViolationReason.FOREIGN_SECRET)

    def mayPublish(self, peer: PeerCredentials, key: bytes) -> bool:
        return True

    def mayBlock(self, receiver: PeerCredentials, publisher: PeerCredentials) -> bool:
        return self._settings.block_across_users or receiver.uid == publisher.uid or receiver.uid in (0, os.geteuid())


@implementer(ICredentialsPolicy)
class KernelPolicy:
    """Whoever may write to the socket's path; on an abstract address only the server's user and root."""

    name = "kernel"
    description = "go by the kernel's word on the peer and by --allow-user (the default)"

    def make(self, settings: AccessSettings) -> KernelCredentials:
        allowed = settings.allowed_users
        if allowed is None and settings.is_abstract:
            allowed = frozenset((0,))
        return KernelCredentials(settings, allowed)


@implementer(ICredentialsPolicy)
class OwnUserPolicy:
    """Nobody but the server's own user, whatever the socket's mode is."""

    name = "own-user"
    description = "as kernel, but nobody connects except the server's own user"

    def make(self, settings: AccessSettings) -> KernelCredentials:
        return KernelCredentials(settings, frozenset())
