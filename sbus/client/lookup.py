"""The default addresses of the bus.

Apart from `sbus.client.connecting`, because ``sbus pub`` (`sbus.cli.quick`) can afford no import beyond `os`.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["default_addresses", "find_default"]


def default_addresses(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return where servers listen by default: ``twistd sbus`` for a user and for root, and ``sbusd``."""
    directory = environ.get("XDG_RUNTIME_DIR")
    return [*([os.path.join(directory, "sbus.sock")] if directory else []), "/run/sbus.sock", "/run/sbus.socket"]


def find_default(environ: Mapping[str, str] = os.environ) -> str:
    """Return ``$SBUS_SOCKET``, else the first default address that exists, else ``/run/sbus.sock``."""
    if environ.get("SBUS_SOCKET"):
        return environ["SBUS_SOCKET"]
    return next((path for path in default_addresses(environ) if os.path.exists(path)), "/run/sbus.sock")
