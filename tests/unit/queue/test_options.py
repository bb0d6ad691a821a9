"""The command line of ``twistd sbus-queue``."""

from __future__ import annotations

import pytest

from sbus.errors import UsageError
from sbus.queue.jobs import Rules
from sbus.queue.service import Settings
from sbus.queue.twistd import parse_queue


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("jobs", Settings("jobs", None, "/d/jobs.sqlite", Rules())),
        ("jobs=jobs/", Settings("jobs", b"jobs/", "/d/jobs.sqlite", Rules())),
        ("a=x,y=z,lease=2m", Settings("a", b"x,y=z", "/d/a.sqlite", Rules(lease=120.0))),
        (
            "a=b/*,store=/s/t,deliveries=3,most=7,ordered=key",
            Settings("a", b"b/*", "/s/t", Rules(deliveries=3, is_ordered=True, most=7)),
        ),
        ("a=b,store=nats://h:1?creds=/f", Settings("a", b"b", "nats://h:1?creds=/f", Rules())),
        ("a=queue/b/dead/", Settings("a", b"queue/b/dead/", "/d/a.sqlite", Rules())),
    ],
)
def test_queues(text: str, settings: Settings) -> None:
    """A queue is its name, its pattern, which may have commas, and its rules."""
    assert parse_queue(text, "/d") == settings


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "a queue's name is"),
        ("a=", "the pattern matches the queue's own keys"),
        ("a=queue/", "the pattern matches the queue's own keys"),
        ("a=*/a/*", "the pattern matches the queue's own keys"),
        ("a=!/cred/1/2/3/x", "the pattern matches the queue's own keys, or secret ones"),
        ("a=!", "'!' is reserved"),
        ("a=b,lease=0", "give a time"),
        ("a=b,deliveries=0", "give a number of deliveries"),
        ("a=b,ordered=user", "use key"),
        ("a=b,store=http://host", "no place for its jobs"),
        ("a=b,store=nats://host,ordered=key", "leave out ordered=key"),
    ],
)
def test_queues_that_cannot_be(text: str, problem: str) -> None:
    """What is wrong with a queue is said, with the remedy."""
    with pytest.raises(UsageError, match=problem):
        parse_queue(text, "/d")


def test_a_queue_needs_a_place() -> None:
    """Without a directory, a queue needs a store."""
    with pytest.raises(UsageError, match="give --directory=DIRECTORY"):
        parse_queue("a=b", None)
