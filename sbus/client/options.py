"""What all client libraries can be told about a connection, in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sbus.client.connecting import Backoff
from sbus.client.core import ClientCore, find_dialect
from sbus.protocol.bundles import MAX_BUNDLE
from sbus.protocol.packets import DEFAULT_MAX_PACKET

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of `connect`, in whichever library; see there."""

    dialect: str = "current"
    max_packet: int = DEFAULT_MAX_PACKET
    bundles: bool = True
    reconnect: bool | Backoff = False
    on_gap: Callable[[Exception], Any] | None = None
    on_control: Callable[[bytes, bytes], Any] | None = None

    @property
    def longest(self) -> int:
        """Bytes in the longest packet that sockets and buffers need room for, which may be a bundle."""
        return max(self.max_packet, MAX_BUNDLE) if self.bundles else self.max_packet

    @property
    def backoff(self) -> Backoff | None:
        """How long to wait between attempts to connect again; None if the first loss is the end."""
        return Backoff() if self.reconnect is True else (self.reconnect or None)

    def core(self, on_control: Callable[[bytes, bytes], object] | None) -> ClientCore:
        """The state of a client with these settings.

        :raises sbus.errors.UsageError: if there is no such dialect.
        """
        return ClientCore(find_dialect(self.dialect), self.max_packet, on_control, bundles=self.bundles)
