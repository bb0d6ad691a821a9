"""A local message bus over Unix-domain SOCK_SEQPACKET sockets.

Clients publish under routing keys, and subscribe with wildcards or to secret keys.

`connect` connects the blocking client. The client for asyncio is in `sbus.client.aio`, the one for Twisted in
`sbus.client.tx`. Names are imported on first use, so ``import sbus`` alone is cheap.
"""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from typing import TYPE_CHECKING

from sbus.lazy import lazy_names
from sbus.version import __version__

if TYPE_CHECKING:
    from sbus.client.blocking import Bus, connect
    from sbus.client.core import Message
    from sbus.client.losses import Lost

__all__ = ["Bus", "Lost", "Message", "__version__", "connect"]

__getattr__ = lazy_names(
    __name__,
    {
        "Bus": ".client.blocking",
        "Lost": ".client.losses",
        "Message": ".client.core",
        "connect": ".client.blocking",
    },
)


def _leave_out_current_directory() -> None:
    """Let ``python -m sbus.cli`` import nothing from the current directory, as ``python -P`` does not.

    The interpreter puts that directory in front of everything else, and the next import would run a ``click.py`` that
    lies there. It stays if this package itself comes from it, and for every other program.
    """
    words = sys.orig_argv[1:]
    is_ours = any(
        word.startswith("-msbus.") or (word == "-m" and following.startswith("sbus."))
        for word, following in pairwise([*words, ""])
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
