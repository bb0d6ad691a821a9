"""A service with a process to itself: its memory, and the signals that stop it."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterable
from typing import cast

from twisted.internet.error import ReactorNotRunning
from twisted.internet.interfaces import IReactorCore, IReactorFromThreads, IReactorTime
from twisted.logger import Logger

from sbus.daemon.garbage import collect_less
from sbus.daemon.heap import keep_memory
from sbus.daemon.notify import Notifier
from sbus.daemon.pid_file import PidFile
from sbus.daemon.service import Service
from sbus.errors import UsageError
from sbus.seqpacket.interfaces import Reactor
from sbus.seqpacket.multiplexer import Multiplexer
from sbus.syscalls.descriptors import raise_limit

__all__ = ["Process"]


class Process(Service):
    """The settings of the process, as opposed to those of the service that it runs.

    SIGHUP means two things. From a terminal that closes, it ends the processes in its foreground; so the service stops
    in good order. From an operator or a script, it asks a daemon to continue with new settings or log files; ending it
    would be wrong, and Python's default would even leave the socket and the pid file behind. The signal itself does not
    tell which, but /dev/tty does: a terminal that has closed can no longer be opened (tty(4)).

    SIGUSR1 makes a daemon begin a new log file (`sbus.daemon.logs`), and SIGUSR2 makes it log its counters. systemctl
    kill(1) sends a signal to all processes of a service, so it ends none of them.

    :param signals: the signals that stop the reactor, so that the process exits with status 0.
    :param pid_file: written before the service starts, and removed when the reactor has stopped.
    :ivar log_counters: called in the reactor at SIGUSR2. Set it before the service starts.
    :ivar reload: called in the reactor at SIGHUP, unless that means that the terminal was closed.
    """

    _log = Logger(namespace="sbus.daemon")

    def __init__(
        self, signals: Iterable[int] = (signal.SIGTERM, signal.SIGINT), pid_file: PidFile | None = None
    ) -> None:
        self._signals = tuple(signals)
        self._pid_file = pid_file
        self._handles_signals = False
        self._had_terminal = False
        self._notifier: Notifier | None = None
        self.log_counters: Callable[[], object] = self._has_no_counters
        self.reload: Callable[[], object] = self._has_nothing_to_reload

    def privilegedStartService(self) -> None:
        """Write the pid file while the process may still be root, and raise the limit of descriptors.

        :raises SystemExit: if it cannot be written.
        """
        from twisted.internet import reactor

        super().privilegedStartService()
        raise_limit()
        if self._pid_file is None:
            return
        try:
            self._pid_file.write()
        except UsageError as error:
            self._log.critical("{error}", error=error)  # a daemon's standard error goes nowhere
            raise SystemExit(str(error)) from None
        IReactorCore(reactor).addSystemEventTrigger("after", "shutdown", self._pid_file.remove)
        atexit.register(self._pid_file.remove)  # if the reactor never runs

    def startService(self) -> None:
        from twisted.internet import reactor

        super().startService()
        keep_memory()
        Multiplexer.of(cast(Reactor, reactor)).on_fatal = self.fail
        # With Twisted's own handlers the process would end by the signal instead of with status 0.
        reactor.callWhenRunning(self._handle_signals)
        reactor.callWhenRunning(collect_less)
        self._notifier = Notifier(IReactorTime(reactor))
        reactor.callWhenRunning(self._notifier.ready)

    def reloads(self, is_reloading: bool) -> None:
        """Notify systemd that the process reloads its settings, or that this has ended."""
        if self._notifier is not None:
            self._notifier.reloads(is_reloading)

    def stopService(self) -> None:
        super().stopService()
        gc.disable()  # a collection with thousands of clients takes as long as closing a thousand of them
        if self._notifier is not None:
            self._notifier.stopService()
        if self._handles_signals:
            # A second signal must not interrupt an orderly stop, and the interpreter drops handlers when it exits.
            for number in {*self._signals, signal.SIGHUP}:
                signal.signal(number, signal.SIG_IGN)

    def _handle_signals(self) -> None:
        self._handles_signals = True
        for number in self._signals:
            signal.signal(number, lambda *_: self.stop())
        signal.signal(signal.SIGUSR2, lambda *_: self._call(self.log_counters))
        if signal.SIGHUP not in self._signals and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            self._had_terminal = _has_terminal()
            signal.signal(signal.SIGHUP, lambda *_: self._call(self._hung_up))

    def _has_no_counters(self) -> None:
        self._log.info("SIGUSR2: this process has no counters to log")

    def _hung_up(self) -> None:
        if self._had_terminal and not _has_terminal():
            self._log.info("SIGHUP: the terminal was closed, so this process stops")
            self._stop_reactor()
        else:
            self.reload()

    def _has_nothing_to_reload(self) -> None:
        self._log.info("SIGHUP: there is nothing to reload; SIGTERM stops this process, SIGUSR1 begins a new log file")

    def _call(self, call: Callable[[], object]) -> None:
        from twisted.internet import reactor

        IReactorFromThreads(reactor).callFromThread(call)

    def stop(self) -> None:
        """Stop the reactor in its next turn; signal handlers and threads may call this."""
        self._call(self._stop_reactor)

    def fail(self) -> None:
        """Stop, and exit with status 1."""
        atexit.register(_exit_with_failure)
        self.stop()

    def _stop_reactor(self) -> None:
        from twisted.internet import reactor

        if self.running:
            # It may be stopping already: signals repeat, and the last client leaves when the bus stops.
            with contextlib.suppress(ReactorNotRunning):
                reactor.stop()


def _has_terminal() -> bool:
    """Return whether this process has a controlling terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def _exit_with_failure() -> None:
    """Exit with status 1.

    Twisted offers no way to choose the status. At this point everything else has ended.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # its descriptor was closed when the process started
            stream.flush()
    os._exit(1)
