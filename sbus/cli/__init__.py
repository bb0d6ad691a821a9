"""The command ``sbus``."""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # the module in Python makes enumerations, which takes time
import os
import sys

from sbus.cli import quick
from sbus.distribution import check_installation

__all__ = ["run"]


def run() -> None:
    """Run the command ``sbus``."""
    # While it is being imported, too, Ctrl-C ends the command without a traceback.
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        check_installation()
    except Exception as e:  # a UsageError: naming it would import its module
        sys.exit(f"sbus: {e}")
    if None in (sys.stdin, sys.stdout, sys.stderr):
        from sbus.cli.streams import occupy_closed

        occupy_closed()
    if quick.publish(sys.argv[1:], os.environ):
        return
    from sbus.cli.main import main

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
