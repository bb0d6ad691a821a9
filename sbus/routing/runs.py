"""Runs of messages that go the same way, so that they can be handed on as one: the hot loops of server and client."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from sbus.speedups import is_wanted

__all__ = ["build_messages", "next_messages", "next_run", "total_size"]

S = TypeVar("S")
M = TypeVar("M", bound=tuple[bytes, bytes])


def _next_run(
    packets: list[bytes], start: int, end: int, routes: dict[bytes, tuple[S, ...]]
) -> tuple[tuple[S, ...] | None, int]:
    """How many packets from `start` to `end` are messages that go, by known routes, to the very same receivers?

    :returns: the receivers, and the index behind the last such packet. They are None if the first packet
        is of another kind or malformed, or its key not in `routes`.
    """
    receivers: tuple[S, ...] | None = None
    for at in range(start, end):
        packet = packets[at]
        nul = packet.find(b"\0", 4)
        if nul < 0 or packet[:4] != b"MSG ":
            return receivers, at
        found = routes.get(packet[4:nul])
        if found is not receivers or found is None:
            if receivers is not None or found is None:
                return receivers, at
            receivers = found
    return receivers, end


def _next_messages(
    packets: list[bytes], start: int, end: int, routes: dict[bytes, tuple[S, ...]], kind: type[M]
) -> tuple[tuple[S, ...] | None, list[M]]:
    """As `next_run`, for who wants the messages themselves.

    :param kind: a named tuple of (key, payload).
    :returns: the receivers, and the messages of the run as `kind`.
    """
    receivers: tuple[S, ...] | None = None
    messages: list[M] = []
    for at in range(start, end):
        packet = packets[at]
        nul = packet.find(b"\0", 4)
        if nul < 0 or packet[:4] != b"MSG ":
            break
        key = packet[4:nul]
        found = routes.get(key)
        if found is None or (receivers is not None and found is not receivers):
            break
        receivers = found
        messages.append(tuple.__new__(kind, (key, packet[nul + 1 :])))
    return receivers, messages


def _build_messages(messages: list[tuple[bytes | str, bytes]], start: int, longest: int) -> list[bytes]:
    """The packets that publish messages, (key, payload) each, from `start` up to the first that needs a closer look.

    That is one with a key that holds ``!`` or a NUL, one whose packet has more than `longest` bytes, and one
    that is anything else than a tuple of bytes (or str) and bytes.
    """
    packets: list[bytes] = []
    for at in range(start, len(messages)):
        message = messages[at]
        if not isinstance(message, tuple) or len(message) != 2:
            break
        key, payload = message
        if isinstance(key, str):
            key = key.encode()
        if not isinstance(key, bytes) or not isinstance(payload, bytes) or b"!" in key or b"\0" in key:
            break
        if 5 + len(key) + len(payload) > longest:
            break
        packets.append(b"MSG %b\0%b" % (key, payload))
    return packets


def _total_size(packets: list[bytes]) -> int:
    """The bytes of all packets together."""
    return sum(map(len, packets))


if TYPE_CHECKING or not is_wanted():
    build_messages, next_messages, next_run, total_size = _build_messages, _next_messages, _next_run, _total_size
else:
    try:
        from sbus.routing._runs import build_messages, next_messages, next_run, total_size
    except ImportError:
        build_messages, next_messages, next_run, total_size = _build_messages, _next_messages, _next_run, _total_size
