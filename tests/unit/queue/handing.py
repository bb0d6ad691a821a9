"""A queue with workers, and what it hands to them."""

from __future__ import annotations

from typing import Any

from sbus.queue.jobs import Job, JobQueue, Settings


def queue_with(worker_credit: int = 10, **chosen: Any) -> JobQueue:
    """A queue with one worker, ``w``."""
    queue = JobQueue(Settings(**chosen))
    queue.ready(b"w", 0, 1, worker_credit, {})
    return queue


def put(queue: JobQueue, key: bytes, payload: bytes, uid: int = -1, due: float = 0.0) -> Job:
    """Put a job into a queue."""
    job = Job(0, key, b"0 -", uid, len(payload), payload, due)
    queue.put(job)
    return job


def advance(queue: JobQueue, now: float) -> list[Job]:
    """The jobs that are handed out and sent now."""
    batches = queue.advance(now)
    queue.sent(batches, now)
    return [job for batch in batches for job in batch.jobs.values()]
