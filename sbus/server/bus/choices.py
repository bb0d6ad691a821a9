"""Choices: the control messages that change which packets a client gets, and how.

`handle` finds a strategy or an order by its selector, any other choice by its group, and a question among the requests
(`sbus.server.asks.requests`). A choice about packets to the client takes effect at its place in the client's stream
(`ReceivingHalf.in_order`); its answer is a reply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from sbus.errors import Violation, ViolationReason
from sbus.flood import ClientSettings
from sbus.protocol import controls
from sbus.protocol.bundles import MAX_BUNDLE, MIN_BUNDLE_LIMIT
from sbus.protocol.packets import CMSG, LEAST_PAYLOAD, build
from sbus.server.bus.receiving import ReceivingHalf

__all__ = ["handle"]


def handle(client: ReceivingHalf, key: bytes, payload: bytes | None) -> None:
    """Handle a control message.

    :param payload: the bytes after the NUL; None without a NUL.
    :raises Violation: if the dialect has no control messages, or as the group says.
    """
    registry = client.registry
    if not registry.dialect.control:
        raise Violation(ViolationReason.UNKNOWN_VERB)
    if (chosen := registry.controls.apply(client.settings, key)) is not None:
        client.choose(chosen)
        return
    control = controls.find(key)
    handler = _HANDLERS.get(control.group) if control is not None else None
    if not (handler(client, key) if handler is not None else registry.requests.handle(client, key, payload)):
        registry.counters.unknown_controls += 1


def _echo(client: ReceivingHalf, key: bytes) -> bool:
    client.settings = replace(client.settings, echo=key == controls.ECHO_ON)
    client.has_echo = client.settings.echo
    client.use_rights(client.rights)
    client.registry.interest.echo_changed(client)
    return True


def _bundles(client: ReceivingHalf, key: bytes) -> bool:
    """Begin or end bundles.

    A request for bundles counts as unknown if packets must be shorter than bundles.
    """
    if client.transport is None:
        return False
    wanted = key == controls.BUNDLE_ON
    if wanted and client.registry.limits.max_packet < MIN_BUNDLE_LIMIT:
        return False
    client.in_order("choice", partial(_set_bundles, client, key, wanted))
    return True


def _set_bundles(client: ReceivingHalf, key: bytes, wanted: bool) -> None:
    transport = client.transport
    if transport is None:
        return
    bundles = wanted and transport.start_bundling(MAX_BUNDLE) >= MIN_BUNDLE_LIMIT
    if not bundles:
        transport.stop_bundling()
    client.settings = replace(client.settings, bundles=bundles)
    if bundles == wanted:
        client.answer(build(CMSG, key, b"%d" % MAX_BUNDLE if bundles else b""))
    else:
        client.registry.counters.unknown_controls += 1


def _payloads(client: ReceivingHalf, key: bytes) -> bool:
    """Begin or end payloads in sealed memory.

    A request counts as unknown over a stream, or if too many connections of the user have ended with payloads unread.
    """
    transport = client.transport
    if transport is None or not transport.pass_payloads(key == controls.PAYLOAD_ON, client.user.payloads):
        return False
    client.settings = replace(client.settings, payloads=key == controls.PAYLOAD_ON)
    client.in_order("choice", partial(_set_payloads, client, key, client.settings))
    return True


def _set_payloads(client: ReceivingHalf, key: bytes, settings: ClientSettings) -> None:
    wanted = settings.payloads
    client.put_in_force(settings)
    client.answer(build(CMSG, key, b"%d %d" % (LEAST_PAYLOAD, client.registry.limits.max_payload) if wanted else b""))


def _bye(client: ReceivingHalf, key: bytes) -> bool:
    client.settings = replace(client.settings, bye=key == controls.BYE_ON)
    client.reply(key, client.registry.limits.announced if client.settings.bye else b"")
    return True


def _receipts(client: ReceivingHalf, key: bytes) -> bool:
    client.choose(replace(client.settings, receipts=key == controls.RECEIPTS_ON))
    client.reply(key, b"")
    return True


def _sender(client: ReceivingHalf, key: bytes) -> bool:
    if not client.registry.may_ask_sender(client):
        return False
    client.name_senders(key == controls.SENDER_ON, build(CMSG, key, b""))
    return True


def _denied(client: ReceivingHalf, key: bytes) -> bool:
    client.settings = replace(client.settings, denied=key == controls.DENIED_ON)
    client.reply(key, b"")
    return True


def _observer(client: ReceivingHalf, key: bytes) -> bool:
    client.settings = replace(client.settings, observer=key == controls.OBSERVER_ON)
    client.registry.observe(client, client.settings.observer)
    client.reply(key, b"")
    return True


def _chain(client: ReceivingHalf, key: bytes) -> bool:
    client.settings = replace(client.settings, chain=key == controls.CHAIN_ON)
    client.registry.upstream.observe_name(client, client.settings.chain)
    client.reply(key, b"")
    return True


_HANDLERS: dict[bytes, Callable[[ReceivingHalf, bytes], bool]] = {
    controls.ECHO: _echo,
    controls.BUNDLE: _bundles,
    controls.PAYLOAD: _payloads,
    controls.BYE: _bye,
    controls.RECEIPTS: _receipts,
    controls.SENDER: _sender,
    controls.DENIED: _denied,
    controls.OBSERVER: _observer,
    controls.CHAIN: _chain,
}
"""The handlers of choices, by group; each returns whether it understood the message."""
