"""``twistd sbus --check``: find mistakes that would keep the bus from starting, without starting anything.

It follows a start (`sbus.server.run.plan`) up to the point where something would be made. A socket that another server
listens on is no error: usually the operator checks the options of a running bus, before restarting it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from twisted.logger import ILogObserver, LogEvent, LogLevel, formatEvent, globalLogPublisher
from twisted.python.reflect import namedAny
from zope.interface import provider

from sbus.daemon.options import CommandLine
from sbus.errors import ListenError, SbusError, UsageError
from sbus.server.run.command_line import Options
from sbus.server.run.plan import admin_address, make_bus, plan_link, plan_recorder, plan_sockets
from sbus.server.run.policy import describe
from sbus.server.run.service import BusService
from sbus.syscalls.addresses import Address, parse
from sbus.syscalls.listening import rehearse

__all__ = ["check_options"]

_COMMAND_LINES = {"sbus-recorder": "sbus.recorder.twistd.Options", "sbus-link": "sbus.link.twistd.Options"}
"""Where the command lines of the sidecars are, by name: the server imports neither."""


def check_options(options: Options) -> NoReturn:
    """Print the plan of the bus, or the first thing that keeps it from starting; exit with status 0 or 1.

    :raises SystemExit: always.
    """
    try:
        for line in _findings(options):
            print(line)
    except SbusError as e:
        raise SystemExit(f"sbus: {e}") from None
    sys.exit(0)


def _findings(options: Options) -> Iterator[str]:
    """Yield a line for each part of the bus.

    :raises SbusError: if the bus could not start, or a sidecar could not.
    """
    sockets = plan_sockets(options)
    for option, endpoint in sockets:
        try:
            is_served = rehearse(endpoint.address, group=option.group, stream=option.stream)
        except ListenError as e:
            raise option.explain(e) if option in options["listen"] else e from None
        kind = "stream socket" if option.stream else "socket"
        is_made = endpoint.address.is_path and endpoint.address.descriptor is None
        mode = f", mode {option.permissions:04o}" if is_made else ""
        group = f", group {option.group}" if is_made and option.group is not None else ""
        is_random = option not in options["listen"] and options["socket"] == "/dev/unix/abstract"
        text = "a random abstract address" if is_random else endpoint.address.text
        yield f"{kind} {option.name}: {text}{mode}{group}{_now(is_served)}"
    if options["admin"] is not None:
        yield _admin(options)
    address = sockets[0][1].address
    if (recorder := plan_recorder(options, address)) is not None:
        _check_sidecar("sbus-recorder", recorder)
        _check_directory(options, options["record"], "--record")
        yield f"recorder: writes to {os.path.abspath(options['record'])}"
    if (link := plan_link(options, address)) is not None:
        _check_sidecar("sbus-link", link)
        yield _upstream(options["upstream"])
    _check_log(options)
    try:
        bus = make_bus(options, [(option.listener(endpoint.address), endpoint) for option, endpoint in sockets])
    except SbusError:
        raise
    except Exception as e:
        raise UsageError(
            f"--credentials={options['credentials']}: the plug-in failed with {e!r}: correct what it reads, or choose "
            "another policy"
        ) from None
    yield f"credentials: {options['credentials']}"
    if options.policy is not None:
        yield f"policy: {describe(options.policy)}"
    yield from _limits(bus)


def _now(is_served: bool) -> str:
    return " (a server listens there now; stop it before this one starts)" if is_served else ""


def _admin(options: Options) -> str:
    try:
        address = admin_address(options)
        is_served = rehearse(address, group=options.access.owner, stream=True)
    except ListenError as e:
        raise ListenError(f"--admin: {str(e).replace('--socket', '--admin')}") from None
    return f"admin socket: {address.text}{_now(is_served)}"


def _upstream(text: str) -> str:
    """Describe the master; that it does not run yet is no error, as the link waits for it."""
    address: Address = parse(text)
    try:
        is_served = rehearse(address)
    except ListenError:
        is_served = False
    return f"link: to {text}" + ("" if is_served else " (no server listens there now; the link waits for one)")


def _check_sidecar(service: str, command: Sequence[bytes]) -> None:
    """Check the command line of a sidecar with its own parser."""
    parser: CommandLine = namedAny(_COMMAND_LINES[service])()
    words = list(map(os.fsdecode, command))
    try:
        parser.parseOptions(words[words.index(service) + 1 :])
    except SystemExit as e:
        raise UsageError(str(e)) from None


def _check_directory(options: Options, directory: str, option: str) -> None:
    """Check that this user can write to a directory, or make it.

    With ``twistd --uid`` another user writes there, so only the kind of file is checked.
    """
    existing = directory = os.path.abspath(directory)
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        raise UsageError(f"{option}={directory}: {existing} is not a directory: name another one")
    uid = None if options.parent is None else options.parent.get("uid")
    if uid is None and not os.access(existing, os.W_OK | os.X_OK, effective_ids=True):
        raise UsageError(
            f"{option}={directory}: this user may not write to {existing}: name another directory, or let the user "
            "write there"
        )


def _check_log(options: Options) -> None:
    """Check the directory of the log file, which ``twistd`` does not make."""
    path = None if options.parent is None else options.parent.get("logfile")
    if path and path != "-":
        directory = os.path.dirname(os.path.abspath(path))
        if not os.path.lexists(directory):
            raise UsageError(f"--logfile={path}: there is no directory {directory}: make it first")
        _check_directory(options, directory, "--logfile")


def _limits(bus: BusService) -> Iterator[str]:
    """Yield the limits, and the warnings that the bus would log when it starts."""
    limits, memory = bus.registry.limits, bus.registry.users.budget.memory
    yield (
        f"limits: {limits.max_clients} clients, {limits.user_clients} of one user; memory {memory.limit} B, "
        f"{memory.user_limit} B of one user"
    )
    warnings: list[str] = []

    @provider(ILogObserver)
    def observer(event: LogEvent) -> None:
        if event["log_level"] >= LogLevel.warn:
            warnings.append(f"warning: {formatEvent(event)}")

    globalLogPublisher.addObserver(observer)
    try:
        bus.warn_of_limits()
    finally:
        globalLogPublisher.removeObserver(observer)
    yield from warnings
