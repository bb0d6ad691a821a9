"""Metrics of the queues of one service."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric

from sbus.daemon.metrics_file import counter, gauge
from sbus.queue.jobs import STATES
from sbus.queue.service import QueueService

__all__ = ["families"]

_EVENTS = {
    "put": "Jobs put since the service was started.",
    "doubles": "Puts whose ID was known, so that they added no job.",
    "full": "Jobs refused: too long, or their user had too many, see most=.",
    "dropped": "Messages among these: their publishers get no answer, see the log.",
    "delivered": "Jobs handed to workers; each counts once for each delivery.",
    "acked": "Jobs done.",
    "released": "Jobs that workers gave back because they stopped.",
    "failed": "Jobs that workers gave back as failed. If it rises, see the workers' logs.",
    "expired": "Leases that ran out. If it rises, workers hang, or lease= is too short.",
    "refused": "Workers that were refused: a queue has 1,024 places, and keeps some for each user.",
    "gone": "Workers that ended without giving their jobs back.",
    "dead": "Jobs that died. If it rises: sbus queue dead.",
}


def families(queues: Sequence[QueueService], is_up: bool = True) -> Iterator[Metric]:
    """Yield the metrics of queues."""
    named = {queue.settings.name: queue for queue in queues}
    disk = {name: float(not queue.problem) for name, queue in named.items()}
    workers = {name: len(queue.jobs.workers) for name, queue in named.items()}
    yield gauge("sbus_queue_up", "Whether the service runs. 0: it was stopped, see its log.", float(is_up))
    yield gauge("sbus_queue_disk_ok", "Whether the disk takes jobs. 0: publishers wait; make room.", disk, "queue")
    yield gauge("sbus_queue_workers", "Workers.", workers, "queue")
    counts = {name: queue.jobs.counts() for name, queue in named.items()}
    for state in STATES:
        jobs = {name: each[state] for name, each in counts.items()}
        yield gauge(f"sbus_queue_jobs_{state}", f"Jobs that are {state}.", jobs, "queue")
    for event, text in _EVENTS.items():
        yield counter(
            f"sbus_queue_{event}", text, {name: queue.jobs.events[event] for name, queue in named.items()}, "queue"
        )
