"""The commands that people type: ``sbus`` and ``sbusd``."""

from __future__ import annotations

import signal

__all__ = ["run"]


def run() -> None:
    """The command ``sbus``."""
    # Ctrl-C ends the command also while it is still being imported, and without a traceback.
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_usual:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from sbus.cli.main import main

    if is_usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
