"""``twistd sbus``: the service that the command line describes (`sbus.server.run.command_line`)."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import ExitStack

from twisted.application.service import IService

from sbus.admin.access import Access
from sbus.daemon.clock import use_monotonic_clock
from sbus.daemon.service import MultiService
from sbus.daemon.signals import DeferredSignals
from sbus.errors import ListenError, UsageError
from sbus.seqpacket.endpoints import SeqpacketServerEndpoint
from sbus.server.core.listeners import Listener
from sbus.server.run.bus_process import BusProcess
from sbus.server.run.command_line import Options
from sbus.server.run.link import LinkedBus
from sbus.server.run.plan import admin_address, make_bus, plan_link, plan_recorder, plan_sockets
from sbus.server.run.policy import PolicyFiles
from sbus.server.run.recorder import RecordedBus
from sbus.syscalls.listening import ListeningSocket, listen

__all__ = ["Options", "makeService"]


def _bind(options: Options) -> Iterator[tuple[Listener, SeqpacketServerEndpoint, ListeningSocket]]:
    """Bind all sockets, the main one first; the caller closes those that were bound if a later one fails.

    :raises ListenError: if an address cannot be listened on.
    :raises UsageError: if two sockets have one address.
    """
    for option, endpoint in plan_sockets(options):
        try:
            bound = endpoint.bind()
        except ListenError as e:
            raise option.explain(e) if option in options["listen"] else e from None
        yield option.listener(bound.address), endpoint, bound


def _give_away(options: Options, bound: ListeningSocket) -> None:
    """Give a socket to the user that the server becomes (``twistd --uid``): with the default mode only root connects.

    The recorder and the link run as that user, and operators may.
    """
    uid = None if options.parent is None else options.parent.get("uid")
    if uid is not None:
        bound.give_to(uid)


def _bind_admin(options: Options) -> ListeningSocket:
    """Make the admin socket.

    :raises ListenError: if it cannot be listened on.
    """
    access: Access = options.access
    try:
        bound = listen(admin_address(options), mode=access.mode, group=access.owner, reuse=True, stream=True)
    except ListenError as e:
        raise ListenError(f"--admin: {str(e).replace('--socket', '--admin')}") from None
    _give_away(options, bound)
    return bound


def makeService(options: Options) -> IService:
    """Return the service that the options describe.

    It binds the socket here already: before the process becomes a daemon, so that the caller sees why it fails, and
    before it drops its privileges. With ``--check`` it only looks whether it could.

    :raises SystemExit: with one line, if the address cannot be listened on; with ``--check`` in any case.
    """
    from twisted.internet import reactor

    if options["check"]:
        from sbus.server.run.check import check_options

        check_options(options)
    use_monotonic_clock(reactor)
    signals = DeferredSignals()
    try:
        with ExitStack() as made:
            sockets = []
            for listener, endpoint, bound in _bind(options):
                made.callback(bound.close)
                sockets.append((listener, endpoint, bound))
            bound = sockets[0][2]
            recorder, link = plan_recorder(options, bound.address), plan_link(options, bound.address)
            if recorder is not None or link is not None:
                _give_away(options, bound)  # so that they can connect
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
    bus = make_bus(options, [(listener, endpoint) for listener, endpoint, _ in sockets])
    parent = MultiService()
    process = BusProcess(bus, bool(options["auto-close"]), pid_file=options.pid_file)
    process.setServiceParent(parent)
    policy = None
    if options["policy"] is not None:
        path = os.path.abspath(options["policy"])
        policy = PolicyFiles(bus.registry, path, options.labels, bus.warn_of_shares, process.reloads)
        process.reload = policy.reload_at_signal
    service: MultiService = bus if recorder is None else RecordedBus(bus, bus, recorder)
    if link is not None:
        service = LinkedBus(bus, service, link)
    service.setServiceParent(parent)
    if admin is not None:
        from sbus.admin.server import AdminService  # imports twisted.web and prometheus_client
        from sbus.server.ops.admin_pages import pages

        AdminService(reactor, admin, options.access, pages(bus.registry, policy)).setServiceParent(parent)
    return parent
