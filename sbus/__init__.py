"""A local message bus over Unix-domain SOCK_SEQPACKET sockets.

Clients publish under routing keys, and subscribe with wildcards or to secret keys.

`connect` connects the blocking client. The client for asyncio is in `sbus.client.aio`, the one for Twisted in
`sbus.client.tx`. Names are imported on first use, so ``import sbus`` alone is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbus.lazy import lazy_names
from sbus.version import __version__

if TYPE_CHECKING:
    from sbus.client.blocking import Bus, connect
    from sbus.client.core import Message

__all__ = ["Bus", "Message", "__version__", "connect"]

__getattr__ = lazy_names(
    __name__, {"Bus": ".client.blocking", "Message": ".client.core", "connect": ".client.blocking"}
)
