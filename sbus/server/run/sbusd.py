"""``sbusd``: the bus with the command line of the original daemon.

Programs that start the original run ``sbusd``, read its standard output to the end, and connect. They allow little
time, so the order of steps is the design.

1. *Parse and bind.* Nothing but `sbus.errors`, `sbus.distribution` and the sockets of `sbus.syscalls` is imported by
   then: importing Twisted and the server takes several times as long as starting the interpreter.
2. *Close standard output*, after printing the address if it was chosen at random. The caller may connect from now on.
   Its connection and its packets wait in the kernel's backlog.
3. *Import and serve.* As a daemon, the process that was started exits only now, with status 0, or with 1 and a line on
   standard error if this failed.

Invariants:

* Signals that stop the bus, and SIGUSR1, are blocked from before the socket exists until the reactor runs. None is
  lost, and none can leave a stale socket or pid file.
* Descriptors 0 to 2 are always open (`sbus.syscalls.descriptors`).
* A daemon keeps its standard error only if that is a file, or the journal of systemd (`_is_log`).
* A daemon calls listen(2) again after its forks: ``SO_PEERCRED`` gives clients the process that listened last, which
  must be the one that serves.
* The pid file is created exclusively, or with ``-r`` replaced if it is stale (`sbus.daemon.pid_file`).

Plugins are not searched for, because that would import every plugin on the path.
"""

from __future__ import annotations

import contextlib
import getopt
import os
import pwd
import signal
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from sbus.distribution import check_installation
from sbus.errors import SbusError, UsageError
from sbus.syscalls import addresses, listening
from sbus.syscalls.descriptors import fill_standard, to_null
from sbus.syscalls.names import is_number
from sbus.version import __version__

if TYPE_CHECKING:
    from sbus.daemon.log_budget import LogBudget

__all__ = ["main"]

_USAGE = "usage: sbusd [-a address] [-f | -p pidfile] [-u user] ... [-cgor]"
_HELP = f"""{_USAGE}

A local message bus, with the command line of the original daemon.

  -a address   address to listen on: a path (default: /run/sbus.socket), /dev/unix/abstract/HEX, /dev/fd/N, or
               /dev/unix/abstract for a random one, which is printed
  -c           stop when the last client has left
  -f           stay in the foreground, and write no pid file
  -g           let the group connect
  -o           let all other users connect
  -p pidfile   file for the process ID (default: /run/sbus.pid; /dev/null: none)
  -r           replace a leftover socket, or an empty file, at the address, and a leftover pid file
  -u user      let only this user (name or UID) and the daemon's own connect; repeatable
  --max-memory=SIZE, --user-memory=SIZE
               as for twistd sbus, such as 64M
  --user-clients=[NAME=]CLIENTS
               as for twistd sbus: clients of each user, or of one; repeatable (default: 256)
  --log-level=LEVEL
               least level of events that are logged to standard error: debug, info, warn (default), error or critical
  --help       print this, and exit
  --version    print the version, and exit

SIGINT and SIGTERM stop it; SIGHUP does with -f, and is ignored otherwise.
twistd sbus has more options."""
_RANDOM = "/dev/unix/abstract"
_NO_PID_FILE = "/dev/null"


@dataclass(slots=True)
class _Settings:
    """The values from the command line; the defaults are the original's."""

    address: str = "/run/sbus.socket"
    pid_file: str = "/run/sbus.pid"
    foreground: bool = False
    auto_close: bool = False
    reuse: bool = False
    mode: int = 0o700
    users: tuple[int, ...] = ()
    max_memory: int | None = None
    user_memory: int | None = None
    user_clients: int | None = None
    user_clients_of: dict[int, int] = field(default_factory=dict)
    log_level: str = "warn"


def main() -> None:
    """Run the command ``sbusd``."""
    try:
        check_installation()
        settings = _parse(sys.argv[1:])
    except getopt.GetoptError:
        print(_USAGE, file=sys.stderr)
        sys.exit(1)
    except SbusError as e:
        sys.exit(f"sbusd: {e}")
    try:
        _run(settings)
    except SbusError as e:
        sys.exit(f"sbusd: {_with_own_options(str(e))}")


def _parse(arguments: list[str]) -> _Settings:
    """Parse the command line.

    :raises getopt.GetoptError: if it is malformed.
    :raises UsageError: if it names a user who does not exist, or if a size or a level is malformed.
    :raises SystemExit: after printing what ``--help`` or ``--version`` asks for.
    """
    settings = _Settings()
    names = ["help", "version", "max-memory=", "user-memory=", "user-clients=", "log-level="]
    options, rest = getopt.getopt(arguments, "a:cfgop:ru:", names)
    if rest:
        raise getopt.GetoptError("too many arguments")
    for option, value in options:
        match option:
            case "--help":
                print(_HELP)
                sys.exit()
            case "--version":
                print(f"sbus {__version__}")
                sys.exit()
            case "--max-memory":
                settings.max_memory = _memory("max-memory", value)
            case "--user-memory":
                settings.user_memory = _memory("user-memory", value)
            case "--user-clients":
                _take_user_clients(settings, value)
            case "--log-level":
                settings.log_level = _level(value)
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


def _memory(option: str, text: str) -> int:
    from sbus.daemon.values import size
    from sbus.policy.rules import LEAST_USER_MEMORY
    from sbus.server.bus.memory import LEAST_MAX_MEMORY

    least = {"max-memory": LEAST_MAX_MEMORY, "user-memory": LEAST_USER_MEMORY}
    return size(option, least[option])(text)


def _take_user_clients(settings: _Settings, text: str) -> None:
    from sbus.server.core.limits import parse_user_clients

    uid, clients = parse_user_clients(text)
    if uid is None:
        settings.user_clients = clients
    else:
        settings.user_clients_of[uid] = clients


def _level(text: str) -> str:
    from sbus.daemon.log_text import LEVELS
    from sbus.daemon.values import choice

    return str(choice("log-level", *LEVELS)(text))


def _uid(text: str) -> int:
    if is_number(text) and int(text) < 2**32 - 1:
        return int(text)
    try:
        return pwd.getpwnam(text).pw_uid
    except KeyError:
        raise UsageError(f"-u {text}: there is no such user: give a UID, or a name from getent passwd") from None


def _with_own_options(text: str) -> str:
    """Replace the options of ``twistd sbus`` in an error's text by those of ``sbusd``."""
    return text.replace("choose another --socket", "choose another address (-a)").replace("--reuse", "-r")


def _run(settings: _Settings) -> None:
    fill_standard()
    # A signal that comes before the bus serves takes effect when it serves, so that it stops in good order.
    stopping = [signal.SIGINT, signal.SIGTERM]
    if settings.foreground:
        stopping.append(signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, [*stopping, signal.SIGUSR1])
    with contextlib.ExitStack() as files:
        bound = _listen(settings)
        files.callback(bound.close)
        if settings.address == _RANDOM:
            print(bound.address.text, flush=True)
        report = None
        if not settings.foreground:
            report = _become_daemon(stopping)
            if bound.address.descriptor is None:
                bound.sock.listen(listening.BACKLOG)  # again: SO_PEERCRED gives clients the process that listened last
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            if settings.pid_file != _NO_PID_FILE:
                from sbus.daemon.pid_file import PidFile

                pid_file = PidFile(settings.pid_file, "-p")
                pid_file.write(replace=settings.reuse)
                files.callback(pid_file.remove)
            os.chdir("/")
        for standard in (0, 1):
            to_null(standard)

        def is_serving() -> None:
            if report is not None:
                if not _is_log(2):
                    to_null(2)
                with contextlib.suppress(OSError):  # the parent has gone
                    os.write(report, b"\0")
                os.close(report)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [*stopping, signal.SIGUSR1])

        _serve(bound, settings, stopping, is_serving)


def _listen(settings: _Settings) -> listening.ListeningSocket:
    address = addresses.parse(settings.address)
    bound = listening.listen(address, mode=settings.mode, reuse=settings.reuse, replace_empty=settings.reuse)
    if address.descriptor is not None and settings.mode != 0o700:
        print("sbusd: -g and -o have no effect on an inherited socket", file=sys.stderr)
    return bound


def _is_log(descriptor: int) -> bool:
    """Return whether a standard error is a place for a log, and not a caller that waits for its end."""
    from sbus.daemon.log_text import is_journal

    mode = os.fstat(descriptor).st_mode
    is_device = stat.S_ISCHR(mode) and not os.isatty(descriptor)
    return stat.S_ISREG(mode) or is_device or is_journal(sys.stderr)


def _become_daemon(stopping: list[signal.Signals]) -> int:
    """Continue in a new process without a terminal; the original waits for its report.

    :returns: a descriptor. Write a byte to it when the bus serves; if it is closed without one, the start has failed.
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
    to_null(1)  # the caller waits for the end of standard output, not for this process
    os._exit(0 if os.read(reading, 1) else 1)


def _serve(
    bound: listening.ListeningSocket,
    settings: _Settings,
    stopping: list[signal.Signals],
    is_serving: Callable[[], None],
) -> None:
    """Run the bus until a signal, or with -c its last client, stops it."""
    from twisted.internet import epollreactor

    epollreactor.install()
    from twisted.internet import reactor

    from sbus.daemon.clock import use_monotonic_clock
    from sbus.daemon.log_budget import LogBudget
    from sbus.daemon.service import MultiService
    from sbus.seqpacket.endpoints import SeqpacketServerEndpoint
    from sbus.server.core.components import FloodControls
    from sbus.server.core.credentials import AccessSettings, KernelPolicy
    from sbus.server.core.limits import Limits
    from sbus.server.run.bus_process import BusProcess
    from sbus.server.run.service import BusService

    log_budget = LogBudget(level=settings.log_level)
    _log_to_standard_error(log_budget)
    use_monotonic_clock(reactor)
    access = AccessSettings(
        allowed_users=frozenset(settings.users) if settings.users else None,
        is_abstract=bound.address.is_abstract,
    )
    bus = BusService(
        SeqpacketServerEndpoint(reactor, bound),
        KernelPolicy().make(access),
        Limits(
            max_memory=settings.max_memory,
            user_memory=settings.user_memory,
            user_clients=Limits().user_clients if settings.user_clients is None else settings.user_clients,
            user_clients_of=settings.user_clients_of,
        ),
        controls=FloodControls.built_in(),
        log_budget=log_budget,
    )
    services = MultiService()
    BusProcess(bus, settings.auto_close, stopping).setServiceParent(services)
    bus.setServiceParent(services)
    services.startService()
    reactor.addSystemEventTrigger("before", "shutdown", services.stopService)
    reactor.callWhenRunning(is_serving)
    reactor.run()


def _log_to_standard_error(budget: LogBudget) -> None:
    """Log to standard error; by default warnings and errors, and nothing else, as the original."""
    from twisted.logger import globalLogBeginner

    from sbus.daemon.log_file import OutputFiles
    from sbus.daemon.log_text import text_log
    from sbus.daemon.logs import limited, rotate_at_signal

    rotate_at_signal(OutputFiles())
    globalLogBeginner.beginLoggingTo(
        [limited(text_log(sys.stderr), budget)], redirectStandardIO=False, discardBuffer=True
    )


if __name__ == "__main__":
    main()
