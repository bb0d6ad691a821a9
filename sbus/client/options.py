"""The options of `connect`, in one place for all three client libraries."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

from sbus.client.arguments import check_callback, check_count, check_seconds
from sbus.client.connecting import Backoff
from sbus.client.denials import Denial
from sbus.client.losses import Lost
from sbus.errors import UsageError
from sbus.protocol.bundles import MAX_BUNDLE
from sbus.protocol.keys import find_dialect
from sbus.protocol.packets import DEFAULT_MAX_PACKET

__all__ = ["ConnectOptions", "Keywords", "ServiceKeywords"]


class ServiceKeywords(TypedDict, total=False):
    """The keyword arguments of `connect` except ``reconnect``.

    `ConnectOptions` describes them.
    """

    dialect: str
    max_packet: int
    bundles: bool
    timeout: float | None
    reconnect_buffer: int
    on_gap: Callable[[Exception], object] | None
    on_lost: Callable[[Lost], object] | None
    on_denied: Callable[[Denial], object] | None
    sender: bool
    payloads: bool
    on_control: Callable[[bytes, bytes], object] | None


class Keywords(ServiceKeywords, total=False):
    """The keyword arguments of `connect`; `ConnectOptions` describes them."""

    reconnect: bool | Backoff


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectOptions:
    """How to connect to a bus, and what to do when the connection is lost.

    :ivar dialect: ``current``, or ``early`` for servers of the protocol's first revision.
    :ivar max_packet: bytes in the longest packet, of a server that does not say that itself. One whose limit is above
        409,600 bytes does, and is believed; the early dialect and older servers do not (``--max-packet``).
    :ivar bundles: negotiate :doc:`bundles </bundles>` with the server, and use them if it has them.
    :ivar timeout: seconds to retry while the server's backlog is full and, with `reconnect`, while there is no server;
        None for no limit.
    :ivar reconnect: reconnect and subscribe again when the connection is lost; a `Backoff` sets the pauses.
    :ivar reconnect_buffer: with `reconnect`, bytes of messages that may wait for a connection; `publish` raises
        `sbus.errors.BufferFull` beyond.
    :ivar on_gap: called with the reason once a connection has been replaced; messages may have been missed.
    :ivar on_lost: called with each `Lost` that the server reports, in its place among the messages (see
        `sbus.client.losses`), and with each message that was longer than this client's buffer; without it the client
        does not ask for such reports, and logs messages that were too long.
    :ivar on_denied: called with each `Denial` that no call and no reader raises as `sbus.errors.NotAllowed`: a refused
        message, a refused subscription with a callback, and a number of refusals that the server has summed up. Without
        it the client logs the first denial of each key.
    :ivar sender: ask who published each message (`sbus.client.core.Message.sender`). If the server does not name
        senders, the client ends the connection, even with `reconnect`: waiting and later calls raise
        `sbus.errors.UsageError`.
    :ivar payloads: send and receive large messages in sealed memory, without copies (:doc:`/payloads`); the payload of
        a received one is a read-only `memoryview`. With a server that does not take them all messages are ordinary.
    :ivar on_control: called with (key, payload) of control messages that the client does not handle itself.
    :raises sbus.errors.UsageError: if there is no such dialect, if `sender` is set and it has no senders, if
        `max_packet` or `reconnect_buffer` is not positive, or if an option is of the wrong type.
    """

    dialect: str = "current"
    max_packet: int = DEFAULT_MAX_PACKET
    bundles: bool = True
    timeout: float | None = 30.0
    reconnect: bool | Backoff = False
    reconnect_buffer: int = 2 << 20
    on_gap: Callable[[Exception], object] | None = None
    on_lost: Callable[[Lost], object] | None = None
    on_denied: Callable[[Denial], object] | None = None
    sender: bool = False
    payloads: bool = False
    on_control: Callable[[bytes, bytes], object] | None = None

    def __post_init__(self) -> None:
        if self.sender and not find_dialect(self.dialect).control:
            raise UsageError("sender=True: the early dialect has no control messages, so it names no senders")
        find_dialect(self.dialect)
        limit = "give the server's limit in bytes (409600 by default)"
        check_count(self.max_packet, "max_packet", limit)
        if self.reconnect_buffer != math.inf:
            check_count(self.reconnect_buffer, "reconnect_buffer", "give a number of bytes above 0, or math.inf")
        if self.timeout is not None:
            check_seconds(self.timeout)
        if self.reconnect and not isinstance(self.reconnect, (bool, Backoff)):
            raise UsageError(f"reconnect={self.reconnect!r:.80}: give True, False or a Backoff")
        for name in ("on_gap", "on_lost", "on_denied", "on_control"):
            if (function := getattr(self, name)) is not None:
                check_callback(function, name)

    @property
    def buffer_size(self) -> int:
        """Bytes that the send buffer must hold at first: the longest packet or, if longer, a bundle."""
        return max(self.max_packet, MAX_BUNDLE) if self.bundles else self.max_packet

    @property
    def receive_size(self) -> int:
        """Bytes of the longest packet to receive at first, whatever may be sent."""
        return max(self.buffer_size, DEFAULT_MAX_PACKET)

    @property
    def backoff(self) -> Backoff | None:
        """The pauses between attempts to reconnect; None if the client does not reconnect."""
        return Backoff() if self.reconnect is True else (self.reconnect or None)
