"""A client's name at the server, and what to do when it proves nothing.

The server names a client by the IDs that the kernel reports for it (unix(7), ``SO_PEERCRED``). Across namespaces the
kernel has no ID to report: a process outside of the server's PID namespace has the PID 0, and a user without a mapping
in the server's user namespace has the overflow UID, usually 65534. Many processes share such a name, so the server
refuses them secret keys, and disconnects a client that subscribes to one. A client that knows its name can do better:
it raises an error that says what is the matter.
"""

from __future__ import annotations

import re

from sbus.errors import InvalidKey, ViolationReason
from sbus.syscalls.sockets import overflow_ids

__all__ = ["check_name", "explain_name"]

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
