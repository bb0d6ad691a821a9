"""The command line of a service that ``twistd`` runs.

The parsers of its values are in `sbus.daemon.values`; services import them from here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from twisted.python import usage

from sbus.daemon.log_budget import LogBudget
from sbus.daemon.log_text import LEVELS
from sbus.daemon.logs import LEAST_RATE, LogSettings, configure
from sbus.daemon.pid_file import PidFile
from sbus.daemon.values import amount, choice, duration, mode, size
from sbus.distribution import check_installation
from sbus.errors import UsageError
from sbus.syscalls.descriptors import fill_standard
from sbus.version import __version__

__all__ = ["CommandLine", "amount", "choice", "duration", "mode", "size"]

_LOG = LogSettings()


class CommandLine(usage.Options):
    """The command line of a service.

    :cvar command: the service's name on the command line of ``twistd``.
    :cvar gone: former options, such as ``--old``, and for each what took its place.
    :ivar log_budget: the bytes that the log may grow by.
    :ivar pid_file: the file of ``twistd --pidfile=``; None without that option.
    """

    command: str
    gone: Mapping[str, str] = {}
    log_budget: LogBudget
    pid_file: PidFile | None = None

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
            _take_descriptors()
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
            twistd = {} if self.parent is None else self.parent
            self.log_budget = configure(twistd, settings)
            self.pid_file = _take_pid_file(twistd)
        except (usage.UsageError, UsageError) as e:
            raise SystemExit(f"{self.command}: {e} (see twistd {self.command} --help)") from None


def _take_descriptors() -> None:
    """Open the standard descriptors that are closed, before the reactor takes their numbers.

    :raises UsageError: if it has them already, from ``twistd --reactor=``.
    """
    closed = None in (sys.__stdin__, sys.__stdout__, sys.__stderr__)
    if closed and "twisted.internet.reactor" in sys.modules:
        raise UsageError(
            "standard descriptors are closed, and --reactor= uses their numbers: redirect them (</dev/null >/dev/null "
            "2>&1), or leave out --reactor="
        )
    fill_standard()


def _take_pid_file(twistd: MutableMapping[str, Any]) -> PidFile | None:
    """Take the pid file over from ``twistd``.

    twistd writes one even if nobody asks for it, into the current directory, so that two services cannot start in one
    directory, and none in a directory that is read-only. And it believes any number in a file that a crash has left:
    in a container that starts again that is its own, 1.

    :param twistd: the options of ``twistd`` itself.
    :raises UsageError: if the file that was asked for is that of a process that runs, or cannot be written.
    """
    path, twistd["pidfile"] = twistd.get("pidfile"), ""
    # The default value is one object, so another one comes from the command line, even if it says the same.
    if not path or path is getattr(twistd, "defaults", {}).get("pidfile") or path == os.devnull:
        return None
    file = PidFile(path)
    if twistd.get("chroot") is None:
        file.check()
    return file
