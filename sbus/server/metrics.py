"""The metrics of a bus, for Prometheus.

Every figure is a total that is kept as it happens, or a number that is at hand: a scrape asks no client for anything.
No key, PID or client number is a label.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from sbus.server.registry import SubscriptionRegistry
from sbus.server.upstream import Upstream
from sbus.syscalls.batch import COMPILED
from sbus.version import __version__

__all__ = ["families", "render"]


class _Family:
    """One family, as the library's renderer takes it."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> list[Metric]:
        return [self._metric]


def render(registry: SubscriptionRegistry) -> Iterator[str]:
    """Yield the families in Prometheus's text format."""
    for metric in families(registry):
        yield generate_latest(_Family(metric)).decode()


def families(registry: SubscriptionRegistry) -> Iterator[Metric]:
    """Yield the metrics of a bus."""
    counters, budget = registry.counters, registry.users.budget
    yield InfoMetricFamily(
        "sbus_build", "The server that answers.", {"version": __version__, "compiled": "yes" if COMPILED else "no"}
    )
    totals = (
        ("connected", counters.connected, "Clients admitted since the start. A steep rise: programs that reconnect."),
        (
            "refused",
            counters.refused,
            "Connections accepted only to be closed, by a limit or a rule; see the log.",
        ),
        (
            "user_limits",
            counters.user_limits,
            "Connections and subscriptions refused by a limit for one user. See sbus users for whose.",
        ),
        ("published_messages", counters.published, "Messages that clients have published."),
        ("routed_messages", counters.routed, "Copies of these that were meant for a receiver."),
        (
            "conflated_messages",
            counters.conflated,
            "Copies that a newer message of the same key replaced (blocking/soft/latest). No loss.",
        ),
        (
            "violations",
            counters.violations,
            "Packets that broke the protocol. The log has the client and the rule.",
        ),
        ("unknown_controls", counters.unknown_controls, "Control messages that the server does not know."),
    )
    for name, value, text in totals:
        yield CounterMetricFamily(f"sbus_{name}", text, value=value)
    dropped = CounterMetricFamily(
        "sbus_dropped_messages",
        "Copies that were not delivered, by cause. If it rises, find the slow receivers with sbus clients --sort=lost.",
        labels=["reason"],
    )
    for reason, count in counters.dropped_by.items():
        dropped.add_metric([reason.value], count)
    yield dropped
    yield from _link_families(registry.upstream)
    memory = budget.memory
    gauges = (
        ("clients", len(registry.clients), "Clients connected now."),
        ("clients_limit", registry.limits.max_clients, "Clients that may be connected (--max-clients)."),
        ("users", len(registry.users), "Users with a connection now."),
        ("users_with_queue", budget.users, "Users with a receiver that does not keep up now."),
        ("queue_bytes", budget.bytes, "Bytes of packets in all queues. Near the limit, messages are dropped."),
        ("queue_limit_bytes", budget.limit, "The limit of these (--total-queue-bytes)."),
        (
            "memory_bytes",
            memory.held,
            "Memory that clients make the server hold. At the limit one is disconnected.",
        ),
        ("memory_limit_bytes", memory.limit, "The limit of that (--max-memory)."),
        ("cached_routes", len(registry.routes), "Keys in the route cache."),
    )
    for name, value, text in gauges:
        yield GaugeMetricFamily(f"sbus_{name}", text, value=value)


def _link_families(upstream: Upstream) -> Iterator[Metric]:
    """Yield the metrics of the link to the bus's master, if there has been one, or should be."""
    if not upstream.has_link and not upstream.secrets_go_up:
        return
    yield GaugeMetricFamily(
        "sbus_link_up",
        "Whether the link to the master carries messages. If not, the log says why.",
        value=upstream.is_up,
    )
    lost = CounterMetricFamily(
        "sbus_link_lost_messages",
        "Messages that the link has lost, by direction: while it was down, or because a side was too slow.",
        labels=["direction"],
    )
    for direction, count in zip(("up", "down"), upstream.lost, strict=True):
        lost.add_metric([direction], count)
    yield lost
    yield CounterMetricFamily(
        "sbus_link_dropped_secrets",
        "Secret messages for clients of other buses that were dropped because the link was down.",
        value=upstream.dropped_secrets,
    )
