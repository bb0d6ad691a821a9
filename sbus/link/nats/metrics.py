"""The counters of a bridge as metrics, for ``--metrics-file``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from sbus.daemon.metrics_file import counter, gauge
from sbus.link.nats.counters import Counters

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["families"]


def families(
    counters: Counters, *, waiting_out: int, waiting_in: int, is_connected: bool, subscriptions: int
) -> Iterator[Metric]:
    """Yield the metrics of a bridge.

    :param waiting_out: messages that wait for NATS.
    :param waiting_in: messages that wait for the bus.
    :param subscriptions: subscriptions on NATS.
    """
    yield gauge("sbus_nats_connected", "1 while the bridge is connected to NATS. If 0, its log says why.", is_connected)
    yield gauge(
        "sbus_nats_subscriptions", "Subscriptions on NATS, for the patterns of the bus's clients.", subscriptions
    )
    yield gauge(
        "sbus_nats_waiting_messages",
        "Messages that wait for NATS, and for the bus. If it stays high, that side is too slow, or away.",
        {"nats": waiting_out, "bus": waiting_in},
        "side",
    )
    yield counter(
        "sbus_nats_messages",
        "Messages by their fate; the page on NATS explains each kind.",
        asdict(counters),
        "kind",
    )
