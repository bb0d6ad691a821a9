"""``sbusd``: the bus with the command line of the original daemon, for programs that start that one.

Such programs allow little time: they start the daemon, wait until its standard output is closed,
and connect. So ``sbusd`` listens before it imports Twisted and most of its own modules; a client that connects
meanwhile waits in the backlog. For the same reason it searches for no plugins.
"""

from __future__ import annotations

import contextlib
import getopt
import os
import pwd
import select
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from sbus.errors import SbusError, UsageError
from sbus.syscalls import addresses, listening

__all__ = ["main"]

_USAGE = "usage: sbusd [-a address] [-f | -p pidfile] [-u user] ... [-cgor]"
_RANDOM = "/dev/unix/abstract"
_NO_PID_FILE = "/dev/null"


@dataclass(slots=True)
class _Settings:
    """The command line."""

    address: str = "/run/sbus.socket"
    pid_file: str = "/run/sbus.pid"
    foreground: bool = False
    auto_close: bool = False
    reuse: bool = False
    mode: int = 0o700
    users: tuple[int, ...] = ()


class _Failed(SbusError):
    """The daemon cannot start; the text says why and what to do."""


def main() -> None:
    """Run the command ``sbusd``."""
    try:
        settings = _parse(sys.argv[1:])
    except getopt.GetoptError:
        print(_USAGE, file=sys.stderr)
        sys.exit(1)
    except SbusError as e:
        sys.exit(f"sbusd: {e}")
    try:
        _run(settings)
    except SbusError as e:
        sys.exit(f"sbusd: {_in_our_words(str(e))}")


def _parse(arguments: list[str]) -> _Settings:
    """Parse the command line.

    :raises getopt.GetoptError: if it has an unknown option or an argument.
    :raises UsageError: if it names a user that does not exist.
    """
    settings = _Settings()
    options, rest = getopt.getopt(arguments, "a:cfgop:ru:")
    if rest:
        raise getopt.GetoptError("too many arguments")
    for option, value in options:
        match option:
            case "-a":
                settings.address = value
            case "-c":
                settings.auto_close = True
            case "-f":
                settings.foreground = True
            case "-g":
                settings.mode |= 0o070
            case "-o":
                settings.mode |= 0o007
            case "-p":
                settings.pid_file = value
            case "-r":
                settings.reuse = True
            case "-u":
                settings.users += (_uid(value),)
    return settings


def _uid(text: str) -> int:
    if text.isdecimal() and int(text) < 2**32 - 1:
        return int(text)
    try:
        return pwd.getpwnam(text).pw_uid
    except KeyError:
        raise UsageError(f"-u {text}: there is no such user: give a name that getent passwd knows, or a UID") from None


def _in_our_words(text: str) -> str:
    """Return an error text with this command's options in place of those of ``twistd sbus``."""
    return text.replace("choose another --socket", "choose another address (-a)").replace("--reuse", "-r")


def _run(settings: _Settings) -> None:
    _fill_standard_descriptors()
    # From now on a signal to stop takes effect when the bus serves, so that the bus stops in good order.
    stopping = [signal.SIGINT, signal.SIGTERM]
    if settings.foreground:
        stopping.append(signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, stopping)
    with contextlib.ExitStack() as files:
        bound = _listen(settings)
        files.callback(bound.close)
        if settings.address == _RANDOM:
            print(bound.address.text, flush=True)
        report = None
        if not settings.foreground:
            report = _become_daemon(stopping)
            if bound.address.descriptor is None:
                bound.sock.listen(socket.SOMAXCONN)  # again, so that SO_PEERCRED shows this process to clients
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            if settings.pid_file != _NO_PID_FILE:
                files.callback(_write_pid_file(settings.pid_file, settings.reuse))
            os.chdir("/")
        for standard in (0, 1):
            _to_null(standard)

        def is_serving() -> None:
            if report is not None:
                if os.isatty(2):
                    _to_null(2)
                with contextlib.suppress(OSError):  # the starting process has ended
                    os.write(report, b"\0")
                os.close(report)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, stopping)

        _serve(bound, settings, stopping, is_serving)


def _listen(settings: _Settings) -> listening.ListeningSocket:
    address = addresses.parse(settings.address)
    bound = listening.listen(address, mode=settings.mode, reuse=settings.reuse, replace_empty=settings.reuse)
    if address.descriptor is not None:
        if settings.mode != 0o700:
            print("sbusd: -g and -o mean nothing for a socket that was passed down", file=sys.stderr)
        if bound.sock.fileno() <= 2:
            # The standard descriptors are to be closed.
            passed, bound.sock = bound.sock, bound.sock.dup()
            passed.detach()
    return bound


def _fill_standard_descriptors() -> None:
    """Open the closed standard descriptors on the null device, so that no socket takes their place."""
    while (null := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(null)


def _to_null(descriptor: int) -> None:
    """Put the null device in place of a standard descriptor, so that nothing opened later takes its place."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, descriptor)
    os.close(null)


def _become_daemon(stopping: list[signal.Signals]) -> int:
    """Go on in a process without a terminal; the process that was started waits for a byte from there.

    :returns: the descriptor to write the byte to when the bus serves. Closing it without a byte means that the start
        has failed.
    """
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        _wait_for_daemon(reading, stopping)
    os.close(reading)
    os.setsid()
    if os.fork():
        os._exit(0)
    return writing


def _wait_for_daemon(reading: int, stopping: list[signal.Signals]) -> NoReturn:
    for number in stopping:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stopping)
    _to_null(1)  # a program that waits for the end of standard output must not wait for this process
    os._exit(0 if os.read(reading, 1) else 1)


def _write_pid_file(path: str, replace: bool) -> Callable[[], None]:
    """Write the PID of this process to a file.

    :param replace: whether to replace a file with the PID of a process that has ended.
    :returns: the function that removes the file.
    :raises _Failed: if the file exists or cannot be written.
    """
    path = os.path.abspath(path)
    try:
        if replace and _is_stale(path):
            os.unlink(path)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        raise _Failed(
            f"the pid file {path} exists: stop the sbusd that it names, or if there is none, start with -r or remove it"
        ) from None
    except OSError as e:
        raise _Failed(f"cannot write the pid file {path}: {e.strerror}: choose another (-p), or none (-f)") from None
    with os.fdopen(fd, "w") as file:
        file.write(f"{os.getpid()}\n")
        made = os.fstat(fd)

    def remove() -> None:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.lstat(path), made):
                os.unlink(path)

    return remove


def _is_stale(path: str) -> bool:
    """Return whether this is the pid file of a process that has ended."""
    try:
        with open(path) as file:
            process = os.pidfd_open(int(file.read(32)))
    except ProcessLookupError:
        return True
    except (OSError, ValueError, OverflowError):
        return False
    try:
        return bool(select.select([process], [], [], 0)[0])  # ended, but its parent has not collected it yet
    finally:
        os.close(process)


def _serve(
    bound: listening.ListeningSocket,
    settings: _Settings,
    stopping: list[signal.Signals],
    is_serving: Callable[[], None],
) -> None:
    """Run the bus until it is stopped.

    :param is_serving: called when clients are served.
    """
    from twisted.internet import epollreactor

    epollreactor.install()
    from twisted.internet import reactor

    from sbus.daemon.service import MultiService
    from sbus.seqpacket.endpoints import SeqpacketServerEndpoint
    from sbus.server.components import FloodControls
    from sbus.server.credentials import AccessSettings, KernelPolicy
    from sbus.server.process import BusProcess
    from sbus.server.service import BusService

    _log_to_standard_error()
    access = AccessSettings(
        allowed_users=frozenset(settings.users) if settings.users else None,
        is_abstract=bound.address.is_abstract,
    )
    bus = BusService(
        SeqpacketServerEndpoint(reactor, bound), KernelPolicy().make(access), controls=FloodControls.built_in()
    )
    services = MultiService()
    BusProcess(bus, settings.auto_close, stopping).setServiceParent(services)
    bus.setServiceParent(services)
    services.startService()
    reactor.addSystemEventTrigger("before", "shutdown", services.stopService)
    reactor.callWhenRunning(is_serving)
    reactor.run()


def _log_to_standard_error() -> None:
    """Log warnings and errors to standard error, as the original daemon does, and nothing else."""
    from twisted.logger import (
        FilteringLogObserver,
        LogLevel,
        LogLevelFilterPredicate,
        globalLogBeginner,
        textFileLogObserver,
    )

    observer = FilteringLogObserver(
        textFileLogObserver(sys.stderr), [LogLevelFilterPredicate(defaultLogLevel=LogLevel.warn)]
    )
    globalLogBeginner.beginLoggingTo([observer], redirectStandardIO=False, discardBuffer=True)


if __name__ == "__main__":
    main()
