"""A local message bus over Unix-domain SOCK_SEQPACKET sockets.

Clients publish under routing keys, and subscribe with wildcards or to secret keys.

`connect` connects the blocking client. The client for asyncio is in `sbus.client.aio`, the one for Twisted in
`sbus.client.tx`; the other names here serve all three. Names are imported on first use, so ``import sbus`` alone is
cheap.
"""

from __future__ import annotations

import os
import sys
from itertools import pairwise

from sbus.lazy import lazy_names
from sbus.version import __version__

TYPE_CHECKING = False  # importing typing would take a third of the time that `sbus pub` needs
if TYPE_CHECKING:
    from sbus.client.api import Inbox
    from sbus.client.blocking import Bus, Subscription, connect
    from sbus.client.connecting import Backoff
    from sbus.client.denials import Denial
    from sbus.client.dispatch import Message
    from sbus.client.identity import Sender
    from sbus.client.losses import Lost
    from sbus.client.responding import Request
    from sbus.errors import (
        Closed,
        ConnectError,
        ConnectionLost,
        Disconnected,
        InvalidKey,
        NobodyListens,
        NotAllowed,
        PacketTooLong,
        RequestFailed,
        SbusError,
        TimedOut,
        UsageError,
    )

__all__ = [
    "Backoff",
    "Bus",
    "Closed",
    "ConnectError",
    "ConnectionLost",
    "Denial",
    "Disconnected",
    "Inbox",
    "InvalidKey",
    "Lost",
    "Message",
    "NobodyListens",
    "NotAllowed",
    "PacketTooLong",
    "Request",
    "RequestFailed",
    "SbusError",
    "Sender",
    "Subscription",
    "TimedOut",
    "UsageError",
    "__version__",
    "connect",
]

_HOMES = {
    "Backoff": ".client.connecting",
    "Bus": ".client.blocking",
    "Denial": ".client.denials",
    "Inbox": ".client.api",
    "Lost": ".client.losses",
    "Message": ".client.dispatch",
    "Request": ".client.responding",
    "Sender": ".client.identity",
    "Subscription": ".client.blocking",
    "connect": ".client.blocking",
}
__getattr__ = lazy_names(__name__, {name: _HOMES.get(name, ".errors") for name in __all__})


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def _leave_out_current_directory() -> None:
    """Let ``python -m sbus`` import nothing from the current directory, as ``python -P`` does not.

    The interpreter puts that directory in front of everything else, and the next import would run a ``click.py`` that
    lies there. It stays if this package itself comes from it, and for every other program.
    """
    words = sys.orig_argv[1:]
    is_ours = any(
        f"{word.removeprefix('-m') or following}.".startswith("sbus.")
        for word, following in pairwise([*words, ""])
        if word.startswith("-m")
    )
    if sys.argv[:1] != ["-m"] or not is_ours or sys.flags.safe_path or not sys.path:
        return
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    try:
        is_foreign = os.path.samefile(sys.path[0] or ".", ".") and not os.path.samefile(".", home)
    except OSError:  # the current directory is gone
        return
    if is_foreign:
        del sys.path[0]


_leave_out_current_directory()
