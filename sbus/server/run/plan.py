"""The plan that the command line of ``twistd sbus`` describes: to be made, or only checked."""

from __future__ import annotations

from dataclasses import replace

from sbus.protocol.keys import DIALECTS
from sbus.seqpacket.endpoints import SeqpacketServerEndpoint
from sbus.server.core.credentials import AccessSettings, KernelPolicy
from sbus.server.core.listeners import Listener, ListenOption, check_paths
from sbus.server.run.command_line import Options
from sbus.server.run.link import link_command
from sbus.server.run.recorder import recorder_command
from sbus.server.run.service import BusService
from sbus.server.run.subuid import SubordinateIds
from sbus.syscalls.addresses import Address, parse

__all__ = ["admin_address", "make_bus", "plan_link", "plan_recorder", "plan_sockets"]


def plan_sockets(options: Options) -> list[tuple[ListenOption, SeqpacketServerEndpoint]]:
    """Return all sockets with their resolved endpoints, the main one first.

    :raises ListenError: if systemd or the parent process has not passed what an address names.
    :raises UsageError: if two sockets have one address.
    """
    from twisted.internet import reactor

    sockets = [
        (
            option,
            SeqpacketServerEndpoint(
                reactor,
                option.address.text,
                mode=option.permissions,
                group=option.group,
                reuse=True,
                max_packet=options.limits.max_packet,
                stream=option.stream,
            ),
        )
        for option in _listen_options(options)
    ]
    for _, endpoint in sockets:
        endpoint.resolve()
    check_paths((option.name, endpoint.address) for option, endpoint in sockets)
    return sockets


def _listen_options(options: Options) -> list[ListenOption]:
    main = [
        ListenOption(name=name, address=parse(address), mode=options["mode"], group=options["group"])
        for name, address in options.main_sockets
    ]
    return [*main, *options["listen"]]


def admin_address(options: Options) -> Address:
    """Return the resolved address of the admin socket; the options ask for one.

    :raises ListenError: if systemd has not passed it.
    """
    from twisted.internet import reactor

    address = parse(options["admin"])
    if address.systemd is not None:
        address = SeqpacketServerEndpoint(reactor, address.text, stream=True).resolve()
    return address


def plan_recorder(options: Options, address: Address) -> list[bytes] | None:
    """Return the command of the recorder, or None if the options ask for none.

    :param address: where the bus listens.
    """
    if not options["record"]:
        return None
    return recorder_command(
        address,
        options["record"],
        dialect=options["dialect"],
        max_packet=options.limits.max_packet,
        options=options["record-options"] or (),
    )


def plan_link(options: Options, address: Address) -> list[bytes] | None:
    """Return the command of the link, or None if the options ask for none.

    :param address: where the bus listens.
    """
    if not options["upstream"]:
        return None
    return link_command(
        address,
        options["upstream"],
        options["upstream-out"],
        options["upstream-in"],
        secrets=bool(options["upstream-secrets"]),
    )


def make_bus(options: Options, sockets: list[tuple[Listener, SeqpacketServerEndpoint]]) -> BusService:
    """Make the bus; it does not listen yet.

    :param sockets: the labels and the resolved endpoints, the main one first.
    """
    (main, endpoint), *others = sockets
    address = endpoint.address
    access = AccessSettings(
        allowed_users=frozenset(options["allow-user"]) if options["allow-user"] else None,
        is_abstract=address.is_abstract and not others,
        block_across_users=bool(options["block-across-users"]),
    )
    if options["allow-user"] or not others or options["credentials"] != KernelPolicy.name:
        main = replace(main, is_abstract=False)  # the credentials policy decides
    return BusService(
        endpoint,
        options.credentials.make(access),
        options.limits,
        policy=options.policy,
        dialect=DIALECTS[options["dialect"]],
        ignore_violations=options["on-violation"] == "ignore",
        public_interest=not options["no-interest"],
        public_senders=not options["no-sender"],
        last_values=tuple(options["last-value"]),
        name=options["name"] or address.text,
        secrets_go_up=bool(options["upstream-secrets"]),
        controls=options.controls,
        owner_of=SubordinateIds().owner if options["subuid-as-owner"] else None,
        log_budget=options.log_budget,
        main=main,
        listeners=others,
    )
