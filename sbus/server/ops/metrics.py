"""The metrics of a bus, for Prometheus.

Every figure is a total that is kept as it happens, or a number that is at hand; only the users are looked at one by
one, and the clients for the longest queue while there is one, in slices. No key, PID or client number is a label.

A counter that is the difference of others (deliveries, hits of the route cache) never goes down: a reader would take it
for a restart.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator

from prometheus_client.core import InfoMetricFamily, Metric

from sbus.admin.pages import Pieces
from sbus.daemon.metrics_file import counter, gauge, text_of
from sbus.server.bus.registry import SubscriptionRegistry
from sbus.server.core.counters import word_of
from sbus.server.ops.admin_status import STARTED_AT, STEP, largest_queue
from sbus.syscalls.batch import COMPILED
from sbus.version import __version__

__all__ = ["Metrics"]

_NO_RULES = ("closed", "credentials", "default", "secret")
"""The value of a refusal in the place of a rule."""
_MOST_RULES = 200
"""Rules with separate series: they make one piece of an answer, which must take less than half a millisecond."""


class Metrics:
    """The metrics of one bus.

    :param registry: the bus.
    """

    def __init__(self, registry: SubscriptionRegistry) -> None:
        self._registry = registry
        self._highest: dict[str, float] = {}

    def pieces(self) -> Pieces:
        """Yield the families in Prometheus's text format, one by one."""
        labels = {"bus": self._registry.upstream.name}
        for metric in self.families():
            yield "" if metric is None else text_of(metric, labels)

    def families(self) -> Iterator[Metric | None]:
        """Yield the metrics; None between slices."""
        yield from self._clients()
        yield from self._messages()
        yield from self._queues()
        yield from self._users()
        yield from self._link()
        yield from self._work()
        yield from self._process()

    def _rising(self, name: str, value: float) -> float:
        """Return the highest value that a counter has had."""
        value = self._highest[name] = max(value, self._highest.get(name, 0))
        return value

    def _clients(self) -> Iterator[Metric]:
        registry, counters = self._registry, self._registry.counters
        yield InfoMetricFamily(
            "sbus_build", "The server that answers.", {"version": __version__, "compiled": "yes" if COMPILED else "no"}
        )
        yield gauge("sbus_start_time_seconds", "When the bus was started, in seconds since 1970.", STARTED_AT)
        yield gauge("sbus_clients", "Clients connected now.", len(registry.clients))
        yield gauge(
            "sbus_clients_limit",
            "Clients that may be connected (--max-clients). Near it, connections are refused: raise it, or find the "
            "user with most of them with sbus users.",
            registry.limits.max_clients,
        )
        yield counter(
            "sbus_clients_connected",
            "Clients admitted since the start. A steep rise: programs that reconnect; sbus clients --closed shows why.",
            counters.connected,
        )
        yield counter(
            "sbus_clients_disconnected",
            "Clients that have left, by reason. Reasons other than peer-closed and server-stopped are trouble: "
            "sbus clients --closed shows whose.",
            {word_of(why): count for why, count in counters.disconnected_by.items()},
            "reason",
        )
        yield counter(
            "sbus_clients_refused",
            "Connections accepted only to be closed, by reason: a limit or a rule. The log has the user.",
            {word_of(why): count for why, count in counters.refused_by.items()},
            "reason",
        )
        yield counter(
            "sbus_violations",
            "Packets that broke the protocol, by rule. A program has a bug; the log has the client.",
            {word_of(why): count for why, count in counters.violations_by.items()},
            "reason",
        )
        yield counter(
            "sbus_denied",
            "Packets that clients had no permission for, by rule of the policy. sbus top shows whose; the audit log "
            "has the clients, and sbus policy explain the rule.",
            self._denied(),
            "rule",
        )
        yield counter(
            "sbus_unknown_controls",
            "Control messages that the server does not know, and ignores: a client newer than the server.",
            counters.unknown_controls,
        )

    def _denied(self) -> dict[str, float]:
        """Return the refusals by rule: of the first rules in force each, also 0, and of all others together."""
        policy, denied = self._registry.guard.permissions.policy, self._registry.counters.denied_by
        rules = () if policy is None else policy.rules[:_MOST_RULES]
        found: dict[str, float] = {name: denied[name] for name in (*_NO_RULES, *(rule.name for rule in rules))}
        others = sum(count for name, count in denied.items() if name not in found)
        return found | ({"(others)": others} if others else {})

    def _messages(self) -> Iterator[Metric]:
        registry, counters = self._registry, self._registry.counters
        waiting = registry.users.budget
        yield counter("sbus_published_messages", "Messages that clients have published.", counters.published)
        yield counter("sbus_published_bytes", "Bytes of their packets.", counters.published_bytes)
        yield counter(
            "sbus_unrouted_messages",
            "Messages that nobody but observers, such as the recorder, was subscribed to. If all of a program's are, a "
            "key or a pattern is misspelt: /v1/events?unrouted=1 shows the keys.",
            counters.unrouted,
        )
        yield counter(
            "sbus_routed_messages",
            "Copies of messages that were meant for a receiver, lost or not.",
            self._rising("routed", counters.routed),  # falls if a receiver left before a copy went into the mail
        )
        yield counter(
            "sbus_routed_bytes", "Bytes of these copies.", self._rising("routed bytes", counters.routed_bytes)
        )
        mail = registry.scheduler
        delivered = counters.routed - counters.dropped - counters.conflated - waiting.messages - mail.mail_copies
        yield counter(
            "sbus_delivered_messages",
            "Copies that were handed to receivers. Level while sbus_published_messages rises: see sbus_queue_bytes.",
            self._rising("messages", delivered),
        )
        yield counter(
            "sbus_delivered_bytes",
            "Bytes of these, and of conflated copies.",
            self._rising("bytes", counters.routed_bytes - counters.dropped_bytes - waiting.bytes - mail.mail_bytes),
        )
        yield counter(
            "sbus_dropped_messages",
            "Copies that were not delivered, by cause. If it rises, find the slow receivers with sbus clients "
            "--sort=lost.",
            {why.value: count for why, count in counters.dropped_by.items()},
            "reason",
        )
        yield counter("sbus_dropped_bytes", "Bytes of these copies.", counters.dropped_bytes)
        yield counter(
            "sbus_conflated_messages",
            "Copies that a newer message of the same key replaced (blocking/soft/latest). No loss.",
            counters.conflated,
        )
        yield counter("sbus_payloads", "Published messages whose payload was in sealed memory.", counters.payloads)
        yield counter(
            "sbus_payload_bytes", "Bytes of these payloads, which the server has not copied.", counters.payload_bytes
        )
        yield counter(
            "sbus_payloads_missing",
            "Payloads that have arrived without their memory: the server had no free descriptor (see process_max_fds), "
            "or a security module of the kernel did not pass it.",
            counters.payloads_missing,
        )
        if registry.last_values is not None:
            yield gauge("sbus_last_values", "Messages that are kept (--last-value).", len(registry.last_values))

    def _queues(self) -> Iterator[Metric | None]:
        registry = self._registry
        budget, backpressure = registry.users.budget, registry.backpressure
        yield gauge(
            "sbus_clients_lagging",
            "Receivers that do not keep up now. If it stays above 0, sbus clients --sort=queue shows which.",
            budget.queues,
        )
        yield gauge("sbus_queue_messages", "Messages in all queues.", budget.messages)
        yield gauge(
            "sbus_queue_bytes", "Bytes of packets in all queues. Near the limit, messages are dropped.", budget.bytes
        )
        yield gauge("sbus_queue_limit_bytes", "The limit of these (--total-queue-bytes).", budget.limit)
        for largest in largest_queue(registry):
            if largest is None:
                yield None
            else:
                yield gauge(
                    "sbus_queue_largest_bytes",
                    "Bytes in the longest queue of one receiver; --queue-bytes limits it.",
                    largest,
                )
        yield gauge(
            "sbus_publishers_held",
            "Publishers that a receiver blocks now. sbus clients shows by whom.",
            backpressure.held,
        )
        yield counter(
            "sbus_publishers_held_seconds",
            "Time that publishers were blocked, summed over all of them. A rate of 1: one is blocked all the time.",
            self._rising("held", backpressure.held_seconds),
        )
        yield gauge(
            "sbus_payload_files",
            "Memory files of payloads that wait. If it stays high, sbus clients --sort=queue shows for whom.",
            budget.payload_files,
        )
        memory = budget.memory
        yield gauge(
            "sbus_memory_bytes",
            "Memory that clients make the server hold. At the limit, the user with most loses a client: sbus users.",
            memory.held,
        )
        yield gauge("sbus_memory_limit_bytes", "The limit of that (--max-memory).", memory.limit)

    def _users(self) -> Iterator[Metric | None]:
        registry = self._registry
        at_limit = dict.fromkeys(("clients", "patterns", "memory"), 0)
        patterns = 0
        for at, user in enumerate(registry.users.all(), 1):
            patterns += user.patterns
            if not user.is_exempt:
                at_limit["clients"] += user.connections >= user.share.clients.most
                at_limit["patterns"] += user.patterns >= user.share.patterns.most
                at_limit["memory"] += not user.may_hold(0)
            if at % STEP == 0:
                yield None
        yield gauge("sbus_users", "Users with a connection now.", len(registry.users))
        yield gauge(
            "sbus_users_with_queue", "Users with a receiver that does not keep up now.", registry.users.budget.users
        )
        yield gauge(
            "sbus_users_at_limit",
            "Users at a limit of one user, by the limit. They are refused more: see sbus users.",
            at_limit,
            "limit",
        )
        yield counter(
            "sbus_user_limits",
            "Connections and subscriptions refused by a limit for one user. See sbus users for whose.",
            registry.counters.user_limits,
        )
        yield gauge("sbus_patterns", "Subscriptions of all clients to different patterns.", patterns)

    def _link(self) -> Iterator[Metric]:
        """Yield the metrics of the link to the bus's master, or its bridge, if there has been one, or should be."""
        upstream = self._registry.upstream
        if not upstream.has_link and not upstream.secrets_go_up:
            return
        yield gauge(
            "sbus_link_up",
            "Whether the link to the master, or the bridge to NATS, carries messages. If not, its log says why.",
            upstream.is_up,
        )
        yield counter(
            "sbus_link_lost_messages",
            "Messages that the link has lost, by direction: while it was down, or because a side was too slow.",
            dict(zip(("up", "down"), upstream.lost, strict=True)),
            "direction",
        )
        yield counter(
            "sbus_link_dropped_secrets",
            "Secret messages for clients of other buses that were dropped because the link was down.",
            upstream.dropped_secrets,
        )

    def _work(self) -> Iterator[Metric]:
        registry, router = self._registry, self._registry.router
        yield gauge("sbus_route_cache_entries", "Keys in the route cache.", len(registry.routes))
        yield counter(
            "sbus_route_cache_hits",
            "Messages whose receivers were in the route cache.",
            self._rising("hits", registry.counters.published - router.misses),
        )
        yield counter(
            "sbus_route_cache_misses",
            "Messages whose receivers had to be looked up. More than a tenth of all: keys that hardly repeat, or "
            "subscriptions that come and go.",
            router.misses,
        )
        yield counter(
            "sbus_turns_waited",
            "Times that a client had to wait for its user's next turn, because the work of one turn was used up. Alone "
            "it is no trouble: a user is busy, and the others are served in between.",
            registry.scheduler.waited,
        )
        if registry.attached:
            yield gauge(
                "sbus_attached_up",
                "Whether a program that belongs to the bus (its recorder, its link) is connected. 0: the log says why.",
                {name: float(is_up()) for name, is_up in sorted(registry.attached.items())},
                "name",
            )

    def _process(self) -> Iterator[Metric]:
        yield counter(
            "process_cpu_seconds",
            "CPU time of the server. A rate near 1: its one thread is busy, and publishers wait.",
            time.process_time(),
        )
        with open("/proc/self/statm", "rb") as file:
            virtual, resident = (int(word) * resource.getpagesize() for word in file.read().split()[:2])
        yield gauge("process_resident_memory_bytes", "Memory of the server.", resident)
        yield gauge("process_virtual_memory_bytes", "Address space of the server.", virtual)
        open_files = os.stat("/proc/self/fd").st_size  # 0 before Linux 6.2
        if open_files:
            yield gauge("process_open_fds", "Open file descriptors; each client has one.", open_files)
        yield gauge("process_max_fds", "The limit of these (ulimit -n).", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
