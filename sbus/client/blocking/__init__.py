"""The blocking client: `connect`, and the `Bus` it returns."""

from __future__ import annotations

from sbus.client.blocking.bus import Bus, Subscription, Watch, connect

__all__ = ["Bus", "Subscription", "Watch", "connect"]
