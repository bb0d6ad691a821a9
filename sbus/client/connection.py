"""What the connections of the three libraries have in common: the core, the outbox, and reports to the application."""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import TypeVarTuple, cast

from sbus.client.api import ClientApi, Sub
from sbus.client.connecting import find_address
from sbus.client.core import ClientCore
from sbus.client.denials import Denial, DenialLog
from sbus.client.dispatch import Waiter, is_of_application
from sbus.client.losses import PAYLOAD, LossKeeper, Lost, place_loss
from sbus.client.options import ConnectOptions
from sbus.client.outbox import Outbox
from sbus.errors import Disconnected, UsageError
from sbus.protocol.keys import find_dialect

__all__ = ["Connection"]

Args = TypeVarTuple("Args")

_LOSS_LOG_INTERVAL = 10.0
"""Seconds between two log lines about packets that were too long."""


class Connection(ClientApi[Sub]):
    """A connection to a bus: what does not depend on how its library waits.

    :param address: path or abstract address of the bus; by default the result of
        `sbus.client.connecting.find_address`.
    :ivar outbox: the packets to send.
    """

    def __init__(self, address: str | os.PathLike[str] | None, options: ConnectOptions) -> None:
        super().__init__()
        self._options = options
        self.address = find_address(address)
        self.core = ClientCore(
            find_dialect(options.dialect),
            options.max_packet,
            options.on_control and self._control_received,
            bundles=options.bundles,
            bye=True,
            on_lost=options.on_lost and self._loss_received,
            on_denied=self._denied,
            refuse=self._refused,
            sender=options.sender,
            give_up=self._give_up,
            on_truncated=self._loss_received,
            make_room=self._make_room,
            payloads=options.payloads,
        )
        self.core.on_settled = self._on_settled
        self.outbox = Outbox()
        self.outbox.extend(self.core.resync_packets())
        self._backoff = options.backoff
        self._loss_reason: Disconnected | None = None  # why the connection was lost, until `on_gap` is called
        self._reconnecting = False
        self._error: Exception | None = None  # why the connection has ended
        self._unlogged, self._log_losses_at = 0, 0.0
        self._denial_log = DenialLog(self._warn)

    # --- what a library implements -----------------------------------------------------------

    @abstractmethod
    def call_user(self, callback: Callable[[*Args], object], *args: *Args) -> None:
        """Call the application; what it raises does not end the connection."""

    @abstractmethod
    def report_lost(self, lost: Lost) -> None:
        """Call ``on_lost``."""

    @abstractmethod
    def _on_settled(self) -> None:
        """Note that more is known about the packets that the server takes (`ClientCore.on_settled`)."""

    def _make_room(self, size: int) -> None:
        """Receive, and send, packets of up to `size` bytes from now on."""

    @abstractmethod
    def _give_up(self, error: UsageError) -> None:
        """End the connection: the server does not name senders."""

    # --- what the application is told --------------------------------------------------------

    def _control_received(self, key: bytes, payload: bytes) -> None:
        assert self._options.on_control is not None
        self.call_user(self._options.on_control, key, payload)

    def _denied(self, denial: Denial) -> None:
        if self._options.on_denied is None:
            self._denial_log.add(denial)
        else:
            self.call_user(self._options.on_denied, denial)

    def _loss_received(self, lost: Lost) -> None:
        """Count a loss, and report it in its place; log it for an application without ``on_lost``."""
        self._lost += lost.messages or 0
        on_lost = self._options.on_lost
        if on_lost is None:
            self._log_loss(lost)
        else:
            keepers = cast(list[LossKeeper], [sink for sink in self.core.sinks() if is_of_application(sink)])
            place_loss(lost, keepers, lambda lost: self.call_user(on_lost, lost))

    def _log_loss(self, lost: Lost) -> None:
        """Log a packet that could not be received: the first one at once, later ones as sums."""
        now = time.monotonic()
        self._unlogged += 1
        if now >= self._log_losses_at:
            why = "as longer than this client's buffer"
            remedy = "connect with max_packet= (--max-packet) the limit of the bus"
            if lost.why == PAYLOAD:
                why, remedy = "as their memory did not come", "let the security module pass memfds of the bus"
            self._warn(f"lost, {why}: packets: {self._unlogged}, the last one of {lost.bytes} bytes; {remedy}")
            self._unlogged, self._log_losses_at = 0, now + _LOSS_LOG_INTERVAL

    # --- the outbox --------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error

    def _take_back(self, packet: bytes) -> None:
        self.outbox.take_back(packet)

    def _release(self) -> None:
        """Release what waited until the server's limits were known; what exceeds them fails its call, or is logged."""
        if self.outbox.is_held and self.core.is_settled:
            self.outbox.is_held = False
            for error in self.outbox.refuse(self.core.refusal):
                self._warn(f"a message that waited for a connection was dropped, as the bus has another limit: {error}")

    def _restart(self, fence: Waiter) -> list[Waiter]:
        """Prepare for the next connection, which begins with the choices of this client and a fence.

        :returns: the waiters to fail once the caller's own state is consistent.
        """
        self.core.rebuild_routes()  # an exception may have interrupted a call in the middle of a change
        waiters = self._forget_connection()
        self.outbox.restart(self.core.resync_packets() + self.core.fence(fence), hold=self.core.holds)
        return waiters
