"""The commands that people type: ``sbus`` and ``sbusd``."""

from __future__ import annotations

import signal

__all__ = ["run"]


def run() -> None:
    """The command ``sbus``."""
    # Ctrl-C ends the command also while it is still being imported, and without a traceback.
    ctrl_c = signal.getsignal(signal.SIGINT)
    if ctrl_c is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from sbus.cli.main import main

    signal.signal(signal.SIGINT, ctrl_c)
    main()
