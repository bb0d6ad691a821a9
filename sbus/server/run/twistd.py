"""``twistd sbus``: the service that the command line describes (`sbus.server.run.command_line`)."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

from twisted.application.service import IService

from sbus.admin.access import Access
from sbus.daemon.clock import use_monotonic_clock
from sbus.daemon.service import MultiService
from sbus.daemon.signals import DeferredSignals
from sbus.errors import ListenError, UsageError
from sbus.seqpacket.endpoints import SeqpacketServerEndpoint
from sbus.seqpacket.systemd import passed_names
from sbus.server.core.credentials import AccessSettings, KernelPolicy
from sbus.server.core.listeners import (
    MAIN,
    Listener,
    ListenOption,
    check_names,
    check_paths,
    passed_sockets,
)
from sbus.server.run.bus_process import BusProcess
from sbus.server.run.command_line import DIALECTS, Options
from sbus.server.run.link import LinkedBus, link_command
from sbus.server.run.policy import PolicyFiles
from sbus.server.run.recorder import RecordedBus, recorder_command
from sbus.server.run.service import BusService
from sbus.server.run.subuid import SubordinateIds
from sbus.syscalls.addresses import parse
from sbus.syscalls.listening import ListeningSocket, listen

__all__ = ["Options", "makeService"]


def _endpoint(options: Options, option: ListenOption) -> SeqpacketServerEndpoint:
    from twisted.internet import reactor

    return SeqpacketServerEndpoint(
        reactor,
        option.address.text,
        mode=option.permissions,
        group=option.group,
        reuse=True,
        max_packet=options.limits.max_packet,
        stream=option.stream,
    )


def _bind(options: Options) -> Iterator[tuple[Listener, SeqpacketServerEndpoint, ListeningSocket]]:
    """Bind all sockets, the main one first; the caller closes those that were bound if a later one fails.

    :raises ListenError: if an address cannot be listened on.
    :raises UsageError: if two sockets have one name or one address.
    """
    sockets = [(option, _endpoint(options, option)) for option in _sockets(options)]
    for _, endpoint in sockets:
        endpoint.resolve()
    check_names(option.name for option, _ in sockets)
    check_paths((option.name, endpoint.address) for option, endpoint in sockets)
    for option, endpoint in sockets:
        try:
            bound = endpoint.bind()
        except ListenError as e:
            if option not in options["listen"]:
                raise
            text = str(e).replace("choose another --socket", "choose another address")
            raise ListenError(f"{option.text}: {text}") from None
        yield option.listener(bound.address), endpoint, bound


def _sockets(options: Options) -> list[ListenOption]:
    """Return all sockets that the options ask for, the main one first."""
    main = [(MAIN.name, options["socket"])]
    if options["socket"] == "systemd":
        main = passed_sockets(passed_names(), options["listen"])
    passed = [
        ListenOption(name=name, address=parse(address), mode=options["mode"], group=options["group"])
        for name, address in main
    ]
    return [*passed, *options["listen"]]


def _give_away(options: Options, bound: ListeningSocket) -> None:
    """Give a socket to the user that the server becomes (``twistd --uid``): with the default mode only root connects.

    The recorder and the link run as that user, and operators may.
    """
    uid = None if options.parent is None else options.parent.get("uid")
    if uid is not None:
        bound.give_to(uid)


def _recorder(options: Options, bound: ListeningSocket) -> list[bytes]:
    """Return the recorder's command, after making sure that it can connect."""
    _give_away(options, bound)
    return recorder_command(
        bound.address,
        options["record"],
        dialect=options["dialect"],
        max_packet=options.limits.max_packet,
        options=options["record-options"] or (),
    )


def _link(options: Options, bound: ListeningSocket) -> list[bytes]:
    """Return the command of a link, after making sure that it can connect."""
    _give_away(options, bound)
    return link_command(
        bound.address,
        options["upstream"],
        options["upstream-out"],
        options["upstream-in"],
        secrets=bool(options["upstream-secrets"]),
        max_packet=options.limits.max_packet,
    )


def _bind_admin(options: Options) -> ListeningSocket:
    """Make the admin socket.

    :raises ListenError: if it cannot be listened on.
    """
    from twisted.internet import reactor

    access: Access = options.access
    try:
        address = parse(options["admin"])
        if address.systemd is not None:
            address = SeqpacketServerEndpoint(reactor, address.text, stream=True).resolve()
        bound = listen(
            address,
            mode=access.mode,
            group=access.admin if access.metrics is None else None,
            reuse=True,
            stream=True,
        )
    except ListenError as e:
        raise ListenError(f"--admin: {str(e).replace('--socket', '--admin')}") from None
    _give_away(options, bound)
    return bound


def makeService(options: Options) -> IService:
    """Return the service that the options describe.

    It binds the socket here already: before the process becomes a daemon, so that the caller sees why it fails, and
    before it drops its privileges.

    :raises SystemExit: with one line, if the address cannot be listened on.
    """
    from twisted.internet import reactor

    use_monotonic_clock(reactor)
    signals = DeferredSignals()
    try:
        with ExitStack() as made:
            sockets = []
            for listener, endpoint, bound in _bind(options):
                made.callback(bound.close)
                sockets.append((listener, endpoint, bound))
            (main, endpoint, bound), *others = sockets
            recorder = _recorder(options, bound) if options["record"] else None
            link = _link(options, bound) if options["upstream"] else None
            admin = None
            if options["admin"] is not None:
                admin = _bind_admin(options)
                made.callback(admin.close)
            closing = made.pop_all()
    except (ListenError, UsageError) as e:
        signals.restore()
        raise SystemExit(f"sbus: {e}") from None
    signals.hand_over(reactor)
    atexit.register(closing.close)
    if options["socket"] == "/dev/unix/abstract":
        print(bound.address.text, flush=True)
    access = AccessSettings(
        allowed_users=frozenset(options["allow-user"]) if options["allow-user"] else None,
        is_abstract=bound.address.is_abstract and not others,
        block_across_users=bool(options["block-across-users"]),
    )
    if options["allow-user"] or not others or options["credentials"] != KernelPolicy.name:
        main = replace(main, is_abstract=False)  # the credentials policy decides
    bus = BusService(
        endpoint,
        options.credentials.make(access),
        options.limits,
        policy=options.policy,
        dialect=DIALECTS[options["dialect"]],
        ignore_violations=options["on-violation"] == "ignore",
        public_interest=not options["no-interest"],
        public_senders=not options["no-sender"],
        last_values=tuple(options["last-value"]),
        name=options["name"] or bound.address.text,
        secrets_go_up=bool(options["upstream-secrets"]),
        controls=options.controls,
        owner_of=SubordinateIds().owner if options["subuid-as-owner"] else None,
        log_budget=options.log_budget,
        main=main,
        listeners=[(listener, endpoint) for listener, endpoint, _ in others],
    )
    parent = MultiService()
    process = BusProcess(bus, bool(options["auto-close"]), pid_file=options.pid_file)
    process.setServiceParent(parent)
    policy = None
    if options["policy"] is not None:
        policy = PolicyFiles(
            bus.registry, os.path.abspath(options["policy"]), options.labels, on_loaded=bus.warn_of_shares
        )
        process.reload = policy.reload_at_signal
    service: MultiService = bus if recorder is None else RecordedBus(bus, recorder)
    if link is not None:
        service = LinkedBus(bus, service, link)
    service.setServiceParent(parent)
    if admin is not None:
        from sbus.admin.server import AdminService  # imports twisted.web and prometheus_client
        from sbus.server.ops.admin_pages import pages

        AdminService(reactor, admin, options.access, pages(bus.registry, policy)).setServiceParent(parent)
    return parent
