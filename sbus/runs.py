"""Runs of messages that go the same way, so that they can be handed on as one; the hot loop of the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from sbus.compiled import is_wanted

__all__ = ["next_run"]

S = TypeVar("S")


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


if TYPE_CHECKING or not is_wanted():
    next_run = _next_run
else:
    try:
        from sbus._runs import next_run
    except ImportError:
        next_run = _next_run
