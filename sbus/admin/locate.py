"""Where the admin socket of a bus is: what commands and the page look at, in this order."""

from __future__ import annotations

import os

from sbus.errors import AddressError

__all__ = ["SUFFIX", "VARIABLE", "admin_path", "find_admin"]

SUFFIX = ".admin"
"""The text that is appended to the path of a bus by default."""
VARIABLE = "SBUS_ADMIN"
"""The environment variable with the path."""


def admin_path(address: str) -> str | None:
    """Return the default path of the admin socket of a bus; None if its address is no path."""
    is_path = (
        address and not address.startswith(("@", "/dev/fd/", "/dev/unix/")) and address.partition(":")[0] != "systemd"
    )
    return address + SUFFIX if is_path else None


def find_admin(given: str | None = None, bus: str | None = None) -> str:
    """Return the path of the admin socket: the given one, else ``$SBUS_ADMIN``, else that of the bus.

    :param bus: the address of the bus; None for the default one.
    :raises AddressError: if the bus has no path, so that there is no default.
    """
    found = given or (None if bus else os.environ.get(VARIABLE))
    if found:
        return found
    from sbus.client.connecting import find_address  # the server uses `admin_path` alone, and loads no client

    address = find_address(bus)
    path = admin_path(address)
    if path is None:
        raise AddressError(f"the bus at {address} has no path, so its admin socket has no default: give --admin=PATH")
    return path
