"""The log of a process that ``twistd`` runs: its place and its limits.

``twistd`` opens the log itself (``--logfile``, ``--syslog``, ``--logger``), before the service starts. It has no limit:
a file is rotated at 1 MB, and all older files are kept. The option ``logger`` of twistd names a function that makes the
log. So a service's command line puts `observer` there (`configure`), which makes the log that twistd would have made,
behind a `LogLimiter`, and with a `BoundedLogFile` for a file. ``sbusd`` and ``sbus web``, which log to standard error,
use `limited` and `rotate_at_signal` alone.

The settings are those of the process, as the log is; twistd calls `observer` without arguments.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, cast

from twisted.internet.interfaces import IReactorCore, IReactorFromThreads, IReactorTime
from twisted.logger import ILogObserver, LegacyLogObserverWrapper, LogEvent, Logger
from twisted.python.log import ILogObserver as ILegacyLogObserver
from twisted.python.reflect import namedAny
from zope.interface import implementer

from sbus.daemon.log_budget import DEFAULT_RATE, LogBudget, json_size, text_size
from sbus.daemon.log_file import BoundedLogFile, OutputFiles
from sbus.daemon.log_limiter import LogLimiter
from sbus.daemon.log_text import text_log
from sbus.errors import UsageError

__all__ = ["LEAST_RATE", "LogSettings", "configure", "limited", "observer", "rotate_at_signal"]

_log = Logger(namespace="sbus.daemon")

LEAST_RATE = 1_000
"""The smallest limit of a log's growth, in bytes per second: with less, a sum would not name who was refused."""
_SERVER_ALLOWANCE = 1.0
"""Seconds' worth of the rate for lines in an interval that no client's event caused: some tracebacks."""


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """The limits of a log.

    :ivar level: the least level of events that are logged.
    :ivar rate: bytes per second that it may grow by.
    :ivar file_bytes: bytes of a log file.
    :ivar files: log files, the current one included.
    """

    level: str = "info"
    rate: int = DEFAULT_RATE
    file_bytes: int = 1 << 20
    files: int = 5


@dataclass
class _Process:
    """The options of twistd."""

    options: MutableMapping[str, Any] = field(default_factory=dict)
    settings: LogSettings = LogSettings()
    logger: Callable[[], Any] | None = None
    budget: LogBudget = field(default_factory=LogBudget)


_process = _Process()


def configure(options: MutableMapping[str, Any], settings: LogSettings) -> LogBudget:
    """Give the process a limited log.

    :param options: the options of ``twistd`` itself.
    :returns: the log's budget, to be shared with other limiters.
    :raises UsageError: if ``--logger`` names nothing.
    """
    logger = None
    if name := options.get("logger"):
        try:
            logger = namedAny(name)
        except Exception as e:
            raise UsageError(f"--logger={name}: it cannot be imported: {e}") from None
    _process.options, _process.settings, _process.logger = options, settings, logger
    # How an unknown logger writes an event is not known: JSON takes the most bytes.
    _process.budget = LogBudget(rate=settings.rate, size=json_size if logger else text_size, level=settings.level)
    options["logger"] = f"{__name__}.observer"
    return _process.budget


def observer() -> ILogObserver:
    """Return the observer for ``twistd --logger``."""
    log = _new_log()
    rotate_at_signal(log if isinstance(log, BoundedLogFile) else OutputFiles())
    return limited(log, _process.budget)


def limited(log: ILogObserver, budget: LogBudget) -> ILogObserver:
    """Return a limiter in front of a log; it writes its sums when the reactor stops."""
    from twisted.internet import reactor

    limiter = LogLimiter(IReactorTime(reactor), log, budget, allowance=_SERVER_ALLOWANCE)
    IReactorCore(reactor).addSystemEventTrigger("after", "shutdown", limiter.stop)
    return _InMainThread(limiter)


@implementer(ILogObserver)
class _InMainThread:
    """Calls an observer in the thread of the reactor only."""

    def __init__(self, log: ILogObserver) -> None:
        self._log = log

    def __call__(self, event: LogEvent) -> None:
        if threading.current_thread() is threading.main_thread():
            self._log(event)
        else:
            from twisted.internet import reactor

            IReactorFromThreads(reactor).callFromThread(self._log, event)


def _new_log() -> ILogObserver:
    """Return the log that twistd would have made; see `twisted.scripts._twistd_unix.UnixAppLogger`."""
    options, settings = _process.options, _process.settings
    if _process.logger is not None:
        log = _process.logger()
        return log if ILogObserver.providedBy(log) else LegacyLogObserverWrapper(log)
    if options.get("syslog"):
        from twisted.python.syslog import SyslogObserver

        legacy = cast(ILegacyLogObserver, SyslogObserver(options.get("prefix") or "").emit)
        return LegacyLogObserverWrapper(legacy)
    name = options.get("logfile")
    if name == "-" and not options.get("nodaemon"):
        raise SystemExit("Daemons cannot log to stdout: choose another --logfile, or add --nodaemon")
    if name == "-" or (options.get("nodaemon") and not name):
        return text_log(sys.stdout)
    try:
        file = BoundedLogFile(name or "twistd.log", settings.file_bytes, settings.files)
    except OSError as e:
        raise SystemExit(f"cannot write the log {e.filename}: {e.strerror}: choose another --logfile") from None
    return file


def rotate_at_signal(log: BoundedLogFile | OutputFiles) -> None:
    """At SIGUSR1 begin a new log file: without this, the signal would end the process.

    A whole service gets it (``systemctl kill --signal=SIGUSR1``), also those processes that have no file.
    """
    from twisted.internet import reactor

    def rotate() -> None:
        try:
            log.rotate()
        except OSError as e:
            _log.error(
                "SIGUSR1: cannot open the log again: {why}: the log goes on in the old file; let this user write to "
                "{path}",
                why=e.strerror,
                path=e.filename,
            )
        else:
            _log.info("SIGUSR1: the log goes on here")

    if not signal.getsignal(signal.SIGUSR1):
        signal.signal(signal.SIGUSR1, lambda *_: IReactorFromThreads(reactor).callFromThread(rotate))
