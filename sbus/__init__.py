"""A local message bus: routing keys, wildcards and secrets over Unix-domain SOCK_SEQPACKET sockets.

`connect` is the blocking client's; the others are in `sbus.client.aio` (asyncio) and
`sbus.client.tx` (Twisted). Nothing is imported before it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sbus.version import __version__

if TYPE_CHECKING:
    from sbus.client.blocking import Bus, connect
    from sbus.client.core import Message

__all__ = ["Bus", "Message", "__version__", "connect"]


def __getattr__(name: str) -> Any:
    if name in ("Bus", "connect"):
        from sbus.client import blocking

        return getattr(blocking, name)
    if name == "Message":
        from sbus.client.core import Message

        return Message
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
