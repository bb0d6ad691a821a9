"""The Twisted client: `connect`, the `Bus` that it makes, and `BusClientService`."""

from __future__ import annotations

from sbus.client.tx.bus import Bus, Subscription, Watch, connect
from sbus.client.tx.service import BusClientService

__all__ = ["Bus", "BusClientService", "Subscription", "Watch", "connect"]
