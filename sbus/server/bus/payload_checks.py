"""Checking a large message that a client publishes.

The server never maps the memory. Memory that is sealed and has no holes is safe to map for every receiver.
"""

from __future__ import annotations

from sbus.errors import Violation, ViolationReason
from sbus.flood import PayloadMessage, SharedMemory
from sbus.protocol.packets import FMSG, parse_range
from sbus.server.bus.receiving import ReceivingHalf
from sbus.syscalls.memfd import Attached

__all__ = ["publish"]


def publish(client: ReceivingHalf, packet: bytes, key: bytes, text: bytes) -> bool:
    """Handle an ``FMSG``.

    :param text: the range, which follows the NUL.
    :returns: False if the message has to wait for room; handle it again later.
    :raises Violation: if the client has not asked for payloads, may not publish this, or its memory or range is wrong.
    """
    registry = client.registry
    if not client.settings.payloads:
        raise Violation(ViolationReason.UNKNOWN_VERB)
    offset, length = parse_range(text)
    if not isinstance(packet, Attached):
        raise Violation(ViolationReason.BAD_DESCRIPTORS)
    if packet.is_cut and not packet.files:
        registry.counters.payloads_missing += 1
        registry.delivery.log.warn(
            "A payload of client {number} has arrived without its memory, and is dropped: the server has no free "
            "descriptor (ulimit -n), or a security module of the kernel refuses to pass it",
            number=client.number,
        )
        return True
    if packet.is_cut or len(packet.files) != 1:
        raise Violation(ViolationReason.BAD_DESCRIPTORS)
    (memfd,) = packet.files
    if memfd.fault() is not None:
        raise Violation(ViolationReason.BAD_MEMORY)
    if offset + length > memfd.size or length > registry.limits.max_payload:
        raise Violation(ViolationReason.BAD_RANGE)
    route = registry.route(key)
    memory = packet.memory
    if memory is None or memory.publisher is not client.user:
        memory = packet.memory = SharedMemory(memfd, client.user, packet.is_batch)
    message = PayloadMessage.published(key, memory, offset, length, client.signature)
    delivery = registry.delivery
    if not delivery.has_room_for(message, route, client):
        return False
    registry.guard.check_payloads(client, key)
    copy = message.copied(registry.limits.max_packet) if registry.guard.asks_payload else None
    payload = None if copy is None else copy[bytes.__len__(message) :]
    registry.guard.check_publication(client, key, payload, route, FMSG)
    registry.deliver_payload(message, route, client, client.has_echo)
    return True
