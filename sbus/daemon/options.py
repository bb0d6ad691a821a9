"""The command line of a service that ``twistd`` runs.

The parsers of its values are in `sbus.daemon.values`; services import them from here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from twisted.python import usage

from sbus.daemon.values import amount, choice, duration, mode
from sbus.distribution import check_installation
from sbus.errors import UsageError
from sbus.version import __version__

__all__ = ["CommandLine", "amount", "choice", "duration", "mode"]


class CommandLine(usage.Options):
    """The command line of a service.

    :cvar command: the service's name on the command line of ``twistd``.
    """

    command: str

    def opt_version(self) -> None:
        """Print the version of sbus and exit."""
        print(f"sbus {__version__}")
        sys.exit(0)

    def parseOptions(self, options: Sequence[str] | None = None) -> None:
        """Parse and check the command line.

        :raises SystemExit: with one line if it is wrong. Twisted itself would print all of the help around that line.
        """
        try:
            check_installation()
            super().parseOptions(options)  # type: ignore[no-untyped-call]
        except (usage.UsageError, UsageError) as e:
            raise SystemExit(f"{self.command}: {e} (see twistd {self.command} --help)") from None
