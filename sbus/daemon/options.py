"""The command line of a service that ``twistd`` runs.

The parsers of its values are in `sbus.daemon.values`; services import them from here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from twisted.python import usage

from sbus.daemon.log_budget import LogBudget
from sbus.daemon.log_text import LEVELS
from sbus.daemon.logs import LEAST_RATE, LogSettings, configure
from sbus.daemon.values import amount, choice, duration, mode, size
from sbus.distribution import check_installation
from sbus.errors import UsageError
from sbus.version import __version__

__all__ = ["CommandLine", "amount", "choice", "duration", "mode", "size"]

_LOG = LogSettings()


class CommandLine(usage.Options):
    """The command line of a service.

    :cvar command: the service's name on the command line of ``twistd``.
    :cvar gone: former options, such as ``--old``, and for each what took its place.
    :ivar log_budget: the bytes that the log may grow by.
    """

    command: str
    gone: Mapping[str, str] = {}
    log_budget: LogBudget

    optParameters: list[list[object]] = [
        [
            "log-level",
            None,
            _LOG.level,
            f"Least level of events that are logged: {', '.join(LEVELS)}",
            choice("log-level", *LEVELS),
        ],
        [
            "log-rate",
            None,
            _LOG.rate,
            "Bytes per second that the log may grow by; further events are logged in sums",
            amount("log-rate", "bytes per second", least=LEAST_RATE),
        ],
        [
            "log-file-bytes",
            None,
            _LOG.file_bytes,
            "Size of a log file in bytes, at which a new one is begun (twistd --logfile)",
            amount("log-file-bytes", "bytes"),
        ],
        ["log-files", None, _LOG.files, "Log files that are kept, with the current one", amount("log-files", "files")],
    ]

    def opt_version(self) -> None:
        """Print the version of sbus and exit."""
        print(f"sbus {__version__}")
        sys.exit(0)

    def parseArgs(self, *words: str) -> None:
        """Refuse words that are no options."""
        if words:
            raise usage.UsageError(f"{words[0]}: there are only options here; they begin with --")

    def parseOptions(self, options: Sequence[str] | None = None) -> None:
        """Parse and check the command line.

        :raises SystemExit: with one line if it is wrong. Twisted itself would print all of the help around that line.
        """
        try:
            check_installation()
            for word in options or ():
                if (place := self.gone.get(name := word.partition("=")[0])) is not None:
                    raise UsageError(f"{name} is gone: {place}")
            super().parseOptions(options)  # type: ignore[no-untyped-call]
            settings = LogSettings(
                level=self["log-level"],
                rate=self["log-rate"],
                file_bytes=self["log-file-bytes"],
                files=self["log-files"],
            )
            self.log_budget = configure({} if self.parent is None else self.parent, settings)
        except (usage.UsageError, UsageError) as e:
            raise SystemExit(f"{self.command}: {e} (see twistd {self.command} --help)") from None
