"""The command ``sbus``."""

from __future__ import annotations

import os
import signal
import sys

from sbus.cli import quick
from sbus.distribution import check_installation
from sbus.errors import UsageError

__all__ = ["run"]


def run() -> None:
    """Run the command ``sbus``."""
    # While it is being imported, too, Ctrl-C ends the command without a traceback.
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        check_installation()
    except UsageError as e:
        sys.exit(f"sbus: {e}")
    if quick.publish(sys.argv[1:], os.environ):
        return
    from sbus.cli.main import main

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
