"""The link of a bus to its master (``twistd sbus --upstream``), as a child process.

The link is a client of both buses (`sbus.link`), a separate user, and a sidecar of this bus
(`sbus.server.run.children`). When its standard input ends, it passes on the packets queued for it, and exits.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from sbus.server.core.users import LINK
from sbus.server.run.children import SidecarBus, supervised_command
from sbus.syscalls.addresses import Address, connectable_text

__all__ = ["LinkedBus", "link_command"]


def link_command(
    address: Address,
    upstream: str,
    out: Sequence[bytes],
    into: Sequence[bytes],
    *,
    secrets: bool,
) -> list[bytes]:
    """Return the command that runs the link of a bus.

    :param address: the address at which the bus listens.
    :param upstream: the address of its master.
    :param out: the patterns that may go up.
    :param into: the patterns that may come down.
    :param secrets: whether secret messages go up.
    :raises sbus.errors.AddressError: if no client can connect to the bus's address.
    """
    words: list[str | bytes] = [
        *supervised_command("sbus-link"),
        *(
            f"--socket={connectable_text(address)}",
            f"--upstream={upstream if upstream.startswith('@') else os.path.abspath(upstream)}",
        ),
        *(b"--upstream-out=" + pattern for pattern in out),
        *(b"--upstream-in=" + pattern for pattern in into),
    ]
    if secrets:
        words.append("--upstream-secrets")
    return [os.fsencode(word) for word in words]


class LinkedBus(SidecarBus):
    """A bus and its link, which runs while the bus does."""

    sidecar = "link"
    uid = LINK
    without = "nothing crosses"
    stop_timeout = 10.0  # the link gives up by itself after 5 seconds

    def is_attached(self) -> bool:
        """Return whether the link carries messages."""
        return self._bus.registry.upstream.is_up
