"""Where the admin socket of a bus is, if nobody says it."""

from __future__ import annotations

import pytest

from sbus.admin.locate import admin_path


@pytest.mark.parametrize("address", ["/run/sbus.sock", "/dev/shm/bus", "bus", "sub/bus"])
def test_beside_a_path(address: str) -> None:
    """It is beside the socket of the bus, also in ``/dev/shm``, which is a directory as any other."""
    assert admin_path(address) == address + ".admin"


@pytest.mark.parametrize(
    "address", ["", "@bus", "/dev/fd/3", "/dev/unix/abstract/00", "/dev/unix/abstract", "systemd:bus"]
)
def test_no_path(address: str) -> None:
    """Beside an address that is no path it cannot be."""
    assert admin_path(address) is None
