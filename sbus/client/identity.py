"""Clients as the server names them: this one, the senders of messages, and what to do when a name proves nothing.

The server names a client by the IDs that the kernel reports for it (unix(7), ``SO_PEERCRED``). Across namespaces the
kernel has no ID to report: a process outside of the server's PID namespace has the PID 0, and a user without a mapping
in the server's user namespace has the overflow UID, usually 65534. Many processes share such a name, so the server
refuses them secret keys, and disconnects a client that subscribes to one. A client that knows its name can do better:
it raises an error that explains the problem, and it accepts no sender with such a name as a user.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sbus.errors import InvalidKey, UsageError, ViolationReason
from sbus.protocol.notices import NOBODY, parse_sender, split_credentials
from sbus.syscalls.sockets import overflow_ids

__all__ = ["Sender", "check_name", "explain_name"]

_LONGEST_UID = 20
"""Digits in the longest text that is a UID; Python turns thousands of them into no number."""
_LINK = re.compile(rb"!/cred/(\d+)/(\d+)/(\d+)")


def explain_name(me: bytes) -> str | None:
    """Explain why a name proves nothing, and what to do; None if it is a client's own.

    :param me: the name as ``whoami`` returns it.
    """
    uid, gid = overflow_ids()
    ids = [tuple(map(int, link)) for link in _LINK.findall(me)]
    causes = []
    if any(link[2] == 0 for link in ids):
        causes.append(
            "the server runs in another PID namespace and cannot see this process: run both in one (containers: "
            "--pid=host for the server, or a shared process namespace for the pod)"
        )
    if any(link[1] == uid or link[0] == gid for link in ids):
        causes.append(
            "the server's user namespace has no ID for this user: run both in one user namespace (containers: "
            "--userns=host for the server), or map the user"
        )
    if not causes:
        return None
    return f"the server knows this process as {me.decode(errors='replace')}, as it does others: {'; and '.join(causes)}"


def check_name(me: bytes) -> None:
    """Check that the server will let a client with this name have secret keys.

    :raises sbus.errors.InvalidKey: with the cause and the remedy, if it will not.
    """
    if (explanation := explain_name(me)) is not None:
        raise InvalidKey(
            f"requests, inboxes and proofs need a private key, and there is none: {explanation}",
            ViolationReason.UNPROVEN_IDENTITY,
        )


@dataclass(frozen=True, slots=True)
class Sender:
    """The publisher of a message, as the server knows it: nothing that a client sends can change it.

    ``str(sender)`` is the name that ``whoami`` returns to the publisher. The program around an embedded bus has the
    number 0, no IDs and the name ``-``.

    :ivar number: the number of its connection at its own bus, as ``sbus clients`` lists it there; never reused.
    :ivar gid: the group of its process when it connected.
    :ivar uid: the user of its process when it connected.
    :ivar pid: its process when it connected.
    :ivar chain: in a tree of buses, the name of the link that carries the publisher's bus; None for a client of the
        root bus, and without a tree. The IDs are those that the publisher's own bus knows.
    """

    number: int
    gid: int | None
    uid: int | None
    pid: int | None
    chain: str | None = None

    @classmethod
    def parse(cls, payload: bytes) -> Sender | None:
        """Return the sender in the payload of a notice (`sbus.protocol.notices`), or None if it is malformed."""
        parsed = parse_sender(payload)
        if parsed is None:
            return None
        number, credentials = parsed
        return cls(number, *split_credentials(credentials))

    def __str__(self) -> str:
        if self.uid is None:
            return NOBODY.decode()
        link = f"{self.chain}/" if self.chain else ""
        return f"{link}!/cred/{self.gid}/{self.uid}/{self.pid}"

    def is_user(self, user: str | int) -> bool:
        """Return whether the publisher is this user.

        The result is False for IDs that prove nothing, as across containers, and for the program around the bus. Each
        call looks up the name; if that is too slow, look it up once and pass the UID.

        :param user: the name or the UID; the UID may also be text.
        :raises sbus.errors.UsageError: if there is no user with this name.
        """
        return self.uid == _uid_of(user) and explain_name(str(self).encode()) is None


def _uid_of(user: str | int) -> int:
    if isinstance(user, bool) or not isinstance(user, int | str):  # True is no UID, though it equals 1
        raise UsageError(f"a user is a name or a UID, not {type(user).__name__}")
    if isinstance(user, int):
        return user
    if user.isascii() and user.isdigit() and len(user) <= _LONGEST_UID:
        return int(user)
    from pwd import getpwnam  # most clients never look up a name

    try:
        return getpwnam(user).pw_uid
    except (KeyError, ValueError):
        raise UsageError(f"there is no user {user[:256]!r} here: give a name from `getent passwd`, or a UID") from None
