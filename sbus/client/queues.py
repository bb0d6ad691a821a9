"""Queues, the clients' half: what publishers and workers say, and what the service sends them.

The service is a client like this one (`sbus.queue`); :ref:`queue-wire` has the table of the messages.
"""

from __future__ import annotations

import time
from typing import Literal

from sbus.client.arguments import check_seconds, check_text
from sbus.errors import NobodyListens, PacketTooLong, UsageError

__all__ = [
    "ALL_QUEUES",
    "INBOX",
    "LONGEST_WHY",
    "MOST_CREDIT",
    "REASONS",
    "Reason",
    "build_job",
    "build_put",
    "check_job",
    "check_queue",
    "no_service",
    "parse_put",
    "queue_key",
]

Reason = Literal["released", "failed", "poison"]
REASONS: tuple[Reason, ...] = ("released", "failed", "poison")
ALL_QUEUES = b"queue/ls"
"""The services of all queues answer a request on this key, each for itself."""
INBOX = b"/sbus/work/"
"""The part between a worker's name and its token in the key of its inbox."""
_LONGEST_ID = 256
"""Bytes of the longest ID against doubles: the service remembers the IDs of a day."""
LONGEST_WHY = 1000
"""The most bytes of a reason, which the service keeps in memory."""
HEAD_ROOM = 512
"""Bytes of a packet that a job's sender, and the keys around it, may take on its way."""
MOST_CREDIT = 4096
"""Jobs at once: an announcement that names them all fits a packet."""


def check_queue(name: str) -> str:
    """Return the name of a queue.

    :raises UsageError: if no queue can have it.
    """
    check_text(name, "a queue's name")
    if not name or len(name) > 64 or not all(c.isascii() and (c.isalnum() or c in "_.-") for c in name):
        raise UsageError(f"queue {name!r:.80}: a queue's name is 1 to 64 of A-Z a-z 0-9 _ . -")
    return name


def queue_key(name: str, verb: bytes) -> bytes:
    """Return a key of a queue."""
    return b"queue/%b/%b" % (check_queue(name).encode(), verb)


def no_service(name: str | None = None) -> NobodyListens:
    """Return the error for a queue that no service has; without a name, for a bus without queues."""
    missing = f"the queue {name}" if name else "a queue"
    return NobodyListens(
        f"no service on this bus has {missing}: start one with twistd sbus-queue, or see its log for the name"
    )


# --- what publishers send -------------------------------------------------------------------------


def build_put(payload: bytes, id: bytes | str | None = None, delay: float = 0.0) -> bytes:
    """Return the payload of a request that puts a job into a queue.

    :param id: as for `sbus.client.workers.QueueCalls.enqueue`.
    :param delay: likewise.
    :raises UsageError: if the ID is neither text nor bytes, is empty or too long, or has white space or a NUL in it.
    """
    words = []
    if id is not None:
        try:
            name = id.encode() if isinstance(id, str) else bytes(memoryview(id))
        except (TypeError, UnicodeEncodeError):
            raise UsageError(f"id={id!r:.80}: give bytes, or text that UTF-8 can encode") from None
        if len(name) > _LONGEST_ID or name.split() != [name] or b"\0" in name:
            raise UsageError(f"id={id!r:.80}: give 1 to {_LONGEST_ID} bytes without white space and NUL")
        words.append(b"id=" + name)
    delay = check_seconds(delay or 0.0, "delay")
    if delay:
        if not 0 < delay < float("inf"):
            raise UsageError(f"delay={delay}: give a number of seconds")
        words.append(b"not-before=%.3f" % (time.time() + delay))
    return b"%b\0%b" % (b" ".join(words), payload)


def parse_put(payload: bytes) -> tuple[bytes, float, bytes]:
    """Return the ID, the earliest time, and the job's payload in what `build_put` returns.

    :raises UsageError: if it is malformed.
    """
    words, nul, rest = payload.partition(b"\0")
    if nul and not words:
        return b"", 0.0, rest
    if not nul:
        raise UsageError("a put is [id=ID] [not-before=TIME], a NUL, and the job")
    id, not_before = b"", 0.0
    for word in words.split():
        name, _, value = word.partition(b"=")
        if name == b"id" and 0 < len(value) <= _LONGEST_ID:
            id = value
        elif name == b"not-before" and (seconds := _seconds(value)) is not None:
            not_before = seconds
        else:
            raise UsageError(f"{word.decode(errors='replace'):.80}: use id= (1 to {_LONGEST_ID} bytes) or not-before=")
    return id, not_before, rest


def _seconds(text: bytes) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


def check_job(size: int, longest: int) -> None:
    """Check the size of a job, also for the packet that takes it to a worker: it never goes into sealed memory.

    :param longest: bytes of the longest packet.
    :raises PacketTooLong: if it is too long.
    """
    if size + HEAD_ROOM > longest:
        raise PacketTooLong(
            f"a job of {size:,} bytes, and the limit is {longest - HEAD_ROOM:,}, a packet less {HEAD_ROOM}: "
            "put it into a file, and the file's path into the job"
        )


# --- what the service sends ----------------------------------------------------------------------


def build_job(round: int, id: int, tries: int, lease: bytes, sender: bytes, key: bytes, payload: bytes) -> bytes:
    """Return the payload of a message with a job for a worker.

    :param lease: seconds, as text.
    :param sender: the publisher, as in a notice of the bus.
    """
    return b"%d %d %d %b %b %b\0%b" % (round, id, tries, lease, sender, key, payload)
