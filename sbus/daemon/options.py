"""The command line of a service that ``twistd`` runs.

The parsers of its values are in `sbus.daemon.values`; services import them from here.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence, Set
from typing import Any

from twisted.logger import Logger
from twisted.python import usage

from sbus.daemon.log_budget import LogBudget
from sbus.daemon.log_text import LEVELS
from sbus.daemon.logs import LEAST_RATE, LogSettings, configure
from sbus.daemon.pid_file import PidFile, PidFileInUse
from sbus.daemon.values import amount, choice, duration, mode, size
from sbus.distribution import check_installation
from sbus.errors import UsageError
from sbus.syscalls.descriptors import fill_standard
from sbus.version import __version__

__all__ = ["CommandLine", "amount", "choice", "duration", "mode", "size"]

_LOG = LogSettings()
_KEEP = "--log-keep=FILESxSIZE, such as --log-keep=5x1M, replaces it"


def _parse_keep(text: str) -> tuple[int, int]:
    """Parse the value of ``--log-keep``, such as ``5x1M``; return the files and the bytes of each.

    :raises UsageError: if that is not what the text is.
    """
    files, _, each = text.partition("x")
    try:
        return amount("log-keep", "files")(files), size("log-keep")(each)
    except UsageError:
        raise UsageError(f"--log-keep={text}: give the files to keep and the size of each, such as 5x1M") from None


class CommandLine(usage.Options):
    """The command line of a service.

    :cvar command: the service's name on the command line of ``twistd``.
    :cvar gone: former options, such as ``--old``, and for each what took its place.
    :cvar deprecated: options, without dashes, that work for one more release, and for each what takes its place. The
        help leaves them out; their default is None.
    :cvar limit_options: options, without dashes, that the help lists last.
    :ivar log_budget: the bytes that the log may grow by.
    :ivar pid_file: the file of ``twistd --pidfile=``; None without that option.
    """

    command: str
    gone: Mapping[str, str] = {}
    deprecated: Mapping[str, str] = {"log-file-bytes": _KEEP, "log-files": _KEEP}
    limit_options: Set[str] = frozenset()
    log_budget: LogBudget
    pid_file: PidFile | None = None

    optParameters: list[list[object]] = [
        [
            "log-level",
            None,
            _LOG.level,
            f"Lowest level of events that are logged: {', '.join(LEVELS)}",
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
            "log-keep",
            None,
            f"{_LOG.files}x{_LOG.file_bytes >> 20}M",
            "Log files that are kept, with the current one, and the size at which one is full (twistd --logfile)",
        ],
        ["log-file-bytes", None, None, "", amount("log-file-bytes", "bytes")],
        ["log-files", None, None, "", amount("log-files", "files")],
    ]

    _log = Logger(namespace="sbus.daemon")

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
            files, file_bytes = _parse_keep(self["log-keep"])
            settings = LogSettings(
                level=self["log-level"],
                rate=self["log-rate"],
                file_bytes=self["log-file-bytes"] or file_bytes,
                files=self["log-files"] or files,
            )
            twistd = {} if self.parent is None else self.parent
            self.log_budget = configure(twistd, settings)
            self.pid_file = _take_pid_file(twistd, bool(self.get("check")))
            for name, place in self.deprecated.items():
                if self[name] is not None:
                    self._log.warn("--{option} will be gone in the next release: {place}", option=name, place=place)
        except (usage.UsageError, UsageError) as e:
            raise SystemExit(
                f"{self.command}: {e}{self._place_of(str(e))} (see twistd {self.command} --help)"
            ) from None

    def _place_of(self, problem: str) -> str:
        """Return where an option that is not known here belongs, if twistd has it."""
        unknown = re.fullmatch("option (--?([a-z-]+)) not recognized", problem)
        if unknown is None or self.parent is None or unknown[2] not in self.parent.synonyms:
            return ""
        return f": it is twistd's own and stands before the service, as in twistd {unknown[1]} {self.command}"

    def getUsage(self, width: int | None = None) -> str:
        """Return the help: the limits last, and no deprecated option."""
        others, end, rest = self._usage_of(lambda name: name not in self.limit_options, width).partition("\n\n")
        if not self.limit_options:
            return others + end + rest
        limits = self._usage_of(self.limit_options.__contains__, width).partition("\n\n")[0]
        return f"{others}\n{limits.replace('Options:', 'Limits:', 1)}{end}{rest}"

    def _usage_of(self, is_listed: Callable[[str], bool], width: int | None) -> str:
        every = self.longOpt
        names = {option: option.rstrip("=") for option in every}
        self.longOpt = [o for o, name in names.items() if is_listed(name) and name not in self.deprecated]
        try:
            return str(super().getUsage(width))
        finally:
            self.longOpt = every


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


def _take_pid_file(twistd: MutableMapping[str, Any], may_run: bool) -> PidFile | None:
    """Take the pid file over from ``twistd``.

    twistd writes one even if nobody asks for it, into the current directory, so that two services cannot start in one
    directory, and none in a directory that is read-only. And it believes any number in a file that a crash has left:
    in a container that starts again that is its own, 1.

    :param twistd: the options of ``twistd`` itself.
    :param may_run: whether the process of the file may run, as nothing is started.
    :raises UsageError: if the file that was asked for is that of a process that runs, or cannot be written.
    """
    path, twistd["pidfile"] = twistd.get("pidfile"), ""
    # The default value is one object, so another one comes from the command line, even if it says the same.
    if not path or path is getattr(twistd, "defaults", {}).get("pidfile") or path == os.devnull:
        return None
    file = PidFile(path)
    if twistd.get("chroot") is None:
        try:
            file.check()
        except PidFileInUse:
            if not may_run:
                raise
    return file
