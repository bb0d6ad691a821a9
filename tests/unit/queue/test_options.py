"""The command line of ``twistd sbus-queue``."""

from __future__ import annotations

import pytest

from sbus.errors import UsageError
from sbus.queue.jobs import Settings
from sbus.queue.twistd import Options, parse_queue


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("jobs", Settings(name="jobs", store="/d/jobs.sqlite")),
        ("jobs=jobs/", Settings(name="jobs", pattern=b"jobs/", store="/d/jobs.sqlite")),
        ("a=x,y/z=,lease=2m", Settings(name="a", pattern=b"x,y/z=", store="/d/a.sqlite", lease=120.0)),
        (
            "a=b/*,store=/s/t,deliveries=3,most=7,bytes=8K,ordered=key",
            Settings(name="a", pattern=b"b/*", store="/s/t", deliveries=3, most=7, most_bytes=8192, is_ordered=True),
        ),
        ("a=b,store=nats://h:1?creds=/f", Settings(name="a", pattern=b"b", store="nats://h:1?creds=/f")),
        ("a=queue/b/dead/", Settings(name="a", pattern=b"queue/b/dead/", store="/d/a.sqlite")),
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
        ("a=b,lese=5s", "an option is unknown or malformed: after the pattern, use store=, lease="),
        ("a=b,lese=5s,deliveries=3", "an option is unknown"),
        ("a=b,lease=5s,often", "an option is unknown or malformed"),
        ("a,lese=5s", "an option is unknown"),
        ("a=b,lease=0", "give a time of 0.1 seconds or more, such as"),
        ("a=b,lease=1000000000000001", r"give a time from 0.1 to 1e\+15 seconds, such as"),
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


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "no queue: give --queue"),
        (["--queue=a=b/", "--queue=a=c/"], "--queue=a is given twice"),
        (["--queue=a", "--max-packet=512"], "--max-packet=512: give a number of bytes, at least 513"),
    ],
)
def test_options_that_cannot_be(words: list[str], problem: str) -> None:
    """Queues have different names, and packets that a job fits."""
    options = Options()
    with pytest.raises(SystemExit, match=problem):
        options.parseOptions(["--socket=/s", "--directory=/d", *words])
